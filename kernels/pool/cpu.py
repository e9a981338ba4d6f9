"""Max and average pooling: the threads share out the rows of the output, over all images of a batch.

Channels are contiguous, so the innermost loop goes over them: for each pixel of a window, one comparison or
addition of vectors. Windows may overlap, but never across images: the backward passes share out images.
"""

from __future__ import annotations

from numpy import ndarray

from minidl.jit import jit, parallel_jit, prange

from .reference import Pair
from .reference import __all__ as __all__


@jit
def _span(out: int, size: int, kernel: int, stride: int, padding: int) -> tuple[int, int, int]:
    """Along one axis: the pixels start..stop-1 of the image that output `out` looks at, and where its window begins."""
    start = out * stride - padding
    return max(start, 0), min(start + kernel, size), start


@jit
def _take(x: ndarray, tap: int, y: ndarray, place: ndarray) -> None:
    """The first pixel x (C,) of a window is the largest so far, y (C,); its place is the number of the tap."""
    here = place.dtype.type(tap)
    for c in range(x.size):
        y[c] = x[c]
        place[c] = here


@jit
def _keep_largest(x: ndarray, tap: int, y: ndarray, place: ndarray) -> None:
    """A further pixel x (C,). `|` and not `or`: without branches, LLVM makes vectors of the loop."""
    here = place.dtype.type(tap)
    for c in range(x.size):
        wins = (x[c] > y[c]) | (x[c] != x[c])  # NaN wins
        y[c] = x[c] if wins else y[c]
        place[c] = here if wins else place[c]


@jit
def _max_pool_image(x: ndarray, kernel: Pair, stride: Pair, padding: Pair, y: ndarray, place: ndarray) -> None:
    height, width = x.shape[:2]
    for oh in range(y.shape[0]):
        h_start, h_stop, h_zero = _span(oh, height, kernel[0], stride[0], padding[0])
        for ow in range(y.shape[1]):
            w_start, w_stop, w_zero = _span(ow, width, kernel[1], stride[1], padding[1])
            for h in range(h_start, h_stop):
                for w in range(w_start, w_stop):
                    tap = (h - h_zero) * kernel[1] + w - w_zero
                    if h == h_start and w == w_start:
                        _take(x[h, w], tap, y[oh, ow], place[oh, ow])
                    else:
                        _keep_largest(x[h, w], tap, y[oh, ow], place[oh, ow])


@parallel_jit
def max_pool(x: ndarray, kernel: Pair, stride: Pair, padding: Pair, y: ndarray, place: ndarray) -> None:
    for n in prange(x.shape[0]):
        _max_pool_image(x[n], kernel, stride, padding, y[n], place[n])


@jit
def _max_pool_backward_image(
    dy: ndarray, place: ndarray, kernel: Pair, stride: Pair, padding: Pair, dx: ndarray
) -> None:
    dx[:] = 0
    for oh in range(dy.shape[0]):
        for ow in range(dy.shape[1]):
            h, w = oh * stride[0] - padding[0], ow * stride[1] - padding[1]
            for c in range(dx.shape[2]):
                tap = place[oh, ow, c]
                dx[h + tap // kernel[1], w + tap % kernel[1], c] += dy[oh, ow, c]


@parallel_jit
def max_pool_backward(dy: ndarray, place: ndarray, kernel: Pair, stride: Pair, padding: Pair, dx: ndarray) -> None:
    for n in prange(dx.shape[0]):
        _max_pool_backward_image(dy[n], place[n], kernel, stride, padding, dx[n])


@jit
def _add(x: ndarray, factor: float, y: ndarray) -> None:
    """y += factor * x"""
    for c in range(x.size):
        y[c] += factor * x[c]


@jit
def _average_pool_image(x: ndarray, kernel: Pair, stride: Pair, padding: Pair, y: ndarray) -> None:
    factor = x.dtype.type(1 / (kernel[0] * kernel[1]))
    y[:] = 0
    for oh in range(y.shape[0]):
        h_start, h_stop, _ = _span(oh, x.shape[0], kernel[0], stride[0], padding[0])
        for ow in range(y.shape[1]):
            w_start, w_stop, _ = _span(ow, x.shape[1], kernel[1], stride[1], padding[1])
            for h in range(h_start, h_stop):
                for w in range(w_start, w_stop):
                    _add(x[h, w], factor, y[oh, ow])


@parallel_jit
def average_pool(x: ndarray, kernel: Pair, stride: Pair, padding: Pair, y: ndarray) -> None:
    for n in prange(x.shape[0]):
        _average_pool_image(x[n], kernel, stride, padding, y[n])


@jit
def _average_pool_backward_image(dy: ndarray, kernel: Pair, stride: Pair, padding: Pair, dx: ndarray) -> None:
    factor = dx.dtype.type(1 / (kernel[0] * kernel[1]))
    dx[:] = 0
    for oh in range(dy.shape[0]):
        h_start, h_stop, _ = _span(oh, dx.shape[0], kernel[0], stride[0], padding[0])
        for ow in range(dy.shape[1]):
            w_start, w_stop, _ = _span(ow, dx.shape[1], kernel[1], stride[1], padding[1])
            for h in range(h_start, h_stop):
                for w in range(w_start, w_stop):
                    _add(dy[oh, ow], factor, dx[h, w])


@parallel_jit
def average_pool_backward(dy: ndarray, kernel: Pair, stride: Pair, padding: Pair, dx: ndarray) -> None:
    for n in prange(dx.shape[0]):
        _average_pool_backward_image(dy[n], kernel, stride, padding, dx[n])
