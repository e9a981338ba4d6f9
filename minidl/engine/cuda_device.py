"""A GPU: its memory, its streams and its kernels.

    gpu = open_gpu("cuda:0")
    memory = gpu.allocate(1024)              bytes on the device
    gpu.send(array, memory.address)          host -> device
    with gpu.running():                      the functions of kernels/<op>/cuda.py launch on this device
        kernels("elementwise").fill(1.0, array_at(memory.address, (256,), "float32"))
    gpu.fetch(memory.address, array)         device -> host; waits for the launches before

Work goes to one of two streams: `main` for kernels and for copies that they wait for, `copies` for batches that are
copied while kernels run. The driver does the work of a stream in order, and later than it is asked for. The compute
capability must be 8.0 or higher.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from minidl.engine import cuda_cache, cuda_driver
from minidl.engine.cuda import Grid, Kernel, launch_with, types_of, words_of
from minidl.engine.cuda_driver import DriverError
from minidl.engine.device import address
from minidl.errors import ConfigError, MinidlError

LEAST = (8, 0)  # compute capability: kernels copy to shared memory in the background
ON_TENSOR_CORES = ("matmul",)  # operations with kernels of other precisions: cuda_tf32.py, cuda_bf16.py
KIB, MIB = 2**10, 2**20
WORD = 8  # bytes


class _Current(threading.local):
    gpu: Gpu | None = None  # for which this thread may call the driver


_current = _Current()


class DeviceMemory:
    """Bytes in a GPU's memory. They are freed with this object."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self.nbytes, self.address = nbytes, gpu.reserve(nbytes) if nbytes else 0
        if nbytes:
            weakref.finalize(self, gpu.quietly, "cuMemFree_v2", self.address).atexit = False


