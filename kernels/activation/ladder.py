"""The steps of README.md as code: y = tanh(x). bench/bench_activation.py prints the table."""

from __future__ import annotations

import math

from numpy import ndarray

from minidl.engine.jit import jit, parallel_jit, prange

from ..elementwise.stream import chunks, part
from . import cpu, functions


@jit
def one_call_each(x: ndarray, y: ndarray) -> None:
    """As one writes it first: the mathematics library is called for one number at a time."""
    for i in range(y.size):
        y[i] = math.tanh(x[i])


@jit
def polynomial(x: ndarray, y: ndarray) -> None:
    """Plain arithmetic without a branch: LLVM computes 16 numbers at once."""
    for i in range(y.size):
        y[i] = functions.tanh(x[i])


@parallel_jit
def all_threads(x: ndarray, y: ndarray) -> None:
    """The same loop on chunks. A large output is still read from memory before it is overwritten."""
    for chunk in prange(chunks(y)):
        polynomial(part(x, chunk), part(y, chunk))


RUNGS = {
    "1 a call for each element": one_call_each,
    "2 a polynomial, in vectors": polynomial,
    "3 chunks, all threads": all_threads,
    "4 large outputs past the caches": cpu.tanh,
}
