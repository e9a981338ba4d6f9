from __future__ import annotations

from kernel_cases import Arguments, Arrays, Cases


def cases(a: Arrays) -> Cases:
    for image, kernel, outputs, groups, stride, padding, dilation, out in (
        ((1, 1, 1, 1), (1, 1), 1, 1, (1, 1), (0, 0), (1, 1), (1, 1)),
        ((7, 7, 9, 2), (3, 2), 5, 1, (2, 1), (1, 1), (1, 1), (4, 10)),
        ((2, 8, 7, 3), (3, 3), 2, 1, (1, 2), (0, 2), (2, 1), (4, 5)),
        ((2, 5, 6, 4), (3, 1), 6, 2, (1, 2), (1, 0), (1, 1), (5, 3)),
        ((2, 5, 5, 3), (3, 3), 3, 3, (1, 1), (2, 2), (2, 2), (5, 5)),  # depthwise
    ):
        x, y = a.normal(*image), a.normal(image[0], *out, outputs)
        weight = a.normal(*kernel, image[3] // groups, outputs)
        window: Arguments = dict(stride=stride, padding=padding, dilation=dilation)
        if groups == 1:
            patch = kernel[0] * kernel[1] * image[3]
            # two tasks, that take one image at a time, or two: of 7 images one is left over
            window["columns"] = a.empty(2, 1 + image[0] % 2, out[0] * out[1], patch)
            name, partial = "", dict(partial=a.empty(2, 2, patch, outputs))
        else:
            window["groups"] = groups
            name, partial = "grouped_", {}
        yield name + "forward", dict(x=x, weight=weight, **window, y=a.empty(*y.shape))
        yield name + "backward_input", dict(dy=y, weight=weight, **window, dx=a.empty(*x.shape))
        yield name + "backward_weight", dict(x=x, dy=y, **window, **partial, dweight=a.empty(*weight.shape))
