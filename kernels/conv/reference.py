"""Two-dimensional convolution (cross-correlation, as is usual in deep learning).

    x (N, H, W, C)   weight (kh, kw, C/groups, O)   y (N, Ho, Wo, O)   Ho = (H + 2 * ph - dh * (kh - 1) - 1) // sh + 1

    y[n, i, j, o] = sum over u, v, c of  x[n, i * sh + u * dh - ph, j * sw + v * dw - pw, c] * weight[u, v, c, o]

where x is 0 outside the image. With groups, output channel o reads only the C/groups input channels of its own group;
groups = C is a depthwise convolution. Both gradients follow from the same sum: each product x[..] * weight[..] in y[..]
adds dy[..] * weight[..] to dx[..] and x[..] * dy[..] to dweight[..].
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

__all__ = ["backward_input", "backward_weight", "forward"]

Pair = tuple[int, int]  # (vertical, horizontal)
Shape = tuple[int, int, int, int]
Index = tuple[int | slice, ...]
Products = Iterator[tuple[Index, Index, Index]]


def output_length(size: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> int:
    """Return the number of positions of a window of `kernel` taps along an axis of `size` pixels."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def output_size(x_shape: Shape, w_shape: Shape, stride: Pair, padding: Pair, dilation: Pair) -> Pair:
    """Return (Ho, Wo)."""
    height, width = (output_length(x_shape[1 + i], w_shape[i], stride[i], padding[i], dilation[i]) for i in (0, 1))
    return height, width


def _products(
    x: np.ndarray, weight: np.ndarray, y: np.ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair
) -> Products:
    """Yield the indices (into x, weight, y) of the products in the sum above: vector @ matrix, added to a vector.

    There is one for each output pixel, position in the kernel that is inside the image, and group.
    """
    height, width = x.shape[1:3]
    kernel_height, kernel_width, inputs, outputs = weight.shape
    outputs //= groups
    for n, i, j, u, v in np.ndindex(*y.shape[:3], kernel_height, kernel_width):
        h = i * stride[0] + u * dilation[0] - padding[0]
        w = j * stride[1] + v * dilation[1] - padding[1]
        if 0 <= h < height and 0 <= w < width:
            for g in range(groups):
                c, o = slice(g * inputs, (g + 1) * inputs), slice(g * outputs, (g + 1) * outputs)
                yield (n, h, w, c), (u, v, slice(None), o), (n, i, j, o)


def forward_scratch(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> int:
    """Return the number of elements of scratch, or of `packed`: 0, since these loops need none."""
    return 0


backward_input_scratch = backward_weight_scratch = packed_size = forward_scratch


def forward(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, scale: np.ndarray, shift: np.ndarray, shortcut: np.ndarray,
    relu: bool, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool, packed: np.ndarray,
    scratch: np.ndarray, y: np.ndarray,
) -> None:  # fmt: skip
    """Compute y = conv(x, weight) [+ bias (O,)] [* scale (O,) + shift (O,)] [+ shortcut (a vector)] [relu].

    bias, scale, shift and shortcut have size 0 if they are not wanted. These loops ignore three arguments. winograd: a
    fast kernel may use a form with larger rounding errors (kernels/conv/WINOGRAD.md). scratch: memory for intermediate
    results of a fast kernel. packed: of size 0, or packed_size(...) numbers that the caller keeps for the next call,
    with the weight in the form in which a fast kernel reads it. If the last number is 0, the kernel writes this form
    and sets the number to 1. Otherwise it reads `packed`, and not `weight`.
    """
    y[...] = 0
    for at_x, at_weight, at_y in _products(x, weight, y, groups, stride, padding, dilation):
        y[at_y] += x[at_x] @ weight[at_weight]
    if bias.size:
        y += bias
    if scale.size:
        y *= scale
        y += shift
    if shortcut.size:
        y += shortcut.reshape(y.shape)
    if relu:
        y[y < 0] = 0


def backward_input(
    dy: np.ndarray, weight: np.ndarray, shortcut: np.ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    winograd: bool, scratch: np.ndarray, dx: np.ndarray,
) -> None:  # fmt: skip
    """Compute dx, the gradient of x [+ shortcut, a vector: the gradient of x from another branch]."""
    dx[...] = 0
    for at_x, at_weight, at_y in _products(dx, weight, dy, groups, stride, padding, dilation):
        dx[at_x] += weight[at_weight] @ dy[at_y]
    if shortcut.size:
        dx += shortcut.reshape(dx.shape)


def backward_weight(
    x: np.ndarray, dy: np.ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    winograd: bool, scratch: np.ndarray, dweight: np.ndarray,
) -> None:  # fmt: skip
    """Compute dweight = dL/dweight."""
    dweight[...] = 0
    for at_x, at_weight, at_y in _products(x, dweight, dy, groups, stride, padding, dilation):
        dweight[at_weight] += np.outer(x[at_x], dy[at_y])
