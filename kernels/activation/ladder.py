"""The steps of README.md as code: y = tanh(x), vectors (n,). bench/bench_activation.py prints the table."""

from __future__ import annotations

import math

from numpy import ndarray

from minidl.engine.jit import Part, jit

from ..elementwise.stream import chunked
from . import cpu, functions


@jit
def one_call_each(x: ndarray, y: ndarray) -> None:
    """Call the mathematics library for one number at a time: the obvious first version."""
    for i in range(y.size):
        y[i] = math.tanh(x[i])


@jit
def polynomial(x: ndarray, y: ndarray) -> None:
    """Use plain arithmetic without a branch: LLVM computes 16 numbers simultaneously."""
    for i in range(y.size):
        y[i] = functions.tanh(x[i])


@chunked
def all_threads(x: Part, y: Part) -> None:
    """Run the same loop on chunks. A large output is still read from memory before it is overwritten."""
    polynomial(x, y)


RUNGS = {
    "1 a call for each element": one_call_each,
    "2 a polynomial, in vectors": polynomial,
    "3 chunks, all threads": all_threads,
    "4 large outputs past the caches, prefetched strips": cpu.tanh,
}
