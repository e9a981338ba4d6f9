import numpy as np

from kernel_cases import Arrays, Cases


def cases(a: Arrays) -> Cases:
    shapes = (
        (1, 1, 1, 1, 1), (3, 7, 5, 1, 1), (5, 9, 6, 3, 2), (2, 33, 65, 5, 3), (7, 1, 12, 12, 4), (4, 300, 16, 2, 3),
        (2, 9, 300, 25, 2), (2, 50, 64, 16, 1), (1, 140, 20, 1, 1),
    )  # fmt: skip
    for images, pixels, channels, groups, blocks in shapes:
        shape, statistics = (images, pixels, channels), (images, groups)
        x = a.normal(*shape) + a.normal(channels) + a.constant(10)
        weight, bias = a.normal(channels), a.normal(channels)
        for relu in (False, True):
            shortcut = a.normal(*(shape if relu == pixels % 2 else (0, pixels, channels)))
            yield "group_norm", dict(
                x=x, weight=weight, bias=bias, eps=1e-5, shortcut=shortcut, relu=relu,
                mean=a.empty(*statistics), rstd=a.empty(*statistics), y=a.empty(*shape),
            )  # fmt: skip
            yield "group_norm_backward", dict(
                dy=a.normal(*shape), x=x, weight=weight, bias=bias, mean=a.normal(*statistics) + a.constant(10),
                rstd=a.positive(*statistics), relu=relu, partial=np.full((blocks, 2, channels), 7.0),
                dx=a.empty(*shape), dweight=a.empty(channels), dbias=a.empty(channels),
            )  # fmt: skip
