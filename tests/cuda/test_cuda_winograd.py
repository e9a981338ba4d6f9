"""Winograd's form on the emulator: edges of tiles against float64, its choice, its machine code, broken kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulator import Emulator, KernelError
from on_emulator import mutated, placed
from sample import each
from sass import read
from test_cuda_conv import Layer, expected, operands
from test_cuda_kernels import TARGETS

from minidl.engine.cuda import Grid, Kernel, launch_with, types_of
from minidl.kernels.conv import cuda as _cuda

ACCURACY = {np.float32: 1e-5, np.float64: 1e-13}  # largest error, relative to the largest output (WINOGRAD.md: 2.4e-6)
LAYERS = {
    "tiles beyond the border": Layer((2, 9, 6, 5), (3, 3), 6),
    "no padding": Layer((1, 6, 10, 33), (3, 3), 40, padding=(0, 0)),
    "padding 2": Layer((3, 4, 5, 8), (3, 3), 1, padding=(2, 2)),
    "more padding than taps": Layer((1, 5, 3, 4), (3, 3), 12, padding=(1, 4)),
}


def compute(
    name: str, layer: Layer, finish: bool, offset: int = 0, dtype: Any = np.float32, kernels: Any = _cuda,
    **options: Any,
) -> tuple[np.ndarray, Emulator]:  # fmt: skip
    """Call a function of cuda_winograd.py on the emulator, and compare its result with the one in float64.

    finish: with bias, scale, shift, shortcut and relu; for dx, with the shortcut
    """
    x, weight, dy = (placed(array, offset) for array in operands(layer, dtype).values())
    random, outputs = np.random.default_rng(1), layer.outputs * finish
    bias, scale, shift = (random.standard_normal(outputs).astype(dtype) for _ in range(3))
    want = expected(name, layer, x, weight, dy)
    shortcut = random.standard_normal(want.size * finish).astype(dtype)
    form = kernels.winograd_form
    scratch = np.full(getattr(form, f"{name}_scratch")(layer.image, layer.weight, layer.padding), np.nan, dtype)
    out = placed(np.full(want.shape, np.nan, dtype), offset)
    for array in (x, weight, dy, bias, scale, shift, shortcut):
        array.flags.writeable = False
    emulator = Emulator(fuse=False, **options)
    with launch_with(emulator):
        if name == "forward":
            arguments = x, weight, bias, scale, shift, shortcut, finish, layer.padding
            form.forward(*arguments, placed(scratch, offset), out)
        else:
            form.backward_input(dy, weight, shortcut, layer.padding, placed(scratch, offset), out)
    if finish and name == "forward":
        want = (want + bias) * scale + shift
    if finish:
        want = want + shortcut.reshape(want.shape)
    if finish and name == "forward":
        want = np.maximum(want, 0)
    np.testing.assert_array_less(abs(out - want), ACCURACY[dtype] * abs(want).max())
    return out, emulator


@pytest.mark.parametrize("finish", [True, False])
@pytest.mark.parametrize("name", ["forward", "backward_input"])
@pytest.mark.parametrize("layer", each(2, LAYERS))
def test_edges_of_tiles(layer: str, name: str, finish: bool) -> None:
    compute(name, LAYERS[layer], finish)


def test_bits_do_not_depend_on_the_order_of_blocks_nor_on_alignment() -> None:
    layer = LAYERS["tiles beyond the border"]
    (first, _), (second, _) = compute("forward", layer, True), compute("forward", layer, True, 1, order="shuffled")
    assert first.tobytes() == second.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forward", "backward_input"])
def test_in_float64(name: str) -> None:
    compute(name, LAYERS["no padding"], True, dtype=np.float64)


# -- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "wanted", "chosen"),
    [
        (Layer((2, 8, 8, 64), (3, 3), 64), True, True),
        (Layer((2, 8, 8, 64), (3, 3), 64), False, False),  # --conv direct
        (Layer((2, 8, 8, 64), (3, 3), 32), True, False),  # the planes would take longer than the products saved
        (Layer((2, 8, 8, 64), (3, 3), 64, stride=(2, 1)), True, False),
        (Layer((2, 8, 8, 64), (3, 3), 64, dilation=(1, 2)), True, False),
        (Layer((2, 8, 8, 128), (3, 3), 128, groups=2), True, False),
        (Layer((2, 8, 8, 64), (3, 2), 64), True, False),
        (Layer((2, 2, 2, 64), (3, 3), 64), True, False),  # a tile has 4 x 4 outputs
    ],
)
def test_when_the_form_is_chosen(layer: Layer, wanted: bool, chosen: bool) -> None:
    """For y and for dx. The sizes of scratch belong to the choice."""
    x, weight, dy = operands(layer).values()
    options, none = (layer.groups, layer.stride, layer.padding, layer.dilation, wanted), x[:0]
    sizes = [f(layer.image, layer.weight, *options) for f in (_cuda.forward_scratch, _cuda.backward_input_scratch)]
    scratch = [np.empty(size, np.float32) for size in sizes]
    launched: list[str] = []
    with launch_with(lambda kernel, grid, arguments: launched.append(kernel.name)):
        _cuda.forward(x, weight, none, none, none, none, False, *options, none, scratch[0], dy.copy())
        _cuda.backward_input(dy, weight, none, *options, scratch[1], x.copy())
    assert launched.count("from_planes") == 2 * chosen
    assert [size > 0 for size in sizes] == [chosen, chosen]


# -- machine code -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cc", each(2, TARGETS))
def test_machine_code(cc: tuple[int, int]) -> None:
    """The products keep their sums in registers, and the others wait for memory only: sectors are used whole."""
    layer = Layer((1, 8, 8, 64), (3, 3), 128)
    seen = []

    def check(kernel: Kernel, grid: Grid, arguments: tuple[Any, ...]) -> None:
        sass = read(kernel, types_of(arguments), cc)
        assert (sass.compiled.stack, sass.compiled.spills) == (0, 0)
        assert sass.compiled.registers <= 128
        assert sass.blocks_per_sm() >= 2
        if kernel.name == "product":
            assert sass.share() >= 0.9
            assert set(sass.widths("LDS")) == {128}
        else:
            emulator = Emulator(fuse=False, counting=True)
            emulator(kernel, grid, arguments)
            assert emulator.counts is not None
            costs = emulator.counts.costs.values()
            assert sum(cost.units for cost in costs) <= 1.05 * sum(cost.least for cost in costs)
        seen.append(kernel.name)

    x, weight, dy = (placed(array, 0) for array in operands(layer).values())
    none, scratch = x[:0], np.zeros(_cuda.winograd_form.forward_scratch(layer.image, layer.weight, (1, 1)), np.float32)
    with launch_with(check):
        _cuda.winograd_form.forward(x, weight, none, none, none, none, False, (1, 1), placed(scratch, 0), dy)
    assert seen == ["weight_to_planes", "to_planes", "product", "from_planes"]


MUTANTS = {  # what is broken: (file, piece, replacement, function)
    "a pixel beyond the image": ("conv/cuda_winograd.py", "if inside(top + h, left + w, height, width) else",
                                 "if inside(top + h, left + w, height, width + 1) else", "forward"),
    "outputs beyond the image": ("conv/cuda_winograd.py", "left + w < width:", "left + w <= width:", "forward"),
    "taps are not reversed": ("conv/cuda_winograd.py", "-size if backward else size", "size", "backward_input"),
    "padding is not reversed": ("conv/cuda_winograd.py", "edge - padding[0], edge - padding[1]", "padding",
                                "backward_input"),
    "a row of BT is negative": ("conv/cuda_winograd.py", "number(A) * (d3 - number(B2) * d1)",
                                "number(A) * (number(B2) * d1 - d3)", "forward"),
    "a row of AT is missing": ("conv/cuda_winograd.py", " + p[at + 5 * step]", "", "forward"),
    "a factor of G is 1": ("conv/cuda_winograd.py", "number(B) * g1 * number(AT_B)", "number(B) * g1", "forward"),
    "only columns are transformed": ("conv/cuda_winograd.py", "_inputs(p, PATCH * h, 1)", "pass", "forward"),
    "a tile too many": ("conv/cuda_winograd.py", "n < images:\n        p = ", "n <= images:\n        p = ", "forward"),
    "planes of a overlap": ("matmul/cuda_tile.py", "a_at + plane * rows * depth", "a_at + plane * depth", "forward"),
    "planes of b overlap": ("matmul/cuda_tile.py", "b_at + plane * depth * columns", "b_at", "forward"),
    "planes of out overlap": ("matmul/cuda_tile.py", "int32(plane * rows + m) if planes", "m if planes", "forward"),
}  # fmt: skip


@pytest.mark.parametrize("broken", each(5, MUTANTS))
def test_a_broken_form_is_found(broken: str) -> None:
    file, old, new, name = MUTANTS[broken]
    with mutated("conv", file, old, new) as changed, pytest.raises((KernelError, AssertionError)):
        for layer in ("tiles beyond the border", "padding 2"):
            compute(name, LAYERS[layer], True, kernels=changed)
