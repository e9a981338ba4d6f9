"""Values that do not exist while a step is recorded. Code that reads them raises Unrecordable."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import typeof_impl
from numpy.typing import DTypeLike

from minidl.engine.device import recording
from minidl.errors import MinidlError


class Unrecordable(MinidlError, RuntimeError):
    """The model does something that cannot be recorded."""


class Running:
    """The recorder that is active in any thread of this process, or None. Recordings run one at a time (guard.py)."""

    recorder: Any = None


def refuse(*_: Any, **__: Any) -> Any:
    """Raise Unrecordable. The step that is being recorded remains refused even if its code catches the exception."""
    recorder = recording.recorder or Running.recorder  # Running.recorder: in other threads of the step
    if recorder is None:
        raise Unrecordable("this array or tensor was made while a step was recorded, and has no values: "
                           "do not keep tensors of one step for another")  # fmt: skip
    return recorder.refuse()


class Recorded(np.ndarray):
    """An array whose values must not be read during recording. It can be sliced and reshaped.

    Numba refuses it as well, so no kernel can run with it: not in another thread, and not after the recording.
    """

    __numba_array_subtype_dispatch__ = True  # Numba calls `_numba_type` instead of taking it for an np.ndarray

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        return part if isinstance(part, np.ndarray) else refuse()

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        allowed = function in (np.broadcast_to, np.shape, np.ndim, np.size)
        return super().__array_function__(function, types, args, kwargs) if allowed else refuse()

    def view(self, *kinds: Any, **named: Any) -> Any:
        return super().view(Recorded) if kinds == (Recorded,) and not named else refuse()

    __array_ufunc__ = __setitem__ = __iter__ = __bool__ = __float__ = __int__ = __contains__ = __index__ = refuse
    __complex__ = __reduce__ = __reduce_ex__ = __copy__ = __deepcopy__ = __format__ = refuse
    flat = data = property(refuse)


_COMPUTING = """
    all any argmax argmin argpartition argsort astype byteswap choose clip compress conj conjugate copy cumprod cumsum
    diagonal dot dump dumps fill getfield item max mean min nonzero partition prod put repeat resize round searchsorted
    setfield sort std sum take tobytes tofile tolist trace var
"""
for _name in _COMPUTING.split():
    setattr(Recorded, _name, refuse)


@typeof_impl.register(Recorded)
def _numba_type(array: Recorded, context: Any) -> Any:
    return refuse()


class Hidden:
    """The base class of objects that stand for a value. Operations not defined by a subclass raise Unrecordable."""

    __slots__ = ()
    __array_ufunc__ = refuse

    def __getattr__(self, name: str) -> Any:
        return refuse()


_SPECIAL = """
    abs add and bool bytes ceil complex contains copy deepcopy delitem divmod eq float floor floordiv format ge getitem
    gt hash index int invert iter le len lshift lt matmul mod mul ne neg or pos pow radd rand rdivmod reduce reduce_ex
    repr reversed rfloordiv rlshift rmatmul rmod rmul ror round rpow rrshift rshift rsub rtruediv rxor setitem str sub
    truediv trunc xor
"""
for _name in _SPECIAL.split():
    setattr(Hidden, f"__{_name}__", refuse)


class Labels(Hidden):
    """The labels of a batch during recording: a shape and a type.

    This is not an array: NumPy would read the values of one. Losses may reshape it and pass it to `ops.cross_entropy`.
    `isinstance(y, np.ndarray)` is true, as on the tape. (`type(y) is np.ndarray` is false.)
    """

    __slots__ = ("_array", "dtype", "ndim", "shape", "size")
    __class__ = property(lambda self: np.ndarray)

    def __init__(self, array: np.ndarray) -> None:
        self._array = array.view(Recorded)
        self.shape, self.dtype, self.ndim, self.size = array.shape, array.dtype, array.ndim, array.size

    @staticmethod
    def array_of(values: Any) -> np.ndarray:
        """Return recorded labels, or other values, as an array."""
        return values._array if type(values) is Labels else np.asarray(values)

    def __len__(self) -> int:
        return len(self._array)

    def reshape(self, *shape: Any) -> Labels:
        return Labels(self._array.reshape(*shape))

    def ravel(self) -> Labels:
        return Labels(self._array.reshape(-1))

    flatten = ravel

    def squeeze(self, axis: Any = None) -> Labels:
        return Labels(self._array.squeeze(axis))

    def astype(self, dtype: DTypeLike, *_: Any, **__: Any) -> Labels:
        return self if np.dtype(dtype) == self.dtype else refuse()

    def __getitem__(self, key: Any) -> Labels:
        parts = key if isinstance(key, tuple) else (key,)
        basic = all(part is None or part is ... or isinstance(part, slice) for part in parts)
        return Labels(self._array[key]) if basic else refuse()


class Drawn(Hidden):
    """A placeholder for a number that each replay sets: the seed of dropout's random sequence, or an offset in it.

    kind: "seed" or "offset". value: the number. An offset counts from the position at which the step begins.
    """

    __slots__ = ("kind", "value")
    __class__ = property(lambda self: int)

    def __init__(self, kind: str, value: int) -> None:
        self.kind, self.value = kind, value


class Lost(Hidden):
    """The values of a tensor that outlives the recording that made it."""

    __slots__ = ()
