"""Softmax and cross-entropy on a GPU: a warp for each short row, a block for each long one (reduce/cuda_rows.py).

A row is passed three times: for its maximum, for the sum of exp(x - maximum), and for the output. Shared memory keeps
the row between the passes. Sums are in float64, and their order depends only on the shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from numba import float64, int32, int64
from numpy import ndarray

from minidl.engine.cuda import cuda, kernel, launch
from minidl.engine.cuda_memory import get, put

from ..elementwise.quads import QUAD
from ..reduce.block_sum import THREADS, WARP, WARPS, block_sum
from ..reduce.cuda_matrix import load_part, store_part, wide
from ..reduce.cuda_rows import CACHED, Row, row_first, row_kernels
from .reference import __all__ as __all__

COUNTING = 1024  # threads of the block that counts correct rows


def _softmax(logarithm: bool) -> Callable[[Row], Callable[..., None]]:
    """Return the kernels of softmax, or of its logarithm (x - maximum) - log(sum): max + log(sum) would lose digits."""

    def make(row: Row) -> Callable[..., None]:
        position, total, largest, step = row.position, row.total, row.largest, row.threads * QUAD
        keep, again = row.keep, row.again

        def softmax(x: ndarray, rows: int, classes: int, wide: bool, y: ndarray) -> None:
            sums, found = cuda.shared.array(WARPS, float64), cuda.shared.array(WARPS, x.dtype)
            cache, number = cuda.shared.array(CACHED, x.dtype, 16), x.dtype.type
            r, first, base = position()
            if r >= rows:
                return
            begin, highest, result = int32(r * classes), number(-math.inf), float64(0)
            v = cuda.local.array(QUAD, number)
            for c in range(first, classes, step):
                load_part(x, begin + c, classes - c, wide, v)
                keep(cache, base, c, v)
                for j in range(QUAD):
                    highest = max(highest, v[j]) if c + j < classes else highest
            highest = largest(highest, found)
            for c in range(first, classes, step):
                again(cache, base, x, begin + c, c, classes - c, wide, v)
                for j in range(QUAD):
                    if c + j < classes:
                        result += math.exp(v[j] - highest)
            result = total(result, sums)
            result = number(math.log(result) if logarithm else 1 / result)
            for c in range(first, classes, step):
                again(cache, base, x, begin + c, c, classes - c, wide, v)
                for j in range(QUAD):
                    v[j] = (v[j] - highest) - result if logarithm else math.exp(v[j] - highest) * result
                store_part(y, begin + c, classes - c, wide, v)

        return softmax

    return make


_softmaxes, _log_softmaxes = row_kernels(_softmax(False)), row_kernels(_softmax(True))


def softmax(x: ndarray, y: ndarray) -> None:
    _softmaxes(*x.shape, x, *x.shape, wide(x.shape[1], x, y), y)


def log_softmax(x: ndarray, y: ndarray) -> None:
    _log_softmaxes(*x.shape, x, *x.shape, wide(x.shape[1], x, y), y)


def _gradient(logarithm: bool) -> Callable[[Row], Callable[..., None]]:
    def make(row: Row) -> Callable[..., None]:
        position, total, keep, again, step = row.position, row.total, row.keep, row.again, row.threads * QUAD

        def gradient(dy: ndarray, y: ndarray, rows: int, classes: int, wide: bool, dx: ndarray) -> None:
            """dx = y * (dy - sum of dy * y), or dx = dy - exp(y) * sum of dy"""
            sums, number = cuda.shared.array(WARPS, float64), y.dtype.type
            dy_cache, y_cache = cuda.shared.array(CACHED, y.dtype, 16), cuda.shared.array(CACHED, y.dtype, 16)
            r, first, base = position()
            if r >= rows:
                return
            begin, result = int32(r * classes), float64(0)
            d, v = cuda.local.array(QUAD, number), cuda.local.array(QUAD, number)
            for c in range(first, classes, step):
                load_part(dy, begin + c, classes - c, wide, d)
                load_part(y, begin + c, classes - c, wide, v)
                keep(dy_cache, base, c, d)
                keep(y_cache, base, c, v)
                for j in range(QUAD):
                    result += float64(d[j]) * (1.0 if logarithm else float64(v[j]))
            inner = number(total(result, sums))
            for c in range(first, classes, step):
                again(dy_cache, base, dy, begin + c, c, classes - c, wide, d)
                again(y_cache, base, y, begin + c, c, classes - c, wide, v)
                for j in range(QUAD):
                    d[j] = d[j] - math.exp(v[j]) * inner if logarithm else v[j] * (d[j] - inner)
                store_part(dx, begin + c, classes - c, wide, d)

        return gradient

    return make


_gradients, _log_gradients = row_kernels(_gradient(False)), row_kernels(_gradient(True))


def softmax_backward(dy: ndarray, y: ndarray, dx: ndarray) -> None:
    _gradients(*y.shape, dy, y, *y.shape, wide(y.shape[1], dy, y, dx), dx)


def log_softmax_backward(dy: ndarray, y: ndarray, dx: ndarray) -> None:
    _log_gradients(*y.shape, dy, y, *y.shape, wide(y.shape[1], dy, y, dx), dx)


def _row_losses(row: Row) -> Callable[..., None]:
    position, total, largest, step = row.position, row.total, row.largest, row.threads * QUAD
    keep, again = row.keep, row.again

    def row_losses(
        logits: ndarray, labels: ndarray, smoothing: float, rows: int, classes: int, wide: bool, losses: ndarray
    ) -> None:
        """losses[r, 0] = the loss of row r: log(sum of exp(z)) - sum of target * z, with z = logit - maximum"""
        sums, found = cuda.shared.array(WARPS, float64), cuda.shared.array(WARPS, logits.dtype)
        cache, number = cuda.shared.array(CACHED, logits.dtype, 16), logits.dtype.type
        r, first, base = position()
        if r >= rows:
            return
        begin, highest, result, spread = int32(r * classes), number(-math.inf), float64(0), float64(0)
        v = cuda.local.array(QUAD, number)
        for c in range(first, classes, step):
            load_part(logits, begin + c, classes - c, wide, v)
            keep(cache, base, c, v)
            for j in range(QUAD):
                highest = max(highest, v[j]) if c + j < classes else highest
        highest = largest(highest, found)
        for c in range(first, classes, step):
            again(cache, base, logits, begin + c, c, classes - c, wide, v)
            for j in range(QUAD):
                if c + j < classes:
                    spread += v[j] - highest
                    result += math.exp(v[j] - highest)
        result, spread = math.log(total(result, sums)), total(spread, sums)
        if first == 0:
            label = get(labels, r)
            if label < 0 or label >= classes:
                put(losses, begin, number(math.nan))
            else:
                expected = (1 - smoothing) * float64(get(logits, int32(begin + label)) - highest)
                if smoothing > 0:
                    expected += smoothing / classes * spread
                put(losses, begin, number(result - expected))

    return row_losses


_losses_of_rows = row_kernels(_row_losses)


@kernel(threads=THREADS)
def _mean(losses: ndarray, rows: int, classes: int, loss: ndarray) -> None:
    """loss[0] = the mean of losses[:, 0]: a single block"""
    sums = cuda.shared.array(WARPS, float64)
    total = float64(0)
    for r in range(cuda.threadIdx.x, rows, THREADS):
        total += get(losses, int32(r * classes))
    total = block_sum(total, sums)
    if cuda.threadIdx.x == 0:
        put(loss, 0, loss.dtype.type(total / rows))


def cross_entropy(logits: ndarray, labels: ndarray, smoothing: float, probabilities: ndarray, loss: ndarray) -> None:
    # The losses of the rows lie in the first column of `probabilities`, until the probabilities are computed.
    rows, classes = logits.shape
    aligned = wide(classes, logits)
    _losses_of_rows(rows, classes, logits, labels, smoothing, rows, classes, aligned, probabilities)
    launch(_mean, 1, probabilities, rows, classes, loss)
    softmax(logits, probabilities)


@kernel(threads=THREADS)
def _cross_entropy_backward(
    dloss: ndarray, probabilities: ndarray, labels: ndarray, on_label: float, off_label: float, rows: int,
    classes: int, wide: bool, dlogits: ndarray,
) -> None:  # fmt: skip
    """dlogits = dloss * (probability - target) / rows: a thread for each quad"""
    item, across = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x), int32((classes + QUAD - 1) // QUAD)
    r, c = item // across, int32(item % across * QUAD)
    if r >= rows:
        return
    number, label = dlogits.dtype.type, get(labels, r)
    scale = number(get(dloss, 0) / number(rows))
    if label < 0 or label >= classes:
        scale = number(math.nan)
    p = cuda.local.array(QUAD, number)
    load_part(probabilities, int32(r * classes + c), classes - c, wide, p)
    for j in range(QUAD):
        p[j] = scale * (p[j] - (on_label if label == c + j else off_label))
    store_part(dlogits, int32(r * classes + c), classes - c, wide, p)


def cross_entropy_backward(
    dloss: ndarray, probabilities: ndarray, labels: ndarray, smoothing: float, dlogits: ndarray
) -> None:
    (rows, classes), number = probabilities.shape, dlogits.dtype.type
    off_label = smoothing / classes
    launch(
        _cross_entropy_backward, -(-rows * -(-classes // QUAD) // THREADS), dloss, probabilities, labels,
        number(1 - smoothing + off_label), number(off_label), rows, classes,
        wide(classes, probabilities, dlogits), dlogits,
    )  # fmt: skip


@kernel(threads=COUNTING)
def _correct(logits: ndarray, labels: ndarray, rows: int, classes: int, count: ndarray) -> None:
    """A single block: a warp finds the maximum of every 32nd row."""
    counts = cuda.shared.array(WARP, int32)
    warp, lane, mine = int32(cuda.threadIdx.x // WARP), int32(cuda.threadIdx.x % WARP), int32(0)
    for r in range(warp, rows, COUNTING // WARP):
        _, where = row_first(logits, int32(r * classes), classes)
        mine = int32(mine + (1 if get(labels, r) == where else 0))
    if lane == 0:
        counts[warp] = mine
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        found = int64(0)
        for w in range(COUNTING // WARP):
            found += counts[w]
        put(count, 0, found)


def correct(logits: ndarray, labels: ndarray, count: ndarray) -> None:
    launch(_correct, 1, logits, labels, *logits.shape, count)
