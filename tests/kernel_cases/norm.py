from __future__ import annotations

from kernel_cases import Arrays, Cases


def cases(a: Arrays) -> Cases:
    for rows, channels in ((1, 7), (7, 1), (33, 65), (1001, 3)):
        shape = rows, channels
        x = a.normal(*shape) + a.constant(10)
        weight, bias, running_mean = a.normal(channels), a.normal(channels), a.normal(channels)
        eps, running_var = 1e-5, a.positive(channels)
        yield "batch_norm", dict(
            x=x, weight=weight, bias=bias, eps=eps, momentum=0.1, running_mean=running_mean,
            running_var=running_var, mean=a.empty(channels), rstd=a.empty(channels), y=a.empty(*shape),
        )  # fmt: skip
        yield "batch_norm_eval", dict(
            x=x, weight=weight, bias=bias, eps=eps, running_mean=running_mean, running_var=running_var,
            y=a.empty(*shape),
        )  # fmt: skip
        yield "layer_norm", dict(
            x=x, weight=weight, bias=bias, eps=eps, mean=a.empty(rows), rstd=a.empty(rows), y=a.empty(*shape)
        )
        gradients = dict(dx=a.empty(*shape), dweight=a.empty(channels), dbias=a.empty(channels))
        for name, count in (("batch_norm_backward", channels), ("layer_norm_backward", rows)):
            yield name, dict(
                dy=a.normal(*shape), x=x, weight=weight, mean=a.normal(count) + a.constant(10),
                rstd=a.positive(count), **gradients,
            )  # fmt: skip
        yield "batch_norm_eval_backward", dict(
            dy=a.normal(*shape), x=x, weight=weight, eps=eps, running_mean=running_mean,
            running_var=running_var, **gradients,
        )  # fmt: skip
