"""NVIDIA's driver, libcuda.so.1, called through ctypes. It needs no CUDA toolkit and no other package.

    driver = load()
    driver.cuStreamSynchronize(stream)      raises DriverError if the function fails

`load` raises ConfigError if there is no driver, or if it finds no GPU.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

from minidl.errors import ConfigError, MinidlError

LIBRARY = "libcuda.so.1"
SUCCESS, OUT_OF_MEMORY, NOT_READY = 0, 2, 600  # some of the driver's error codes
NO_KERNEL_IMAGE = (200, 209, 218, 222)  # a cubin that this GPU or this driver cannot run
MAJOR, MINOR = 75, 76  # attributes of a device: its compute capability
NON_BLOCKING, NO_TIMING, THREAD_LOCAL = 1, 2, 1  # options of streams, events and captures

OUT = c_void_p  # the address of a result
ADDRESS = c_uint64  # in device memory
FUNCTIONS: dict[str, tuple[Any, ...]] = {  # name -> types of the arguments, as in NVIDIA's cuda.h
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (OUT,),
    "cuGetErrorName": (c_int, OUT),
    "cuGetErrorString": (c_int, OUT),
    "cuDeviceGetCount": (OUT,),
    "cuDeviceGet": (OUT, c_int),
    "cuDeviceGetName": (c_void_p, c_int, c_int),
    "cuDeviceGetAttribute": (OUT, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (OUT, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemGetInfo_v2": (OUT, OUT),
    "cuMemAlloc_v2": (OUT, c_size_t),
    "cuMemFree_v2": (ADDRESS,),
    "cuMemHostAlloc": (OUT, c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (ADDRESS, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, ADDRESS, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (ADDRESS, ADDRESS, c_size_t, c_void_p),
    "cuMemsetD8Async": (ADDRESS, c_ubyte, c_size_t, c_void_p),
    "cuStreamCreate": (OUT, c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, OUT),
    "cuGraphInstantiateWithFlags": (OUT, c_void_p, c_uint64),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphExecDestroy": (c_void_p,),
    "cuEventCreate": (OUT, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuModuleLoadData": (OUT, c_void_p),
    "cuModuleGetFunction": (OUT, c_void_p, c_char_p),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
}


class DriverError(MinidlError):
    """A function of the driver has failed. code: the driver's error code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Driver:
    """The functions of the driver, under their names. version: the newest CUDA that it supports, such as (13, 0)."""

    version: tuple[int, int]

    def __init__(self, library: Any) -> None:
        for name, types in FUNCTIONS.items():
            try:
                function = getattr(library, name)
            except AttributeError:
                raise ConfigError(f"the NVIDIA driver is too old: it has no {name}; update the driver") from None
            function.argtypes, function.restype = types, c_int
            setattr(self, name, function if name.startswith("cuGetError") else _Checked(self, name, function))
        self.launch_address = ctypes.cast(library.cuLaunchKernel, c_void_p).value

    def __getattr__(self, name: str) -> Any:  # for type checkers: __init__ sets all functions
        raise AttributeError(name)

    def check(self, code: int, name: str) -> None:
        """Raise DriverError unless the code that a function has returned means success."""
        if code == SUCCESS:
            return
        texts = []
        for function in (self.cuGetErrorName, self.cuGetErrorString):
            text = c_char_p()
            function(code, ctypes.byref(text))
            texts.append((text.value or b"unknown error").decode())
        raise DriverError(f"{name}: {texts[0]} ({code}): {texts[1]}", code)

    def get(self, name: str, *arguments: Any, kind: Any = c_int) -> int:
        """Return the result of a function whose first parameter is the result's address."""
        result = kind()
        getattr(self, name)(ctypes.byref(result), *arguments)
        return int(result.value or 0)


class _Checked:
    """A function of the driver that raises DriverError if it fails."""

    def __init__(self, driver: Driver, name: str, function: Any) -> None:
        self.driver, self.name, self.function = driver, name, function

    def __call__(self, *arguments: Any) -> None:
        code = self.function(*arguments)
        if code != SUCCESS:
            self.driver.check(code, self.name)


@cache
def load() -> Driver:
    """Return the driver of this machine. Raises ConfigError if there is none, or if it finds no GPU."""
    try:
        driver = Driver(ctypes.CDLL(LIBRARY))
    except OSError as error:
        raise ConfigError(f"no GPU can be used, because there is no NVIDIA driver ({error}): "
                          "install it, or leave out cuda") from None  # fmt: skip
    try:
        driver.cuInit(0)
        count = driver.get("cuDeviceGetCount")
    except DriverError as error:
        raise ConfigError(f"no GPU can be used: {error}") from None
    if not count:
        raise ConfigError("the NVIDIA driver finds no GPU: leave out cuda, or check $CUDA_VISIBLE_DEVICES")
    version = driver.get("cuDriverGetVersion")
    driver.version = version // 1000, version % 1000 // 10
    return driver
