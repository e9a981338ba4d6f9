"""Winograd's convolution. (Interface; the kernels follow.)

form: an int from choice.py, never DIRECT. Images (N, H, W, C), weight (r, r, C, O), stride and dilation 1, one group.
"""

from __future__ import annotations

from numpy import ndarray

from minidl.jit import jit

from .reference import Pair

Shape = tuple[int, int, int, int]


def forward_scratch(form: int, x_shape: Shape, w_shape: Shape, padding: Pair) -> int:
    """How many numbers `forward` wants as scratch. It depends on the number of threads; the bits of y do not."""
    raise NotImplementedError


def backward_input_scratch(form: int, x_shape: Shape, w_shape: Shape, padding: Pair) -> int:
    raise NotImplementedError


def backward_weight_scratch(form: int, x_shape: Shape, w_shape: Shape, padding: Pair) -> int:
    raise NotImplementedError


@jit
def forward(
    form: int, x: ndarray, weight: ndarray, bias: ndarray, scale: ndarray, shift: ndarray, relu: bool, padding: Pair,
    scratch: ndarray, y: ndarray,
) -> None:  # fmt: skip
    """y (N, Ho, Wo, O) = conv(x, weight) [+ bias] [* scale + shift] [relu]; bias, scale, shift (O,) or size 0"""


@jit
def backward_input(form: int, dy: ndarray, weight: ndarray, padding: Pair, scratch: ndarray, dx: ndarray) -> None:
    """dx (N, H, W, C) from dy (N, Ho, Wo, O)"""


@jit
def backward_weight(form: int, x: ndarray, dy: ndarray, padding: Pair, scratch: ndarray, dweight: ndarray) -> None:
    """dweight (r, r, C, O)"""
