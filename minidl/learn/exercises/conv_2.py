"""Conv 2: im2col, a convolution as a matrix product.

The patch of an output pixel is all that its window reads: kh x kw pixels with C channels each. im2col writes the patch
of each pixel into a row of a matrix. Then the convolution is columns @ weight, with weight (kh * kw * C, O). Fill the
hole: write the patch of output pixel (i, j), which begins at row i * stride - padding and column j * stride - padding
of the image. Pixels outside the image are 0. `patch` is 0 at first.

Read: step 3 of the ladder in kernels/conv/README.md.
Hint: patch[u, v] is a pixel: C numbers. The line after the hole puts it into memory in the order (u, v, c).
"""

import numpy as np
from numpy import ndarray


def im2col(x: ndarray, kh: int, kw: int, stride: int, padding: int) -> ndarray:
    """Return columns (Ho * Wo, kh * kw * C) of an image x (H, W, C)."""
    height, width, channels = x.shape
    rows, columns = (height + 2 * padding - kh) // stride + 1, (width + 2 * padding - kw) // stride + 1
    out = np.empty((rows, columns, kh * kw * channels))
    for i in range(rows):
        for j in range(columns):
            patch = np.zeros((kh, kw, channels))
            raise NotImplementedError  # HOLE: fill patch[u, v] for all u and v
            out[i, j] = patch.reshape(-1)
    return out.reshape(rows * columns, -1)
