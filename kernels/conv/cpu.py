"""Compiled convolution: which kernel computes a call. README.md and WINOGRAD.md explain the algorithms:

    winograd    winograd.py, winograd_gradient.py      fewer multiplications, for some geometries (choice.py: which)
    large       winograd_large.py                      the same for layers with many weights and few pixels
    product     pointwise.py                           matrix products, for kernels of 1 x 1
    narrow      depthwise.py, depthwise_gradient.py    groups of few channels
    direct      direct.py, weight_gradient.py          the sum of the definition, for any geometry

Each algorithm has separate kernels, so a step compiles only those that its layers use. `forward`, `backward_input` and
`backward_weight` choose one by the shapes of their arguments.
"""

from __future__ import annotations

from typing import Any

from numpy import ndarray

from minidl.engine.jit import choice, jit, threads
from minidl.kernels.matmul import cpu as matmul

from . import (
    depthwise,
    depthwise_gradient,
    direct,
    pointwise,
    rectangles,
    weight_gradient,
    winograd_gradient,
    winograd_large,
)
from . import winograd as fast
from .choice import DIRECT, count_of, gradient_form, input_form, tiles_of, winograd_form
from .forms import count_of_pieces, kernel_of, tile_of, uses_blocks
from .norms import no_norms
from .reference import Pair, Shape, output_size
from .reference import __all__ as __all__


def _algorithm(
    form: int, narrow: bool, images: int, out: Pair, channels: int, outputs: int, w_shape: Shape, groups: int,
    stride: Pair, padding: Pair, dilation: Pair,
) -> str:  # fmt: skip
    """Return which algorithm computes a pass.

    form: of Winograd's method, or DIRECT. narrow: whether the kernels for narrow groups can compute it.
    images: their number. out: (height, width) of what is written (dweight: of y). channels, outputs: read and written
    """
    if form != DIRECT:
        tiles = count_of(images, tiles_of(tile_of(form)[0], *out, dilation))
        whole = count_of_pieces(form, kernel_of(form, w_shape[:2], stride)) == 1
        return "large" if whole and uses_blocks(form, channels, outputs, groups, tiles) else "winograd"
    if pointwise.is_product(w_shape, groups, stride, padding):
        return "product"
    return "narrow" if narrow else "direct"


