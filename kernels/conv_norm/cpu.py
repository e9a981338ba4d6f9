"""Convolutions beside batch norms: they add up what they write. Some also normalise what they read.

`normalizes` and `adds_up` say for which layers. README.md explains why this saves time, and what is shared with the
kernels of conv and norm: a step with these kernels has the same bits as one without.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray

from minidl.engine.jit import choice, helper, jit

from ..conv import cpu as conv
from ..conv import depthwise, depthwise_gradient, direct, pointwise, rectangles, winograd_gradient
from ..conv import winograd as fast
from ..conv.choice import F4X4_3X3, input_form, winograd_form
from ..conv.cpu import algorithm_of_dweight, algorithm_of_dx, algorithm_of_y
from ..conv.forms import kernel_of
from ..conv.norms import Norms
from ..conv.reference import Pair, Shape, output_size
from ..matmul.blocks import LANES
from ..norm import cpu as norm
from ..norm.blocks import constants_of
from .reference import __all__ as __all__


def adds_up(
    output: str, x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    winograd: bool,
) -> bool:  # fmt: skip
    """Return whether `forward` can compute the sums of y (output = "y"), or backward_input those of dx ("dx").

    A task must write successive pixels: so dx with a stride is excluded, unless Winograd's method computes it, and so
    are algorithms that divide the channels among the tasks.
    """
    options = groups, stride, padding, dilation
    (channels, outputs), out = (x_shape[3], w_shape[3]), output_size(x_shape, w_shape, stride, padding, dilation)
    if output == "y":
        algorithm, form = algorithm_of_y(x_shape, w_shape, *options, winograd)
    else:
        algorithm, form = algorithm_of_dx(x_shape, w_shape, *options, winograd)
        channels, outputs, out = outputs, channels, x_shape[1:3]
    if algorithm == "winograd":
        kernel = kernel_of(form, w_shape[:2], stride)
        if output == "dx" and kernel[2:] != (1, 1):  # phases
            return False
        return fast.adds_up(form, x_shape[0], out, kernel, channels, outputs, groups, dilation)
    if algorithm == "product":
        return pointwise.adds_up(x_shape[0] * out[0] * out[1], channels, outputs)
    return algorithm in ("narrow", "direct") and (output == "y" or stride == (1, 1))


def normalizes(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> bool:
    """Return whether `forward` and backward_weight can normalise x."""
    layer = x_shape, w_shape, groups, stride, padding, dilation, winograd
    forward, gradient = algorithm_of_y(*layer), algorithm_of_dweight(*layer)
    if forward == gradient == ("winograd", F4X4_3X3) and w_shape[:2] == (3, 3):
        return groups == 1 and x_shape[3] % LANES == 0
    out, narrow = output_size(x_shape, w_shape, stride, padding, dilation), forward[0] == gradient[0] == "narrow"
    return narrow and rectangles.normalizes(x_shape[1:3], out, w_shape, groups, stride, padding, dilation)


# -- sizes of memory --------------------------------------------------------------------------------------------------


def forward_scratch(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> int:
    """Return the number of elements of forward's scratch."""
    layer = x_shape, w_shape, groups, stride, padding, dilation, winograd
    if algorithm_of_y(*layer)[0] == "product":
        return pointwise.scratch_size(x_shape[0] * x_shape[1] * x_shape[2], x_shape[3], w_shape[3])
    return conv.forward_scratch(*layer) + _bands(*layer)


