from __future__ import annotations

import numpy as np

from kernel_cases import Arrays, Cases


def cases(a: Arrays) -> Cases:
    for image, kernel, stride, padding in (
        ((1, 1, 1, 1), (1, 1), (1, 1), (0, 0)),
        ((2, 8, 8, 33), (2, 2), (2, 2), (0, 0)),
        ((2, 9, 7, 3), (2, 2), (2, 2), (0, 0)),  # no window contains the last row and column
        ((2, 8, 7, 3), (3, 2), (3, 2), (0, 0)),
        ((3, 6, 6, 1), (2, 2), (2, 2), (1, 1)),
        ((2, 5, 8, 8), (2, 2), (2, 2), (0, 0)),
        ((1, 5, 6, 12), (3, 3), (2, 2), (1, 1)),
        ((3, 7, 9, 5), (3, 2), (2, 1), (1, 1)),  # windows overlap and extend beyond the image
        ((3, 9, 9, 17), (3, 3), (2, 2), (1, 1)),
        ((5, 7, 7, 3), (2, 3), (3, 4), (0, 0)),  # no window contains the pixels between windows and at the end
        ((2, 5, 7, 17), (5, 7), (1, 1), (0, 0)),
        ((1, 17, 18, 3), (17, 16), (1, 1), (1, 0)),  # a window of 272 pixels: a position needs more than one byte
        ((1, 17, 16, 18), (17, 16), (17, 16), (0, 0)),
    ):
        n, *pixels, channels = image
        out_pixels = [(p + 2 * d - k) // s + 1 for p, k, s, d in zip(pixels, kernel, stride, padding, strict=True)]
        out = n, *out_pixels, channels
        window = dict(kernel=kernel, stride=stride, padding=padding)
        place = np.full(out, 77, np.uint8 if kernel[0] * kernel[1] <= 256 else np.int32)
        winner = _places(a, place, pixels, **window)
        ties = a.integers(3, *image).astype(a.dtype)
        ties.reshape(-1)[5::7] = np.nan
        for x in (a.normal(*image), ties):
            yield "max_pool", dict(x=x, **window, y=a.empty(*out), place=place)
        yield "max_pool_backward", dict(dy=a.normal(*out), place=winner, **window, dx=a.empty(*image))
        yield "average_pool", dict(x=a.normal(*image), **window, y=a.empty(*out))
        yield "average_pool_backward", dict(dy=a.normal(*out), **window, dx=a.empty(*image))


def _places(
    a: Arrays, like: np.ndarray, pixels: list[int], kernel: tuple[int, int], stride: tuple[int, int],
    padding: tuple[int, int],
) -> np.ndarray:  # fmt: skip
    """Return a random position in each window, inside the image."""
    places = np.empty_like(like)
    for index in np.ndindex(*like.shape):
        inside = []
        for axis in (0, 1):
            start = index[1 + axis] * stride[axis] - padding[axis]
            inside.append([k for k in range(kernel[axis]) if 0 <= start + k < pixels[axis]])
        kh, kw = (axis[a.random.integers(len(axis))] for axis in inside)
        places[index] = kh * kernel[1] + kw
    return places
