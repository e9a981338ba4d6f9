"""Compile the kernels of a recorded step before it runs, several at a time.

Worker processes (`python -m minidl.program.precompile`) compile the kernels that are not in the cache yet. This process
then loads them from the cache. A worker reads one line for each kernel,

    cpu conv forward float32[4] float32[4] ... bool int64 int64x2        device, op, kernel, types of arguments

and replies `ready`. If anything fails (the cache cannot be written, a worker dies), this process compiles the kernels
itself, which only takes longer.
"""

from __future__ import annotations

import gc
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import DTypeLike

from minidl.engine.device import Device
from minidl.engine.jit import cached, threads
from minidl.program.call import numba_type
from minidl.resources import cores

# Approximate compilation times in seconds (1 for all others). The slowest kernels begin first. Those with 0, and those
# of dx, begin last: they share functions with the others, and load them from the cache.
SECONDS = {"conv.winograd_forward": 13, "conv_norm.winograd_forward": 13, "conv.direct_forward": 10,
           "conv_norm.direct_forward": 10, "conv.direct_backward_weight": 7, "norm.batch_norm": 5, "matmul.nn": 5,
           "conv.narrow_forward": 4, "conv_norm.narrow_forward": 4, "conv.product_forward": 4,
           "conv_norm.product_forward": 4, "conv.winograd_backward_weight": 3,
           "conv_norm.winograd_backward_weight": 3, "group_norm.group_norm": 3, "conv.large_forward": 2,
           "movement.copy": 2, "reduce.sum": 2, "softmax.cross_entropy": 1.5, "matmul.nt": 0, "matmul.tn": 0,
           "conv.product_backward_weight": 0}  # fmt: skip

OnProgress = Callable[[int, int], None]  # called with the number of kernels that are ready, and of all kernels


def silent(ready: int, total: int) -> None:
    """Report no progress."""


class Kernel(NamedTuple):
    """A kernel, and the types of its arguments."""

    device: str
    op: str
    name: str
    signature: tuple[types.Type, ...]

    @property
    def function(self) -> Any:
        return getattr(getattr(Device(self.device), self.op), self.name)

    @classmethod
    def of(cls, device: str, op: str, name: str, arguments: Iterable[Any]) -> Kernel:
        """Return the kernel of a call. If it is one of several (`jit.choice`), the arguments determine which one."""
        arguments = list(arguments)
        choose = getattr(getattr(getattr(Device(device), op), name), "choose", None)
        name = choose(*arguments).__name__ if choose else name
        return cls(device, op, name, tuple(map(numba_type, arguments)))

    def ready(self) -> bool:
        """Return whether the kernel is compiled, in this process or in the cache."""
        return self.signature in self.function.overloads or cached(self.function, self.signature)


class KernelCollector:
    """A stand-in for a device that lists the kernels that would be called, and calls none."""

    def __init__(self, device: Device) -> None:
        self.name, self.kernels = device.name, list[Kernel]()

    def __getattr__(self, op: str) -> Any:
        return _CollectorOp(self, op)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        return Device(self.name).empty(shape, dtype)


class _CollectorOp(NamedTuple):
    collector: KernelCollector
    op: str

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kernels = getattr(Device(self.collector.name), self.op)
        if name not in kernels.__all__:  # such as nn_scratch, which returns a size
            return getattr(kernels, name)

        def collect(*arguments: Any) -> None:
            self.collector.kernels.append(Kernel.of(self.collector.name, self.op, name, arguments))

        return collect


def compile_all(kernels: Iterable[Kernel], progress: OnProgress = silent) -> None:
    """Compile these kernels, or load them from the cache. progress: called with (kernels ready, all kernels)."""
    kernels = list(dict.fromkeys(kernels))
    missing = [kernel for kernel in kernels if not kernel.ready()]
    progress(len(kernels) - len(missing), len(kernels))
    missing.sort(key=_seconds, reverse=True)
    if len(missing) > 1 and worker_limit() > 1:
        requests = [" ".join([*kernel[:3], *map(_encode, kernel.signature)]) for kernel in missing]
        with suppress(OSError):  # no process can be started
            compile_in_processes(
                "minidl.program.precompile", requests,
                lambda ready: progress(len(kernels) - len(missing) + ready, len(kernels)),
            )  # fmt: skip
    for kernel in kernels:
        if kernel.signature not in kernel.function.overloads:
            kernel.function.compile(kernel.signature)
    progress(len(kernels), len(kernels))