def backward_input_scratch(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> int:
    """Return the number of elements of backward_input's scratch."""
    layer = x_shape, w_shape, groups, stride, padding, dilation, winograd
    if algorithm_of_dx(*layer)[0] == "product":
        return pointwise.scratch_size(x_shape[0] * x_shape[1] * x_shape[2], w_shape[3], x_shape[3])
    return conv.backward_input_scratch(*layer)


def backward_weight_scratch(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> int:
    """Return the number of elements of backward_weight's scratch."""
    layer = x_shape, w_shape, groups, stride, padding, dilation, winograd
    return conv.backward_weight_scratch(*layer) + _bands(*layer)


def _bands(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> int:
    """Return how many numbers of scratch are for normalised bands."""
    layer = x_shape, w_shape, groups, stride, padding, dilation, winograd
    if algorithm_of_y(*layer)[0] != "narrow" or not normalizes(*layer):
        return 0
    out = output_size(x_shape, w_shape, stride, padding, dilation)
    return rectangles.memory_of_bands(x_shape[1:3], out, w_shape, groups, stride, padding, dilation)


# -- the arguments of convolutions ------------------------------------------------------------------------------------


@helper
def _before(weight: ndarray, bias: ndarray, mean: ndarray, rstd: ndarray) -> ndarray:
    """Return mean, scale and bias of a batch norm (3, C); C may be 0."""
    before = np.empty((3, mean.size), mean.dtype)
    for c in range(mean.size):
        before[0, c], before[1, c], before[2, c] = mean[c], rstd[c] * weight[c], bias[c]
    return before


@helper
def _of_y(before: ndarray, sums: ndarray) -> Norms:
    """Return the Norms of a forward pass."""
    none = before.reshape(-1)[:0]
    return Norms(before, none, none, False, none, sums, np.zeros(sums.shape[0], np.bool_))


@helper
def _of_dx(
    x: ndarray, weight: ndarray, bias: ndarray, mean: ndarray, rstd: ndarray, relu: bool, relu_y: ndarray, sums: ndarray
) -> Norms:
    """Return the Norms of a data gradient."""
    constants, none = constants_of(mean, rstd * weight, bias), relu_y[:0].reshape(3, 0)
    return Norms(none, x.reshape(-1), constants, relu, relu_y, sums, np.zeros(sums.shape[0], np.bool_))


# -- y ----------------------------------------------------------------------------------------------------------------


@jit
def winograd_forward(
    x: ndarray, norm_weight: ndarray, norm_bias: ndarray, norm_mean: ndarray, norm_rstd: ndarray, weight: ndarray,
    bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool, groups: int, stride: Pair,
    padding: Pair, dilation: Pair, winograd: bool, packed: ndarray, scratch: ndarray, y: ndarray, sums: ndarray,
) -> None:  # fmt: skip
    form = winograd_form(y.shape[0], y.shape[1:3], weight.shape[:2], x.shape[3], y.shape[3], stride, dilation, groups)
    norms = _of_y(_before(norm_weight, norm_bias, norm_mean, norm_rstd), sums)
    fast.forward(form, x, weight, bias, scale, shift, shortcut, relu, stride, padding, dilation, packed, scratch, y,
                 norms)  # fmt: skip


@jit
def product_forward(
    x: ndarray, norm_weight: ndarray, norm_bias: ndarray, norm_mean: ndarray, norm_rstd: ndarray, weight: ndarray,
    bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool, groups: int, stride: Pair,
    padding: Pair, dilation: Pair, winograd: bool, packed: ndarray, scratch: ndarray, y: ndarray, sums: ndarray,
) -> None:  # fmt: skip
    norms = _of_y(scratch[:0].reshape(3, 0), sums)
    pointwise.convolve(x, weight, False, bias, scale, shift, shortcut, relu, scratch, y, norms)


@jit
def narrow_forward(
    x: ndarray, norm_weight: ndarray, norm_bias: ndarray, norm_mean: ndarray, norm_rstd: ndarray, weight: ndarray,
    bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool, groups: int, stride: Pair,
    padding: Pair, dilation: Pair, winograd: bool, packed: ndarray, scratch: ndarray, y: ndarray, sums: ndarray,
) -> None:  # fmt: skip
    norms = _of_y(_before(norm_weight, norm_bias, norm_mean, norm_rstd), sums)
    depthwise.convolve(x, weight, False, bias, scale, shift, shortcut, relu, groups, stride, padding, dilation,
                       scratch, y, norms)  # fmt: skip


@jit
def direct_forward(
    x: ndarray, norm_weight: ndarray, norm_bias: ndarray, norm_mean: ndarray, norm_rstd: ndarray, weight: ndarray,
    bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool, groups: int, stride: Pair,
    padding: Pair, dilation: Pair, winograd: bool, packed: ndarray, scratch: ndarray, y: ndarray, sums: ndarray,
) -> None:  # fmt: skip
    direct.convolve(x, weight, False, bias, scale, shift, shortcut, relu, groups, stride, padding, dilation,
                    packed, scratch, y, _of_y(scratch[:0].reshape(3, 0), sums))  # fmt: skip


@choice
def forward(
    x: ndarray, norm_weight: ndarray, norm_bias: ndarray, norm_mean: ndarray, norm_rstd: ndarray, weight: ndarray,
    bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool, groups: int, stride: Pair,
    padding: Pair, dilation: Pair, winograd: bool, packed: ndarray, scratch: ndarray, y: ndarray, sums: ndarray,
) -> Any:  # fmt: skip
    algorithm, _ = algorithm_of_y(x.shape, weight.shape, groups, stride, padding, dilation, winograd)
    kernels = {
        "winograd": winograd_forward, "product": product_forward, "narrow": narrow_forward, "direct": direct_forward,
    }  # fmt: skip
    return kernels[algorithm]


# -- dx ---------------------------------------------------------------------------------------------------------------


@jit
def winograd_backward_input(
    dy: ndarray, weight: ndarray, shortcut: ndarray, norm_x: ndarray, norm_weight: ndarray, norm_bias: ndarray,
    norm_mean: ndarray, norm_rstd: ndarray, norm_relu: bool, relu_y: ndarray, groups: int, stride: Pair, padding: Pair,
    dilation: Pair, winograd: bool, scratch: ndarray, dx: ndarray, sums: ndarray,
) -> None:  # fmt: skip
    shape, kernel = dx.shape, weight.shape[:2]
    form = input_form(shape[0], shape[1:3], kernel, dy.shape[3], shape[3], stride, padding, dilation, groups)
    norms = _of_dx(norm_x, norm_weight, norm_bias, norm_mean, norm_rstd, norm_relu, relu_y, sums)
    fast.backward_input(form, dy, weight, shortcut, stride, padding, dilation, scratch, dx, norms)


@jit
def product_backward_input(
    dy: ndarray, weight: ndarray, shortcut: ndarray, norm_x: ndarray, norm_weight: ndarray, norm_bias: ndarray,
    norm_mean: ndarray, norm_rstd: ndarray, norm_relu: bool, relu_y: ndarray, groups: int, stride: Pair, padding: Pair,
    dilation: Pair, winograd: bool, scratch: ndarray, dx: ndarray, sums: ndarray,
) -> None:  # fmt: skip
    none, norms = scratch[:0], _of_dx(norm_x, norm_weight, norm_bias, norm_mean, norm_rstd, norm_relu, relu_y, sums)
    pointwise.convolve(dy, weight, True, none, none, none, shortcut, False, scratch, dx, norms)


@jit
def narrow_backward_input(
    dy: ndarray, weight: ndarray, shortcut: ndarray, norm_x: ndarray, norm_weight: ndarray, norm_bias: ndarray,
    norm_mean: ndarray, norm_rstd: ndarray, norm_relu: bool, relu_y: ndarray, groups: int, stride: Pair, padding: Pair,
    dilation: Pair, winograd: bool, scratch: ndarray, dx: ndarray, sums: ndarray,
) -> None:  # fmt: skip
    none, norms = scratch[:0], _of_dx(norm_x, norm_weight, norm_bias, norm_mean, norm_rstd, norm_relu, relu_y, sums)
    depthwise.convolve(dy, weight, True, none, none, none, shortcut, False, groups, stride, padding, dilation,
                       scratch, dx, norms)  # fmt: skip


@jit
def direct_backward_input(
    dy: ndarray, weight: ndarray, shortcut: ndarray, norm_x: ndarray, norm_weight: ndarray, norm_bias: ndarray,
    norm_mean: ndarray, norm_rstd: ndarray, norm_relu: bool, relu_y: ndarray, groups: int, stride: Pair, padding: Pair,
    dilation: Pair, winograd: bool, scratch: ndarray, dx: ndarray, sums: ndarray,
) -> None:  # fmt: skip
    none, norms = scratch[:0], _of_dx(norm_x, norm_weight, norm_bias, norm_mean, norm_rstd, norm_relu, relu_y, sums)
    direct.convolve(dy, weight, True, none, none, none, shortcut, False, groups, stride, padding, dilation,
                    none, scratch, dx, norms)  # fmt: skip


@choice
def backward_input(
    dy: ndarray, weight: ndarray, shortcut: ndarray, norm_x: ndarray, norm_weight: ndarray, norm_bias: ndarray,
    norm_mean: ndarray, norm_rstd: ndarray, norm_relu: bool, relu_y: ndarray, groups: int, stride: Pair, padding: Pair,
    dilation: Pair, winograd: bool, scratch: ndarray, dx: ndarray, sums: ndarray,
) -> Any:  # fmt: skip
    algorithm, _ = algorithm_of_dx(dx.shape, weight.shape, groups, stride, padding, dilation, winograd)
    kernels = {
        "winograd": winograd_backward_input, "product": product_backward_input, "narrow": narrow_backward_input,
        "direct": direct_backward_input,
    }  # fmt: skip
    return kernels[algorithm]


# -- dweight, and the batch norms -------------------------------------------------------------------------------------


@jit
def winograd_backward_weight(
    x: ndarray, norm_weight: ndarray, norm_bias: ndarray, norm_mean: ndarray, norm_rstd: ndarray, dy: ndarray,
    groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool, scratch: ndarray, dweight: ndarray,
) -> None:  # fmt: skip
    before = _before(norm_weight, norm_bias, norm_mean, norm_rstd)
    winograd_gradient.backward_weight(F4X4_3X3, x, dy, stride, padding, dilation, before, scratch, dweight)


@jit
def narrow_backward_weight(
    x: ndarray, norm_weight: ndarray, norm_bias: ndarray, norm_mean: ndarray, norm_rstd: ndarray, dy: ndarray,
    groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool, scratch: ndarray, dweight: ndarray,
) -> None:  # fmt: skip
    before = _before(norm_weight, norm_bias, norm_mean, norm_rstd)
    depthwise_gradient.backward_weight(x, dy, groups, stride, padding, dilation, before, scratch, dweight)


@choice
def backward_weight(
    x: ndarray, norm_weight: ndarray, norm_bias: ndarray, norm_mean: ndarray, norm_rstd: ndarray, dy: ndarray,
    groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool, scratch: ndarray, dweight: ndarray,
) -> Any:  # fmt: skip
    algorithm, _ = algorithm_of_dweight(x.shape, dweight.shape, groups, stride, padding, dilation, winograd)
    return {"winograd": winograd_backward_weight, "narrow": narrow_backward_weight}[algorithm]


@jit
def batch_norm(
    x: ndarray, weight: ndarray, bias: ndarray, eps: float, momentum: float, shortcut: ndarray, relu: bool,
    sums: ndarray, running_mean: ndarray, running_var: ndarray, mean: ndarray, rstd: ndarray, y: ndarray,
) -> None:  # fmt: skip
    norm.finish(x, weight, bias, eps, momentum, shortcut, relu, sums, running_mean, running_var, mean, rstd, y)


@jit
def batch_norm_backward(
    dy: ndarray, x: ndarray, weight: ndarray, bias: ndarray, mean: ndarray, rstd: ndarray, relu: bool,
    sums: ndarray, dx: ndarray, dweight: ndarray, dbias: ndarray,
) -> None:  # fmt: skip
    norm.finish_backward(dy, x, weight, bias, mean, rstd, relu, sums, dx, dweight, dbias)
