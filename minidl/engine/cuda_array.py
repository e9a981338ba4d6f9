"""Arrays in a GPU's memory, as far as the host needs them: an address, a shape and a type."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from minidl.errors import MinidlError


def refuse(*_: Any, **__: Any) -> Any:
    raise MinidlError("this array is in a GPU's memory, and its values cannot be read or written from the host")


class OnDevice(np.ndarray):
    """An array in a GPU's memory. It can be sliced and reshaped. Reading or writing its values raises MinidlError.

    It does not own the memory. NumPy functions that ignore subclasses, such as np.asarray, would crash the process.
    """

    def __getitem__(self, key: Any) -> Any:
        parts = key if isinstance(key, tuple) else (key,)
        numbers = sum(isinstance(part, int) for part in parts)
        views = all(part is None or part is ... or isinstance(part, slice | int) for part in parts)
        return super().__getitem__(key) if views and numbers < self.ndim else refuse()

    __array_ufunc__ = __array_function__ = __setitem__ = __iter__ = __contains__ = refuse
    __bool__ = __float__ = __int__ = __index__ = __complex__ = refuse
    __copy__ = __deepcopy__ = __reduce__ = __reduce_ex__ = __format__ = __repr__ = refuse
    item = tolist = tobytes = tofile = copy = astype = fill = refuse


def array_at(address: int, shape: tuple[int, ...], dtype: DTypeLike) -> OnDevice:
    """Return the contiguous array at an address in a GPU's memory."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    there: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.ndarray.__new__(OnDevice, shape, dtype, there)
