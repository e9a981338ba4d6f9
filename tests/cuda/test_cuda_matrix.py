"""Kernels for the rows or columns of a matrix: each reads the matrix as few times as it says, 16 bytes at a time;
rows longer than the cache in shared memory; broken kernels are found."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from emulator import Emulator
from kernel_cases.comparing import assert_close, module, parameters
from on_emulator import assert_found, placed, reference, run
from sample import each, each_row
from sass import read
from test_cuda_kernels import TARGETS

from minidl.engine.cuda import Grid, Kernel, launch_with, types_of

LARGEST_WASTE = 1.05  # bytes transferred / bytes of the matrices
# (folder, kernel): (rows, columns), how often a matrix is read, and written
TRANSFERS: dict[tuple[str, str], tuple[tuple[int, int], float, int]] = {
    ("reduce", "sum"): ((2048, 16), 1, 0),
    ("norm", "batch_norm"): ((2048, 16), 2, 1),  # the statistics are known after the first pass
    ("norm", "batch_norm_backward"): ((2048, 16), 4, 1),
    ("norm", "affine"): ((256, 16), 1, 1), ("norm", "affine_backward"): ((2048, 16), 4, 1),
    ("norm", "layer_norm"): ((64, 256), 1, 1),
    ("norm", "layer_norm_backward"): ((64, 512), 4, 1),  # twice for the sums over the rows, twice for dx
    ("group_norm", "group_norm"): ((1024, 16), 1.875, 1),  # an eighth of the image is kept
    ("group_norm", "group_norm_backward"): ((1024, 16), 5.75, 1),
    ("softmax", "softmax"): ((16, 256), 1, 1), ("softmax", "log_softmax"): ((2, 2048), 1, 1),
    ("softmax", "softmax_backward"): ((16, 256), 2, 1), ("softmax", "log_softmax_backward"): ((2, 2048), 2, 1),
    ("softmax", "cross_entropy_backward"): ((16, 256), 1, 1),
}  # fmt: skip


MATRICES = ("x", "dy", "y", "dx", "logits", "probabilities", "dlogits")


def arguments_of(folder: str, kernel: str, rows: int, columns: int) -> dict[str, Any]:
    """Return arguments for a matrix of this shape, of which every number is 1."""

    def ones(*shape: int) -> np.ndarray:
        return placed(np.ones(shape, np.float32), 0)

    matrix, middle = ones(rows, columns), ones(1, rows, columns)
    found: dict[str, Any] = {p: ones(columns) for p in parameters(folder, kernel)}  # weight, bias, ...
    found |= {p: ones(rows, columns) for p in MATRICES if p in found}
    found |= dict(eps=1e-5, momentum=0.1, relu=True, smoothing=0.1, partial=np.ones((1, 2, columns)))
    found |= dict(shortcut=matrix[:0], labels=np.zeros(rows, np.int64), dloss=ones(1), loss=ones(1))
    if kernel.startswith("layer_norm"):
        found |= dict(mean=ones(rows), rstd=ones(rows))
    if folder == "reduce":
        found |= dict(x=middle, partial=np.ones((1, 1, columns)), out=ones(1, columns))
    if folder == "group_norm":  # an image in two groups
        found |= {p: found[p].reshape(1, rows, columns) for p in ("x", "dy", "y", "dx") if p in found}
        found |= dict(shortcut=matrix[:0].reshape(0, rows, columns), mean=ones(1, 2), rstd=ones(1, 2))
    return found


@pytest.mark.parametrize(("folder", "kernel"), each_row(2, TRANSFERS))
def test_the_matrix_is_transferred_16_bytes_at_a_time(folder: str, kernel: str) -> None:
    (rows, columns), reads, writes = TRANSFERS[folder, kernel]
    size, transferred = rows * columns, Counter[str]()

    def launcher(launched: Kernel, grid: Grid, arguments: tuple[Any, ...]) -> None:
        emulator = Emulator(fuse=False, counting=True)
        emulator(launched, grid, arguments)
        assert emulator.counts is not None
        arrays = [a for a in arguments if isinstance(a, np.ndarray) and a.ndim]
        matrices = {f"argument {i}" for i, array in enumerate(arrays) if array.size == size}
        for (_, array, does, nbytes), cost in emulator.counts.costs.items():
            if array in matrices:
                transferred[does] += 32 * cost.units
                transferred["by 16 bytes"] += 32 * cost.units * (nbytes == 16)
        if matrices:
            for cc in TARGETS:
                assert read(launched, types_of(arguments), cc).blocks_per_sm() >= 2

    arguments = arguments_of(folder, kernel, rows, columns)
    with launch_with(launcher):
        getattr(module(folder, "cuda"), kernel)(*(arguments[p] for p in parameters(folder, kernel)))
    assert 4 * size * reads <= transferred["read"] <= LARGEST_WASTE * 4 * size * reads
    assert transferred["written"] == 4 * size * writes
    assert LARGEST_WASTE * transferred["by 16 bytes"] >= transferred["read"] + transferred["written"]


@pytest.mark.parametrize("columns", each(2, [2051, 2052]))
@pytest.mark.parametrize(("folder", "kernel"), [("norm", "layer_norm"), ("norm", "layer_norm_backward")])
def test_a_row_may_be_longer_than_the_cache(folder: str, kernel: str, columns: int) -> None:
    arguments = arguments_of(folder, kernel, 2, columns)
    random = np.random.default_rng(0)
    for p in ("x", "dy", "weight", "bias"):
        if p in arguments:
            arguments[p] = random.standard_normal(arguments[p].shape, np.float32)
    expected = reference(folder, kernel, arguments)
    assert_close(run(folder, kernel, arguments, expected, Emulator()), expected, "float32", kernel)


BARRIER = "    cuda.syncthreads()  # the previous sums have been read\n"
RESULT = "                    result += math.exp"  # without its end
MUTANTS = [  # (folder, kernel, file, piece, replacement)
    ("reduce", "sum", "reduce/cuda_matrix.py", "if j < count else array", "if j <= count else array"),
    ("reduce", "sum", "reduce/cuda_matrix.py", "value, 4)", "value, 2)"),
    ("reduce", "sum", "reduce/cuda_matrix.py", "if lane < LANES:", "if lane < 1:"),
    ("reduce", "sum", "reduce/cuda_matrix.py", "    cuda.syncthreads()\n    column", "    column"),
    ("reduce", "sum", "reduce/cuda_matrix.py", "range(warp, parts, WARPS)", "range(warp, WARPS, WARPS)"),
    ("reduce", "sum", "reduce/cuda_matrix.py", "sums[thread] = total\n    cuda.syncthreads()", "sums[thread] = total"),
    ("reduce", "sum", "reduce/cuda_matrix.py", "int32((part + 1) * rows", "int32(part * rows"),
    ("reduce", "sum", "reduce/cuda.py", "range(begin + row, end, HEIGHT)", "range(begin + row, end - 1, HEIGHT)"),
    ("reduce", "sum", "reduce/cuda.py", "if cuda.threadIdx.x < STRIP and i < inner:", "if i < inner:"),
    ("reduce", "sum", "reduce/cuda.py", "if i >= begin and i + QUAD <= min(end", "if i + QUAD <= min(end"),
    ("reduce", "sum", "reduce/cuda.py", "i + QUAD <= min(end, whole)", "i + QUAD <= whole"),
    ("reduce", "sum", "reduce/cuda.py", "if i + j >= begin and i + j < end", "if i + j < end"),
    ("reduce", "maximum", "reduce/cuda_rows.py", "(value == best and k < where)", "(value == best and k > where)"),
    ("reduce", "maximum", "reduce/cuda_rows.py", "for step in range(5)", "for step in range(4)"),
    ("reduce", "maximum", "reduce/cuda_rows.py", "range(lane + WARP, n, WARP)", "range(lane + WARP, n, 2 * WARP)"),
    ("reduce", "maximum_backward", "reduce/cuda.py", "== row % n:", "== row // n:"),
    ("norm", "batch_norm", "norm/cuda.py", "- float64(origin[j])", ""),
    ("norm", "batch_norm", "norm/cuda.py", "max(rows - 1, 1)", "rows"),
    ("norm", "batch_norm", "norm/cuda.py", "load_part(shortcut, at,", "load_part(shortcut, c,"),
    ("norm", "batch_norm", "norm/cuda.py", "zero if relu and v[j] < zero", "zero if v[j] < zero"),
    ("norm", "batch_norm", "norm/cuda.py", "return\n        at, count, z", "pass\n        at, count, z"),
    ("norm", "batch_norm_backward", "norm/cuda.py", "b[j] + v[j] * s[j] * w[j]", "b[j] + v[j] * w[j]"),
    ("norm", "batch_norm_backward", "norm/cuda_gradients.py", "return relu and ", "return "),
    ("norm", "batch_norm_backward", "norm/cuda_gradients.py", "2 * part + 1)", "part + 1)"),
    ("norm", "batch_norm_backward", "reduce/cuda_matrix.py", BARRIER + "    for", "    for"),
    ("norm", "batch_norm_backward", "reduce/cuda_matrix.py", BARRIER + "    sums", "    sums"),
    ("norm", "layer_norm", "norm/cuda_layer.py", "if c + j < channels else 0.0", ""),
    ("norm", "layer_norm", "norm/cuda_layer.py", "if first == 0:", "if True:"),
    ("norm", "layer_norm", "reduce/cuda_rows.py", "within * cached", "0"),
    ("norm", "layer_norm", "reduce/cuda_rows.py", "launch(short, -(-rows // WARPS)", "launch(short, rows // WARPS"),
    ("norm", "layer_norm_backward", "norm/cuda_layer.py", "- mean_dz - ", "- "),
    ("norm", "layer_norm_backward", "norm/cuda_gradients.py", "row // pixels * groups", "row * groups * 0"),
    ("group_norm", "group_norm", "group_norm/cuda.py", "- distance * distance, 0.0)", ", 0.0)"),
    ("group_norm", "group_norm", "group_norm/cuda.py", "if j < count:\n", "if j <= count:\n"),
    ("group_norm", "group_norm", "group_norm/cuda.py", "range(1, size)", "range(1, size - 1)"),
    ("group_norm", "group_norm", "group_norm/cuda.py", "[thread] = total\n    cuda.syncthreads()", "[thread] = total"),
    ("group_norm", "group_norm", "group_norm/cuda.py", " and channels % STRIP == 0", ""),
    ("group_norm", "group_norm_backward", "group_norm/cuda.py", "- number(first[j])", ""),
    ("group_norm", "group_norm_backward", "group_norm/cuda.py", "store4(z_cache, i * QUAD", "store4(z_cache, 0 * QUAD"),
    ("group_norm", "group_norm_backward", "norm/cuda_gradients.py", "row // pixels * groups", "row // groups * pixels"),
    ("softmax", "softmax", "softmax/cuda.py", "if c + j < classes:\n    " + RESULT, "if True:\n    " + RESULT),
    ("softmax", "softmax", "reduce/cuda_rows.py", "value, 8))", "value, 4))"),
    ("softmax", "softmax", "reduce/cuda_rows.py", "] = value\n    cuda.syncthreads()", "] = value"),
    ("softmax", "log_softmax", "softmax/cuda.py", "math.log(result) if", "result if"),
    ("softmax", "softmax_backward", "softmax/cuda.py", "v[j] * (d[j] - inner)", "v[j] * d[j]"),
    ("softmax", "log_softmax_backward", "softmax/cuda.py", "(1.0 if logarithm", "(2.0 if logarithm"),
    ("softmax", "cross_entropy", "softmax/cuda.py", "label >= classes:\n                p", "0:\n                p"),
    ("softmax", "cross_entropy", "softmax/cuda.py", "(1 - smoothing) * float64", "float64"),
    ("softmax", "cross_entropy", "softmax/cuda.py", "x, rows, THREADS)", "x, rows - 1, THREADS)"),
    ("softmax", "cross_entropy_backward", "softmax/cuda.py", "label == c + j", "label == c"),
    ("softmax", "cross_entropy_backward", "softmax/cuda.py", "label >= classes:\n        s", "label > 9:\n        s"),
    ("softmax", "correct", "softmax/cuda.py", "(warp, rows, COUNTING", "(warp, WARP, COUNTING"),
    ("softmax", "correct", "softmax/cuda.py", "    cuda.syncthreads()\n    if cuda", "    if cuda"),
]  # fmt: skip


@pytest.mark.parametrize(("folder", "kernel", "file", "old", "new"), each_row(5, MUTANTS))
def test_a_broken_kernel_is_found(folder: str, kernel: str, file: str, old: str, new: str) -> None:
    assert_found(folder, kernel, file, old, new)
