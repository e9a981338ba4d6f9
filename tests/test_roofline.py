"""The roofline of bench/roofline.py: its bytes, multiply-adds and bounds equal those that one computes by hand."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench import roofline, traffic
from bench.rates import Rates
from bench.traffic import Reuse, Stream, Work
from bench.worker import count_flops
from minidl.kernels.matmul import blocks
from minidl.ops.conv import with_winograd
from minidl.program.table import Operand

KIB = 1024


@pytest.fixture(autouse=True)
def avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 8 or 12 x 32 and 6 x 64 numbers, as with AVX-512: the figures do not depend on the machine."""
    monkeypatch.setattr(traffic, "MR", 8)
    monkeypatch.setattr(traffic, "PRODUCT_MR", 12)
    monkeypatch.setattr(traffic, "PANELS", 2)
    monkeypatch.setattr(traffic, "NR", 32)
    monkeypatch.setattr(blocks, "MC_KC", 2**17)


def operand(*shape: int, region: str = "workspace", offset: int = 0) -> Operand:
    return Operand(region, offset, shape, 4 * math.prod(shape))


def arrays(**shapes: tuple[int, ...]) -> dict[str, Operand]:
    return {name: operand(*shape, region=name) for name, shape in shapes.items()}


def far(arguments: dict[str, object]) -> dict[str, float]:
    return dict.fromkeys(arguments, math.inf)


