"""Compilation of CUDA kernels: the only module that imports numba-cuda. `import minidl` does not import it.

    @device            a function of one thread, compiled into the kernels that call it
    @kernel(...)       a kernel, with the size of its blocks
    launch(k, blocks, ...)    what the functions of kernels/<op>/cuda.py call
    compiled(k, types, cc)    machine code, made without a GPU or a driver
    to_ptx(k, types, cc)      the step before it, NVIDIA's assembly language for all GPUs

Kernels see arrays as vectors: `launch` passes each array as a flat one, and shapes as numbers. So a kernel has one
signature for each type of number. An int becomes an int32, a float a float64, and a NumPy scalar keeps its type.

A launch goes to the launcher that `launch_with` has set: the driver, a recorder, or the emulator of tests/cuda.
Index arithmetic is 32-bit, so an array has at most 2**31 - 1 elements.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from minidl.engine.device import address
from minidl.errors import ConfigError

MISSING = (
    "CUDA kernels need numba-cuda, which is not installed: pip install 'minidl[cuda13]' "
    "(drivers from version 580), or 'minidl[cuda12]' (older drivers)"
)
LARGEST = 2**31 - 1  # elements of an array
MOST = 2**16 - 1  # blocks along y, and along z

try:
    from numba import cuda as cuda  # kernels import it from here
    from numba import types

    if getattr(cuda, "implementation", "") != "NVIDIA":  # numba's own numba.cuda, without numba-cuda
        raise ImportError(MISSING)
    from cuda.core import Linker, LinkerOptions, ObjectCode
    from numba.cuda import dispatcher
except ImportError as error:
    raise ConfigError(MISSING) from error


def device(function: Callable[..., Any]) -> Any:
    """Compile a function of one thread into each kernel that calls it."""
    return cuda.jit(device=True, forceinline=True)(function)


@dataclass(frozen=True)
class Kernel:
    """A kernel: blocks of `threads` threads, of which an SM must be able to hold at least `blocks_per_sm`."""

    function: Callable[..., None]
    threads: int
    blocks_per_sm: int

    @property
    def name(self) -> str:
        return self.function.__name__.lstrip("_")


def kernel(threads: int = 256, blocks_per_sm: int = 1) -> Callable[[Callable[..., None]], Kernel]:
    """Return a decorator that makes a Kernel. More blocks per SM leave fewer registers for each thread."""
    return lambda function: Kernel(function, threads, blocks_per_sm)


# -- launches ---------------------------------------------------------------------------------------------------------

Grid = tuple[int, int, int]
Launcher = Callable[[Kernel, Grid, tuple[Any, ...]], None]
_launcher: Launcher | None = None


@contextmanager
def launch_with(launcher: Launcher) -> Iterator[None]:
    """Pass launches to this function: launcher(kernel, (blocks x, y, z), arguments)."""
    global _launcher
    before, _launcher = _launcher, launcher
    try:
        yield
    finally:
        _launcher = before


def launch(kernel: Kernel, blocks: int | tuple[int, ...], *arguments: Any) -> None:
    """Run a kernel on so many blocks (x, y, z). Nothing happens if there are 0.

    Raises ConfigError without a launcher, for an array that is too large, and for too many blocks along y or z.
    """
    x, y, z = (*(blocks if isinstance(blocks, tuple) else (blocks,)), 1, 1)[:3]
    if x * y * z == 0:
        return
    if max(y, z) > MOST:
        raise ConfigError(f"{kernel.name} needs {x} x {y} x {z} blocks: expected at most {MOST} along y and z")
    if _launcher is None:
        raise ConfigError("no CUDA device is open, so no kernel can run on one")
    _launcher(kernel, (x, y, z), tuple(_flat(a) if hasattr(a, "reshape") and a.ndim else a for a in arguments))


def _flat(array: Any) -> Any:
    if array.size > LARGEST:
        raise ConfigError(f"an array of {array.size} elements: on a GPU, expected at most {LARGEST}")
    return array.reshape(-1)


def types_of(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the Numba types with which a kernel receives these arguments."""
    return tuple(_type_of(argument) for argument in arguments)


def _type_of(argument: Any) -> Any:
    if isinstance(argument, bool | np.bool_):
        return types.boolean
    if isinstance(argument, int):
        return types.int32
    if isinstance(argument, float) and not isinstance(argument, np.floating):
        return types.float64
    number = getattr(types, "boolean" if argument.dtype == bool else argument.dtype.name)
    return types.Array(number, 1, "C") if argument.ndim else number


DATA = 4  # the index of the data's address among the words of a vector


def words_of(argument: Any) -> list[int]:
    """Return the words in which Numba passes an argument to a kernel: 7 for a vector, 1 for a number."""
    if isinstance(argument, np.ndarray) and argument.ndim:
        return [0, 0, argument.size, argument.itemsize, address(argument), argument.size, argument.itemsize]
    number = np.asarray(np.int32(argument) if type(argument) is int else argument)
    return [int.from_bytes(number.tobytes(), "little", signed=True)]


# -- compilation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """A kernel for one signature and compute capability. `symbol` is its name in the PTX and in the cubin."""

    symbol: str
    ptx: str
    cubin: bytes
    registers: int  # per thread
    stack: int  # bytes per thread, without spills
    spills: int  # bytes of stores and loads
    shared: int  # bytes per block


_compiling = threading.Lock()


@cache
def to_ptx(kernel: Kernel, signature: tuple[Any, ...], cc: tuple[int, int]) -> str:
    """Translate a kernel for arguments of these types (`types_of`) and a compute capability, such as (8, 0)."""
    with _compiling:
        before = dispatcher.get_current_device  # Numba asks the driver for the compute capability of device functions
        dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)
        try:
            ptx, _ = cuda.compile(
                kernel.function, types.void(*signature), cc=cc, device=False, abi="numba",
                launch_bounds=(kernel.threads, kernel.blocks_per_sm),
            )  # fmt: skip
        finally:
            dispatcher.get_current_device = before
    return str(ptx)


@cache
def compiled(kernel: Kernel, signature: tuple[Any, ...], cc: tuple[int, int]) -> Compiled:
    """Compile a kernel: the parameters of `to_ptx`."""
    ptx = to_ptx(kernel, signature, cc)
    options = LinkerOptions(arch=f"sm_{cc[0]}{cc[1]}", ptxas_options=["-v"])
    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=options)
    cubin, log = linker.link("cubin"), linker.get_info_log()
    symbol = re.search(r"\.visible \.entry (\w+)\(", ptx)
    assert symbol is not None

    def number(pattern: str) -> int:
        return sum(int(found) for found in re.findall(pattern, log))

    return Compiled(
        symbol[1], ptx, bytes(cubin.code),
        registers=number(r"Used (\d+) registers"),
        stack=number(r"(\d+) bytes stack frame"),
        spills=number(r"(\d+) bytes spill"),
        shared=sum(int(size) for size in re.findall(r"\.shared .*\.b8 \w+\[(\d+)\];", ptx)),
    )  # fmt: skip