class Gpu:
    """One GPU. `open_gpu` makes it. precision: of `PRECISIONS` (gpus.py)."""

    sum_parts = 256  # see Device: about two blocks for each SM, and the same number on each GPU

    def __init__(self, number: int, precision: str = "float32") -> None:
        self.name, self.driver, self.precision = f"cuda:{number}", cuda_driver.load(), precision
        driver, count = self.driver, self.driver.get("cuDeviceGetCount")
        if number >= count:
            names = ", ".join(f"cuda:{i}" for i in range(count))
            raise ConfigError(f"there is no {self.name}: this machine has {names}")
        handle = driver.get("cuDeviceGet", number)
        text = ctypes.create_string_buffer(256)
        driver.cuDeviceGetName(text, 256, handle)
        self.model = text.value.decode(errors="replace")
        major, minor = (driver.get("cuDeviceGetAttribute", a, handle) for a in (cuda_driver.MAJOR, cuda_driver.MINOR))
        self.capability = major, minor
        if self.capability < LEAST:
            found, least = (".".join(map(str, cc)) for cc in (self.capability, LEAST))
            raise ConfigError(f"{self.name} ({self.model}) has compute capability {found}: expected {least} or higher")
        _check_version(driver)
        with self.errors():
            self._context = driver.get("cuDevicePrimaryCtxRetain", handle, kind=ctypes.c_void_p)
            self.use()
        self.main, self.copies = self.stream(), self.stream()
        self._functions: dict[tuple[Any, ...], int] = {}
        self.captures = True  # whether the driver makes graphs of launches

    def __repr__(self) -> str:
        return f"Gpu({self.name!r})"

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Name the device in errors of the driver."""
        try:
            yield
        except DriverError as error:
            if error.code == cuda_driver.OUT_OF_MEMORY:
                raise ConfigError(f"{self.name} is out of memory: use a smaller --batch-size or model") from None
            raise MinidlError(f"{self.name} ({self.model}) has failed, in {error}; checkpoints are intact: continue "
                              "with --resume") from None  # fmt: skip

    def use(self) -> None:
        """Let this thread call the driver for this device."""
        if _current.gpu is not self:
            self.driver.cuCtxSetCurrent(self._context)
            _current.gpu = self

    # -- memory

    def free(self) -> int:
        """Return the bytes that are free on the device."""
        self.use()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self.errors():
            self.driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        return free.value

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Return memory of this size, on a boundary of 256 bytes. Raises ConfigError if there is too little."""
        return DeviceMemory(self, nbytes)

    def reserve(self, nbytes: int) -> int:
        if nbytes > (free := self.free()):
            unit, name = (MIB, "MiB") if nbytes >= MIB else (KIB, "KiB")
            raise ConfigError(f"{self.name} is out of memory: {-(-nbytes // unit):,} {name} more are needed, and "
                              f"{free // unit:,} {name} are free: use a smaller --batch-size or model")  # fmt: skip
        with self.errors():
            return self.driver.get("cuMemAlloc_v2", nbytes, kind=ctypes.c_uint64)

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an array in host memory that the device can read and write while the host goes on."""
        nbytes = max(1, int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize)
        self.use()
        with self.errors():
            place = self.driver.get("cuMemHostAlloc", nbytes, 0, kind=ctypes.c_void_p)
        raw = (ctypes.c_char * nbytes).from_address(place)
        weakref.finalize(raw, self.quietly, "cuMemFreeHost", place).atexit = False
        return np.ndarray(shape, dtype, raw)

    def quietly(self, name: str, handle: int) -> None:
        """Free something by a function of the driver. If that fails, the device is lost, with its memory."""
        with suppress(DriverError):
            self.use()
            getattr(self.driver, name)(handle)

    # -- copies

    def send(self, array: np.ndarray, to: int, stream: int | None = None) -> None:
        """Copy a contiguous array to the device. A pinned array must stay as it is until the copy is done."""
        self.use()
        if array.nbytes:
            with self.errors():
                self.driver.cuMemcpyHtoDAsync_v2(to, address(array), array.nbytes, stream or self.main)

    def fetch(self, place: int, array: np.ndarray) -> None:
        """Copy memory of the device into a contiguous array, after the launches before; wait for it."""
        self.use()
        with self.errors():
            if array.nbytes:
                self.driver.cuMemcpyDtoHAsync_v2(address(array), place, array.nbytes, self.main)
            self.driver.cuStreamSynchronize(self.main)

    def copy(self, source: int, to: int, nbytes: int, stream: int | None = None) -> None:
        """Copy memory of the device to another place on the device."""
        self.use()
        with self.errors():
            self.driver.cuMemcpyDtoDAsync_v2(to, source, nbytes, stream or self.main)

    def fetch_later(self, place: int, array: np.ndarray, stream: int) -> None:
        """Begin to copy memory of the device into a pinned array. It has arrived when a later event has happened."""
        self.use()
        with self.errors():
            self.driver.cuMemcpyDtoHAsync_v2(address(array), place, array.nbytes, stream)

    def clear(self, memory: DeviceMemory) -> None:
        """Fill memory with zeros."""
        self.use()
        if memory.nbytes:
            with self.errors():
                self.driver.cuMemsetD8Async(memory.address, 0, memory.nbytes, self.main)

    def synchronize(self) -> None:
        """Wait until all work of the stream `main` is done."""
        self.use()
        with self.errors():
            self.driver.cuStreamSynchronize(self.main)

    def stream(self) -> int:
        """Return a new stream, which waits for no other one by itself."""
        self.use()
        with self.errors():
            return self.driver.get("cuStreamCreate", cuda_driver.NON_BLOCKING, kind=ctypes.c_void_p)

    def event(self) -> int:
        self.use()
        with self.errors():
            return self.driver.get("cuEventCreate", cuda_driver.NO_TIMING, kind=ctypes.c_void_p)

    def record(self, event: int, stream: int) -> None:
        """Let the event happen when the present work of the stream is done."""
        self.use()
        with self.errors():
            self.driver.cuEventRecord(event, stream)

    def wait(self, event: int, stream: int | None = None) -> None:
        """Let later work of a stream (None: the host) wait until the event has happened."""
        self.use()
        with self.errors():
            if stream is None:
                self.driver.cuEventSynchronize(event)
            else:
                self.driver.cuStreamWaitEvent(stream, event, 0)

    # -- kernels

    def kernels(self, op: str) -> ModuleType:
        """Return the functions of an op: see `kernels`."""
        return kernels(self.file(op))

    def file(self, op: str) -> str:
        """Return which file has the functions of an op for this precision, such as matmul.cuda_tf32."""
        other = self.precision != "float32" and op in ON_TENSOR_CORES
        return f"{op}.cuda_{self.precision}" if other else f"{op}.cuda"

    def function(self, kernel: Kernel, signature: tuple[Any, ...]) -> int:
        """Return the driver's handle of a kernel for arguments of these types."""
        key = kernel, signature
        if key not in self._functions:
            compiled = cuda_cache.load(kernel, signature, self.capability)
            self.use()
            try:
                module = self.driver.get("cuModuleLoadData", compiled.cubin, kind=ctypes.c_void_p)
            except DriverError as error:
                if error.code in cuda_driver.NO_KERNEL_IMAGE:
                    raise ConfigError(f"{self.name} cannot load a kernel: {error}; update the NVIDIA driver") from None
                raise
            self._functions[key] = self.driver.get(
                "cuModuleGetFunction", module, compiled.symbol.encode(), kind=ctypes.c_void_p
            )
        return self._functions[key]

    def has(self, kernel: Kernel, signature: tuple[Any, ...]) -> bool:
        """Return whether `function` has loaded this kernel."""
        return (kernel, signature) in self._functions

    def launch(self, kernel: Kernel, grid: Grid, arguments: tuple[Any, ...]) -> None:
        """Launch a kernel on arrays of this device and numbers. The launcher of `running`."""
        function = self.function(kernel, types_of(arguments))
        words = np.array([word for argument in arguments for word in words_of(argument)], np.int64)
        pointers = address(words) + WORD * np.arange(len(words), dtype=np.int64)
        with self.errors():
            self.driver.cuLaunchKernel(
                function, *grid, kernel.threads, 1, 1, 0, self.main, address(pointers), None
            )  # fmt: skip

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the kernels that are launched in the `with` block on this device."""
        self.use()
        with launch_with(self.launch):
            yield


def kernels(file: str) -> ModuleType:
    """Return a file of kernels, such as matmul.cuda. Raises ConfigError if there is none."""
    name = f"minidl.kernels.{file}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ConfigError(f"{file.split('.')[0]} has no kernels for a GPU") from None


def _check_version(driver: cuda_driver.Driver) -> None:
    """Raise ConfigError if the driver is too old for the machine code that the installed compiler makes."""
    from cuda.bindings import nvjitlink

    needed = nvjitlink.version()[0]
    if driver.version[0] < needed:
        other = "pip install 'minidl[cuda12]', or update the driver" if needed > 12 else "update the driver"
        raise ConfigError(f"the NVIDIA driver supports CUDA {driver.version[0]}.{driver.version[1]}, and the installed "
                          f"numba-cuda makes kernels for CUDA {needed}: {other}")  # fmt: skip


@cache
def open_gpu(name: str, precision: str = "float32") -> Gpu:
    """Return the GPU with this name, such as cuda:0. Raises ConfigError if it cannot be used."""
    return Gpu(int(name.removeprefix("cuda:")), precision)
