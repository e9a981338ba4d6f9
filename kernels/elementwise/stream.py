"""Shared by all elementwise kernels: the division of a vector into chunks, and stores that bypass the caches.

Elementwise kernels do little arithmetic per byte: memory bandwidth limits them. Three rules follow.

- One thread processes a short vector: waking other threads costs more than it saves.
- A chunk is sliced first, then traversed from 0: LLVM turns this loop into vector instructions.
- An output that is too large for the caches bypasses them. An ordinary store first reads the cache line that it is
  about to overwrite; a non-temporal store does not, so relu moves two vectors instead of three. An output that fits
  should stay in the cache, because the next kernel reads it. Non-temporal stores save nothing if the kernel reads the
  output anyway (theta in theta -= lr * g).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy import ndarray

from minidl.engine.jit import VECTOR_BYTES, in_parts, jit

CHUNK = 16384  # elements that one thread processes at a time
SERIAL = 32768  # up to this number of elements, one thread processes the whole vector
CACHE = 1 << 25  # bytes: from this size on, an output is likely to be evicted before it is read


@jit
def chunks(x: ndarray) -> int:
    """Return the number of chunks of x (n,); 1 if one thread is to process all of it."""
    return (x.size + CHUNK - 1) // CHUNK if x.size > SERIAL else 1


@jit
def chunk(x: ndarray, k: int, chunks: int) -> ndarray:
    """Return chunk k of x (n,). The last chunk extends to the end of x; a single chunk is all of x."""
    return x[k * CHUNK : (k + 1) * CHUNK if k + 1 < chunks else x.size]


@jit
def _begin(x: ndarray, k: int, chunks: int) -> int:
    return k * CHUNK


@jit
def _passes_caches(out: ndarray, k: int, chunks: int) -> bool:
    return out.size * out.itemsize >= CACHE and out.ctypes.data % VECTOR_BYTES == 0


# A decorator that makes a kernel from a function for one chunk. The function may have two computed parameters:
# past: whether stores to the output (the last `Part`) bypass the caches: if it is large and aligned to whole vectors;
# begin: the index of the chunk's first element.
chunked = in_parts(chunks, chunk, begin=_begin, past=_passes_caches)


def _element(context: Any, builder: Any, kind: Any, array: Any, i: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [i])


def _scope(builder: Any) -> Any:
    """Return the LLVM alias scope that `get` gives to its loads; the stores of `put` declare not to alias it."""
    add = builder.module.add_metadata
    return add([add(["what get reads", add(["elementwise kernels"])])])


@intrinsic
def get(typing: Any, x: Any, i: Any) -> Any:
    """Return x[i], in a loop that reads with `get` and writes with `put`.

    An output may be the same array as an input (relu in place), because each vector of elements is read before it is
    written. LLVM cannot know that two arrays overlap either exactly or not at all, so it would process one element at a
    time. The alias scope declares that `put` does not write what `get` reads.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = builder.load(_element(context, builder, x, *arguments))
        value.set_metadata("alias.scope", _scope(builder))
        return value

    return x.dtype(x, types.int64), generate


@intrinsic
def put(typing: Any, out: Any, i: Any, value: Any, past: Any) -> Any:
    """Store out[i] = value; if `past`, bypass the caches. Use it in a loop over i from 0 with a constant `past`.

    LLVM makes one loop for each value of `past`. It vectorises the non-temporal stores only if they declare the
    alignment of a whole vector. Vector stores have this alignment, since `out` is aligned and i begins at 0.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _element(context, builder, out, *arguments[:2])
        with builder.if_else(arguments[3]) as (yes, no):
            with yes:
                store = builder.store(arguments[2], place, align=VECTOR_BYTES)
                store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
                store.set_metadata("noalias", _scope(builder))
            with no:
                builder.store(arguments[2], place).set_metadata("noalias", _scope(builder))
        return context.get_dummy_value()

    return types.void(out, types.int64, out.dtype, types.boolean), generate


@intrinsic
def finish(typing: Any, past: Any) -> Any:
    """If stores bypassed the caches (`past`), wait until all threads can see them: their order is not guaranteed."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        with builder.if_then(arguments[0]):
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(types.boolean), generate
