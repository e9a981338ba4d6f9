"""What every elementwise kernel shares: how a vector is cut into chunks, and stores that pass the caches by.

Elementwise kernels do little arithmetic for each byte: memory decides how fast they are. Three rules follow.

- A short vector stays on one thread: to wake the others costs more than it saves.
- A chunk is sliced first and then walked from 0: LLVM turns that loop into vector instructions.
- An output too large for the caches is written past them. An ordinary store first reads the line that it is about to
  overwrite; a non-temporal one does not: relu moves two vectors instead of three. An output that fits is better off in
  the cache, where its reader finds it; and one that was read anyway (theta in theta -= lr g) gains nothing.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy import ndarray

from minidl.engine.jit import VECTOR_BYTES, jit

CHUNK = 16384  # elements that one thread takes at a time
SERIAL = 32768  # up to so many elements, one thread does all of it
CACHE = 1 << 25  # bytes of an output that is likely to be evicted before anybody reads it


@jit
def chunks(x: ndarray) -> int:
    return (x.size + CHUNK - 1) // CHUNK


@jit
def part(x: ndarray, chunk: int) -> ndarray:
    return x[chunk * CHUNK : (chunk + 1) * CHUNK]


@jit
def passes_caches(out: ndarray) -> bool:
    """Whether to write `out` past the caches: it is large, and begins where a vector may be stored that way."""
    return out.size * out.itemsize >= CACHE and out.ctypes.data % VECTOR_BYTES == 0


def _element(context: Any, builder: Any, kind: Any, array: Any, i: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [i])


def _scope(builder: Any) -> Any:
    """LLVM's name for "what `get` reads", which `put` says that it does not write to."""
    add = builder.module.add_metadata
    return add([add(["what get reads", add(["elementwise kernels"])])])


@intrinsic
def get(typing: Any, x: Any, i: Any) -> Any:
    """x[i], in a loop that reads here and writes with `put`.

    An output may lie exactly where an input does (relu in place): each element is read before it is written, so
    vectors of them may be, too. LLVM cannot know that the two overlap exactly or not at all, and would step from
    element to element; so it is told that `put` does not touch what `get` reads.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = builder.load(_element(context, builder, x, *arguments))
        value.set_metadata("alias.scope", _scope(builder))
        return value

    return x.dtype(x, types.int64), generate


@intrinsic
def put(typing: Any, out: Any, i: Any, value: Any, past: Any) -> Any:
    """out[i] = value; past: past the caches. For a loop over i from 0, `past` the same in all of it.

    LLVM makes two loops of that one, each with vector stores. It does so only where a non-temporal store claims to be
    aligned as a whole vector is; the vector stores are, since `out` is and i begins at 0.
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
    """Where stores went past the caches: wait until every thread would see them. They are not ordered otherwise."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        with builder.if_then(arguments[0]):
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(types.boolean), generate
