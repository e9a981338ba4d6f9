"""Convolution, compiled: which kernel computes it. The lesson is README.md, the kernels are in

    direct.py       the sum as it stands, for any geometry
    winograd.py     fewer multiplications, for some (choice.py says for which)
"""

from __future__ import annotations

from numpy import ndarray

from minidl.jit import jit

from . import direct
from .reference import Pair, Shape
from .reference import __all__ as __all__


def forward_scratch(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> int:
    """x_shape (N, H, W, C), w_shape (kh, kw, C/groups, O)"""
    return direct.forward_scratch(x_shape, w_shape, groups, stride, padding, dilation)


def backward_input_scratch(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> int:
    return direct.backward_input_scratch(x_shape, w_shape, groups, stride, padding, dilation)


def backward_weight_scratch(
    x_shape: Shape, w_shape: Shape, groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool
) -> int:
    return direct.backward_weight_scratch(x_shape, w_shape, groups, stride, padding, dilation)


@jit
def forward(
    x: ndarray, weight: ndarray, bias: ndarray, scale: ndarray, shift: ndarray, relu: bool,
    groups: int, stride: Pair, padding: Pair, dilation: Pair, winograd: bool, scratch: ndarray, y: ndarray,
) -> None:  # fmt: skip
    direct.forward(x, weight, bias, scale, shift, relu, groups, stride, padding, dilation, scratch, y)


@jit
def backward_input(
    dy: ndarray, weight: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    winograd: bool, scratch: ndarray, dx: ndarray,
) -> None:  # fmt: skip
    direct.backward_input(dy, weight, groups, stride, padding, dilation, scratch, dx)


@jit
def backward_weight(
    x: ndarray, dy: ndarray, groups: int, stride: Pair, padding: Pair, dilation: Pair,
    winograd: bool, scratch: ndarray, dweight: ndarray,
) -> None:  # fmt: skip
    direct.backward_weight(x, dy, groups, stride, padding, dilation, scratch, dweight)
