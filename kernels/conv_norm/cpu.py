"""Convolutions beside batch norms: Winograd's F(4x4,3x3) normalises what it reads, and adds up what it writes.

`normalizes` and `adds_up` say for which shapes. README.md explains why this saves time, and what is shared with the
kernels of conv and norm: a step with these kernels has the same bits as one without.
"""

from __future__ import annotations

from numpy import ndarray

from minidl.engine.jit import helper, jit

from ..conv import winograd as fast
from ..conv import winograd_gradient
from ..conv.choice import F4X4_3X3, count_of, gradient_form, tiles_of
from ..conv.forms import uses_blocks
from ..conv.reference import Pair, Shape, output_size
from ..conv.winograd import Norms
from ..matmul.blocks import LANES
from ..norm import cpu as norm
from ..norm.blocks import constants_of
from .reference import __all__ as __all__


def adds_up(images: int, out: Pair, w_shape: Shape, groups: int, stride: Pair, dilation: Pair, winograd: bool) -> bool:
    """Return whether `forward` can compute the sums of y (images, *out, O).

    With w_shape (kh, kw, O, C), return whether backward_input can compute those of dx (images, *out, C).
    """
    form = gradient_form(images, out, w_shape[:2], w_shape[2], w_shape[3], stride, dilation, groups)
    return winograd and groups == 1 and fast.adds_up(form, images, out, w_shape[2], w_shape[3], dilation)


def normalizes(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> bool:
    """Return whether `forward` and backward_weight can normalise x."""
    out, (channels, outputs) = output_size(x_shape, w_shape, stride, padding, dilation), w_shape[2:]
    form = gradient_form(x_shape[0], out, w_shape[:2], channels, outputs, stride, dilation, groups)
    tiles = count_of(x_shape[0], tiles_of(4, *out, dilation))
    blocks = uses_blocks(form, channels, outputs, groups, tiles)
    return bool(winograd and groups == 1 and form == F4X4_3X3 and channels % LANES == 0 and not blocks)


@helper
def _before(weight: ndarray, bias: ndarray, mean: ndarray, rstd: ndarray) -> ndarray:
    """Return mean, scale and bias of a batch norm (3, C). C is 0 or, as `normalizes` demands, whole vectors."""
    return constants_of(mean, rstd * weight, bias).reshape(3, mean.size)


@jit
def forward(
    x: ndarray, norm_weight: ndarray, norm_bias: ndarray, norm_mean: ndarray, norm_rstd: ndarray, weight: ndarray,
    bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool, groups: int, stride: Pair,
    padding: Pair, dilation: Pair, winograd: bool, packed: ndarray, scratch: ndarray, y: ndarray, sums: ndarray,
) -> None:  # fmt: skip
    none = scratch[:0]
    norms = Norms(_before(norm_weight, norm_bias, norm_mean, norm_rstd), none, none, False, none, sums)
    fast.forward(F4X4_3X3, x, weight, bias, scale, shift, shortcut, relu, padding, dilation, packed, scratch, y, norms)


@jit
def backward_input(
    dy: ndarray, weight: ndarray, shortcut: ndarray, norm_x: ndarray, norm_weight: ndarray, norm_bias: ndarray,
    norm_mean: ndarray, norm_rstd: ndarray, norm_relu: bool, relu_y: ndarray, groups: int, stride: Pair, padding: Pair,
    dilation: Pair, winograd: bool, scratch: ndarray, dx: ndarray, sums: ndarray,
) -> None:  # fmt: skip
    constants = constants_of(norm_mean, norm_rstd * norm_weight, norm_bias)
    norms = Norms(scratch[:0].reshape(0, 1), norm_x.reshape(-1), constants, norm_relu, relu_y, sums)
    fast.backward_input(F4X4_3X3, dy, weight, shortcut, padding, dilation, scratch, dx, norms)


@jit
def backward_weight(
    x: ndarray, norm_weight: ndarray, norm_bias: ndarray, norm_mean: ndarray, norm_rstd: ndarray, dy: ndarray,
    groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool, scratch: ndarray, dweight: ndarray,
) -> None:  # fmt: skip
    before = _before(norm_weight, norm_bias, norm_mean, norm_rstd)
    winograd_gradient.backward_weight(F4X4_3X3, x, dy, padding, dilation, before, scratch, dweight)


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
