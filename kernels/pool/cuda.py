"""Max and average pooling on a GPU: a thread for four neighbouring channels of a pixel.

Forward, a thread visits the pixels of the window of its output. Backward, it visits the windows that contain its pixel
of dx, and adds their gradients in the order of the outputs: each element of dx is written once, by one thread. If
windows lie side by side without overlap, a thread distributes the gradient of its window instead, so that dy and place
are read once. Pixels beyond the last window then belong to windows without a gradient.
"""

from __future__ import annotations

from typing import Any

from numba import int32
from numpy import ndarray

from minidl.engine.cuda import Kernel, cuda, device, kernel, launch

from ..elementwise.quads import QUAD
from ..reduce.block_sum import THREADS
from ..reduce.cuda_matrix import load_part, store_part, wide
from .reference import Pair
from .reference import __all__ as __all__


def _blocks(pixels: ndarray) -> int:
    """Return the number of blocks that have a thread for each quad of an array (N, H, W, C)."""
    return -(-(pixels.size // max(1, pixels.shape[3])) * -(-pixels.shape[3] // QUAD) // THREADS)


@device
def _item(height: int, width: int, channels: int) -> tuple[int, int, int, int]:
    """Return (image, row, column, first channel) of this thread's quad in an array (N, height, width, channels)."""
    item, across = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x), int32((channels + QUAD - 1) // QUAD)
    pixel, c = item // across, int32(item % across * QUAD)
    line, w = pixel // width, pixel % width
    return line // height, line % height, w, c


@device
def _at(n: int, h: int, w: int, c: int, height: int, width: int, channels: int) -> int:
    """Return the index of element (n, h, w, c) of an array (N, height, width, channels)."""
    return int32(((n * height + h) * width + w) * channels + c)


def _forward(largest: bool) -> Kernel:
    """Return the kernel of max pooling, or of average pooling; place is then not used."""

    def pool(
        x: ndarray, images: int, height: int, width: int, channels: int, out_height: int, out_width: int,
        kernel_height: int, kernel_width: int, stride_h: int, stride_w: int, padding_h: int, padding_w: int,
        factor: float, wide: bool, y: ndarray, place: ndarray,
    ) -> None:  # fmt: skip
        n, oh, ow, c = _item(out_height, out_width, channels)
        if n >= images:
            return
        count, number, index = int32(channels - c), x.dtype.type, place.dtype.type
        v, best, where = cuda.local.array(QUAD, number), cuda.local.array(QUAD, number), cuda.local.array(QUAD, index)
        top, left = int32(oh * stride_h - padding_h), int32(ow * stride_w - padding_w)
        first = True
        for j in range(QUAD):
            v[j], best[j], where[j] = 0, 0, 0
        for h in range(max(top, 0), min(top + kernel_height, height)):
            for w in range(max(left, 0), min(left + kernel_width, width)):
                load_part(x, _at(n, h, w, c, height, width, channels), count, wide, v)
                for j in range(QUAD):
                    if not largest:
                        best[j] += v[j]
                    elif first or v[j] > best[j] or v[j] != v[j]:  # NaN wins
                        best[j], where[j] = v[j], index((h - top) * kernel_width + w - left)
                first = False
        at = _at(n, oh, ow, c, out_height, out_width, channels)
        if largest:
            store_part(place, at, count, wide, where)
        else:
            for j in range(QUAD):
                best[j] *= factor
        store_part(y, at, count, wide, best)

    return kernel(threads=THREADS)(pool)


_max_pool, _average_pool = _forward(True), _forward(False)


def max_pool(x: ndarray, kernel: Pair, stride: Pair, padding: Pair, y: ndarray, place: ndarray) -> None:
    launch(
        _max_pool, _blocks(y), x, *x.shape, *y.shape[1:3], *kernel, *stride, *padding, x.dtype.type(1),
        wide(x.shape[3], x, y, place), y, place,
    )  # fmt: skip


def average_pool(x: ndarray, kernel: Pair, stride: Pair, padding: Pair, y: ndarray) -> None:
    launch(
        _average_pool, _blocks(y), x, *x.shape, *y.shape[1:3], *kernel, *stride, *padding,
        x.dtype.type(1 / (kernel[0] * kernel[1])), wide(x.shape[3], x, y), y, y[:0],
    )  # fmt: skip


@device
def _outputs(pixel: int, kernel: int, stride: int, padding: int, outputs: int) -> tuple[int, int]:
    """Return [first, end) of the outputs whose windows contain a pixel, on one axis."""
    first = pixel + padding - kernel + stride  # of the first such output * stride, rounded up below
    return int32(max(first, 0) // stride), int32(min((pixel + padding) // stride + 1, outputs))


def _backward(largest: bool) -> Kernel:
    def gather(
        dy: ndarray, place: ndarray, images: int, height: int, width: int, channels: int, out_height: int,
        out_width: int, kernel_height: int, kernel_width: int, stride_h: int, stride_w: int, padding_h: int,
        padding_w: int, factor: float, wide: bool, dx: ndarray,
    ) -> None:  # fmt: skip
        """A thread adds the gradients of the windows that contain its pixel."""
        n, h, w, c = _item(height, width, channels)
        if n >= images:
            return
        count, number = int32(channels - c), dy.dtype.type
        d, total = cuda.local.array(QUAD, number), cuda.local.array(QUAD, number)
        where = cuda.local.array(QUAD, place.dtype)
        for j in range(QUAD):
            d[j], total[j], where[j] = 0, 0, 0
        first_h, end_h = _outputs(h, kernel_height, stride_h, padding_h, out_height)
        first_w, end_w = _outputs(w, kernel_width, stride_w, padding_w, out_width)
        for oh in range(first_h, end_h):
            for ow in range(first_w, end_w):
                at = _at(n, oh, ow, c, out_height, out_width, channels)
                load_part(dy, at, count, wide, d)
                if largest:
                    tap = int32((h + padding_h - oh * stride_h) * kernel_width + w + padding_w - ow * stride_w)
                    load_part(place, at, count, wide, where)
                    for j in range(QUAD):
                        total[j] += d[j] if int32(where[j]) == tap else number(0)
                else:
                    for j in range(QUAD):
                        total[j] += d[j]
        if not largest:
            for j in range(QUAD):
                total[j] *= factor  # here, so that no product can be merged with a sum, or not
        store_part(dx, _at(n, h, w, c, height, width, channels), count, wide, total)

    return kernel(threads=THREADS)(gather)


def _side_by_side(largest: bool) -> Kernel:
    def distribute(
        dy: ndarray, place: ndarray, images: int, height: int, width: int, channels: int, out_height: int,
        out_width: int, kernel_height: int, kernel_width: int, windows_h: int, windows_w: int, factor: float,
        wide: bool, dx: ndarray,
    ) -> None:  # fmt: skip
        """A thread writes the pixels of its window. windows_h, windows_w: windows that it takes to cover the image."""
        n, oh, ow, c = _item(windows_h, windows_w, channels)
        if n >= images:
            return
        count, number = int32(channels - c), dy.dtype.type
        d, v = cuda.local.array(QUAD, number), cuda.local.array(QUAD, number)
        where = cuda.local.array(QUAD, place.dtype)
        for j in range(QUAD):
            d[j], where[j] = 0, 0
        if oh < out_height and ow < out_width:
            at = _at(n, oh, ow, c, out_height, out_width, channels)
            load_part(dy, at, count, wide, d)
            if largest:
                load_part(place, at, count, wide, where)
        top, left = int32(oh * kernel_height), int32(ow * kernel_width)
        for h in range(top, min(top + kernel_height, height)):
            for w in range(left, min(left + kernel_width, width)):
                for j in range(QUAD):
                    if largest:
                        v[j] = d[j] if int32(where[j]) == (h - top) * kernel_width + w - left else number(0)
                    else:
                        v[j] = d[j] * factor
                store_part(dx, _at(n, h, w, c, height, width, channels), count, wide, v)

    return kernel(threads=THREADS)(distribute)


_max_gather, _average_gather = _backward(True), _backward(False)
_max_distribute, _average_distribute = _side_by_side(True), _side_by_side(False)


def _launch_backward(
    gather: Kernel, distribute: Kernel, dy: ndarray, place: ndarray, kernel: Pair, stride: Pair, padding: Pair,
    factor: Any, dx: ndarray,
) -> None:  # fmt: skip
    images, height, width, channels = dx.shape
    aligned = wide(channels, dy, dx, place)
    shapes = images, height, width, channels, *dy.shape[1:3], *kernel
    if kernel == stride and padding == (0, 0):
        windows = -(-height // kernel[0]), -(-width // kernel[1])
        blocks = -(-images * windows[0] * windows[1] * -(-channels // QUAD) // THREADS)
        launch(distribute, blocks, dy, place, *shapes, *windows, factor, aligned, dx)
    else:
        launch(gather, _blocks(dx), dy, place, *shapes, *stride, *padding, factor, aligned, dx)


def max_pool_backward(dy: ndarray, place: ndarray, kernel: Pair, stride: Pair, padding: Pair, dx: ndarray) -> None:
    _launch_backward(_max_gather, _max_distribute, dy, place, kernel, stride, padding, dy.dtype.type(1), dx)


def average_pool_backward(dy: ndarray, kernel: Pair, stride: Pair, padding: Pair, dx: ndarray) -> None:
    factor = dy.dtype.type(1 / (kernel[0] * kernel[1]))
    _launch_backward(_average_gather, _average_distribute, dy, dy[:0], kernel, stride, padding, factor, dx)
