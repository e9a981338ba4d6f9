from __future__ import annotations

import numpy as np

from kernel_cases import Arrays, Cases


def cases(a: Arrays) -> Cases:
    for image, kernel, stride, padding in (
        ((1, 1, 1, 1), (1, 1), (1, 1), (0, 0)),
        ((2, 8, 8, 33), (2, 2), (2, 2), (0, 0)),
        ((3, 7, 9, 5), (3, 2), (2, 1), (1, 1)),  # windows overlap and stick out
        ((5, 7, 7, 3), (2, 3), (3, 4), (0, 0)),  # pixels between windows and at the end are left out
        ((2, 5, 7, 17), (5, 7), (1, 1), (0, 0)),
    ):
        n, *pixels, channels = image
        out_pixels = [(p + 2 * d - k) // s + 1 for p, k, s, d in zip(pixels, kernel, stride, padding, strict=True)]
        out = n, *out_pixels, channels
        window = dict(kernel=kernel, stride=stride, padding=padding)
        argmax = a.integers(pixels[0] * pixels[1], *out).astype(np.int32)
        ties = a.integers(3, *image).astype(a.dtype)
        for x in (a.normal(*image), ties):
            yield "max_pool", dict(x=x, **window, y=a.empty(*out), argmax=np.full(out, -1, np.int32))
        yield "max_pool_backward", dict(dy=a.normal(*out), argmax=argmax, dx=a.empty(*image))
        yield "average_pool", dict(x=a.normal(*image), **window, y=a.empty(*out))
        yield "average_pool_backward", dict(dy=a.normal(*out), **window, dx=a.empty(*image))
