"""Which way a convolution is computed: the one place that decides between the direct kernel and Winograd's forms."""

from __future__ import annotations

from minidl.jit import jit

from .reference import Pair

DIRECT, F4X4_3X3, F2X2_3X3, F2X2_5X5 = 0, 1, 2, 3  # F(m x m, r x r): m x m outputs at once of an r x r kernel


@jit
def _possible(kernel: Pair, stride: Pair, dilation: Pair, groups: int) -> bool:
    square = kernel[0] == kernel[1] and (kernel[0] == 3 or kernel[0] == 5)
    return square and stride == (1, 1) and dilation == (1, 1) and groups == 1


@jit
def winograd_form(
    out: Pair, kernel: Pair, channels: int, outputs: int, stride: Pair, dilation: Pair, groups: int
) -> int:
    """The form for y (out, outputs) from x (channels); for dx: out is x's size, channels and outputs swapped."""
    if not _possible(kernel, stride, dilation, groups) or channels < 16 or outputs < 16 or min(out) < 4:
        return DIRECT
    return F4X4_3X3 if kernel[0] == 3 else F2X2_5X5


@jit
def weight_form(out: Pair, kernel: Pair, channels: int, outputs: int, stride: Pair, dilation: Pair, groups: int) -> int:
    """The form for dweight from x (channels) and dy (out, outputs)."""
    return winograd_form(out, kernel, channels, outputs, stride, dilation, groups)
