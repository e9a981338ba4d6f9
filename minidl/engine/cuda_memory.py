"""Instructions that Numba does not offer: accesses of 16 bytes, copies to shared memory in the background.

Indices count elements. They are not checked and not negative. `array` is a vector in global or shared memory.

    get(array, i)             array[i] without Python's rule for negative indices, which would cost instructions
    put(array, i, value)
    load4(array, i)           four neighbours; in float32 one access of 16 bytes. i is a multiple of 4.
    store4(array, i, values)
    shifted(array, i)         the array from element i on, which may be negative. A sum of i and an index that change
                              at different times takes fewer instructions in this way.

    copy(target, i, source, j)        shared target[i] = global source[j]
    copy_16(target, i, source, j)     the same for 16 bytes: four float32, or two float64
    copy_if(..., wanted)              writes 0 if `wanted` is false; source[j] is then not read
    copy_16_if(..., wanted)
    commit()                          ends a group of copies
    wait_all()                        waits for all groups of this thread
    wait_but_one()                    waits for all but the newest

Other threads see copied values after a wait and a barrier. Copies need compute capability 8.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from minidl.engine import cuda as _cuda  # noqa: F401  (explains a missing numba-cuda)

I32, I64 = ir.IntType(32), ir.IntType(64)
SHARED = 3  # the number of the address space
Generated = tuple[Any, Callable[..., Any]]  # a signature, and the function that generates its LLVM instructions


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index_type: Any, index: Any) -> Any:
    """Return the address of array[index]."""
    data = context.make_array(array_type)(context, builder, value=array).data
    if index.type.width < 64:
        index = builder.sext(index, I64) if index_type.signed else builder.zext(index, I64)
    return builder.gep(data, [index], inbounds=True)


@intrinsic
def get(typing: Any, array: Any, index: Any) -> Generated:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(_pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1]))

    return array.dtype(array, index), generate


@intrinsic
def put(typing: Any, array: Any, index: Any, value: Any) -> Generated:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[2], _pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1]))
        return context.get_dummy_value()

    return types.void(array, index, array.dtype), generate


def _four(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """Return the address of array[index], as that of a vector of four numbers."""
    vector = ir.VectorType(context.get_data_type(sig.args[0].dtype), 4)
    pointer = _pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
    return builder.bitcast(pointer, vector.as_pointer())


def _alignment(array_type: Any) -> int:
    """Return the bytes of which the address of four elements is a multiple."""
    return int(min(16, 4 * array_type.dtype.bitwidth // 8))


@intrinsic
def load4(typing: Any, array: Any, index: Any) -> Generated:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vector = builder.load(_four(context, builder, sig, args), align=_alignment(sig.args[0]))
        return context.make_tuple(builder, sig.return_type, [builder.extract_element(vector, I32(i)) for i in range(4)])

    return types.UniTuple(array.dtype, 4)(array, index), generate


@intrinsic
def store4(typing: Any, array: Any, index: Any, values: Any) -> Generated:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = _four(context, builder, sig, args)
        vector = ir.Constant(pointer.type.pointee, ir.Undefined)
        for i in range(4):
            vector = builder.insert_element(vector, builder.extract_value(args[2], i), I32(i))
        builder.store(vector, pointer, align=_alignment(sig.args[0]))
        return context.get_dummy_value()

    return types.void(array, index, types.UniTuple(array.dtype, 4)), generate


@intrinsic
def shifted(typing: Any, array: Any, index: Any) -> Generated:
    """The compiler cannot see through the move. It would add the indices first, which takes more instructions."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        result = context.make_array(sig.args[0])(context, builder, value=args[0])
        data = builder.gep(result.data, [context.cast(builder, args[1], sig.args[1], types.int64)])
        move = ir.InlineAsm(ir.FunctionType(data.type, [data.type]), "mov.u64 $0, $1;", "=l,l")
        result.data = builder.call(move, [data], attrs=("readnone", "nounwind"))
        return result._getvalue()

    return array(array, index), generate


# -- copies in the background -----------------------------------------------------------------------------------------


def _instruction(builder: Any, text: str, constraints: str, args: list[Any]) -> None:
    """Emit one PTX instruction that no other access to memory may pass."""
    function = ir.FunctionType(ir.VoidType(), [a.type for a in args])
    builder.call(ir.InlineAsm(function, text, f"{constraints}~{{memory}}", side_effect=True), args)


def _copy(nbytes: int, conditional: bool) -> Callable[..., Any]:
    """Return the code generator of a copy. nbytes: 16, or 0 for one element."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        target = _pointer(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        target = builder.ptrtoint(builder.addrspacecast(target, target.type.pointee.as_pointer(SHARED)), I32)
        source = _pointer(context, builder, sig.args[2], args[2], sig.args[3], args[3])
        size = nbytes or sig.args[2].dtype.bitwidth // 8
        text = f"cp.async.{'cg' if size == 16 else 'ca'}.shared.global [$0], [$1], {size}"
        if conditional:
            wanted = context.cast(builder, args[4], sig.args[4], types.boolean)
            read = builder.select(wanted, I32(size), I32(0))
            _instruction(builder, text + ", $2;", "r,l,r,", [target, source, read])
        else:
            _instruction(builder, text + ";", "r,l,", [target, source])
        return context.get_dummy_value()

    return generate


@intrinsic
def copy(typing: Any, target: Any, at: Any, source: Any, index: Any) -> Generated:
    return types.void(target, at, source, index), _copy(0, False)


@intrinsic
def copy_16(typing: Any, target: Any, at: Any, source: Any, index: Any) -> Generated:
    return types.void(target, at, source, index), _copy(16, False)


@intrinsic
def copy_if(typing: Any, target: Any, at: Any, source: Any, index: Any, wanted: Any) -> Generated:
    return types.void(target, at, source, index, wanted), _copy(0, True)


@intrinsic
def copy_16_if(typing: Any, target: Any, at: Any, source: Any, index: Any, wanted: Any) -> Generated:
    return types.void(target, at, source, index, wanted), _copy(16, True)


def _group(text: str) -> Callable[..., Any]:
    """Return the code generator of an instruction without operands."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _instruction(builder, text, "", [])
        return context.get_dummy_value()

    return generate


@intrinsic
def commit(typing: Any) -> Generated:
    return types.void(), _group("cp.async.commit_group;")


@intrinsic
def wait_all(typing: Any) -> Generated:
    return types.void(), _group("cp.async.wait_group 0;")


@intrinsic
def wait_but_one(typing: Any) -> Generated:
    return types.void(), _group("cp.async.wait_group 1;")
