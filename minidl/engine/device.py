"""A device is a table of kernels.

An op looks up a kernel by name on its device and passes it arrays:

    device.matmul.nn(a, b, bias, relu, packed, scratch, out)

The op is the same for every device. `Device("cpu")` finds `nn` in kernels/matmul/cpu.py, compiled by Numba.
`Device("reference")` finds it in kernels/matmul/reference.py: plain loops, slow but easy to verify. A new kind of
device needs a name in DEVICES, and for each operation another file with the same functions.
"""

from __future__ import annotations

import importlib
import math
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike

from minidl.engine.concurrency import check_fork, kernel_lock, one_at_a_time
from minidl.errors import ConfigError

DEVICES = ("cpu", "reference")
ALIGNMENT = 64  # bytes of a cache line, and of the widest vector load


class _Recording(threading.local):
    """recorder: replaces the device while this thread records a step (program/record.py); else None."""

    recorder: Any = None


recording = _Recording()


class Device:
    """The kernels of one kind of device, and its memory. Each kind has one instance: Device("cpu") is Device("cpu").

    Raises ConfigError for an unknown name.
    """

    _made: ClassVar[dict[str, Device]] = {}
    name: str
    sum_parts = 32  # the most parts of a sum: a constant, so that sums do not depend on the number of threads

    def __new__(cls, name: str) -> Device:
        if name not in DEVICES:
            raise ConfigError(f"unknown device {name!r}: expected one of {', '.join(DEVICES)}")
        if name not in cls._made:
            cls._made[name] = super().__new__(cls)
            cls._made[name].name = name
        return cls._made[name]

    def __reduce__(self) -> tuple[type[Device], tuple[str]]:
        return Device, (self.name,)  # a copied or unpickled device is the same object

    def __getattr__(self, op: str) -> Any:
        if op.startswith("_"):
            raise AttributeError(op)
        table: Any = importlib.import_module(f"minidl.kernels.{op}.{self.name}")
        if self.name != "reference":
            check_fork()
            table = _LockedKernels(table) if one_at_a_time() else table
        setattr(self, op, table)  # later look-ups find this attribute and do not call __getattr__
        return table

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """Return an uninitialised array on a 64-byte boundary, for a kernel that writes every element."""
        return aligned(math.prod(shape), dtype, np.empty).reshape(shape)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        return np.zeros(shape, dtype)

    def labels(self, values: Any) -> np.ndarray:
        """Return labels as an array. A recorder also accepts the labels of the recorded batch, which have no values."""
        return np.asarray(values)

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy source into target. Both must be contiguous and have the same shape."""
        target[...] = source

    def made(self, tensor: Any) -> None:
        """Called for each new tensor. A recorder checks that none of them outlives the recording."""

    def __repr__(self) -> str:
        return f"Device({self.name!r})"


class _LockedKernels:
    """The kernels of one op, each called under the kernels' lock; other functions of the module are unchanged."""

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._kernels, name)
        if name in self._kernels.__all__:
            function = _LockedKernel(function)
        setattr(self, name, function)
        return function


class _LockedKernel:
    """A kernel that is called under the kernels' lock. Its attributes are those of the kernel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self._lock = kernel, kernel_lock()

    def __call__(self, *arguments: Any) -> None:
        with self._lock:
            self._kernel(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


def _forget_kernels() -> None:
    """Let each device look up its kernels again, and check whether this process can run them."""
    for name, device in Device._made.items():
        vars(device).clear()
        device.name = name


os.register_at_fork(after_in_child=_forget_kernels)


def acting(device: Device) -> Device:
    """Return the device, or the recorder that replaces it while this thread records a step."""
    return recording.recorder or device


def address(array: np.ndarray) -> int:
    """Return the address of an array's first byte. (`array.ctypes.data` is the same, but five times slower.)"""
    return int(array.__array_interface__["data"][0])


def undo_after_recording(owner: object, name: str) -> None:
    """If this thread records a step, restore an attribute at the end of the recording. Called before it is changed."""
    if recording.recorder is not None:
        recording.recorder.changed.append((owner, name, getattr(owner, name)))


def forbid_recording(*reason: str) -> None:
    """Raise Unrecordable while this thread records a step. Called before values of tensors are read or written.

    While recording, results have no values, and parameters' values would become constants of the recorded step.
    reason: what the step does; default: it reads values.
    """
    if recording.recorder is not None:
        recording.recorder.refuse(*reason)


def aligned(size: int, dtype: DTypeLike, make: Callable[..., np.ndarray] = np.zeros) -> np.ndarray:
    """Return a vector of `size` elements that begins on a 64-byte boundary: zeros, unless `make` is np.empty."""
    nbytes = size * np.dtype(dtype).itemsize
    raw = make(nbytes + ALIGNMENT, np.uint8)
    start = -address(raw) % ALIGNMENT
    return raw[start : start + nbytes].view(dtype)