def algorithm_of_y(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> tuple[str, int]:
    """Return the algorithm that computes y, and its form if it is Winograd's."""
    out, (channels, outputs) = output_size(x_shape, w_shape, stride, padding, dilation), (x_shape[3], w_shape[3])
    form = winograd_form(x_shape[0], out, w_shape[:2], channels, outputs, stride, dilation, groups)
    form, narrow = form if winograd else DIRECT, rectangles.is_narrow(w_shape, groups)
    pass_ = x_shape[0], out, channels, outputs
    return _algorithm(form, narrow, *pass_, w_shape, groups, stride, padding, dilation), form


def algorithm_of_dx(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> tuple[str, int]:
    """Return the algorithm that computes dx, and its form if it is Winograd's."""
    images, out, (channels, outputs) = x_shape[0], x_shape[1:3], (w_shape[3], x_shape[3])
    form = input_form(images, out, w_shape[:2], channels, outputs, stride, padding, dilation, groups)
    form, narrow = form if winograd else DIRECT, rectangles.is_narrow(w_shape, groups)
    pass_ = images, out, channels, outputs
    return _algorithm(form, narrow, *pass_, w_shape, groups, stride, padding, dilation), form


def algorithm_of_dweight(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> tuple[str, int]:
    """Return the algorithm that computes dweight, and its form if it is Winograd's."""
    out, (channels, outputs) = output_size(x_shape, w_shape, stride, padding, dilation), (x_shape[3], w_shape[3])
    form = gradient_form(x_shape[0], out, w_shape[:2], channels, outputs, stride, dilation, groups)
    form = form if winograd else DIRECT
    narrow = rectangles.computes_gradient(x_shape[1:3], out, w_shape, groups, stride, padding, dilation)
    pass_ = x_shape[0], out, channels, outputs
    return _algorithm(form, narrow, *pass_, w_shape, groups, stride, padding, dilation), form


def _pixels(x_shape: Shape) -> int:
    return x_shape[0] * x_shape[1] * x_shape[2]


# -- sizes of memory; x_shape (N, H, W, C), w_shape (kh, kw, C / groups, O) --------------------------------------------


def forward_scratch(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> int:
    """Return the number of elements of forward's scratch."""
    algorithm, form = algorithm_of_y(x_shape, w_shape, groups, stride, padding, dilation, winograd)
    match algorithm:
        case "winograd":
            return fast.forward_scratch(form, x_shape, w_shape, stride, padding, dilation)
        case "large":
            return winograd_large.forward_scratch(form, x_shape, w_shape, padding, dilation)
        case "product":
            return matmul.nn_scratch(_pixels(x_shape), w_shape[3], x_shape[3])
        case "narrow":
            return depthwise.scratch_size(w_shape)
    return int(direct.scratch_size(threads(), x_shape, w_shape, False, groups, stride, padding, dilation))


def packed_size(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> int:
    """Return the number of elements of forward's `packed`."""
    algorithm, form = algorithm_of_y(x_shape, w_shape, groups, stride, padding, dilation, winograd)
    match algorithm:
        case "winograd":
            return fast.packed_size(form, x_shape, w_shape, stride, padding, dilation)
        case "product":
            return matmul.packed_size(_pixels(x_shape), w_shape[3], x_shape[3])
        case "narrow" | "large":
            return 0
    return int(direct.packed_size(w_shape, groups, stride, padding, dilation))


def backward_input_scratch(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> int:
    """Return the number of elements of backward_input's scratch."""
    algorithm, form = algorithm_of_dx(x_shape, w_shape, groups, stride, padding, dilation, winograd)
    match algorithm:
        case "winograd":
            return fast.backward_input_scratch(form, x_shape, w_shape, stride, dilation)
        case "large":
            return winograd_large.backward_input_scratch(form, x_shape, w_shape, dilation)
        case "product":
            return matmul.nt_scratch(_pixels(x_shape), x_shape[3], w_shape[3])
        case "narrow":
            return depthwise.scratch_size(w_shape)
    return int(direct.scratch_size(threads(), x_shape, w_shape, True, groups, stride, padding, dilation))


def backward_weight_scratch(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> int:
    """Return the number of elements of backward_weight's scratch."""
    out = output_size(x_shape, w_shape, stride, padding, dilation)
    algorithm, form = algorithm_of_dweight(x_shape, w_shape, groups, stride, padding, dilation, winograd)
    match algorithm:
        case "winograd":
            return winograd_gradient.backward_weight_scratch(form, x_shape, w_shape, stride, padding, dilation)
        case "large":
            return winograd_large.backward_weight_scratch(form, x_shape, w_shape, padding, dilation)
        case "product":
            return matmul.tn_scratch(x_shape[3], w_shape[3], _pixels(x_shape))
        case "narrow":
            return depthwise_gradient.scratch_size(x_shape, out, w_shape)
    return int(weight_gradient.scratch_size(threads(), out, x_shape, w_shape, groups, stride, padding, dilation))


# -- y ----------------------------------------------------------------------------------------------------------------


@jit
def winograd_forward(
    x: ndarray, weight: ndarray, bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool,
    groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool, packed: ndarray, scratch: ndarray,
    y: ndarray,
) -> None:  # fmt: skip
    form = winograd_form(y.shape[0], y.shape[1:3], weight.shape[:2], x.shape[3], y.shape[3], stride, dilation, groups)
    fast.forward(form, x, weight, bias, scale, shift, shortcut, relu, stride, padding, dilation, packed, scratch, y,
                 no_norms(scratch))  # fmt: skip


@jit
def large_forward(
    x: ndarray, weight: ndarray, bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool,
    groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool, packed: ndarray, scratch: ndarray,
    y: ndarray,
) -> None:  # fmt: skip
    form = winograd_form(y.shape[0], y.shape[1:3], weight.shape[:2], x.shape[3], y.shape[3], stride, dilation, groups)
    winograd_large.forward(form, x, weight, bias, scale, shift, shortcut, relu, padding, dilation, scratch, y)


@jit
def product_forward(
    x: ndarray, weight: ndarray, bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool,
    groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool, packed: ndarray, scratch: ndarray,
    y: ndarray,
) -> None:  # fmt: skip
    pointwise.forward(x, weight, bias, scale, shift, shortcut, relu, packed, scratch, y)


@jit
def narrow_forward(
    x: ndarray, weight: ndarray, bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool,
    groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool, packed: ndarray, scratch: ndarray,
    y: ndarray,
) -> None:  # fmt: skip
    depthwise.convolve(x, weight, False, bias, scale, shift, shortcut, relu, groups, stride, padding, dilation,
                       scratch, y, no_norms(scratch))  # fmt: skip


@jit
def direct_forward(
    x: ndarray, weight: ndarray, bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool,
    groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool, packed: ndarray, scratch: ndarray,
    y: ndarray,
) -> None:  # fmt: skip
    direct.convolve(x, weight, False, bias, scale, shift, shortcut, relu, groups, stride, padding, dilation,
                    packed, scratch, y, no_norms(scratch))  # fmt: skip


@choice
def forward(
    x: ndarray, weight: ndarray, bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool,
    groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool, packed: ndarray, scratch: ndarray,
    y: ndarray,
) -> Any:  # fmt: skip
    algorithm, _ = algorithm_of_y(x.shape, weight.shape, groups, stride, padding, dilation, winograd)
    kernels = {
        "winograd": winograd_forward, "large": large_forward, "product": product_forward,
        "narrow": narrow_forward, "direct": direct_forward,
    }  # fmt: skip
    return kernels[algorithm]


# -- dx ---------------------------------------------------------------------------------------------------------------


@jit
def winograd_backward_input(
    dy: ndarray, weight: ndarray, shortcut: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    winograd: bool, scratch: ndarray, dx: ndarray,
) -> None:  # fmt: skip
    shape, kernel = dx.shape, weight.shape[:2]
    form = input_form(shape[0], shape[1:3], kernel, dy.shape[3], shape[3], stride, padding, dilation, groups)
    fast.backward_input(form, dy, weight, shortcut, stride, padding, dilation, scratch, dx, no_norms(scratch))


@jit
def large_backward_input(
    dy: ndarray, weight: ndarray, shortcut: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    winograd: bool, scratch: ndarray, dx: ndarray,
) -> None:  # fmt: skip
    shape, kernel = dx.shape, weight.shape[:2]
    form = input_form(shape[0], shape[1:3], kernel, dy.shape[3], shape[3], stride, padding, dilation, groups)
    winograd_large.backward_input(form, dy, weight, shortcut, padding, dilation, scratch, dx)


@jit
def product_backward_input(
    dy: ndarray, weight: ndarray, shortcut: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    winograd: bool, scratch: ndarray, dx: ndarray,
) -> None:  # fmt: skip
    pointwise.backward_input(dy, weight, shortcut, scratch, dx)


@jit
def narrow_backward_input(
    dy: ndarray, weight: ndarray, shortcut: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    winograd: bool, scratch: ndarray, dx: ndarray,
) -> None:  # fmt: skip
    none = scratch[:0]
    depthwise.convolve(dy, weight, True, none, none, none, shortcut, False, groups, stride, padding, dilation,
                       scratch, dx, no_norms(scratch))  # fmt: skip


@jit
def direct_backward_input(
    dy: ndarray, weight: ndarray, shortcut: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    winograd: bool, scratch: ndarray, dx: ndarray,
) -> None:  # fmt: skip
    none = scratch[:0]
    direct.convolve(dy, weight, True, none, none, none, shortcut, False, groups, stride, padding, dilation,
                    none, scratch, dx, no_norms(scratch))  # fmt: skip


@choice
def backward_input(
    dy: ndarray, weight: ndarray, shortcut: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    winograd: bool, scratch: ndarray, dx: ndarray,
) -> Any:  # fmt: skip
    algorithm, _ = algorithm_of_dx(dx.shape, weight.shape, groups, stride, padding, dilation, winograd)
    kernels = {
        "winograd": winograd_backward_input, "large": large_backward_input, "product": product_backward_input,
        "narrow": narrow_backward_input, "direct": direct_backward_input,
    }  # fmt: skip
    return kernels[algorithm]


# -- dweight ----------------------------------------------------------------------------------------------------------


@jit
def winograd_backward_weight(
    x: ndarray, dy: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    winograd: bool, scratch: ndarray, dweight: ndarray,
) -> None:  # fmt: skip
    shape, kernel, none = dy.shape, dweight.shape[:2], scratch[:0].reshape(3, 0)
    form = gradient_form(shape[0], shape[1:3], kernel, x.shape[3], shape[3], stride, dilation, groups)
    winograd_gradient.backward_weight(form, x, dy, stride, padding, dilation, none, scratch, dweight)


@jit
def large_backward_weight(
    x: ndarray, dy: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    winograd: bool, scratch: ndarray, dweight: ndarray,
) -> None:  # fmt: skip
    shape, kernel = dy.shape, dweight.shape[:2]
    form = gradient_form(shape[0], shape[1:3], kernel, x.shape[3], shape[3], stride, dilation, groups)
    winograd_large.backward_weight(form, x, dy, padding, dilation, scratch, dweight)


@jit
def product_backward_weight(
    x: ndarray, dy: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    winograd: bool, scratch: ndarray, dweight: ndarray,
) -> None:  # fmt: skip
    pointwise.backward_weight(x, dy, scratch, dweight)


@jit
def narrow_backward_weight(
    x: ndarray, dy: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    winograd: bool, scratch: ndarray, dweight: ndarray,
) -> None:  # fmt: skip
    none = scratch[:0].reshape(3, 0)
    depthwise_gradient.backward_weight(x, dy, groups, stride, padding, dilation, none, scratch, dweight)


@jit
def direct_backward_weight(
    x: ndarray, dy: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    winograd: bool, scratch: ndarray, dweight: ndarray,
) -> None:  # fmt: skip
    weight_gradient.backward_weight(x, dy, groups, stride, padding, dilation, scratch, dweight)


@choice
def backward_weight(
    x: ndarray, dy: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    winograd: bool, scratch: ndarray, dweight: ndarray,
) -> Any:  # fmt: skip
    algorithm, _ = algorithm_of_dweight(x.shape, dweight.shape, groups, stride, padding, dilation, winograd)
    kernels = {
        "winograd": winograd_backward_weight, "large": large_backward_weight, "product": product_backward_weight,
        "narrow": narrow_backward_weight, "direct": direct_backward_weight,
    }  # fmt: skip
    return kernels[algorithm]
