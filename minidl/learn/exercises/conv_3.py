"""Conv 3: the gradient of the images.

In y[i] = sum over u of x[i * stride + u - padding] * weight[u], each product adds dy[i] * weight[u] to the gradient of
the x that it reads. A fast kernel does not scatter these: it gathers, so that each pixel is written once. Pixel p of dx
is the sum of dy[i] * weight[u] over all i and u with p = i * stride + u - padding. Fill the hole: find all such pairs
for pixel p. With a stride of 2, an even p uses other taps than an odd one.

Read: "The gradients" in kernels/conv/README.md.
Hint: go through u. For which p + padding - u is there an i, and when is this i an output?
"""

import numpy as np
from numpy import ndarray


def backward(dy: ndarray, weight: ndarray, size: int, stride: int, padding: int) -> ndarray:
    """Return dx (size,), the gradient of x; dy (outputs,), weight (taps,)."""
    dx = np.zeros(size)
    for p in range(size):
        raise NotImplementedError  # HOLE: write dx[p]
    return dx
