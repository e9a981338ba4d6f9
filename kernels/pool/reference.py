"""Max and average pooling of images: the definition and the oracle of the tests.

x, dx (N, H, W, C); y, dy, place (N, OH, OW, C) with OH = (H + 2 * padding - kernel) // stride + 1; OW likewise.
kernel, stride and padding are (height, width). As in PyTorch, padding is at most half the kernel, so every window
covers at least one pixel.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy import ndarray

__all__ = ["average_pool", "average_pool_backward", "max_pool", "max_pool_backward"]

Pair = tuple[int, int]


def _window(oh: int, ow: int, image: Pair, kernel: Pair, stride: Pair, padding: Pair) -> Iterator[tuple[int, int, int]]:
    """Yield (h, w, tap) for each image pixel that output (oh, ow) depends on, row by row. tap is the index of the pixel
    in the window, kh * kernel width + kw."""
    for kh in range(kernel[0]):
        for kw in range(kernel[1]):
            h = oh * stride[0] - padding[0] + kh
            w = ow * stride[1] - padding[1] + kw
            if 0 <= h < image[0] and 0 <= w < image[1]:
                yield h, w, kh * kernel[1] + kw


def max_pool(x: ndarray, kernel: Pair, stride: Pair, padding: Pair, y: ndarray, place: ndarray) -> None:
    """Compute y = the largest pixel of each window, and place = the index of this pixel in the window.

    place: uint8 if a window has at most 256 pixels, else int32; the backward pass reads it.
    Of equal pixels the first wins. A NaN wins over every number and over an earlier NaN, as in PyTorch.
    """
    for n, oh, ow, c in _indices(y):
        first = True
        for h, w, tap in _window(oh, ow, x.shape[1:3], kernel, stride, padding):
            pixel = x[n, h, w, c]
            if first or pixel > y[n, oh, ow, c] or pixel != pixel:
                y[n, oh, ow, c] = pixel
                place[n, oh, ow, c] = tap
            first = False


def max_pool_backward(dy: ndarray, place: ndarray, kernel: Pair, stride: Pair, padding: Pair, dx: ndarray) -> None:
    """Compute dx: for each pixel, the sum of dy over the windows whose maximum is this pixel."""
    dx[...] = 0
    for n, oh, ow, c in _indices(dy):
        kh, kw = divmod(int(place[n, oh, ow, c]), kernel[1])
        dx[n, oh * stride[0] - padding[0] + kh, ow * stride[1] - padding[1] + kw, c] += dy[n, oh, ow, c]


def average_pool(x: ndarray, kernel: Pair, stride: Pair, padding: Pair, y: ndarray) -> None:
    """Compute y = the sum of each window / (kernel height * kernel width); padding counts as 0 (PyTorch's default)."""
    height, width = x.shape[1:3]
    for n, oh, ow, c in _indices(y):
        total = 0.0
        for h, w, _ in _window(oh, ow, (height, width), kernel, stride, padding):
            total += x[n, h, w, c]
        y[n, oh, ow, c] = total / (kernel[0] * kernel[1])


def average_pool_backward(dy: ndarray, kernel: Pair, stride: Pair, padding: Pair, dx: ndarray) -> None:
    """Compute dx: for each pixel, the sum of dy / (kernel height * kernel width) over the windows that cover it."""
    height, width = dx.shape[1:3]
    dx[...] = 0
    for n, oh, ow, c in _indices(dy):
        for h, w, _ in _window(oh, ow, (height, width), kernel, stride, padding):
            dx[n, h, w, c] += dy[n, oh, ow, c] / (kernel[0] * kernel[1])


def _indices(a: ndarray) -> Iterator[tuple[int, ...]]:
    """Iterate over the indices of the array; the last axis varies fastest."""
    return np.ndindex(*a.shape)
