"""Products on AMX, from bfloat16 parts: as exact as float32, at edges of tiles, with special numbers."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kernel_cases.convolving import compute, expected
from quick import quick

from minidl.engine.jit import HAS_AMX, set_threads, threads
from minidl.kernels.conv import cpu as conv
from minidl.kernels.conv.choice import on_amx
from minidl.kernels.matmul import cpu
from minidl.kernels.matmul.amx_product import uses_amx

pytestmark = pytest.mark.skipif(not HAS_AMX, reason="this CPU has no AMX")

EPSILON = 2.0**-24  # the largest relative error of a rounded float32


def products(a: np.ndarray, b: np.ndarray, bias: np.ndarray | None = None, relu: bool = False) -> list[np.ndarray]:
    """Return a @ b by nn, nn with packed weights, nt and tn (not with a bias or relu).

    Scratch is filled with NaN, and has a guard.
    """
    (m, k), n = a.shape, b.shape[1]
    assert uses_amx(m, n, k)
    found, none = [], np.empty(0, a.dtype)

    def run(kind: str, *operands: np.ndarray, packed: np.ndarray | None = None) -> None:
        size = getattr(cpu, f"{kind}_scratch")(m, n, k)
        raw, out = np.full(size + 64, np.nan, a.dtype), np.full((m, n), np.nan, a.dtype)
        first = none if bias is None else bias
        more = (first, relu, none if packed is None else packed) if kind == "nn" else ()
        getattr(cpu, kind)(*operands, *more, raw[:size], out)
        assert np.isnan(raw[size:]).all()
        found.append(out)

    packed = np.zeros(cpu.packed_size(m, n, k), a.dtype)
    run("nn", a, b)
    run("nn", a, b, packed=packed)
    run("nn", a, np.full_like(b, np.nan), packed=packed)  # b is not read again
    if bias is None and not relu:
        run("nt", a, np.ascontiguousarray(b.T))
        run("tn", np.ascontiguousarray(a.T), b)
    return found


SHAPES = [(128, 128, 128), (129, 130, 131), (160, 257, 150), (143, 1500, 143), (700, 130, 161), (130, 170, 700),
          (129, 224, 170), (320, 128, 160), (170, 150, 2300)]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_as_exact_as_float32_sums(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    random = np.random.default_rng(0)
    scale = 2.0 ** random.integers(-30, 30, (m, 1)), 2.0 ** random.integers(-30, 30, (1, n))
    a = (random.standard_normal((m, k)) * scale[0]).astype(np.float32)
    b = (random.standard_normal((k, n)) * scale[1]).astype(np.float32)
    exact, size = a.astype(np.float64) @ b, abs(a).astype(np.float64) @ abs(b)
    first, *others = products(a, b)
    # A loop of k multiply-adds may have an error of k * EPSILON. In practice, errors add up as in a random walk.
    assert (abs(first - exact) <= 4 * EPSILON * np.sqrt(k) * size).all()
    assert np.sqrt(np.mean(((first - exact) / size) ** 2)) <= EPSILON
    for other in others:
        assert other.tobytes() == first.tobytes()


@pytest.mark.parametrize("shape", [*SHAPES, (128, 128, 784), (300, 256, 1024)])
def test_float64_has_the_same_scratch_and_uses_vectors(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    random = np.random.default_rng(5)
    a, b = random.standard_normal((m, k)), random.standard_normal((k, n))
    for out in products(a, b):
        np.testing.assert_allclose(out, a @ b, rtol=0, atol=1e-12 * np.sqrt(k))


def test_scratch_is_small_for_many_columns() -> None:
    assert cpu.nn_scratch(128, 65536, 1000) <= threads() * 600_000


def test_scratch_is_small_for_many_rows() -> None:
    assert max(cpu.nn_scratch(65536, 128, depth) for depth in (127, 128, 129)) <= threads() * 600_000


def test_integers_are_exact() -> None:
    random = np.random.default_rng(1)
    a, b = (random.integers(-300, 300, shape).astype(np.float32) for shape in ((170, 129), (129, 130)))
    for out in products(a, b):
        assert (out == a.astype(np.int64) @ b.astype(np.int64)).all()


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF])
def test_nan_stays_nan_in_its_row_and_column(bits: int) -> None:
    a, b = np.ones((170, 140), np.float32), np.ones((140, 150), np.float32)
    a[169, 139] = b[139, 3] = np.array([bits], np.uint32).view(np.float32)[0]
    for out in products(a, b):
        assert np.isnan(out[169]).all() and np.isnan(out[:, 3]).all()
        assert (np.delete(out[:169], 3, axis=1) == 140).all()


def test_infinite_numbers_become_nan_and_large_ones_do_not() -> None:
    a, b = np.full((130, 128), 2.0**-20, np.float32), np.ones((128, 128), np.float32)
    a[0, 0], a[1, 0], a[2, 0] = np.inf, -np.inf, 3.38e38
    for out in products(a, b):
        assert not np.isfinite(out[:2]).any() and np.isfinite(out[2:]).all()
        np.testing.assert_allclose(out[2], 3.38e38, rtol=1e-6)


SIZES = pytest.mark.parametrize("m, k, n", [(700, 300, 160), (160, 300, 700), (170, 140, 135), (1100, 160, 1060)])


def factors(m: int, k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(2)
    return random.standard_normal((m, k)).astype(np.float32), random.standard_normal((k, n)).astype(np.float32)


@SIZES
def test_bits_do_not_depend_on_threads(m: int, k: int, n: int) -> None:
    before, found = threads(), []
    try:
        for count in (1, 2):
            set_threads(count)
            found += products(*factors(m, k, n))
    finally:
        set_threads(before)
    assert len({out.tobytes() for out in found}) == 1


@pytest.mark.slow  # another process compiles the kernels again
@SIZES
def test_bits_do_not_depend_on_caches(m: int, k: int, n: int) -> None:
    code = (
        "import hashlib; from test_amx import factors, products\n"
        f"print(hashlib.sha256(products(*factors({m}, {k}, {n}))[0].tobytes()).hexdigest())"
    )
    small = subprocess.run([sys.executable, "-c", code], env={**os.environ, "MINIDL_L2": "256"}, capture_output=True,
                           text=True, check=True, cwd=Path(__file__).parent)  # fmt: skip
    assert small.stdout.strip() == hashlib.sha256(products(*factors(m, k, n))[0].tobytes()).hexdigest()


@pytest.mark.parametrize("depth", [128, 200])  # sums of one piece; of several
def test_a_bias_is_added(depth: int) -> None:
    random = np.random.default_rng(6)
    a, b, bias = (random.standard_normal(size).astype(np.float32) for size in ((150, depth), (depth, 145), (145,)))
    plain = products(a, b)[0]
    for out in products(a, b, bias):
        assert (out == plain + bias).all()


def test_relu_keeps_nan_and_clips_the_rest() -> None:
    random = np.random.default_rng(3)
    a, b = (random.standard_normal(size).astype(np.float32) for size in ((190, 150), (150, 131)))
    a[3, 4] = np.nan
    plain, clipped = products(a, b)[0], products(a, b, relu=True)[0]
    assert np.array_equal(clipped, np.where(plain < 0, np.float32(0), plain), equal_nan=True)


# Float64 uses vectors, in memory of the same size.
@pytest.mark.parametrize("dtype", quick(["float32", "float64"], "float32"))
@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize(
    ("images", "side", "channels", "outputs"), [(5, 16, 32, 64), (7, 17, 40, 70), (3, 20, 131, 120), (64, 8, 125, 131)]
)
def test_winograd(kernel: int, images: int, side: int, channels: int, outputs: int, dtype: str) -> None:
    """The products of y and dx are on AMX."""
    tiles = images * (-(-side // 4)) ** 2
    assert on_amx(channels, outputs, 1, 1, tiles)
    check_winograd((kernel, kernel), images, side, channels, outputs, dtype)


@pytest.mark.parametrize("dtype", quick(["float32", "float64"], "float32"))
@pytest.mark.parametrize(
    ("kernel", "pieces", "images", "side", "channels", "outputs"),
    [((5, 3), 2, 5, 16, 48, 64), ((1, 9), 2, 5, 16, 32, 70), ((5, 7), 6, 7, 17, 16, 40)],
)
def test_winograd_in_pieces(
    kernel: tuple[int, int], pieces: int, images: int, side: int, channels: int, outputs: int, dtype: str
) -> None:
    """A block of 32 rows of U can belong to two pieces."""
    assert on_amx(channels, outputs, 1, pieces, images * (-(-side // 4)) ** 2)
    check_winograd(kernel, images, side, channels, outputs, dtype)


def check_winograd(
    kernel: tuple[int, int], images: int, side: int, channels: int, outputs: int, dtype: str
) -> None:
    random = np.random.default_rng(4)
    x, dy = (random.standard_normal((images, side, side, last)) for last in (channels, outputs))
    weight = random.standard_normal((*kernel, channels, outputs))
    options = 1, (1, 1), (kernel[0] // 2, kernel[1] // 2), (1, 1), True

    found = compute(x.astype(dtype), weight.astype(dtype), dy.astype(dtype), options)
    tolerance = 1e-13 * channels if dtype == "float64" else 2.5e-6 if kernel == (3, 3) else 1e-5
    for ours, exact in zip(found[:2], expected(x, weight, dy, options)):
        np.testing.assert_allclose(ours, exact, rtol=0, atol=tolerance * abs(exact).max())


@pytest.mark.parametrize("dilation", [(1, 1), (2, 1)])
def test_winograd_with_packed_weights_on_any_threads(dilation: tuple[int, int]) -> None:
    """The same bits on one thread and two, and with weights that an earlier call has kept; also with dilation."""
    random, before = np.random.default_rng(7), threads()
    x, weight = random.standard_normal((6, 20, 21, 40)), random.standard_normal((3, 3, 40, 70))
    x, weight, none = x.astype(np.float32), weight.astype(np.float32), np.empty(0, np.float32)
    options = 1, (1, 1), dilation, dilation  # padding and dilation: y is as large as x
    found = []
    try:
        for count in (1, 2):
            set_threads(count)
            shapes = x.shape, weight.shape, *options, True
            scratch = np.full(conv.forward_scratch(*shapes), np.nan, np.float32)
            packed = np.zeros(conv.packed_size(*shapes), np.float32)
            for some in (none, packed, packed):
                y = np.full((6, 20, 21, 70), np.nan, np.float32)
                conv.forward(x, weight, *[none] * 4, False, *options, True, some, scratch, y)
                found.append(y)
    finally:
        set_threads(before)
    assert np.isfinite(found[0]).all()
    assert len({y.tobytes() for y in found}) == 1


@pytest.mark.parametrize(
    ("images", "side", "channels", "outputs"), [(3, 9, 140, 130), (5, 7, 130, 167), (2, 8, 128, 128), (2, 29, 170, 170)]
)
def test_a_kernel_of_1x1(images: int, side: int, channels: int, outputs: int) -> None:
    """The products of matrices, with every end of a layer: compare with separate steps, and with float64."""
    random, before, none = np.random.default_rng(8), threads(), np.empty(0, np.float32)
    shape, options = (images, side, side, channels), (1, (1, 1), (0, 0), (1, 1), True)
    x, dy = (random.standard_normal((images, side, side, c)).astype(np.float32) for c in (channels, outputs))
    weight = random.standard_normal((1, 1, channels, outputs)).astype(np.float32)
    bias, scale, shift = random.standard_normal((3, outputs)).astype(np.float32)
    pixels = images * side * side
    assert uses_amx(pixels, outputs, channels)
    sizes = [getattr(conv, f"{name}_scratch") for name in ("forward", "backward_input", "backward_weight")]

    def forward(*end: np.ndarray, relu: bool = False, packed: np.ndarray = none) -> np.ndarray:
        scratch, y = np.full(sizes[0](shape, weight.shape, *options), np.nan, np.float32), np.full_like(dy, np.nan)
        conv.forward(x, weight, *end, relu, *options, packed, scratch, y)
        return y

    def backward(other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        memory = [np.full(size(shape, weight.shape, *options), np.nan, np.float32) for size in sizes[1:]]
        dx, dweight = np.full_like(x, np.nan), np.full_like(weight, np.nan)
        conv.backward_input(dy, weight, other, *options, memory[0], dx)
        conv.backward_weight(x, dy, *options, memory[1], dweight)
        return dx, dweight

    plain, shortcut = forward(none, none, none, none), dy.reshape(-1)
    expected = np.maximum((plain + bias) * scale + shift + dy, 0)
    packed = np.zeros(conv.packed_size(shape, weight.shape, *options), np.float32)
    dx, dweight = backward(none)
    try:
        for count in (1, 2):
            set_threads(count)
            assert (forward(bias, none, none, none) == plain + bias).all()
            assert (forward(none, none, none, none, relu=True) == np.maximum(plain, 0)).all()
            for keeps in (none, packed, packed):
                assert (forward(bias, scale, shift, shortcut, relu=True, packed=keeps) == expected).all()
            again = backward(x.reshape(-1))
            assert (again[0] == dx + x).all() and (again[1] == dweight).all()
    finally:
        set_threads(before)
    rows, errors = x.reshape(-1, channels).astype(np.float64), dy.reshape(-1, outputs).astype(np.float64)
    large = weight[0, 0].astype(np.float64)
    for found, a, b in ((plain, rows, large), (dx, errors, large.T), (dweight, rows.T, errors)):
        exact = a @ b
        assert abs(found.reshape(exact.shape) - exact).max() <= 1e-6 * np.sqrt(a.shape[1]) * abs(exact).max()


def test_packed_1x1_weights_of_few_and_many_pixels_have_different_sizes() -> None:
    """Programs share packed weights of one size (program/packed.py), and these have another form on AMX."""
    options = 1, (1, 1), (0, 0), (1, 1), True
    for channels, outputs in ((128, 128), (130, 150), (512, 512)):
        few, many = (conv.packed_size((n, 8, 8, channels), (1, 1, channels, outputs), *options) for n in (0, 100))
        assert few != many


def test_it_can_be_switched_off() -> None:
    code = "from minidl.engine.jit import HAS_AMX, VECTOR_BYTES; print(HAS_AMX, VECTOR_BYTES)"
    run = subprocess.run([sys.executable, "-c", code], env={**os.environ, "MINIDL_ISA": "avx512"}, capture_output=True,
                         text=True, check=True)  # fmt: skip
    assert run.stdout.split() == ["False", "64"]
