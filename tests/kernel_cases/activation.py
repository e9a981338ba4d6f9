from __future__ import annotations

import numpy as np

from kernel_cases import Arrays, Cases


def cases(a: Arrays) -> Cases:
    for n in (1, 7, 33, a.many):
        for name in ("relu", "gelu", "silu", "tanh", "sigmoid"):
            yield name, dict(x=5 * a.normal(n), y=a.empty(n))
        for name in ("relu_backward", "tanh_backward", "sigmoid_backward"):
            yield name, dict(dy=a.normal(n), y=a.normal(n), dx=a.empty(n))
        for name in ("gelu_backward", "silu_backward"):
            yield name, dict(dy=a.normal(n), x=5 * a.normal(n), dx=a.empty(n))
        yield "leaky_relu", dict(x=a.normal(n), slope=0.01, y=a.empty(n))
        yield "leaky_relu_backward", dict(dy=a.normal(n), x=a.normal(n), slope=0.01, dx=a.empty(n))
    yield "relu_backward", dict(dy=a.normal(0), y=a.normal(0), dx=a.empty(0))
    edges = np.array([0, -0.0, 1e4, -1e4], a.dtype)  # exp(1e4) is infinite
    yield "sigmoid", dict(x=edges, y=a.empty(4))
    yield "silu_backward", dict(dy=a.normal(4), x=edges, dx=a.empty(4))
    yield "relu_backward", dict(dy=a.normal(4), y=edges, dx=a.empty(4))
