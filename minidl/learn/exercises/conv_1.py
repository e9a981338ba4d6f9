"""Conv 1: a convolution along one axis.

About ten minutes.

    y[i] = sum over u of  x[i * stride + u - padding] * weight[u],    where x is 0 outside

This is the definition of a convolution, with one axis and one channel instead of two axes and many channels. Fill the
hole: compute y for i = 0, 1, ... as long as the window lies within x and its padding.

Read: the first lines of kernels/conv/README.md.
Hint: with its padding, x has size + 2 * padding numbers. How many windows of weight.size numbers fit, `stride` apart?
"""

from numpy import ndarray


def forward(x: ndarray, weight: ndarray, stride: int, padding: int) -> ndarray:
    """Return y; x (size,), weight (taps,)."""
    raise NotImplementedError  # HOLE
