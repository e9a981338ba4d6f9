"""Calls of compiled kernels by address, with arguments prepared in memory.

Calling a kernel from Python costs microseconds, because Numba unpacks every argument. A recorded step (record.py)
unpacks them only once. After that, a call is a pair of addresses: of an entry and of a block.

    block   | kernel's address | argument | argument | ...      slots of 8 bytes; an array takes 5 + 2 ndim of them

A block holds the arguments in the form in which Numba passes them. An entry is a function of a few instructions that
loads the arguments and calls the kernel. It depends only on the types of the arguments, so kernels whose arguments have
equal types share an entry. `run` executes a table of such pairs (entry, block) without the GIL.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from minidl.engine import team
from minidl.engine.jit import jit

SLOT = 8  # bytes
# The slots of an array: meminfo, parent, number of items, item size, address of the data, shape, strides.
DATA = 4  # the index of the data's address among them

_libraries: list[Any] = []  # keep the machine code of the entries in memory
_numbers = itertools.count()  # for names that are unique even if several threads make entries


def numba_type(value: Any) -> types.Type:
    """Return the Numba type for which a kernel with this argument is compiled. Read-only arrays count as writable."""
    if isinstance(value, np.ndarray):
        return types.Array(numba.from_dtype(value.dtype), value.ndim, "C")
    return numba.typeof(int(value) if isinstance(value, int) and not isinstance(value, bool) else value)


@functools.lru_cache(maxsize=10_000)
def array_slots(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the slots of a contiguous array in a block. The address of its data is 0; the caller fills it in."""
    strides = [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return 0, 0, math.prod(shape), itemsize, 0, *shape, *strides


def slots(value: Any) -> list[int]:
    """Return the slots of an argument that is not an array."""
    if isinstance(value, tuple):
        return [int(number) for number in value]
    if isinstance(value, float | np.floating):
        word = np.zeros(1, np.int64)
        word.view(np.asarray(value).dtype)[0] = value
        return [int(word[0])]
    return [int(value)]


def kernel_address(kernel: Any, signature: tuple[types.Type, ...]) -> int:
    """Compile a kernel for these types, or load it from the cache; return the address of its machine code."""
    kernel.compile(signature)
    compiled = kernel.overloads[signature]
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))


@functools.cache
def entry_address(signature: tuple[types.Type, ...]) -> int:
    """Return the address of the entry for this signature, which loads a block's arguments and calls its kernel."""
    context, word = cpu_target.target_context, ir.IntType(64)
    name = f"minidl_entry_{next(_numbers)}"
    with global_compiler_lock:
        library = context.codegen().create_library(name)
        module = library.create_ir_module(name)
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [word.as_pointer()]), name)
        builder = ir.IRBuilder(function.append_basic_block())
        arguments, at = [], 1
        for kind in signature:
            value = context.get_value_type(kind)
            where = builder.gep(function.args[0], [ir.Constant(word, at)])
            if kind == types.boolean:
                arguments.append(builder.trunc(builder.load(where), value))
            else:
                arguments.append(builder.load(builder.bitcast(where, value.as_pointer())))
            at += _length(kind)
        callee = context.call_conv.get_function_type(types.none, signature)
        kernel = builder.inttoptr(builder.load(function.args[0]), callee.as_pointer())
        context.call_conv.call_function(builder, kernel, types.none, signature, arguments)
        builder.ret_void()
        library.add_ir_module(module)
        library.finalize()
    _libraries.append(library)
    return int(library.get_pointer_to_function(name))


def _length(kind: types.Type) -> int:
    """Return the number of slots of an argument of this type."""
    if isinstance(kind, types.Array):
        return 5 + 2 * int(kind.ndim)
    return int(kind.count) if isinstance(kind, types.UniTuple) else 1


@intrinsic
def _call(typing: Any, entry: Any, block: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        word = ir.IntType(64)
        function = ir.FunctionType(ir.VoidType(), [word.as_pointer()])
        pointers = function.as_pointer(), word.as_pointer()
        entry, block = (builder.inttoptr(a, kind) for a, kind in zip(arguments, pointers, strict=True))
        builder.call(entry, [block])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@jit
def run(table: np.ndarray, first: int, last: int) -> None:
    """Make the calls first, ..., last - 1 of a table (calls, 2): the addresses of the entry and block of each call."""
    for i in range(first, last):
        _call(table[i, 0], table[i, 1])


@jit
def run_bound(table: np.ndarray, first: int, last: int, cores: np.ndarray, short: bool) -> bool:
    """Do the same with the calling thread on its own core (engine/team.py). Return False if `team.renew` must be called
    first: then nothing is done."""
    later = team.bind(cores, short)
    if later == team.RENEW:
        return False
    run(table, first, last)
    if later == team.RELEASE:
        team.release(cores)
    return True
