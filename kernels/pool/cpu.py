"""Max and average pooling: the threads divide the images of a batch among themselves.

Channels are contiguous, so vectors hold neighbouring channels; windows.py computes a window. `tap` is the index of a
pixel in its window (row * window width + column), and `place` is the tap of the maximum.

The backward passes write each pixel of dx once. Windows may overlap, so they visit the pixels, and add the gradients of
all windows that contain a pixel. If windows are adjacent, they visit the windows instead, and read each gradient once.
"""

from __future__ import annotations

from numpy import ndarray

from minidl.engine.jit import apart_jit, helper, parallel_jit, prange

from .reference import Pair
from .reference import __all__ as __all__
from .windows import gradients, largest, scaled_sum, spread


@helper
def _window(out: int, size: int, kernel: int, stride: int, padding: int) -> tuple[int, int, int]:
    """Return, on one axis, the first pixel of the window of output `out`, how many pixels it has, and its first tap.

    Pixels beyond the image do not count.
    """
    start = out * stride - padding
    first = max(start, 0)
    return first, min(start + kernel, size) - first, first - start


@helper
def _windows(pixel: int, outputs: int, kernel: int, stride: int, padding: int) -> tuple[int, int, int]:
    """Return, on one axis, the first window that contains the pixel, how many do, and the pixel's tap in the first."""
    first = max(pixel + padding - kernel + stride, 0) // stride  # (pixel + padding - kernel + 1) / stride, rounded up
    end = min((pixel + padding) // stride + 1, outputs)
    return first, max(end - first, 0), pixel + padding - first * stride


@apart_jit
def _max_pool_image(x: ndarray, kernel: Pair, stride: Pair, padding: Pair, y: ndarray, place: ndarray) -> None:
    height, width, channels = x.shape
    for oh in range(y.shape[0]):
        top, rows, tap_h = _window(oh, height, kernel[0], stride[0], padding[0])
        for ow in range(y.shape[1]):
            left, columns, tap_w = _window(ow, width, kernel[1], stride[1], padding[1])
            largest(x, (top * width + left) * channels, width * channels, rows, columns, tap_h * kernel[1] + tap_w,
                    kernel[1], channels, y, place, (oh * y.shape[1] + ow) * channels)  # fmt: skip


@parallel_jit
def max_pool(x: ndarray, kernel: Pair, stride: Pair, padding: Pair, y: ndarray, place: ndarray) -> None:
    if x.shape[0] == 1:  # without a parallel loop, no other thread has to wake up
        _max_pool_image(x[0], kernel, stride, padding, y[0], place[0])
        return
    for n in prange(x.shape[0]):
        _max_pool_image(x[n], kernel, stride, padding, y[n], place[n])


@helper
def _adjacent(kernel: Pair, stride: Pair, padding: Pair) -> bool:
    return kernel == stride and padding == (0, 0)


@apart_jit
def _max_pool_backward_adjacent(dy: ndarray, place: ndarray, kernel: Pair, dx: ndarray) -> None:
    height, width, channels = dy.shape
    line = dx.shape[1] * channels
    for oh in range(height):
        for ow in range(width):
            spread(dy, place, (oh * width + ow) * channels, kernel[0], kernel[1], channels,
                   dx, oh * kernel[0] * line + ow * kernel[1] * channels, line)  # fmt: skip
        dx[oh * kernel[0] : (oh + 1) * kernel[0], width * kernel[1] :] = 0  # these pixels are in no window
    dx[height * kernel[0] :] = 0


@apart_jit
def _max_pool_backward_image(
    dy: ndarray, place: ndarray, kernel: Pair, stride: Pair, padding: Pair, dx: ndarray
) -> None:
    out_height, out_width, channels = dy.shape
    for h in range(dx.shape[0]):
        top, rows, tap_h = _windows(h, out_height, kernel[0], stride[0], padding[0])
        for w in range(dx.shape[1]):
            left, columns, tap_w = _windows(w, out_width, kernel[1], stride[1], padding[1])
            if rows * columns == 0:
                dx[h, w] = 0
                continue
            gradients(dy, place, (top * out_width + left) * channels, out_width * channels, rows, columns,
                      tap_h * kernel[1] + tap_w, stride[0] * kernel[1], stride[1], channels,
                      dx, (h * dx.shape[1] + w) * channels)  # fmt: skip


@parallel_jit
def max_pool_backward(dy: ndarray, place: ndarray, kernel: Pair, stride: Pair, padding: Pair, dx: ndarray) -> None:
    for n in prange(dx.shape[0]):
        if _adjacent(kernel, stride, padding):
            _max_pool_backward_adjacent(dy[n], place[n], kernel, dx[n])
        else:
            _max_pool_backward_image(dy[n], place[n], kernel, stride, padding, dx[n])


@apart_jit
def _average_pool_image(x: ndarray, kernel: Pair, stride: Pair, padding: Pair, y: ndarray) -> None:
    height, width, channels = x.shape
    factor = x.dtype.type(1 / (kernel[0] * kernel[1]))
    for oh in range(y.shape[0]):
        top, rows, _ = _window(oh, height, kernel[0], stride[0], padding[0])
        for ow in range(y.shape[1]):
            left, columns, _ = _window(ow, width, kernel[1], stride[1], padding[1])
            scaled_sum(x, (top * width + left) * channels, width * channels, rows, columns, factor, channels,
                       y, (oh * y.shape[1] + ow) * channels)  # fmt: skip


@parallel_jit
def average_pool(x: ndarray, kernel: Pair, stride: Pair, padding: Pair, y: ndarray) -> None:
    if x.shape[0] == 1:
        _average_pool_image(x[0], kernel, stride, padding, y[0])
        return
    for n in prange(x.shape[0]):
        _average_pool_image(x[n], kernel, stride, padding, y[n])


@apart_jit
def _average_pool_backward_image(dy: ndarray, kernel: Pair, stride: Pair, padding: Pair, dx: ndarray) -> None:
    out_height, out_width, channels = dy.shape
    factor = dx.dtype.type(1 / (kernel[0] * kernel[1]))
    for h in range(dx.shape[0]):
        top, rows, _ = _windows(h, out_height, kernel[0], stride[0], padding[0])
        for w in range(dx.shape[1]):
            left, columns, _ = _windows(w, out_width, kernel[1], stride[1], padding[1])
            if rows * columns == 0:
                dx[h, w] = 0
                continue
            scaled_sum(dy, (top * out_width + left) * channels, out_width * channels, rows, columns, factor, channels,
                       dx, (h * dx.shape[1] + w) * channels)  # fmt: skip


@apart_jit
def _average_pool_backward_adjacent(dy: ndarray, kernel: Pair, dx: ndarray) -> None:
    height, width, channels = dy.shape
    factor = dx.dtype.type(1 / (kernel[0] * kernel[1]))
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
        if _adjacent(kernel, stride, padding):
            _average_pool_backward_adjacent(dy[n], kernel, dx[n])
        else:
            _average_pool_backward_image(dy[n], kernel, stride, padding, dx[n])