@pytest.fixture(autouse=True)
def vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model describe the kernels for vectors on each machine."""
    for module, name in ((traffic, "uses_amx"), (traffic.choice, "on_amx")):
        monkeypatch.setattr(module, name, lambda *_: False)


def test_a_product_on_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "uses_amx", lambda *_: True)
    given = arrays(a=(128, 512), b=(512, 512), bias=(512,), packed=(0,), scratch=(99,), out=(128, 512))
    work = traffic.work("matmul.nn", given, far(given), 1)
    assert work.multiply_adds == 128 * 512 * 512 and work.on_amx
    # 4 strips x 16 panels, 6 bytes for each number; four pieces of 128 products
    strips, panels, out = 16 * 128 * 512 * 6, 4 * 512 * 512 * 6, 128 * 512 * 4
    assert work.beyond(32 * KIB)[0] - work.beyond(1 << 30)[0] == strips + panels + 3 * out
    assert work.beyond(64 * KIB)[0] - work.beyond(1 << 30)[0] == strips + 3 * out  # panel and strip, 48 KiB, fit
    assert work.beyond(32 * KIB)[1] - work.beyond(1 << 30)[1] == (128 * 512 + 512 * 512) * 6 + 3 * out
    one = rates(1)
    assert roofline.seconds_of(work, one)[roofline.TILES] == 128 * 512 * 512 / one.tiles
    assert roofline.seconds_of(work, one._replace(tiles=0.0))[roofline.ARITHMETIC] == 128 * 512 * 512 / one.fma


@pytest.mark.parametrize("amx", [False, True])
@pytest.mark.parametrize("kernel", ["forward", "backward_input", "backward_weight"])
def test_a_convolution_of_1x1_is_a_product(kernel: str, amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "uses_amx", lambda *_: amx)
    x, y, weight = (4, 8, 8, 128), (4, 8, 8, 512), (1, 1, 128, 512)
    roles = {"forward": dict(x=x, weight=weight, y=y), "backward_input": dict(dy=y, weight=weight, dx=x),
             "backward_weight": dict(x=x, dy=y, dweight=weight)}[kernel]  # fmt: skip
    options = {"groups": 1, "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "winograd": True}
    given = {**options, **arrays(**roles)}
    work = traffic.work(f"conv.{kernel}", given, far(given), 1)
    form, *sizes = {"forward": ("nn", 256, 512, 128), "backward_input": ("nt", 256, 128, 512),
                    "backward_weight": ("tn", 128, 512, 256)}[kernel]  # fmt: skip
    assert work.multiply_adds == 256 * 512 * 128 and work.on_amx == amx
    expected = traffic.product_on_amx(*sizes, 1) if amx else traffic.product(*sizes, 1, form)
    assert work.streams[3:] == expected


def test_a_product() -> None:
    """The example of bench/roofline.py: out (128, 512) = a (128, 512) @ b (512, 512)."""
    given = arrays(a=(128, 512), b=(512, 512), bias=(512,), packed=(0,), scratch=(99,), out=(128, 512))
    work = traffic.work("matmul.nn", given, far(given), 1)
    assert work.multiply_adds == 128 * 512 * 512
    panels, strips = 22 * 8 * 512 * 64 * 4, 8 * 128 * 512 * 4  # 22 x 8 tiles
    assert work.beyond(48 * KIB)[0] - work.beyond(1 << 30)[0] == panels + strips
    assert work.beyond(48 * KIB)[1] - work.beyond(1 << 30)[1] == 512 * 512 * 4  # b is packed
    assert work.beyond(140 * KIB)[0] - work.beyond(1 << 30)[0] == strips  # 128 KiB of b and 12 KiB of a fit
    assert work.beyond(1 << 30) == ((128 * 512 + 512 * 512 + 512) * 4, 128 * 512 * 4)


def test_a_batch_of_products_is_as_many_products() -> None:
    batch = {"a_transposed": True, "b_transposed": False, **arrays(a=(5, 70, 40), b=(5, 70, 90), out=(5, 40, 90))}
    one = traffic.work("matmul.tn", given := arrays(a=(70, 40), b=(70, 90), out=(40, 90)), far(given), 1)
    for threads in (1, 2):
        work = traffic.work("matmul.batched", batch, far(batch), threads)
        assert work.multiply_adds == 5 * one.multiply_adds
        assert work.beyond(-1) == (5 * one.beyond(-1)[0], 5 * one.beyond(-1)[1])


def test_a_product_of_one_row_reads_the_weights_once() -> None:
    given = arrays(a=(1, 784), b=(784, 512), bias=(512,), packed=(0,), scratch=(9,), out=(1, 512))
    work = traffic.work("matmul.nn", given, {**far(given), "b": 3e6}, 1)
    assert work.beyond(1 << 20) == ((784 + 784 * 512 + 512) * 4, 512 * 4)
    assert work.beyond(4 << 20)[0] == (784 + 512) * 4
    # 8 pairs of panels read a; two blocks of 392 products, so the output is read again once
    assert work.beyond(-1)[0] == work.beyond(1 << 20)[0] + 8 * 784 * 4 + 512 * 4


def test_threads_read_a_each_and_share_b() -> None:
    given = arrays(a=(128, 784), b=(784, 512), bias=(), packed=(0,), scratch=(9,), out=(128, 512))
    given["bias"] = Operand("constant", 0, (0,), 0)
    read, written = traffic.work("matmul.nn", given, far(given), 2).beyond(1 << 30)
    assert read == (2 * 128 * 784 + 784 * 512) * 4 and written == 128 * 512 * 4


def test_a_transposed_matrix_is_packed_by_each_thread() -> None:
    written = {form: traffic.product(128, 512, 512, 2, form)[3].written for form in ("nn", "nt", "tn")}
    assert written == {"nn": 0, "nt": 0, "tn": 2 * 128 * 512 * 4}


def test_long_sums_are_cut_and_the_output_is_read_again() -> None:
    """KC = 512, so 2048 products are four pieces. 86 strips of 12 rows are four blocks of up to 26 strips."""
    streams = traffic.product(1024, 512, 2048, 1)
    packed, again = streams[2], streams[4]
    assert (packed.read, packed.written) == (3 * 2048 * 512 * 4, 4 * 2048 * 512 * 4)
    assert (again.read, again.written) == (3 * 1024 * 512 * 4,) * 2


def layer(**changed: object) -> dict[str, object]:
    given = arrays(x=(64, 32, 32, 64), weight=(3, 3, 64, 64), packed=(0,), scratch=(9,), y=(64, 32, 32, 64))
    options = {"groups": 1, "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "winograd": False}
    last = {name: given.pop(name) for name in ("packed", "scratch", "y")}
    return {**given, **options, **last, **changed}


def test_a_convolution_has_a_quarter_of_the_products_with_winograd() -> None:
    given = layer()
    direct = traffic.work("conv.forward", given, far(given), 2)
    assert direct.multiply_adds == 64 * 32 * 32 * 9 * 64 * 64
    given = layer(winograd=True)
    fast = traffic.work("conv.forward", given, far(given), 2)
    assert fast.multiply_adds == 64 * 8 * 8 * 36 * 64 * 64 == direct.multiply_adds / 4
    image = 64 * 32 * 32 * 64 * 4
    assert direct.beyond(1 << 40) == fast.beyond(1 << 40) == (image + 9 * 64 * 64 * 4, image)


def test_a_kernel_in_pieces_has_the_products_of_each_piece() -> None:
    """6 x 6 taps are four pieces of 3 x 3."""
    image = (64, 32, 32, 64)
    options = {"groups": 1, "stride": (1, 1), "padding": (3, 3), "dilation": (1, 1), "winograd": True}
    y = arrays(x=image, weight=(6, 6, 64, 64)) | options | arrays(y=image)
    dweight = arrays(x=image, dy=image) | options | arrays(dweight=(6, 6, 64, 64))
    for name, given in (("conv.forward", y), ("conv.backward_weight", dweight)):
        assert traffic.work(name, given, far(given), 2).multiply_adds == 4 * 64 * 8 * 8 * 36 * 64 * 64


def test_a_stride_has_the_products_of_each_phase() -> None:
    """5 x 5 taps with stride 2 are four pieces of y, and one piece of each of four phases of dx."""
    options = {"groups": 1, "stride": (2, 2), "padding": (2, 2), "dilation": (1, 1), "winograd": True}
    weight, images = (5, 5, 64, 64), ((64, 32, 32, 64), (64, 16, 16, 64))
    y = arrays(x=images[0], weight=weight) | options | arrays(y=images[1])
    dx = arrays(dy=images[1], weight=weight) | options | arrays(dx=images[0])
    for name, given in (("conv.forward", y), ("conv.backward_input", dx)):
        assert traffic.work(name, given, far(given), 2).multiply_adds == 4 * 64 * 4 * 4 * 36 * 64 * 64


def test_a_large_layer_leaves_its_transformed_weights_in_the_second_level_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """512 -> 512, 36 planes, 37 tiles: beyond L2 are x, weights, y, and V, for each of 8 panels of 64 outputs."""
    monkeypatch.setattr(traffic.forms, "uses_blocks", lambda *_: True)
    weight, image, v = 9 * 512 * 512 * 4, 37 * 4 * 4 * 512 * 4, 36 * 37 * 512 * 4
    shapes = {"x": (37, 4, 4, 512), "weight": (3, 3, 512, 512), "y": (37, 4, 4, 512)}
    given = layer(winograd=True) | arrays(**shapes)
    work = traffic.work("conv.forward", given, far(given), 2)
    assert work.multiply_adds == 36 * 37 * 512 * 512
    assert work.beyond(1 << 21) == (image + weight + 8 * v, image + v)
    shapes = {"x": (37, 4, 4, 512), "dy": (37, 4, 4, 512), "dweight": (3, 3, 512, 512)}
    options = {"groups": 1, "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "winograd": True}
    given = arrays(**shapes)
    last = {"scratch": operand(5, region="scratch"), "dweight": given["dweight"]}
    given = {"x": given["x"], "dy": given["dy"], **options, **last}
    work = traffic.work("conv.backward_weight", given, far(given), 2)
    assert work.multiply_adds == 36 * 37 * 512 * 512
    assert work.beyond(1 << 21) == (2 * image + 8 * v, weight + v)


def test_a_tile_of_neighbouring_pixels_loads_each_number_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 outputs: 12 pixels load 14 numbers of x for each channel and line of 3 taps, and 3 vectors of weights."""
    monkeypatch.setattr(traffic, "LANES", 16)
    monkeypatch.setattr(traffic, "HEIGHTS", ((0, 0, 0), (12, 8, 8), (8, 6, 4)))
    monkeypatch.setattr(traffic, "panels_of", lambda columns, _: max(1, columns // 32))
    tile = traffic._tile_of(16, SimpleNamespace(spacing=1, step=1, taps=3))
    read = sum(stream.read for stream in traffic._direct(32 * 36, 3 * 3 * 5, 16, 1, 32 * 36 * 5, False, tile))
    assert read == pytest.approx(32 * 3 * (3 * 5) * (14 + 3 * 16) * 4)  # 3 tiles in a line
    assert traffic._tile_of(32, SimpleNamespace(spacing=1, step=2, taps=3)) == (8, 17 / 24)
    assert traffic._tile_of(16, SimpleNamespace(spacing=1, step=3, taps=3)) == (8, 1.0)


@pytest.mark.parametrize("winograd", [False, True])
@pytest.mark.parametrize("kernel", ["forward", "backward_input", "backward_weight"])
def test_the_products_of_each_pass_of_a_strided_convolution(kernel: str, winograd: bool) -> None:
    """With Winograd's form, 81 instead of 16 * 9 products for 4 x 4 outputs."""
    big, small, weight = (2, 32, 32, 16), (2, 16, 16, 32), (3, 3, 16, 32)
    roles = {"forward": {"x": big, "weight": weight, "y": small}, "backward_input": {"dy": small, "weight": weight,
             "dx": big}, "backward_weight": {"x": big, "dy": small, "dweight": weight}}  # fmt: skip
    options = {"groups": 1, "stride": (2, 2), "padding": (1, 1), "dilation": (1, 1), "winograd": winograd}
    given = {**arrays(**roles[kernel]), **options}
    given |= {"packed": operand(0)} if kernel == "forward" else {}
    given["scratch"] = operand(5, region="scratch")
    given[[*roles[kernel]][-1]] = given.pop([*roles[kernel]][-1])  # the output comes last
    work = traffic.work(f"conv.{kernel}", given, far(given), 1)
    assert work.multiply_adds == 2 * 16 * 16 * 16 * 32 * (81 / 16 if winograd else 9)
    assert all(stream.read >= 0 and stream.written >= 0 and stream.distance > 0 for stream in work.streams)


def test_distances_between_calls() -> None:
    """c = a + b; e = c + d: when e reads c, 4 KB lie in between (c itself); a has not been used for 20 KB."""
    place = {name: operand(1024, offset=4096 * i) for i, name in enumerate("abcde")}
    first = {"a": place["a"], "b": place["b"], "out": place["c"]}
    second = {"a": place["c"], "b": place["d"], "out": place["e"]}
    reuse = Reuse()
    assert set(reuse.distances(first).values()) == {math.inf}
    assert reuse.distances(second) == {"a": 4096, "b": math.inf, "out": math.inf}
    assert reuse.distances(first) == {"a": 5 * 4096, "b": 4 * 4096, "out": 3 * 4096}


def test_a_part_of_an_array_is_found_where_the_array_is() -> None:
    reuse = Reuse()
    reuse.distances({"x": operand(1024), "y": operand(1024, region="grad")})
    assert reuse.distances({"x": operand(16, offset=256)}) == {"x": 8192}
    assert reuse.distances({"x": operand(16, offset=4000)}) == {"x": 64 + 4096 + 4096 - 64 - 256}  # what lies after it


def test_a_kernel_without_products() -> None:
    given = arrays(dy=(1 << 20,), y=(1 << 20,), dx=(1 << 20,))
    distances = {"dy": 4.0 * 2**20, "y": math.inf, "dx": 12.0 * 2**20}
    work = traffic.work("activation.relu_backward", given, distances, 2)
    assert work.multiply_adds == 0
    assert work.beyond(2**20) == (8 * 2**20, 4 * 2**20)
    assert work.beyond(3 * 2**20) == (4 * 2**20, 4 * 2**20)  # 4 MiB for two cores: 2 MiB for each of them
    assert work.beyond(6 * 2**20) == (4 * 2**20, 0)


def rates(threads: int = 1, start: float = 0.0) -> Rates:
    """Return round rates: 10^9 multiply-adds per second and thread; 8, 4, 2 and 1 GB/s; half as much for copies."""
    read = tuple(threads * x * 1e9 for x in (8, 4, 2, 1))
    copy = tuple(x / 2 for x in read)
    return Rates(threads, (100, 1000, 10000), threads * 1e9, threads * 2e9, read, copy, start, start)


@pytest.mark.parametrize("streams, products, seconds, limit", [
    ([Stream(1e9, 0, 20000)], 5e8, 1.0, "memory"),
    ([Stream(1e9, 0, 20000)], 2e9, 2.0, "multiply-adds"),
    ([Stream(1e9, 1e9, 20000)], 0, 4.0, "memory"),  # 2 GB at 0.5 GB/s, as in a copy
    ([Stream(3e9, 1e9, 20000)], 0, 6.0, "memory"),  # 2 GB as in a copy, 2 GB are only read
    ([Stream(1e9, 0, 5000), Stream(7e9, 0, 500)], 0, 2.0, "L2"),  # 8 GB pass through L2, only 1 GB comes from L3
    ([Stream(8e9, 0, 50)], 0, 1.0, "L1"),
])  # fmt: skip
def test_the_bound(streams: list[Stream], products: float, seconds: float, limit: str) -> None:
    found = roofline.bound([Work(products, streams)], [rates()])
    assert found == (pytest.approx(seconds), limit, 1)


def test_a_second_thread_is_used_only_if_its_start_is_worth_it() -> None:
    one, two = rates(), rates(2, start=0.5)
    work = Work(4e9, [])
    assert roofline.bound([work, work], [one, two]) == (2.5, "multiply-adds", 2)
    work = Work(0.9e9, [])
    assert roofline.bound([work, work], [one, two]) == (0.9, "multiply-adds", 1)
    fast = one._replace(fma=1e8)
    assert roofline.bound([work, work], [fast, two]) == (0.95, "start of threads", 2)


@pytest.mark.parametrize("model", ["mlp", "resnet20"])
def test_the_products_of_a_recorded_step_are_those_of_its_layers(model: str) -> None:
    """bench/worker.py counts them in another way: from the layers of the model."""
    with with_winograd(False):
        program, _ = roofline.build(model, 2, predict=False)
    works = traffic.step(program.calls, program.arguments, 2)
    assert 2 * sum(work.multiply_adds for work in works) == count_flops(model, 2, predict=False)
    assert all(math.isfinite(stream.distance) for work in works for stream in work.streams)  # the step is repeated


def test_a_machine_that_others_use_is_noticed() -> None:
    assert not roofline.disturbed([rates(1), rates(2)]) and not roofline.disturbed([rates(1)])
    assert roofline.disturbed([rates(1), rates(2)._replace(fma=1.1e9)])


def test_the_table_of_a_step() -> None:
    program, _ = roofline.build("mlp", 8, predict=True)
    lines = roofline.lines_of(program, [rates(), rates(2)], 1)
    rows = roofline.table(lines, rates(2), every=False)
    assert len(roofline.table(lines, rates(2), every=True)) == len(program.calls) + 1 > len(rows)
    assert "x matmul.nn" in rows[0] and rows[-1].endswith("in total")
    assert f"{8 * (784 * 512 + 512 * 512 + 512 * 10) / 1e6:.2f}" in rows[-1]


def test_what_perf_prints() -> None:
    printed = "\n".join([
        "3000;;instructions;2000000;100.00;;",
        "<not supported>;;L1-dcache-load-misses;0;100.00;;",
        "50;;cache-misses;2000000;100.00;;",
    ])  # fmt: skip
    assert roofline.counted(printed, 10) == "perf, per step: instructions 300, missed L3 5"
    assert "cannot" in roofline.counted(printed.splitlines()[1], 10)


def test_a_quick_run(root: Path) -> None:
    command = [sys.executable, "bench/roofline.py", "mlp", "--batch", "8", "--quick", "--json"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "start of a parallel loop" in done.stdout and "in total" in done.stdout and "perf" in done.stdout
    rows = {row["name"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    assert rows["roofline-mlp-b8"]["value"] > 0 and rows["roofline-mlp-b8"]["unit"] == "% of bound"
    assert np.isfinite([row["value"] for row in rows.values()]).all()
