"""A fake of NVIDIA's driver: the functions of libcuda.so.1 that minidl calls, with the emulator as the GPU.

Each function is a C function pointer (ctypes), so minidl's host code runs as it is, compiled code included.

- Device memory is host memory at other addresses, at which the host would crash. It begins as NaN.
- Streams do their work as late as possible: when the host waits for it. A missing wait or event gives wrong results.
  With `eager`, work is done at once: a copy that does not wait for the kernels before it is then too early.
- Kernels run on the emulator, with its checks: bounds, races, barriers. An error there loses the device, and is kept in
  `error`.

Limits: other launches than cuLaunchKernel, and work that has no stream do not exist. All GPUs
are equal. Graphs contain launches only. Nothing happens at the same time.
"""

from __future__ import annotations

import ctypes
import re
import threading
import traceback
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from emulator import run_words

from minidl.engine import cuda_cache
from minidl.engine.cuda_driver import FUNCTIONS, MAJOR, MINOR
from minidl.engine.device import address, aligned

from .streams import Event, Stream, Work

FAR = 1 << 56  # between an address in device memory and that of the host memory which stands for it
INVALID, OUT_OF_MEMORY, NO_CONTEXT, NO_IMAGE, UNSUPPORTED, FAILED = 1, 2, 201, 209, 801, 719
IN_CAPTURE, INVALIDATED = 900, 901
NAMES = {INVALID: b"CUDA_ERROR_INVALID_VALUE", OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY",
         NO_CONTEXT: b"CUDA_ERROR_INVALID_CONTEXT", NO_IMAGE: b"CUDA_ERROR_NO_BINARY_FOR_GPU",
         UNSUPPORTED: b"CUDA_ERROR_NOT_SUPPORTED", FAILED: b"CUDA_ERROR_LAUNCH_FAILED",
         IN_CAPTURE: b"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
         INVALIDATED: b"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"}  # fmt: skip
NEED_CONTEXT = ("cuMem", "cuStream", "cuModule", "cuLaunch", "cuGraph", "cuEvent")
WORDS = 7  # of a vector, among the parameters of a kernel
SIZES = {"b8": 1, "u8": 1, "s8": 1, "u16": 2, "s16": 2, "u32": 4, "s32": 4, "f32": 4, "b32": 4}  # others: 8 bytes


class Failure(Exception):
    """A function of the driver fails with this code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass
class Settings:
    """What the fake driver pretends to be.

    captures: make graphs. breaks_captures: accept a capture, and refuse launches during it. eager: do work at once.
    loads: load cubins. lose_after: the device is lost in this launch; 0: never. definition: "reference" or "cpu", the
    device whose kernels run instead of compiled ones (by_definition.py); used by `environment` only.
    """

    gpus: int = 1
    memory: int = 1 << 30
    capability: tuple[int, int] = (8, 0)
    version: int = 13000
    captures: bool = True
    breaks_captures: bool = False
    eager: bool = False
    loads: bool = True
    lose_after: int = 0
    definition: str = ""


@dataclass
class Function:
    """A kernel. sizes: of its parameters, in bytes. make: returns the work of a launch; None: the emulator's."""

    symbol: str
    ptx: str
    sizes: list[int]
    make: Callable[[list[int]], Work] | None = None


