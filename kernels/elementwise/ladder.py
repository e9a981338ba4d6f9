"""The steps of README.md as code: out = scale x + shift. bench/bench_elementwise.py prints the table."""

from __future__ import annotations

from numpy import ndarray

from minidl.engine.jit import jit, parallel_jit, prange

from . import cpu
from .stream import chunks, part


def in_numpy(x: ndarray, scale: float, shift: float, out: ndarray) -> None:
    """As one writes it first: the product is a new vector, the sum another, and that one is copied."""
    out[:] = scale * x + shift


@jit
def one_loop(x: ndarray, scale: float, shift: float, out: ndarray) -> None:
    """One pass in vectors; but one core cannot keep the memory busy."""
    factor, summand = x.dtype.type(scale), x.dtype.type(shift)
    for i in range(out.size):
        out[i] = factor * x[i] + summand


@parallel_jit
def all_threads(x: ndarray, scale: float, shift: float, out: ndarray) -> None:
    """The same loop on chunks. A large output is still read from memory before it is overwritten."""
    for chunk in prange(chunks(out)):
        one_loop(part(x, chunk), scale, shift, part(out, chunk))


RUNGS = {
    "1 NumPy expression": in_numpy,
    "2 one loop, one thread": one_loop,
    "3 chunks, all threads": all_threads,
    "4 large outputs past the caches": cpu.affine,
}
