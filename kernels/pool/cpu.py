"""Max and average pooling: the threads share out the images of a batch.

Channels are contiguous, so the innermost loop goes over them: for each pixel of a window, one comparison or
addition of vectors. Windows may overlap, but never across images, so that the backward passes are safe too.
"""

from __future__ import annotations

from numpy import ndarray

from minidl.jit import jit, parallel_jit, prange

from .reference import Pair
from .reference import __all__ as __all__


@jit
def _span(out: int, size: int, kernel: int, stride: int, padding: int) -> Pair:
    """Along one axis, the pixels start..stop-1 of the image that output `out` looks at."""
    start = out * stride - padding
    return max(start, 0), min(start + kernel, size)


@jit
def _take(x: ndarray, place: int, y: ndarray, argmax: ndarray) -> None:
    """The first pixel x (C,) of a window is the largest so far, y (C,); its place is h * W + w."""
    here = argmax.dtype.type(place)
    for c in range(x.size):
        y[c] = x[c]
        argmax[c] = here


@jit
def _keep_largest(x: ndarray, place: int, y: ndarray, argmax: ndarray) -> None:
    """A further pixel x (C,). `|` and not `or`: without branches, LLVM makes vectors of the loop."""
    here = argmax.dtype.type(place)
    for c in range(x.size):
        wins = (x[c] > y[c]) | (x[c] != x[c])  # NaN wins
        y[c] = x[c] if wins else y[c]
        argmax[c] = here if wins else argmax[c]


@jit
def _max_pool_image(x: ndarray, kernel: Pair, stride: Pair, padding: Pair, y: ndarray, argmax: ndarray) -> None:
    height, width = x.shape[:2]
    for oh in range(y.shape[0]):
        h_start, h_stop = _span(oh, height, kernel[0], stride[0], padding[0])
        for ow in range(y.shape[1]):
            w_start, w_stop = _span(ow, width, kernel[1], stride[1], padding[1])
            largest, place = y[oh, ow], argmax[oh, ow]
            _take(x[h_start, w_start], h_start * width + w_start, largest, place)
            for h in range(h_start, h_stop):
                for w in range(w_start, w_stop):
                    _keep_largest(x[h, w], h * width + w, largest, place)


@parallel_jit
def max_pool(x: ndarray, kernel: Pair, stride: Pair, padding: Pair, y: ndarray, argmax: ndarray) -> None:
    for n in prange(x.shape[0]):
        _max_pool_image(x[n], kernel, stride, padding, y[n], argmax[n])


@jit
def _max_pool_backward_image(dy: ndarray, argmax: ndarray, dx: ndarray) -> None:
    height, width, channels = dx.shape
    dx[:] = 0
    pixels = dx.reshape(height * width, channels)
    for oh in range(dy.shape[0]):
        for ow in range(dy.shape[1]):
            for c in range(channels):
                pixels[argmax[oh, ow, c], c] += dy[oh, ow, c]


@parallel_jit
def max_pool_backward(dy: ndarray, argmax: ndarray, dx: ndarray) -> None:
    for n in prange(dx.shape[0]):
        _max_pool_backward_image(dy[n], argmax[n], dx[n])


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
        h_start, h_stop = _span(oh, x.shape[0], kernel[0], stride[0], padding[0])
        for ow in range(y.shape[1]):
            w_start, w_stop = _span(ow, x.shape[1], kernel[1], stride[1], padding[1])
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
        h_start, h_stop = _span(oh, dx.shape[0], kernel[0], stride[0], padding[0])
        for ow in range(dy.shape[1]):
            w_start, w_stop = _span(ow, dx.shape[1], kernel[1], stride[1], padding[1])
            for h in range(h_start, h_stop):
                for w in range(w_start, w_stop):
                    _add(dy[oh, ow], factor, dx[h, w])


@parallel_jit
def average_pool_backward(dy: ndarray, kernel: Pair, stride: Pair, padding: Pair, dx: ndarray) -> None:
    for n in prange(dx.shape[0]):
        _average_pool_backward_image(dy[n], kernel, stride, padding, dx[n])
