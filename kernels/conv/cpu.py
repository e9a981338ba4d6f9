"""Convolution, compiled. With one group: as a matrix product (im2col). With several: loops over what is there.

im2col: the patch of x under the kernel at one output pixel is written out as a row of K = kh kw C numbers. Then

    y      (pixels, O) = columns (pixels, K) @ weight (K, O)
    dcolumns           = dy @ weight^T                        and adding the rows back where they came from gives dx
    dweight            = columns^T @ dy                       summed over all images

and a matrix product is what BLAS does best. The price is memory: x is copied kh kw times. So only one block of images
is unrolled at a time, into a scratch that the caller gives: columns (blocks in flight, images a block, pixels, K).
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.jit import jit, parallel_jit, prange

from .reference import Pair
from .reference import __all__ as __all__


@jit
def _inside(size: int, out: int, offset: int, stride: int) -> Pair:
    """The first and one past the last i in [0, out) for which 0 <= i stride + offset < size."""
    first = max(0, -(offset // stride))
    last = min(out, (size - 1 - offset) // stride + 1)
    return min(first, out), max(last, min(first, out))


@jit
def _unroll(x: ndarray, kernel: Pair, out: Pair, stride: Pair, padding: Pair, dilation: Pair, columns: ndarray) -> None:
    """x (H, W, C) -> columns (Ho Wo, kh kw C)"""
    height, width, channels = x.shape
    kernel_width = kernel[1]
    for u in range(kernel[0]):
        row_offset = u * dilation[0] - padding[0]
        top, bottom = _inside(height, out[0], row_offset, stride[0])
        for v in range(kernel_width):
            offset = v * dilation[1] - padding[1]
            left, right = _inside(width, out[1], offset, stride[1])
            k = (u * kernel_width + v) * channels
            for i in range(out[0]):
                block = columns[i * out[1] : (i + 1) * out[1], k : k + channels]
                if i < top or i >= bottom:
                    block[:] = 0
                    continue
                block[:left] = 0
                block[right:] = 0
                row = x[i * stride[0] + row_offset]
                for j in range(left, right):
                    source, target = row[j * stride[1] + offset], block[j]
                    for c in range(channels):
                        target[c] = source[c]


@jit
def _roll_up(
    columns: ndarray, kernel: Pair, out: Pair, stride: Pair, padding: Pair, dilation: Pair, dx: ndarray
) -> None:
    """dx (H, W, C) = the rows of columns (Ho Wo, kh kw C), each added where _unroll took it from"""
    height, width, channels = dx.shape
    kernel_width = kernel[1]
    dx[:] = 0
    for u in range(kernel[0]):
        row_offset = u * dilation[0] - padding[0]
        top, bottom = _inside(height, out[0], row_offset, stride[0])
        for v in range(kernel_width):
            offset = v * dilation[1] - padding[1]
            left, right = _inside(width, out[1], offset, stride[1])
            k = (u * kernel_width + v) * channels
            for i in range(top, bottom):
                row = dx[i * stride[0] + row_offset]
                block = columns[i * out[1] : (i + 1) * out[1], k : k + channels]
                for j in range(left, right):
                    target, source = row[j * stride[1] + offset], block[j]
                    for c in range(channels):
                        target[c] += source[c]


@parallel_jit
def forward(
    x: ndarray, weight: ndarray, stride: Pair, padding: Pair, dilation: Pair, columns: ndarray, y: ndarray
) -> None:
    images, (out_height, out_width, outputs) = x.shape[0], y.shape[1:]
    kernel, out, pixels = weight.shape[:2], (out_height, out_width), out_height * out_width
    w = weight.reshape(-1, outputs)
    tasks, block = columns.shape[:2]
    for task in prange(tasks):
        lo, hi = task * images // tasks, (task + 1) * images // tasks
        for first in range(lo, hi, block):
            count = min(block, hi - first)
            for n in range(count):
                _unroll(x[first + n], kernel, out, stride, padding, dilation, columns[task, n])
            rows = columns[task, :count].reshape(count * pixels, w.shape[0])
            np.dot(rows, w, y[first : first + count].reshape(count * pixels, outputs))


@parallel_jit
def backward_input(
    dy: ndarray, weight: ndarray, stride: Pair, padding: Pair, dilation: Pair, columns: ndarray, dx: ndarray
) -> None:
    images, (out_height, out_width, outputs) = dx.shape[0], dy.shape[1:]
    kernel, out, pixels = weight.shape[:2], (out_height, out_width), out_height * out_width
    w = weight.reshape(-1, outputs)
    tasks, block = columns.shape[:2]
    for task in prange(tasks):
        lo, hi = task * images // tasks, (task + 1) * images // tasks
        for first in range(lo, hi, block):
            count = min(block, hi - first)
            rows = columns[task, :count].reshape(count * pixels, w.shape[0])
            np.dot(dy[first : first + count].reshape(count * pixels, outputs), w.T, rows)
            for n in range(count):
                _roll_up(columns[task, n], kernel, out, stride, padding, dilation, dx[first + n])


@parallel_jit
def backward_weight(
    x: ndarray, dy: ndarray, stride: Pair, padding: Pair, dilation: Pair,
    columns: ndarray, partial: ndarray, dweight: ndarray,
) -> None:  # fmt: skip
    """partial (tasks, 2, K, O): each task's sum, and the product that is being added to it. The tasks' sums are added
    in their order, so that the bits do not depend on who finished first."""
    images, (out_height, out_width, outputs) = x.shape[0], dy.shape[1:]
    kernel, out, pixels = dweight.shape[:2], (out_height, out_width), out_height * out_width
    dw = dweight.reshape(-1, outputs)
    tasks, block = columns.shape[:2]
    for task in prange(tasks):
        lo, hi = task * images // tasks, (task + 1) * images // tasks
        total, product = partial[task, 0], partial[task, 1]
        total[:] = 0
        for first in range(lo, hi, block):
            count = min(block, hi - first)
            for n in range(count):
                _unroll(x[first + n], kernel, out, stride, padding, dilation, columns[task, n])
            rows = columns[task, :count].reshape(count * pixels, dw.shape[0])
            np.dot(rows.T, dy[first : first + count].reshape(count * pixels, outputs), product)
            for k in range(total.shape[0]):
                for o in range(outputs):
                    total[k, o] += product[k, o]
    dw[:] = partial[0, 0]
    for task in range(1, tasks):
        for k in range(dw.shape[0]):
            for o in range(outputs):
                dw[k, o] += partial[task, 0, k, o]


@parallel_jit
def grouped_forward(
    x: ndarray, weight: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair, y: ndarray
) -> None:
    kernel_height, kernel_width, channels, outputs = weight.shape
    each = outputs // groups
    for n in prange(x.shape[0]):
        y[n] = 0
        for u in range(kernel_height):
            top, bottom = _inside(x.shape[1], y.shape[1], u * dilation[0] - padding[0], stride[0])
            for v in range(kernel_width):
                left, right = _inside(x.shape[2], y.shape[2], v * dilation[1] - padding[1], stride[1])
                for i in range(top, bottom):
                    for j in range(left, right):
                        source = x[n, i * stride[0] + u * dilation[0] - padding[0],
                                   j * stride[1] + v * dilation[1] - padding[1]]  # fmt: skip
                        target = y[n, i, j]
                        for c in range(channels):
                            w = weight[u, v, c]
                            for o in range(outputs):
                                target[o] += source[o // each * channels + c] * w[o]


@parallel_jit
def grouped_backward_input(
    dy: ndarray, weight: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair, dx: ndarray
) -> None:
    kernel_height, kernel_width, channels, outputs = weight.shape
    each = outputs // groups
    for n in prange(dx.shape[0]):
        dx[n] = 0
        for u in range(kernel_height):
            top, bottom = _inside(dx.shape[1], dy.shape[1], u * dilation[0] - padding[0], stride[0])
            for v in range(kernel_width):
                left, right = _inside(dx.shape[2], dy.shape[2], v * dilation[1] - padding[1], stride[1])
                for i in range(top, bottom):
                    for j in range(left, right):
                        target = dx[n, i * stride[0] + u * dilation[0] - padding[0],
                                    j * stride[1] + v * dilation[1] - padding[1]]  # fmt: skip
                        source = dy[n, i, j]
                        for c in range(channels):
                            w = weight[u, v, c]
                            for o in range(outputs):
                                target[o // each * channels + c] += source[o] * w[o]


@parallel_jit
def grouped_backward_weight(
    x: ndarray, dy: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair, dweight: ndarray
) -> None:
    """In parallel over the taps (u, v) of the kernel: each has its own elements of dweight."""
    kernel_height, kernel_width, channels, outputs = dweight.shape
    each = outputs // groups
    for tap in prange(kernel_height * kernel_width):
        u, v = tap // kernel_width, tap % kernel_width
        dw = dweight[u, v]
        dw[:] = 0
        top, bottom = _inside(x.shape[1], dy.shape[1], u * dilation[0] - padding[0], stride[0])
        left, right = _inside(x.shape[2], dy.shape[2], v * dilation[1] - padding[1], stride[1])
        for n in range(x.shape[0]):
            for i in range(top, bottom):
                for j in range(left, right):
                    source = x[n, i * stride[0] + u * dilation[0] - padding[0],
                               j * stride[1] + v * dilation[1] - padding[1]]  # fmt: skip
                    gradient = dy[n, i, j]
                    for c in range(channels):
                        for o in range(outputs):
                            dw[c, o] += source[o // each * channels + c] * gradient[o]
