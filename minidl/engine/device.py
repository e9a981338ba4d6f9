"""A device is a table of kernels.

An op asks its device for a kernel by name and hands it arrays:

    device.matmul.nn(a, b, bias, relu, scratch, out)

and never asks which device that is. `Device("cpu")` finds `nn` in kernels/matmul/cpu.py, compiled by Numba;
`Device("reference")` finds it in kernels/matmul/reference.py, plain loops that are slow and easy to believe. A new
kind of device is a new file beside these two, with the same names and signatures in it.
"""

from __future__ import annotations

import importlib
import math
import threading
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from minidl.errors import ConfigError

DEVICES = ("cpu", "reference")
ALIGNMENT = 64  # bytes: a cache line, and the widest vector load

recording = threading.local()  # .recorder: what stands in for a device in this thread (see program/record.py)


class Device:
    """The kernels of one kind of device, and its memory. There is one of each: Device("cpu") is Device("cpu")."""

    _made: ClassVar[dict[str, Device]] = {}
    name: str

    def __new__(cls, name: str) -> Device:
        if name not in DEVICES:
            raise ConfigError(f"unknown device {name!r}: expected one of {', '.join(DEVICES)}")
        if name not in cls._made:
            cls._made[name] = super().__new__(cls)
            cls._made[name].name = name
        return cls._made[name]

    def __reduce__(self) -> tuple[type[Device], tuple[str]]:
        return Device, (self.name,)  # a copy is the same device

    def __getattr__(self, op: str) -> ModuleType:
        if op.startswith("_"):
            raise AttributeError(op)
        table = importlib.import_module(f"minidl.kernels.{op}.{self.name}")
        setattr(self, op, table)  # the next look-up is a plain attribute
        return table

    def empty(self, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.ndarray:
        """Uninitialised memory, on a boundary of 64 bytes: only for a kernel that writes every element."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        raw = np.empty(size + ALIGNMENT, np.uint8)
        start = -address(raw) % ALIGNMENT
        return raw[start : start + size].view(dtype).reshape(shape)

    def zeros(self, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.ndarray:
        return np.zeros(shape, dtype)

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """target = source, both contiguous and of one shape"""
        target[...] = source

    def __repr__(self) -> str:
        return f"Device({self.name!r})"


def acting(device: Device) -> Device:
    """The device itself, or what records in its place."""
    return getattr(recording, "recorder", None) or device


def address(array: np.ndarray) -> int:
    """Of its first byte. (`array.ctypes.data` is the same and takes five times as long.)"""
    return int(array.__array_interface__["data"][0])


def values_exist(device: Device) -> None:
    """Asked before values are looked at: while a step is recorded, there are none yet, and its recorder refuses."""
    recorder: Any = acting(device)
    if recorder is not device:
        recorder.refuse()


def aligned(size: int, dtype: np.typing.DTypeLike) -> np.ndarray:
    """A zeroed vector of `size` elements whose first byte lies on a 64-byte boundary."""
    bytes_ = size * np.dtype(dtype).itemsize
    raw = np.zeros(bytes_ + ALIGNMENT, np.uint8)
    start = -address(raw) % ALIGNMENT
    return raw[start : start + bytes_].view(dtype)
