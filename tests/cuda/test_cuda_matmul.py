"""Matrix products on the emulator: all tiles and edges, the machine code of the main loop, and broken kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulator import Emulator, KernelError
from on_emulator import mutated, placed
from sample import each, each_row
from sass import Operation, Sass, read
from test_cuda_kernels import TARGETS

from minidl.engine.cuda import Grid, Kernel, launch_with, types_of
from minidl.kernels.matmul import cuda as _cuda
from minidl.kernels.matmul.cuda_ladder import RUNGS
from minidl.kernels.matmul.cuda_loader import THREADS

FORMS = ("nn", "nt", "tn")
NOTHING = np.empty(0, np.float32)


def operands(form: str, rows: int, columns: int, depth: int, dtype: Any = np.float32) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(0)
    a = random.standard_normal((depth, rows) if form == "tn" else (rows, depth)).astype(dtype)
    b = random.standard_normal((columns, depth) if form == "nt" else (depth, columns)).astype(dtype)
    return a, b, np.full((rows, columns), np.nan, dtype)


def expected(form: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    x, y = a.astype(np.float64), b.astype(np.float64)
    return (x.T if form == "tn" else x) @ (y.T if form == "nt" else y)


def call(kernels: Any, form: str, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    nothing = np.empty(0, a.dtype)
    if form == "nn":
        kernels.nn(a, b, nothing, False, nothing, nothing, out)
    else:
        getattr(kernels, form)(a, b, nothing, out)


def multiply(
    form: str, rows: int, columns: int, depth: int, dtype: Any = np.float32, offset: int = 0,
    kernels: Any = _cuda, **options: Any,
) -> Emulator:  # fmt: skip
    """Compute a product on the emulator, and compare it with the one in float64."""
    a, b, out = (placed(x, offset) for x in operands(form, rows, columns, depth, dtype))
    a.flags.writeable = b.flags.writeable = False
    emulator = Emulator(fuse=False, **options)
    with launch_with(emulator):
        call(kernels, form, a, b, out)
    largest_error = (depth + 1) * np.finfo(dtype).eps * expected(form, abs(a), abs(b))  # of sums in any order
    np.testing.assert_array_less(abs(out - expected(form, a, b)), largest_error)
    return emulator


# rows, columns, depth: one less and one more than a tile; depths with 0 to 4 tiles and a part of one
ODD = (127, 127, 8), (129, 132, 17), (1, 1, 1), (130, 65, 24), (5, 9, 33)
WIDE = (132, 136, 25), (64, 128, 16)  # multiples of 4: accesses of 16 bytes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", each(3, [*ODD, *WIDE]))
def test_edges_of_tiles(form: str, shape: tuple[int, int, int]) -> None:
    multiply(form, *shape)


@pytest.mark.parametrize("columns", each(6, [7, 8, 9, 16, 31, 32]))
@pytest.mark.parametrize("form", FORMS)
def test_edges_of_narrow_tiles(form: str, columns: int) -> None:
    multiply(form, 513 if columns <= 16 else 257, columns, 19)
    multiply(form, 517, columns, 28)  # successive k are copied by 16 bytes
    multiply(form, 4, columns, 8)


MORE = (
    (260, 4, 9), (136, 8, 32), (516, 8, 7), (300, 12, 10), (257, 16, 31), (260, 32, 20), (132, 64, 12), (516, 60, 12),
    (132, 68, 4),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", MORE)
def test_more_edges_of_tiles(form: str, shape: tuple[int, int, int]) -> None:
    multiply(form, *shape)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(66, 66, 9), (68, 68, 20), (132, 32, 17), (260, 16, 8), (3, 10, 5)])
def test_edges_in_float64(form: str, shape: tuple[int, int, int]) -> None:
    multiply(form, *shape, dtype=np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_an_odd_address(form: str) -> None:
    multiply(form, 132, 64, 16, offset=1)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_realistic_shapes(form: str) -> None:
    for shape in ((512, 512, 512), (64, 1000, 784), (1024, 10, 128), (64, 120, 400)):
        multiply(form, *shape)


# -- machine code -----------------------------------------------------------------------------------------------------


def code(form: str, columns: int, cc: tuple[int, int], dtype: str = "float32", rows: int = 512) -> Sass:
    """Return the kernel for a product with so many columns."""
    found: list[Sass] = []

    def note(kernel: Kernel, grid: Grid, arguments: tuple[Any, ...]) -> None:
        found.append(read(kernel, types_of(arguments), cc))

    a, b, out = operands(form, rows, columns, 64, dtype)
    with launch_with(note):
        call(_cuda, form, a, b, out)
    return found[0]


@pytest.mark.parametrize("cc", each(2, TARGETS))
@pytest.mark.parametrize(("columns", "least"), [(512, 0.90), (513, 0.85)])  # aligned and not
@pytest.mark.parametrize("form", FORMS)
def test_the_main_loop_multiplies(form: str, columns: int, least: float, cc: tuple[int, int]) -> None:
    sass = code(form, columns, cc)
    assert (sass.compiled.stack, sass.compiled.spills) == (0, 0)
    assert sass.compiled.registers <= 128
    assert sass.blocks_per_sm() >= 2
    assert sass.share() >= least
    assert set(sass.widths("LDS")) == {128}


NARROW = {  # (form, columns): least share of multiply-adds
    **{("nn", 8): 0.84, ("nn", 16): 0.87, ("nn", 32): 0.90, ("nn", 33): 0.85, ("nn", 64): 0.90},
    **{("nt", 8): 0.83, ("nt", 16): 0.87, ("nt", 32): 0.89, ("nt", 64): 0.90},
    **{("tn", 8): 0.86, ("tn", 16): 0.90, ("tn", 32): 0.90, ("tn", 64): 0.90},
}


@pytest.mark.parametrize(("form", "columns", "cc"), each_row(7, [(*case, cc) for cc in TARGETS for case in NARROW]))
def test_narrow_tiles(form: str, columns: int, cc: tuple[int, int]) -> None:
    sass = code(form, columns, cc)
    assert (sass.compiled.stack, sass.compiled.spills) == (0, 0)
    assert sass.compiled.registers <= (128 if sass.kernel.threads == 256 else 168)
    assert sass.blocks_per_sm() >= 2
    assert sass.share() >= NARROW[form, columns]
    assert set(sass.widths("LDS")) == {128}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("columns", each(4, [8, 16, 32, 64, 128, 129]))
def test_shared_memory_has_no_conflicts(form: str, columns: int) -> None:
    counts = multiply(form, 512, columns, 24, counting=True).counts
    assert counts is not None
    for (line, nbytes), cost in counts.shared("read").items():
        assert nbytes == 16, f"PTX line {line}"
        assert cost.worst <= 2, f"PTX line {line}"
    for (line, _), cost in counts.shared("written").items():
        assert cost.units <= cost.least, f"PTX line {line}"


def test_register_conflicts_are_counted() -> None:
    lines = ("R8, R2, R4, R8", "R8, R2.reuse, R4, R8", "R9, R2, R6, R8", "R9, R1, R4, R8", "R9, R2, R2, R8")
    loop = [Operation("FFMA", operands) for operands in lines]
    sass = code("nn", 512, TARGETS[0])
    assert replace(sass, operations=loop, loops=[(0, len(loop) - 1)]).register_conflicts() == 2  # the first two


# -- the ladder, and broken kernels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", each(3, RUNGS))
@pytest.mark.parametrize("shape", [(130, 133, 21), (33, 17, 40)])
def test_steps_of_the_ladder(rung: str, shape: tuple[int, int, int]) -> None:
    a, b, out = operands("nn", *shape)
    with launch_with(Emulator(fuse=False)):
        RUNGS[rung](a, b, out)
    np.testing.assert_allclose(out, expected("nn", a, b), rtol=0, atol=1e-4)


LOOP = "                wait_all()\n                cuda.syncthreads()\n"
LAST = "            wait_all()\n            cuda.syncthreads()\n"
FIRST_TURN = LOOP + "                fetch_a(sa, to_a + A_HALF"
SECOND_TURN = LOOP + "                fetch_a(sa, to_a, a"
AFTER = LAST + "            if tiles & 1:"
TILE, LOADER = "cuda_tile.py", "cuda_loader.py"


def without(word: str, text: str) -> str:
    return text.replace(word, "pass", 1)


MUTANTS = {  # what is broken: (file, piece, replacement)
    "no barrier in the first turn": (TILE, FIRST_TURN, without("cuda.syncthreads()", FIRST_TURN)),
    "no barrier in the second turn": (TILE, SECOND_TURN, without("cuda.syncthreads()", SECOND_TURN)),
    "no wait in the first turn": (TILE, FIRST_TURN, without("wait_all()", FIRST_TURN)),
    "no wait in the second turn": (TILE, SECOND_TURN, without("wait_all()", SECOND_TURN)),
    "no barrier after the loop": (TILE, AFTER, without("cuda.syncthreads()", AFTER)),
    "no wait after the loop": (TILE, AFTER, without("wait_all()", AFTER)),
    "the same half twice": (TILE, "multiply(sums, p, q, sa, sb, at_a + A_HALF, at_b + B_HALF)",
                            "multiply(sums, p, q, sa, sb, at_a, at_b + B_HALF)"),
    "the wrong half is filled": (TILE, SECOND_TURN, SECOND_TURN.replace("to_a, a", "to_a + A_HALF, a")),
    "rows are not bounded": (TILE, "a_size, b_size = int32(rows - row0),", "a_size, b_size = int32(ROWS),"),
    "columns are not bounded": (TILE, "int32(columns - column0)\n", "int32(COLUMNS)\n"),
    "one row too many is stored": (TILE, "if first_row <= m < rows:", "if first_row <= m <= rows:"),
    "one column too many is stored": (TILE, "if n + more < columns:", "if n + more <= columns:"),
    "a part of a tile is whole": (TILE, "part = int32((depth - 1) % DEPTH + 1)", "part = int32(DEPTH)"),
    "the part is too deep": (LOADER, "wanted = i + lanes * q < size and (not part or k + rows * j < depth)",
                             "wanted = i + lanes * q < size and (not part or k + rows * j <= depth)"),
    "a wide part is too deep": (LOADER, "wanted = i + more < size and (not part or k + rows * j < depth)",
                                "wanted = i + more < size and (not part or k + rows * j <= depth)"),
    "a transposed part is too deep": (LOADER, "(not part or k + q < depth)", "(not part or k + q <= depth)"),
    "a half of a row is copied elsewhere": (TILE, "(ak ^ ai & VECTOR)", "ak"),
    "the same half of a row twice": (TILE, "at_a ^ VECTOR", "at_a"),
    "a part by rows is too deep": (LOADER, "not part or k < depth)\n", "not part or k <= depth)\n"),
    "the last rows are outside": (TILE, "min(first_row, rows - ROWS)", "first_row"),
    "rows are stored twice": (TILE, "if first_row <= m < rows:", "if m < rows:"),
    "rows change places": (TILE, "int32(y + i * DOWN) if rows_stay", "int32(y + i * VECTOR) if rows_stay"),
    "a tile too few": (TILE, "turns = int32(tiles >> 1)", "turns = int32((tiles - 1) >> 1)"),
    "relu without bias": (TILE, "if bias.size > 0 or relu:", "if bias.size > 0:"),
}  # fmt: skip


@pytest.mark.parametrize("broken", each(10, MUTANTS))
def test_a_broken_product_is_found(broken: str) -> None:
    file, old, new = MUTANTS[broken]
    with mutated("matmul", f"matmul/{file}", old, new) as changed, pytest.raises((KernelError, AssertionError)):
        for shape in ((130, 133, 45), (132, 132, 37), (20, 13, 5), (20, 12, 5)):  # the last two: a part of a tile only
            multiply("nn", *shape, kernels=changed)
        for depth in (28, 4):  # by rows; with 4, what follows the last row is outside the matrix
            multiply("nn", 517, 16, depth, kernels=changed)
        a, b, out = operands("nn", 20, 12, 5)
        with launch_with(Emulator()):
            changed.nn(a, b, NOTHING, True, NOTHING, NOTHING, out)
        np.testing.assert_allclose(out, np.maximum(expected("nn", a, b), 0), atol=1e-5)


def test_every_thread_has_its_place() -> None:
    for tile in (tile for tiles in _cuda.TILES.values() for tile in tiles):
        assert tile.threads == THREADS
    for tile in (*_cuda.BY_ROWS, _cuda.MEDIUM):
        assert tile.threads in (64, 128, 256)
