from __future__ import annotations

import numpy as np

from kernel_cases import Arguments, Arrays, Cases
from minidl.ops.conv import output_length


def cases(a: Arrays) -> Cases:
    for image, kernel, outputs, groups, stride, padding, dilation in (
        ((1, 1, 1, 1), (1, 1), 1, 1, (1, 1), (0, 0), (1, 1)),
        ((7, 7, 9, 2), (3, 2), 5, 1, (2, 1), (1, 1), (1, 1)),
        ((2, 8, 7, 3), (3, 3), 2, 1, (1, 2), (0, 2), (2, 1)),
        ((2, 5, 6, 4), (3, 1), 6, 2, (1, 2), (1, 0), (1, 1)),
        ((2, 5, 5, 3), (3, 3), 3, 3, (1, 1), (2, 2), (2, 2)),  # depthwise
        ((2, 4, 3, 4), (2, 1), 12, 2, (1, 1), (0, 0), (1, 1)),  # 6 outputs in each group
        ((2, 5, 11, 6), (3, 5), 10, 2, (1, 1), (1, 2), (1, 1)),  # 5: bundles of pixels
        ((2, 6, 9, 10), (4, 4), 18, 2, (2, 2), (1, 1), (1, 1)),  # bundles in dx
    ):
        out = tuple(output_length(image[1 + i], kernel[i], stride[i], padding[i], dilation[i]) for i in (0, 1))
        x, y = a.normal(*image), a.normal(image[0], *out, outputs)
        weight = a.normal(*kernel, image[3] // groups, outputs)
        for winograd in (False, True):
            options: Arguments = dict(
                groups=groups, stride=stride, padding=padding, dilation=dilation, winograd=winograd
            )
            geometry = x.shape, weight.shape, *options.values()
            scratch = dict(scratch=a.empty(a.scratch_size("conv", "forward_scratch", *geometry)))
            for bias, scaled, adds, relu in ((0, 0, 0, False), (1, 0, 0, True), (0, 1, 1, False), (1, 1, 1, True)):
                epilogue = dict(
                    bias=a.normal(outputs * bias), scale=a.positive(outputs * scaled),
                    shift=a.normal(outputs * scaled), shortcut=a.normal(y.size * adds),
                )
                arguments = dict(x=x, weight=weight, **epilogue, relu=relu, **options, **scratch)
                for keeps in (0, 1):
                    packed = np.zeros(a.scratch_size("conv", "packed_size", *geometry) * keeps, a.dtype)
                    yield "forward", dict(**arguments, packed=packed, y=a.empty(*y.shape))
            scratch = dict(scratch=a.empty(a.scratch_size("conv", "backward_input_scratch", *geometry)))
            for adds in (0, 1):
                arguments = dict(dy=y, weight=weight, shortcut=a.normal(x.size * adds), **options, **scratch)
                yield "backward_input", dict(**arguments, dx=a.empty(*x.shape))
            scratch = dict(scratch=a.empty(a.scratch_size("conv", "backward_weight_scratch", *geometry)))
            yield "backward_weight", dict(x=x, dy=y, **options, **scratch, dweight=a.empty(*weight.shape))
