"""Products on tensor cores: edges of tiles, machine code, broken kernels, and the emulator's instructions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulator import Emulator, KernelError
from emulator.tensor import round_to_bf16, round_to_tf32
from kernel_cases.comparing import module
from numba import float32, int32, uint32
from numpy import ndarray
from on_emulator import mutated, placed
from sample import each
from sass import Sass, read
from test_cuda_kernels import TARGETS
from test_cuda_matmul import FORMS, call, expected, operands

from minidl.engine.cuda import Grid, Kernel, cuda, kernel, launch, launch_with, types_of
from minidl.engine.cuda_memory import get, put
from minidl.engine.cuda_mma import ldmatrix, multiply_tf32, to_bf16, to_tf32
from minidl.engine.cuda_numbers import bits_of, of_bits
from minidl.engine.device import aligned
from minidl.kernels.matmul import cuda_bf16, cuda_tf32

PRECISIONS = {"tf32": cuda_tf32, "bf16": cuda_bf16}
ROUNDED = {
    "tf32": lambda x: round_to_tf32(x).view(np.float32),
    "bf16": lambda x: (round_to_bf16(x) << np.uint32(16)).view(np.float32),
}
UNIT = {"tf32": 2.0**-11, "bf16": 2.0**-8}  # the largest relative error of rounding a number


def multiply(
    precision: str, form: str, rows: int, columns: int, depth: int, offset: int = 0, kernels: Any = None, **options: Any
) -> Emulator:
    """Compare with the product of rounded numbers, as exact as sums in float32 are, and with that of the numbers."""
    a, b, out = (placed(x, offset) for x in operands(form, rows, columns, depth))
    a.flags.writeable = b.flags.writeable = False
    emulator = Emulator(fuse=False, **options)
    with launch_with(emulator):
        call(kernels or PRECISIONS[precision], form, a, b, out)
    size = expected(form, abs(a), abs(b))
    rounded = expected(form, ROUNDED[precision](a), ROUNDED[precision](b))
    np.testing.assert_array_less(abs(out - rounded), (depth + 1) * np.finfo(np.float32).eps * size)
    np.testing.assert_array_less(abs(out - expected(form, a, b)), 2.1 * UNIT[precision] * size)
    return emulator


# rows, columns, depth: one less and one more than a tile, with 1 to 3 tiles and a part of one; multiples of 4, or not
SHAPES = (127, 129, 33), (129, 132, 36), (1, 1, 1), (132, 128, 16)


@pytest.mark.parametrize("shape", each(2, SHAPES))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_edges_of_tiles(precision: str, form: str, shape: tuple[int, int, int]) -> None:
    multiply(precision, form, *shape)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_addresses_that_are_not_multiples_of_16(precision: str) -> None:
    multiply(precision, "nn", 20, 12, 8, offset=1)


@pytest.mark.parametrize("shape", [(0, 3, 5), (3, 0, 5), (3, 5, 0), (9, 7, 5)])
def test_bias_relu_and_empty_sums(shape: tuple[int, int, int]) -> None:
    a, b, out = operands("nn", *shape)
    bias = np.linspace(-3, 3, shape[1]).astype(np.float32)
    with launch_with(Emulator()):
        cuda_tf32.nn(a, b, bias, True, bias[:0], bias[:0], out)
    np.testing.assert_allclose(out, np.maximum(expected("nn", a, b) + bias, 0), atol=0.02)


def test_bits_do_not_depend_on_the_order_of_blocks() -> None:
    found = []
    for order in ("forward", "shuffled"):
        a, b, out = operands("nn", 140, 150, 20)
        with launch_with(Emulator(order=order)):
            cuda_bf16.nn(a, b, out[0, :0], False, out[0, :0], out[0, :0], out)
        found.append(out.tobytes())
    assert found[0] == found[1]


# -- machine code -----------------------------------------------------------------------------------------------------


def code(precision: str, form: str, columns: int, cc: tuple[int, int]) -> Sass:
    found: list[Sass] = []

    def note(kernel: Kernel, grid: Grid, arguments: tuple[Any, ...]) -> None:
        found.append(read(kernel, types_of(arguments), cc))

    with launch_with(note):
        call(PRECISIONS[precision], form, *operands(form, 512, columns, 64))
    return found[0]


@pytest.mark.parametrize("cc", each(2, TARGETS))
@pytest.mark.parametrize("columns", each(2, [512, 513]))  # aligned and not
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_tensor_cores_multiply(precision: str, form: str, columns: int, cc: tuple[int, int]) -> None:
    sass = code(precision, form, columns, cc)
    assert (sass.compiled.stack, sass.compiled.spills) == (0, 0)
    assert sass.compiled.registers <= 128
    assert sass.blocks_per_sm() >= 2
    loop = [operation.name for operation in sass.main_loop("HMMA")]
    names = {name for name in loop if name.startswith("HMMA")}
    assert names == {"HMMA.16816.F32.BF16" if precision == "bf16" else "HMMA.1688.F32.TF32"}
    assert loop.count(*names) == (16 if precision == "bf16" else 32)
    assert any(name.startswith("LDSM") for name in loop) == (form != "tn")
    assert "FFMA" not in loop


@pytest.mark.parametrize("columns", each(2, [128, 129]))
@pytest.mark.parametrize("form", FORMS)
def test_shared_memory_has_no_conflicts(form: str, columns: int) -> None:
    counts = multiply("tf32", form, 128, columns, 32, counting=True).counts
    assert counts is not None
    for does in ("read", "written"):
        for (line, nbytes), cost in counts.shared(does).items():
            assert cost.units <= cost.requests * nbytes / 4, f"PTX line {line}"


# -- broken kernels ---------------------------------------------------------------------------------------------------

KERNEL, MMA = "matmul/cuda_tensor.py", "            wait_all()\n            cuda.syncthreads()\n"
MUTANTS = {  # what is broken: (piece, replacement)
    "no wait": (MMA, "            cuda.syncthreads()\n"),
    "no barrier": (MMA, "            wait_all()\n"),
    "the same half": ("fetch_b(sb, HALF - half,", "fetch_b(sb, half,"),
    "rows are not bounded": ("fetch_a(sa, HALF - half, a, row0, k0, rows,",
                             "fetch_a(sa, HALF - half, a, row0, k0, 999,"),
    "depth is not bounded": ("i < rows and k < depth)", "i < rows)"),
    "a is not rounded": ("return _tf32(p[0]), _tf32(p[1]), _tf32(p[2]), _tf32(p[3])\n\n    @device\n    def round_b",
                         "return p[0], _tf32(p[1]), _tf32(p[2]), _tf32(p[3])\n\n    @device\n    def round_b"),
    "quads are not permuted alike": ("lane // 16 * VECTOR)", "(lane // 16 ^ 1) * VECTOR)"),
    "rows of b in the wrong order": ("_word(shared, at), _word(shared, further), _word(shared, at + 8)",
                                     "_word(shared, at), _word(shared, at + 8), _word(shared, further)"),
    "a column twice": ("add(sums, i, 3, a, (b[6], b[7]))", "add(sums, i, 3, a, (b[4], b[5]))"),
    "half of the products": ("            if not bf16:\n", "            if bf16:\n"),
    "no bias": ("summand = get(bias, column) if bias.size > 0 else zero", "summand = zero"),
    "a row too many": ("if row < rows:", "if row <= rows:"),
    "a column too many": ("if column < columns:", "if column <= columns:"),
}  # fmt: skip


@pytest.mark.parametrize("broken", each(7, MUTANTS))
def test_a_broken_product_is_found(broken: str) -> None:
    with mutated("matmul", KERNEL, *MUTANTS[broken]), pytest.raises((KernelError, AssertionError)):
        changed = module("matmul", "cuda_tf32")
        multiply("tf32", "nn", 130, 133, 45, kernels=changed)
        a, b, out = operands("nn", 9, 7, 5)
        with launch_with(Emulator()):
            changed.nn(a, b, np.float32(np.arange(7)), False, a[0, :0], a[0, :0], out)
        np.testing.assert_allclose(out, expected("nn", a, b) + np.arange(7), atol=0.02)


@pytest.mark.parametrize("piece", ["_bf16(p[0], p[1]), _bf16(q[0], q[1])", "_bf16(p[0], p[2]), _bf16(p[1], p[3])"])
def test_pairs_of_a_and_b_must_match(piece: str) -> None:
    with mutated("matmul", KERNEL, piece, piece.replace("(p[0], p[", "(p[1], p[")), pytest.raises(AssertionError):
        multiply("bf16", "nt", 20, 20, 20, kernels=module("matmul", "cuda_bf16"))


# -- the emulator's instructions --------------------------------------------------------------------------------------

WARP, WORDS = 32, 128


def run(function: Any, *arguments: ndarray, threads: int = WARP) -> None:
    with launch_with(Emulator()):
        launch(kernel(threads)(function), 1, *arguments)


def test_rounding() -> None:
    def both(x: ndarray, tf32: ndarray, bf16: ndarray) -> None:
        i = int32(cuda.threadIdx.x)
        put(tf32, i, of_bits(int32(to_tf32(get(x, i)))))
        put(bf16, i, to_bf16(get(x, i), -get(x, i)))

    exact = [1.0, -2.5, 0.0, np.inf, -np.inf, 3e38]
    ties = [1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 - 2**-23, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-23, np.pi]
    x = np.float32((exact + ties + [0] * WARP)[:WARP])
    tf32, bf16 = np.zeros(WARP, np.float32), np.zeros(WARP, np.uint32)
    run(both, x, tf32, bf16)
    np.testing.assert_array_equal(tf32[6:9], [1 + 2**-10, 1 + 2**-9, 1])  # ties away from 0
    low, high = (np.uint32(bf16) << np.uint32(16)).view(np.float32), (bf16 & np.uint32(0xFFFF0000)).view(np.float32)
    np.testing.assert_array_equal(low[9:12], [1, 1 + 2**-6, 1 + 2**-7])  # ties to even
    np.testing.assert_array_equal(low, -high)
    np.testing.assert_array_equal(tf32[:5], exact[:5])
    np.testing.assert_array_equal(low[:5], exact[:5])
    assert abs(tf32[12] - np.pi) < 2**-10
    assert abs(low[12] - np.pi) < 2**-7


def test_matrices_are_distributed_as_documented() -> None:
    def distribute(x: ndarray, out: ndarray) -> None:
        shared, lane = cuda.shared.array(WORDS, uint32, 16), int32(cuda.threadIdx.x)
        for j in range(4):
            put(shared, lane * 4 + j, get(x, lane * 4 + j))
        cuda.syncthreads()
        words = ldmatrix(shared, lane * 4)
        for j in range(4):
            put(out, j * WARP + lane, words[j])

    x, out = np.arange(WORDS, dtype=np.uint32), np.zeros(WORDS, np.uint32)
    run(distribute, x, out)
    np.testing.assert_array_equal(out, x)  # matrix m, row g, word t is element 32 m + 4 g + t


def test_numbers_must_be_rounded() -> None:
    def square(x: ndarray) -> None:
        i, zero = int32(cuda.threadIdx.x), float32(0)
        word = uint32(bits_of(get(x, i)))
        c = multiply_tf32((zero, zero, zero, zero), (word, word, word, word), (word, word))
        put(x, i, c[0])

    x = aligned(WARP, np.float32)
    x[:] = 3
    run(square, x)
    np.testing.assert_array_equal(x, 72)
    x[:] = 1 / 3
    with pytest.raises(KernelError, match="not rounded to TF32"):
        run(square, x)


def test_part_of_a_warp_is_found() -> None:
    def some(x: ndarray) -> None:
        i, zero, word = int32(cuda.threadIdx.x), float32(0), uint32(0)
        if get(x, i) > 0:
            put(x, i, multiply_tf32((zero, zero, zero, zero), (word, word, word, word), (word, word))[0])

    with pytest.raises(KernelError, match="mma by a part of a warp"):
        run(some, np.float32(np.arange(WARP)))
