"""Conv 2: im2col, a convolution as a matrix product: a solution."""

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
            for u in range(kh):
                for v in range(kw):
                    h, w = i * stride + u - padding, j * stride + v - padding
                    if 0 <= h < height and 0 <= w < width:
                        patch[u, v] = x[h, w]
            out[i, j] = patch.reshape(-1)
    return out.reshape(rows * columns, -1)
