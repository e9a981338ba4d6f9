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

Signature = tuple[types.Type, ...]
_libraries: list[Any] = []  # keep the machine code of the entries in memory
_entries: dict[Signature, int] = {}  # their addresses


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


def kernel_address(kernel: Any, signature: Signature) -> int:
    """Compile a kernel for these types, or load it from the cache; return the address of its machine code."""
    kernel.compile(signature)
    compiled = kernel.overloads[signature]
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))


def entry_addresses(signatures: Sequence[Signature]) -> list[int]:
    """Return the address of the entry for each signature. Missing ones are compiled together, which is faster."""
    with global_compiler_lock:
        if missing := [one for one in dict.fromkeys(signatures) if one not in _entries]:
            library = cpu_target.target_context.codegen().create_library(f"minidl_entries_{len(_libraries)}")
            module = library.create_ir_module(library.name)
            names = [_build_entry(module, f"{library.name}_{number}", one) for number, one in enumerate(missing)]
            library.add_ir_module(module)
            library.finalize()
            _libraries.append(library)
            _entries.update(zip(missing, map(library.get_pointer_to_function, names), strict=True))
    return [_entries[one] for one in signatures]


def _build_entry(module: ir.Module, name: str, signature: Signature) -> str:
    """Add an entry to a module. Return its name.

    Numba passes the words of an array or a tuple one by one, so each slot is one argument. Two pointers come first: to
    the result and to an exception. The entry reads neither.
    """
    word = ir.IntType(64)
    block = ir.Function(module, ir.FunctionType(ir.VoidType(), [word.as_pointer()]), name).args[0]
    builder = ir.IRBuilder(block.parent.append_basic_block())
    callee = cpu_target.target_context.call_conv.get_function_type(types.none, signature)
    arguments = [builder.alloca(pointer.pointee) for pointer in callee.args[:2]]
    for at, kind in enumerate(callee.args[2:], 1):
        where = builder.gep(block, [ir.Constant(word, at)])
        if kind == ir.IntType(1):
            arguments.append(builder.trunc(builder.load(where), kind))
        else:
            arguments.append(builder.load(builder.bitcast(where, kind.as_pointer())))
    builder.call(builder.inttoptr(builder.load(block), callee.as_pointer()), arguments)
    builder.ret_void()
    return name


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
