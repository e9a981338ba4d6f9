from __future__ import annotations

import numpy as np

from kernel_cases import Arguments, Arrays, Cases


def cases(a: Arrays) -> Cases:
    for image, outputs, side, groups in (
        ((2, 8, 8, 16), 32, 3, 1),
        ((8, 4, 4, 32), 16, 3, 1),
        ((1, 4, 32, 16), 16, 3, 1),
        ((3, 8, 8, 16), 16, 3, 1),  # two blocks of 96 rows
        ((2, 17, 15, 24), 24, 3, 24),  # depthwise
        ((2, 9, 7, 5), 6, 3, 1),  # direct
        ((3, 17, 13, 40), 33, 1, 1),  # a product
    ):
        channels, rows = image[3], image[0] * image[1] * image[2]
        x, y = a.normal(*image), a.normal(*image[:3], outputs)
        weight, blocks = a.normal(side, side, channels // groups, outputs), -(-rows // 128)
        padding = side // 2, side // 2
        options: Arguments = dict(groups=groups, stride=(1, 1), padding=padding, dilation=(1, 1), winograd=True)
        geometry = x.shape, weight.shape, *options.values()
        can = groups > 1 or (side == 3 and channels % 16 == 0)  # normalise, as `normalizes` in cpu.py says
        for normalizes, adds_up, more in ((0, 1, 0), (can, 0, 1), (can, 1, 1)):
            before = norm(a, channels * normalizes)
            size = a.scratch_size("conv_norm", "forward_scratch", *geometry)
            end = dict(bias=a.normal(outputs * more), scale=a.normal(0), shift=a.normal(0),
                       shortcut=a.normal(y.size * more), relu=False, packed=a.normal(0))  # fmt: skip
            yield "forward", dict(
                x=x, **before, weight=weight, **end, **options, scratch=a.empty(size), y=a.empty(*y.shape),
                sums=np.full((blocks * adds_up, 2, outputs), 7.0),
            )  # fmt: skip
        scratch = dict(scratch=a.empty(a.scratch_size("conv_norm", "backward_input_scratch", *geometry)))
        for norm_relu, after in ((False, 0), (True, 0), (False, 1)):
            yield "backward_input", dict(
                dy=y, weight=weight, shortcut=a.normal(x.size * after), norm_x=x, **norm(a, channels),
                norm_relu=norm_relu, relu_y=np.maximum(a.normal(x.size * after), 0), **options, **scratch,
                dx=a.empty(*x.shape), sums=np.full((blocks, 2, channels), 7.0),
            )  # fmt: skip
        if not can:
            continue
        size = a.scratch_size("conv_norm", "backward_weight_scratch", *geometry)
        yield "backward_weight", dict(
            x=x, **norm(a, channels), dy=y, **options, scratch=a.empty(size), dweight=a.empty(*weight.shape)
        )
    for rows, blocks in ((131, 2), (256, 2), (17, 1)):
        shape = rows, 16
        x, dy = a.normal(*shape) + a.constant(10), a.normal(*shape)
        weight, bias, mean, rstd = a.normal(16), a.normal(16), a.normal(16) + a.constant(10), a.positive(16)
        each = -(-rows // blocks)
        parts = [slice(k * each, (k + 1) * each) for k in range(blocks)]
        x64, dy64 = x.astype(np.float64), dy.astype(np.float64)
        moments = np.array([[x64[p].sum(0), ((x64[p] - x64[p].mean(0)) ** 2).sum(0)] for p in parts])
        running = dict(running_mean=a.normal(16), running_var=a.positive(16))
        for relu, stored in ((False, 1), (True, 1), (True, 0)):
            yield "batch_norm", dict(
                x=x, weight=weight, bias=bias, eps=1e-5, momentum=0.1, shortcut=a.normal(rows * stored * relu, 16),
                relu=relu, sums=moments, **running, mean=a.empty(16), rstd=a.empty(16), y=a.empty(rows * stored, 16),
            )  # fmt: skip
            passed = np.where((x64 - mean) * (rstd * weight) + bias > 0, dy64, 0) if relu else dy64
            sums = np.array([[passed[p].sum(0), (passed[p] * (x64[p] - mean)).sum(0)] for p in parts])
            yield "batch_norm_backward", dict(
                dy=dy, x=x, weight=weight, bias=bias, mean=mean, rstd=rstd, relu=relu, sums=sums, dx=a.empty(*shape),
                dweight=a.empty(16), dbias=a.empty(16),
            )  # fmt: skip


def norm(a: Arrays, channels: int) -> Arguments:
    return dict(norm_weight=a.normal(channels), norm_bias=a.normal(channels), norm_mean=a.normal(channels),
                norm_rstd=a.positive(channels))  # fmt: skip
