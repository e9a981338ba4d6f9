"""Compiled convolution. Each function calls one of four kinds of kernels, which README.md and WINOGRAD.md explain:

- direct.py, weight_gradient.py: the sum of the definition, for any geometry;
- depthwise.py, depthwise_gradient.py: the same for groups of few channels;
- pointwise.py: matrix products, for kernels of 1 x 1;
- winograd.py, winograd_gradient.py: fewer multiplications, for some geometries (choice.py decides for which).
"""

from __future__ import annotations

from numpy import ndarray

from minidl.engine.jit import jit, threads
from minidl.kernels.matmul import cpu as matmul

from . import depthwise, direct, pointwise, rectangles, weight_gradient, winograd_gradient
from . import winograd as fast
from .choice import DIRECT, gradient_form, input_form, winograd_form
from .reference import Pair, Shape, output_size
from .reference import __all__ as __all__


def _form(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> int:
    """Return the form of y."""
    out = output_size(x_shape, w_shape, stride, padding, dilation)
    form = winograd_form(out, w_shape[:2], x_shape[3], w_shape[3], stride, dilation, groups)
    return int(form) if winograd else DIRECT


def _pixels(x_shape: Shape) -> int:
    return x_shape[0] * x_shape[1] * x_shape[2]


def forward_scratch(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> int:
    """Return the number of elements of forward's scratch; x_shape (N, H, W, C), w_shape (kh, kw, C/groups, O)."""
    form = _form(x_shape, w_shape, groups, stride, padding, dilation, winograd)
    if form != DIRECT:
        return fast.forward_scratch(form, x_shape, w_shape, padding, dilation)
    if pointwise.is_product(w_shape, groups, stride, padding):
        return matmul.nn_scratch(_pixels(x_shape), w_shape[3], x_shape[3])
    if rectangles.is_narrow(w_shape, groups):
        return depthwise.scratch_size(w_shape)
    return int(direct.scratch_size(threads(), x_shape, w_shape, False, groups, stride, padding, dilation))


def packed_size(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> int:
    """Return the number of elements of forward's `packed`."""
    form = _form(x_shape, w_shape, groups, stride, padding, dilation, winograd)
    if form != DIRECT:
        return fast.packed_size(form, x_shape, w_shape, padding, dilation)
    if pointwise.is_product(w_shape, groups, stride, padding):
        return matmul.packed_size(_pixels(x_shape), w_shape[3], x_shape[3])
    if rectangles.is_narrow(w_shape, groups):
        return 0
    return int(direct.packed_size(w_shape, groups, stride, padding, dilation))


def backward_input_scratch(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> int:
    """Return the number of elements of backward_input's scratch."""
    form = input_form(x_shape[0], x_shape[1:3], w_shape[:2], w_shape[3], x_shape[3], stride, padding, dilation, groups)
    if winograd and form != DIRECT:
        return fast.backward_input_scratch(form, x_shape, w_shape, padding, dilation)
    if pointwise.is_product(w_shape, groups, stride, padding):
        return matmul.nt_scratch(_pixels(x_shape), x_shape[3], w_shape[3])
    if rectangles.is_narrow(w_shape, groups):
        return depthwise.scratch_size(w_shape)
    return int(direct.scratch_size(threads(), x_shape, w_shape, True, groups, stride, padding, dilation))


def backward_weight_scratch(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> int:
    """Return the number of elements of backward_weight's scratch."""
    out = output_size(x_shape, w_shape, stride, padding, dilation)
    form = gradient_form(x_shape[0], out, w_shape[:2], x_shape[3], w_shape[3], stride, dilation, groups)
    if winograd and form != DIRECT:
        return winograd_gradient.backward_weight_scratch(form, x_shape, w_shape, padding, dilation)
    if pointwise.is_product(w_shape, groups, stride, padding):
        return matmul.tn_scratch(x_shape[3], w_shape[3], _pixels(x_shape))
    return int(weight_gradient.scratch_size(threads(), out, x_shape, w_shape, groups, stride, padding, dilation))


@jit
def forward(
    x: ndarray, weight: ndarray, bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool,
    groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool, packed: ndarray, scratch: ndarray,
    y: ndarray,
) -> None:  # fmt: skip
    form = winograd_form(y.shape[1:3], weight.shape[:2], x.shape[3], y.shape[3], stride, dilation, groups)
    if winograd and form != DIRECT:
        fast.forward(form, x, weight, bias, scale, shift, shortcut, relu, padding, dilation, packed, scratch, y,
                     fast.no_norms(scratch))  # fmt: skip
    elif pointwise.is_product(weight.shape, groups, stride, padding):
        pointwise.forward(x, weight, bias, scale, shift, shortcut, relu, packed, scratch, y)
    elif rectangles.is_narrow(weight.shape, groups):
        depthwise.convolve(x, weight, False, bias, scale, shift, shortcut, relu, groups, stride, padding, dilation,
                           scratch, y)  # fmt: skip
    else:
        direct.convolve(x, weight, False, bias, scale, shift, shortcut, relu, groups, stride, padding, dilation,
                        packed, scratch, y)  # fmt: skip


@jit
def backward_input(
    dy: ndarray, weight: ndarray, shortcut: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    winograd: bool, scratch: ndarray, dx: ndarray,
) -> None:  # fmt: skip
    shape, kernel = dx.shape, weight.shape[:2]
    form = input_form(shape[0], shape[1:3], kernel, dy.shape[3], shape[3], stride, padding, dilation, groups)
    if winograd and form != DIRECT:
        fast.backward_input(form, dy, weight, shortcut, padding, dilation, scratch, dx, fast.no_norms(scratch))
    elif pointwise.is_product(weight.shape, groups, stride, padding):
        pointwise.backward_input(dy, weight, shortcut, scratch, dx)
    elif rectangles.is_narrow(weight.shape, groups):
        none = scratch[:0]
        depthwise.convolve(dy, weight, True, none, none, none, shortcut, False, groups, stride, padding, dilation,
                           scratch, dx)  # fmt: skip
    else:
        none = scratch[:0]
        direct.convolve(dy, weight, True, none, none, none, shortcut, False, groups, stride, padding, dilation,
                        none, scratch, dx)  # fmt: skip


@jit
def backward_weight(
    x: ndarray, dy: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    winograd: bool, scratch: ndarray, dweight: ndarray,
) -> None:  # fmt: skip
    shape, kernel = dy.shape, dweight.shape[:2]
    form = gradient_form(shape[0], shape[1:3], kernel, x.shape[3], shape[3], stride, dilation, groups)
    if winograd and form != DIRECT:
        winograd_gradient.backward_weight(form, x, dy, padding, dilation, scratch[:0].reshape(0, 1), scratch, dweight)
    elif pointwise.is_product(dweight.shape, groups, stride, padding):
        pointwise.backward_weight(x, dy, scratch, dweight)
    else:
        weight_gradient.backward_weight(x, dy, groups, stride, padding, dilation, scratch, dweight)
