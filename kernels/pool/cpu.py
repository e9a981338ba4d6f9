"""Max and average pooling: the threads divide the images of a batch among themselves.

Channels are contiguous, so the innermost loop iterates over them: for each pixel of a window, it compares or adds
vectors of channels. `tap` is the index of a pixel in its window (row * window width + column), and `place` is the tap
of the maximum. Windows may overlap, but only within an image, so the backward passes are safe on several threads.

The most common window of max pooling, 2 x 2 with stride 2, has special loops: its four pixels are compared in
registers, and the backward pass writes each pixel of dx once, without writing zeros first.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import apart_jit, helper, parallel_jit, prange

from .reference import Pair
from .reference import __all__ as __all__

VECTOR_CHANNELS = 8  # fewer channels do not fill even a vector of 256 bits: they are processed number by number


@helper
def _span(out: int, size: int, kernel: int, stride: int, padding: int) -> tuple[int, int, int]:
    """Return (start, stop, unclipped start) of the window of output `out` on one axis. start and stop are clipped."""
    start = out * stride - padding
    return max(start, 0), min(start + kernel, size), start


@helper
def _take(x: ndarray, tap: int, y: ndarray, place: ndarray) -> None:
    """Take the first pixel of a window as the largest so far: y (C,) = x (C,), and place (C,) = tap."""
    here = place.dtype.type(tap)
    for c in range(x.size):
        y[c] = x[c]
        place[c] = here


@helper
def _keep_largest(x: ndarray, tap: int, y: ndarray, place: ndarray) -> None:
    """Where a further pixel x is larger than y, or is NaN, set y to x and place to tap. `|` replaces `or`, because LLVM
    vectorises only loops without branches."""
    here = place.dtype.type(tap)
    for c in range(x.size):
        wins = (x[c] > y[c]) | (x[c] != x[c])  # NaN wins
        y[c] = x[c] if wins else y[c]
        place[c] = here if wins else place[c]


@apart_jit
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


@helper
def _is_2x2(kernel: Pair, stride: Pair, padding: Pair) -> bool:
    return kernel == (2, 2) and stride == (2, 2) and padding == (0, 0)


@helper
def _first_largest(a: float, b: float, c: float, d: float) -> tuple[float, np.uint8]:
    """Return the largest of four numbers, and its index; among equal numbers, the first index."""
    best, where = a, np.uint8(0)
    wins = (b > best) | (b != b)  # NaN wins
    best, where = (b if wins else best), (np.uint8(1) if wins else where)
    wins = (c > best) | (c != c)
    best, where = (c if wins else best), (np.uint8(2) if wins else where)
    wins = (d > best) | (d != d)
    return (d if wins else best), (np.uint8(3) if wins else where)


@helper
def _max_pool_pixel(a: ndarray, b: ndarray, c: ndarray, d: ndarray, y: ndarray, place: ndarray) -> None:
    """Compute y (C,) = the largest of the four pixels a, b, c, d (C,) of a window, and place (C,) = its index."""
    for i in range(y.size):
        y[i], place[i] = _first_largest(a[i], b[i], c[i], d[i])


@apart_jit
def _max_pool_2x2(x: ndarray, y: ndarray, place: ndarray) -> None:
    for oh in range(y.shape[0]):
        top, bottom = x[2 * oh], x[2 * oh + 1]
        for ow in range(y.shape[1]):
            if x.shape[2] >= VECTOR_CHANNELS:
                _max_pool_pixel(
                    top[2 * ow], top[2 * ow + 1], bottom[2 * ow], bottom[2 * ow + 1], y[oh, ow], place[oh, ow]
                )
            else:
                for c in range(x.shape[2]):
                    y[oh, ow, c], place[oh, ow, c] = _first_largest(
                        top[2 * ow, c], top[2 * ow + 1, c], bottom[2 * ow, c], bottom[2 * ow + 1, c]
                    )


@helper
def _max_pool_one(x: ndarray, kernel: Pair, stride: Pair, padding: Pair, y: ndarray, place: ndarray) -> None:
    if _is_2x2(kernel, stride, padding):
        _max_pool_2x2(x, y, place)
    else:
        _max_pool_image(x, kernel, stride, padding, y, place)


@parallel_jit
def max_pool(x: ndarray, kernel: Pair, stride: Pair, padding: Pair, y: ndarray, place: ndarray) -> None:
    if x.shape[0] == 1:  # without a parallel loop, no other thread has to wake up
        _max_pool_one(x[0], kernel, stride, padding, y[0], place[0])
        return
    for n in prange(x.shape[0]):
        _max_pool_one(x[n], kernel, stride, padding, y[n], place[n])


@apart_jit
def _max_pool_backward_image(
    dy: ndarray, place: ndarray, kernel: Pair, stride: Pair, padding: Pair, dx: ndarray
) -> None:
    dx[:] = 0
    for oh in range(dy.shape[0]):
        for ow in range(dy.shape[1]):
            h, w = oh * stride[0] - padding[0], ow * stride[1] - padding[1]
            for c in range(dx.shape[2]):
                tap = np.int64(place[oh, ow, c])
                dx[h + tap // kernel[1], w + tap % kernel[1], c] += dy[oh, ow, c]


@helper
def _max_pool_backward_pixel(dy: ndarray, place: ndarray, a: ndarray, b: ndarray, c: ndarray, d: ndarray) -> None:
    zero = dy.dtype.type(0)
    for i in range(dy.size):
        gradient, where = dy[i], place[i]
        a[i] = gradient if where == np.uint8(0) else zero
        b[i] = gradient if where == np.uint8(1) else zero
        c[i] = gradient if where == np.uint8(2) else zero
        d[i] = gradient if where == np.uint8(3) else zero


@apart_jit
def _max_pool_backward_2x2(dy: ndarray, place: ndarray, dx: ndarray) -> None:
    height, width, channels = dy.shape
    zero = dy.dtype.type(0)
    for oh in range(height):
        top, bottom = dx[2 * oh], dx[2 * oh + 1]
        for ow in range(width):
            if channels >= VECTOR_CHANNELS:
                _max_pool_backward_pixel(
                    dy[oh, ow], place[oh, ow], top[2 * ow], top[2 * ow + 1], bottom[2 * ow], bottom[2 * ow + 1]
                )
            else:
                for c in range(channels):
                    gradient, where = dy[oh, ow, c], place[oh, ow, c]
                    top[2 * ow, c] = gradient if where == 0 else zero
                    top[2 * ow + 1, c] = gradient if where == 1 else zero
                    bottom[2 * ow, c] = gradient if where == 2 else zero
                    bottom[2 * ow + 1, c] = gradient if where == 3 else zero
        top[2 * width :] = 0  # if the width or height is odd, the last pixels are in no window
        bottom[2 * width :] = 0
    dx[2 * height :] = 0


@parallel_jit
def max_pool_backward(dy: ndarray, place: ndarray, kernel: Pair, stride: Pair, padding: Pair, dx: ndarray) -> None:
    for n in prange(dx.shape[0]):
        if _is_2x2(kernel, stride, padding):
            _max_pool_backward_2x2(dy[n], place[n], dx[n])
        else:
            _max_pool_backward_image(dy[n], place[n], kernel, stride, padding, dx[n])


@helper
def _add(x: ndarray, factor: float, y: ndarray) -> None:
    """Compute y += factor * x."""
    for c in range(x.size):
        y[c] += factor * x[c]


@apart_jit
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
    if x.shape[0] == 1:
        _average_pool_image(x[0], kernel, stride, padding, y[0])
        return
    for n in prange(x.shape[0]):
        _average_pool_image(x[n], kernel, stride, padding, y[n])


@apart_jit
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


@helper
def _spread_rows(dy: ndarray, kernel: Pair, dx: ndarray) -> None:
    """Compute dx of average pooling for adjacent windows without overlap: each pixel of dx is written once."""
    factor = dx.dtype.type(1 / (kernel[0] * kernel[1]))
    height, width, channels = dy.shape
    for oh in range(height):
        row = dx[oh * kernel[0]]
        for ow in range(width):
            for w in range(ow * kernel[1], (ow + 1) * kernel[1]):
                for c in range(channels):
                    row[w, c] = factor * dy[oh, ow, c]
        row[width * kernel[1] :] = 0
        for kh in range(1, kernel[0]):
            dx[oh * kernel[0] + kh] = row
    dx[height * kernel[0] :] = 0


@parallel_jit
def average_pool_backward(dy: ndarray, kernel: Pair, stride: Pair, padding: Pair, dx: ndarray) -> None:
    for n in prange(dx.shape[0]):
        if kernel == stride and padding == (0, 0):
            _spread_rows(dy[n], kernel, dx[n])
        else:
            _average_pool_backward_image(dy[n], kernel, stride, padding, dx[n])
