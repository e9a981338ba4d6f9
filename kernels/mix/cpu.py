"""Arithmetic on whole models, each operation in one pass over memory. `mix` moves 12 bytes per float32 element."""

from __future__ import annotations

from minidl.engine.jit import Part

from ..elementwise.stream import chunked, get, put
from .reference import __all__ as __all__


@chunked
def mix(theta: Part, other: Part, weight: float) -> None:
    factor = theta.dtype.type(weight)
    for i in range(theta.size):
        theta[i] += factor * (other[i] - theta[i])


@chunked
def axpy(factor: float, x: Part, y: Part) -> None:
    factor = y.dtype.type(factor)
    for i in range(y.size):
        put(y, i, get(y, i) + factor * get(x, i), False)


@chunked
def pull(x: Part, center: Part, weight: float, out: Part) -> None:
    factor = out.dtype.type(weight)
    for i in range(out.size):
        put(out, i, factor * (get(x, i) - get(center, i)), False)


@chunked
def elastic(x: Part, center: Part, weight: float) -> None:
    factor = x.dtype.type(weight)
    for i in range(x.size):
        here, there = get(x, i), get(center, i)
        d = factor * (here - there)
        put(x, i, here - d, False)
        put(center, i, there + d, False)