def _seconds(kernel: Kernel) -> float:
    return 0 if kernel.name.endswith("backward_input") else SECONDS.get(f"{kernel.op}.{kernel.name}", 1)


def worker_limit() -> int:
    """Return how many kernels to compile in parallel: one per thread, or one per core if MINIDL_CORES is set.

    comm/launch/local.py sets MINIDL_CORES for its ranks. One of them compiles for all ranks of the machine.
    """
    return cores() if "MINIDL_CORES" in os.environ else threads()


def compile_in_processes(module: str, requests: Sequence[str], progress: Callable[[int], None]) -> None:
    """Send requests to worker processes, `python -m MODULE`, until all are ready, or no worker is left.

    A request is a line; a worker replies `ready`. progress: called with the number of requests that are ready.
    """
    waiting, ready = deque(requests), 0
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
        "PYTHONSAFEPATH": "1",  # else queue.py in the working folder would hide the standard library's module
        "NUMBA_NUM_THREADS": "1",
        "MINIDL_THREADS": "",
    }
    workers: list[subprocess.Popen[bytes]] = []
    with selectors.DefaultSelector() as replies:
        try:
            for _ in range(min(worker_limit(), len(requests))):
                worker = subprocess.Popen(
                    [sys.executable, "-m", module], env=environment, bufsize=0,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                )  # fmt: skip
                workers.append(worker)
                assert worker.stdout
                replies.register(worker.stdout, selectors.EVENT_READ, worker)
                _request(worker, waiting.popleft())
            while replies.get_map():
                for key, _ in replies.select():
                    worker = key.data
                    if worker.stdout.readline() == b"ready\n":
                        ready += 1
                        progress(ready)
                        if waiting:
                            _request(worker, waiting.popleft())
                            continue
                    replies.unregister(worker.stdout)  # no kernel is left, or the worker died
        finally:
            for worker in workers:
                worker.kill()
                with worker:  # closes its pipes, and waits
                    pass


def _request(worker: subprocess.Popen[bytes], line: str) -> None:
    """Send a request to a worker."""
    assert worker.stdin
    with suppress(BrokenPipeError):  # the worker died, so its output ends as well
        worker.stdin.write(line.encode() + b"\n")


def _encode(kind: types.Type) -> str:
    """Return a type as text: float32[4] for an array with 4 axes, int64x2 for two numbers, int64 for a number."""
    if isinstance(kind, types.Array):
        return f"{kind.dtype}[{kind.ndim}]"
    return f"{kind.dtype}x{kind.count}" if isinstance(kind, types.UniTuple) else str(kind)


def _decode(text: str) -> types.Type:
    """Return the type that `_encode` turns into this text."""
    parts = re.fullmatch(r"([a-z]+[0-9]*)(?:\[(\d+)\]|x(\d+))?", text)
    assert parts, text
    number = types.boolean if parts[1] == "bool" else getattr(types, parts[1])
    if parts[2]:
        return types.Array(number, int(parts[2]), "C")
    return types.UniTuple(number, int(parts[3])) if parts[3] else number


def _read_requests(lines: SimpleQueue[str]) -> None:
    """Queue the lines of standard input. When the parent process exits, exit at once, even during a compilation."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def serve(compile_one: Callable[[str], bool]) -> None:
    """Run a worker process: call a function with each request on standard input.

    The function returns whether the cache now contains the kernel. If not, it cannot be written, and the worker ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    gc.disable()  # this process is short-lived: compilation takes 4% less time, and 3% more memory
    lines: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read_requests, args=[lines], daemon=True).start()
    while compile_one(lines.get()):
        print("ready", flush=True)


def _compile_one(line: str) -> bool:
    device, op, name, *signature = line.split()
    kernel = Kernel(device, op, name, tuple(map(_decode, signature)))
    kernel.function.compile(kernel.signature)
    return cached(kernel.function, kernel.signature)


if __name__ == "__main__":
    serve(_compile_one)
