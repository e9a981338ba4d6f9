"""The steps of README.md as code: out = scale * x + shift for vectors. bench/bench_elementwise.py prints the table."""

from __future__ import annotations

from numpy import ndarray

from minidl.engine.jit import Part, jit

from . import cpu
from .stream import chunked, get, put


def in_numpy(x: ndarray, scale: float, shift: float, out: ndarray) -> None:
    """Store the product and the sum in new vectors and copy the sum: the obvious first version."""
    out[:] = scale * x + shift


@jit
def one_loop(x: ndarray, scale: float, shift: float, out: ndarray) -> None:
    """Make one pass with vector instructions, on one core: several cores would read the third-level cache faster."""
    factor, summand = x.dtype.type(scale), x.dtype.type(shift)
    for i in range(out.size):
        out[i] = factor * x[i] + summand


@chunked
def all_threads(x: Part, scale: float, shift: float, out: Part) -> None:
    """Run the same loop on chunks. A large output is still read from memory before it is overwritten."""
    one_loop(x, scale, shift, out)


@chunked
def past_the_caches(x: Part, scale: float, shift: float, out: Part, past: bool) -> None:
    """Store large outputs past the caches. A core still waits for x, if it does not look far enough ahead."""
    factor, summand = x.dtype.type(scale), x.dtype.type(shift)
    for i in range(out.size):
        put(out, i, factor * get(x, i) + summand, past)


RUNGS = {
    "1 NumPy expression": in_numpy,
    "2 one loop, one thread": one_loop,
    "3 chunks, all threads": all_threads,
    "4 large outputs past the caches": past_the_caches,
    "5 prefetched strips": cpu.affine,
}