class FakeDriver:
    """The library: each attribute cu... is a C function pointer. counts: how often each was called."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.error, self.launches = settings, "", 0
        self.counts = dict.fromkeys(FUNCTIONS, 0)
        self.log: list[str] = []  # the names of the kernels that ran
        self._lost = False
        self._lock, self._thread = threading.RLock(), threading.local()
        self._things: dict[int, Any] = {}  # handle -> stream, event, module, function or graph
        self._device: dict[int, np.ndarray] = {}  # address -> memory
        self._pinned: dict[int, np.ndarray] = {}
        self._ptx: dict[bytes, str] = {}  # cubin -> PTX
        cuda_cache.load = self._remember(cuda_cache.load)
        for name, types in FUNCTIONS.items():
            body = getattr(self, "_" + name.removesuffix("_v2"))
            setattr(self, name, CFUNCTYPE(c_int, *types)(partial(self._call, name, body)))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def _remember(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """Note the PTX of each cubin that is loaded: the emulator runs PTX."""

        def remembering(*arguments: Any) -> Any:
            found = load(*arguments)
            self._ptx[found.cubin] = found.ptx
            return found

        return remembering

    def _call(self, name: str, body: Callable[..., None], *arguments: Any) -> int:
        with self._lock:
            self.counts[name] += 1
            if name.startswith("cuGetError"):
                body(*arguments)
                return 0
            try:
                if self._lost:
                    return FAILED
                if name.startswith(NEED_CONTEXT) and not getattr(self._thread, "context", None):
                    return NO_CONTEXT
                body(*arguments)
            except Failure as failure:
                return failure.code
            except Exception as error:
                self.error, self._lost = self.error or f"{type(error).__name__}: {error}", True
                traceback.print_exc()
            return FAILED if self._lost else 0

    def add(self, thing: Any) -> int:
        """Return a handle of a new thing."""
        handle = 1000 + len(self._things)
        self._things[handle] = thing
        return handle

    def _make(self, at: int, thing: Any) -> None:
        """Write a handle of a new thing to the address of a result."""
        _write(at, self.add(thing), c_void_p)

    # -- the device

    def _cuInit(self, flags: int) -> None:
        pass

    def _cuDriverGetVersion(self, at: int) -> None:
        _write(at, self.settings.version)

    def _cuGetErrorName(self, code: int, at: int) -> None:
        _write(at, ctypes.cast(ctypes.c_char_p(NAMES.get(code, b"?")), c_void_p).value, c_void_p)

    def _cuGetErrorString(self, code: int, at: int) -> None:
        _write(at, ctypes.cast(ctypes.c_char_p(b"of the fake driver"), c_void_p).value, c_void_p)

    def _cuDeviceGetCount(self, at: int) -> None:
        _write(at, self.settings.gpus)

    def _cuDeviceGet(self, at: int, number: int) -> None:
        _write(at, number)

    def _cuDeviceGetName(self, at: int, size: int, device: int) -> None:
        ctypes.memmove(at, b"emulated GPU\0", 13)

    def _cuDeviceGetAttribute(self, at: int, attribute: int, device: int) -> None:
        _write(at, self.settings.capability[(MAJOR, MINOR).index(attribute)])

    def _cuDevicePrimaryCtxRetain(self, at: int, device: int) -> None:
        _write(at, 1 + device, c_void_p)

    def _cuCtxSetCurrent(self, context: int) -> None:
        self._thread.context = context

    # -- memory

    def _cuMemGetInfo(self, free: int, total: int) -> None:
        _write(free, self.settings.memory - sum(m.size for m in self._device.values()), ctypes.c_size_t)
        _write(total, self.settings.memory, ctypes.c_size_t)

    def _cuMemAlloc(self, at: int, nbytes: int) -> None:
        if nbytes > self.settings.memory - sum(m.size for m in self._device.values()):
            raise Failure(OUT_OF_MEMORY)
        memory = aligned(nbytes + 256, np.uint8)
        memory = memory[-address(memory) % 256 :][:nbytes]
        memory[:] = 255
        self._device[address(memory) + FAR] = memory
        _write(at, address(memory) + FAR, ctypes.c_uint64)

    def _cuMemFree(self, place: int) -> None:
        for stream in self._streams():  # as the real driver, which waits
            stream.finish()
        self._device.pop(place)

    def _cuMemHostAlloc(self, at: int, nbytes: int, flags: int) -> None:
        memory = aligned(nbytes, np.uint8)
        self._pinned[address(memory)] = memory
        _write(at, address(memory), c_void_p)

    def _cuMemFreeHost(self, place: int) -> None:
        self._pinned.pop(place)

    def _host(self, place: int, nbytes: int) -> int:
        """Return the host address of device memory. Raises Failure if it is not allocated."""
        for start, memory in self._device.items():
            if start <= place and place + nbytes <= start + memory.size:
                return place - FAR
        raise Failure(INVALID)

    def _is_pinned(self, place: int) -> bool:
        return any(start <= place < start + memory.size for start, memory in self._pinned.items())

    def _cuMemcpyHtoDAsync(self, to: int, source: int, nbytes: int, stream: int) -> None:
        target = self._host(to, nbytes)
        if self._is_pinned(source):
            self._stream(stream).add(partial(ctypes.memmove, target, source, nbytes))
        else:
            content = ctypes.string_at(source, nbytes)  # the driver stages it before it returns
            self._stream(stream).add(lambda: ctypes.memmove(target, content, nbytes))

    def _cuMemcpyDtoHAsync(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self._stream(stream).add(partial(ctypes.memmove, to, self._host(source, nbytes), nbytes))
        if not self._is_pinned(to):  # the driver returns only when the copy is done
            self._stream(stream).finish()

    def _cuMemcpyDtoDAsync(self, to: int, source: int, nbytes: int, stream: int) -> None:
        work = partial(ctypes.memmove, self._host(to, nbytes), self._host(source, nbytes), nbytes)
        self._stream(stream).add(work)

    def _cuMemsetD8Async(self, to: int, value: int, nbytes: int, stream: int) -> None:
        self._stream(stream).add(partial(ctypes.memset, self._host(to, nbytes), value, nbytes))

    # -- streams, events, graphs

    def _streams(self) -> list[Stream]:
        return [thing for thing in self._things.values() if isinstance(thing, Stream)]

    def _stream(self, handle: int) -> Stream:
        stream = self._things.get(handle)
        if not isinstance(stream, Stream):
            raise Failure(INVALID)
        return stream

    def _cuStreamCreate(self, at: int, flags: int) -> None:
        self._make(at, Stream(self.settings.eager))

    def _cuStreamSynchronize(self, handle: int) -> None:
        if self._stream(handle).captured is not None:
            raise Failure(IN_CAPTURE)
        self._stream(handle).finish()

    def _cuStreamWaitEvent(self, handle: int, event: int, flags: int) -> None:
        found: Event = self._things[event]
        self._stream(handle).add(partial(found.wait, found.recorded))

    def _cuEventCreate(self, at: int, flags: int) -> None:
        self._make(at, Event())

    def _cuEventRecord(self, event: int, stream: int) -> None:
        self._things[event].record(self._stream(stream))

    def _cuEventSynchronize(self, event: int) -> None:
        self._things[event].wait(self._things[event].recorded)

    def _cuStreamBeginCapture(self, handle: int, mode: int) -> None:
        if not self.settings.captures:
            raise Failure(UNSUPPORTED)
        self._stream(handle).captured = []

    def _cuStreamEndCapture(self, handle: int, at: int) -> None:
        stream = self._stream(handle)
        work, stream.captured = stream.captured, None
        if self.settings.breaks_captures:
            raise Failure(INVALIDATED)
        self._make(at, work)

    def _cuGraphInstantiateWithFlags(self, at: int, graph: int, flags: int) -> None:
        self._make(at, list(self._things[graph]))

    def _cuGraphLaunch(self, graph: int, stream: int) -> None:
        for work in self._things[graph]:
            self._stream(stream).add(work)

    def _cuGraphDestroy(self, graph: int) -> None:
        self._things[graph] = None

    _cuGraphExecDestroy = _cuGraphDestroy

    # -- kernels

    def _cuModuleLoadData(self, at: int, image: int) -> None:
        if not self.settings.loads:
            raise Failure(NO_IMAGE)
        self._make(at, self._ptx[_elf(image)])

    def _cuModuleGetFunction(self, at: int, module: int, name: bytes) -> None:
        ptx, symbol = self._things[module], name.decode()
        header = re.search(rf"\.entry {re.escape(symbol)}\((.*?)\)", ptx, re.DOTALL)
        if header is None:
            raise Failure(INVALID)
        kinds = re.findall(r"\.param \.(?:align \d+ \.)?(\w+)", header[1])
        self._make(at, Function(symbol, ptx, [SIZES.get(kind, 8) for kind in kinds]))

    def _cuLaunchKernel(self, handle: int, *rest: Any) -> None:
        grid, (threads, y, z, shared), (stream, at, extra) = rest[:3], rest[3:7], rest[7:]
        function: Function = self._things[handle]
        pointers = (c_void_p * len(function.sizes)).from_address(at)
        sizes = zip(pointers, function.sizes, strict=True)
        words = [int.from_bytes(ctypes.string_at(p, n), "little", signed=True) for p, n in sizes]
        if (y, z, shared, extra) != (1, 1, 0, None) or not all(grid):
            raise Failure(INVALID)
        if self.settings.breaks_captures and self._stream(stream).captured is not None:
            raise Failure(IN_CAPTURE)
        self._stream(stream).add(self._run(function, grid, threads, words))

    def _run(self, function: Function, grid: Any, threads: int, words: list[int]) -> Work:
        def run() -> None:
            self.launches += 1
            self.log.append(function.symbol)
            if self._lost or self.launches == self.settings.lose_after:
                self._lost = True
                return
            if function.make is not None:
                function.make(words)()
                return
            arrays, here = [], list(words)
            for i in range(len(words) - WORDS + 1):
                zero, parent, size, item, place, length, stride = words[i : i + WORDS]
                if (zero, parent, length, stride) == (0, 0, size, item) and place >= FAR and size:
                    here[i + 4] = self._host(place, size * item)
                    raw = (ctypes.c_char * (size * item)).from_address(here[i + 4])
                    arrays.append(np.frombuffer(raw, f"u{item}"))
            run_words(function.ptx, grid, threads, here, arrays)

        return run


def _write(at: int, value: Any, kind: Any = c_int) -> None:
    kind.from_address(at).value = value


def _elf(image: int) -> bytes:
    """Return the cubin at an address: an ELF file, whose header says where its last part ends."""
    header = ctypes.string_at(image, 64)
    sections, size, count = (int.from_bytes(header[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62)))
    programs, entry, number = (int.from_bytes(header[a:b], "little") for a, b in ((32, 40), (54, 56), (56, 58)))
    return ctypes.string_at(image, max(sections + size * count, programs + entry * number))
