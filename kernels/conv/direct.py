"""Direct convolution: first version, plain loops."""

from __future__ import annotations

from numpy import ndarray

from minidl.jit import jit, parallel_jit, prange

from .reference import Pair, Shape


@jit
def _inside(size: int, out: int, offset: int, stride: int) -> Pair:
    """The first and one past the last i in [0, out) for which 0 <= i stride + offset < size."""
    first = max(0, -(offset // stride))
    last = min(out, (size - 1 - offset) // stride + 1)
    return min(first, out), max(last, min(first, out))


def forward_scratch(x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair) -> int:
    return 0


backward_input_scratch = backward_weight_scratch = forward_scratch


@parallel_jit
def forward(
    x: ndarray, weight: ndarray, bias: ndarray, scale: ndarray, shift: ndarray, relu: bool,
    groups: int, stride: Pair, padding: Pair, dilation: Pair, scratch: ndarray, y: ndarray,
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
        for i in range(y.shape[1]):
            for j in range(y.shape[2]):
                target = y[n, i, j]
                for o in range(outputs):
                    if bias.size:
                        target[o] += bias[o]
                    if scale.size:
                        target[o] = target[o] * scale[o] + shift[o]
                    if relu and target[o] < 0:
                        target[o] = 0


@parallel_jit
def backward_input(
    dy: ndarray, weight: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair, scratch: ndarray, dx: ndarray
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
def backward_weight(
    x: ndarray, dy: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair, scratch: ndarray, dweight: ndarray
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
