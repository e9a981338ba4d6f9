"""Compiles the kernels of a step before it runs: as many at once as there are cores.

Kernels that are not in the cache yet are given to processes (`python -m minidl.compiler`), which compile them into the
cache, from where this process loads them. A process is asked in one line for each kernel,

    cpu conv forward float32[4] float32[4] ... bool int64 int64x2        device, op, kernel, types of arguments

and answers `ready`. Whatever goes wrong with it (no cache that can be written to, a process that died), the kernel is
then compiled here, which takes longer and no more.
"""

from __future__ import annotations

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

from numba import types

from minidl.engine.device import Device
from minidl.engine.jit import cached, threads
from minidl.program.call import numba_type

# Seconds, about, of those that take more than one: the longest first. The others of matmul and conv need little but
# what these have compiled.
SECONDS = {"conv.forward": 9, "conv.backward_weight": 5, "movement.copy": 3, "matmul.nn": 2, "softmax.cross_entropy": 2,
           "reduce.sum": 2, "matmul.nt": 0, "matmul.tn": 0, "conv.backward_input": 0}  # fmt: skip

Progress = Callable[[int, int], None]


class Kernel(NamedTuple):
    """A kernel, and the types of the arguments that it is wanted for."""

    device: str
    op: str
    name: str
    signature: tuple[types.Type, ...]

    @property
    def function(self) -> Any:
        return getattr(getattr(Device(self.device), self.op), self.name)

    def ready(self) -> bool:
        return self.signature in self.function.overloads or cached(self.function, self.signature)


class Noting:
    """Stands in for a device: notes which kernels it is asked for, and calls none."""

    def __init__(self, device: Device) -> None:
        self.name, self.kernels = device.name, list[Kernel]()

    def __getattr__(self, op: str) -> Any:
        return _NotingOp(self, op)


class _NotingOp(NamedTuple):
    noting: Noting
    op: str

    def __getattr__(self, name: str) -> Callable[..., None]:
        def note(*arguments: Any) -> None:
            signature = tuple(map(numba_type, arguments))
            self.noting.kernels.append(Kernel(self.noting.name, self.op, name, signature))

        return note


def compile_all(kernels: Iterable[Kernel], progress: Progress = lambda ready, total: None) -> None:
    """Compile these kernels, or load them from the cache. progress: called with (kernels ready, all of them)."""
    kernels = list(dict.fromkeys(kernels))
    missing = [kernel for kernel in kernels if not kernel.ready()]
    progress(len(kernels) - len(missing), len(kernels))
    missing.sort(key=lambda kernel: -SECONDS.get(f"{kernel.op}.{kernel.name}", 1))
    if len(missing) > 1 and _at_once() > 1:
        with suppress(OSError):  # no process can be started
            _compile_in_processes(missing, lambda ready: progress(len(kernels) - len(missing) + ready, len(kernels)))
    for kernel in kernels:
        kernel.function.compile(kernel.signature)
    progress(len(kernels), len(kernels))


def _at_once() -> int:
    """How many kernels: a replica compiles for all of them, and may use all their cores (comm/launch.py)."""
    return len(os.sched_getaffinity(0)) if "MINIDL_CORES" in os.environ else threads()


def _compile_in_processes(kernels: Sequence[Kernel], progress: Callable[[int], None]) -> None:
    """Give kernels to processes until all are compiled, or no process is left."""
    waiting, ready = deque(kernels), 0
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
        "PYTHONSAFEPATH": "1",  # or a file of the user's called queue.py would be taken for the library's
        "NUMBA_NUM_THREADS": "1",
        "MINIDL_THREADS": "",
    }
    workers: list[subprocess.Popen[bytes]] = []
    with selectors.DefaultSelector() as answers:
        try:
            for _ in range(min(_at_once(), len(kernels))):
                worker = subprocess.Popen(
                    [sys.executable, "-m", "minidl.program.precompile"], env=environment, bufsize=0,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                )  # fmt: skip
                workers.append(worker)
                assert worker.stdout
                answers.register(worker.stdout, selectors.EVENT_READ, worker)
                _ask(worker, waiting.popleft())
            while answers.get_map():
                for key, _ in answers.select():
                    worker = key.data
                    if worker.stdout.readline() == b"ready\n":
                        ready += 1
                        progress(ready)
                        if waiting:
                            _ask(worker, waiting.popleft())
                            continue
                    answers.unregister(worker.stdout)  # nothing is left to do, or it died
        finally:
            for worker in workers:
                worker.kill()
                with worker:  # closes its pipes, and waits
                    pass


def _ask(worker: subprocess.Popen[bytes], kernel: Kernel) -> None:
    assert worker.stdin
    line = " ".join([*kernel[:3], *map(_word, kernel.signature)])
    with suppress(BrokenPipeError):  # its output says so, too
        worker.stdin.write(line.encode() + b"\n")


def _word(kind: types.Type) -> str:
    """float32[4] for an array with 4 axes, int64x2 for two numbers, int64"""
    if isinstance(kind, types.Array):
        return f"{kind.dtype}[{kind.ndim}]"
    return f"{kind.dtype}x{kind.count}" if isinstance(kind, types.UniTuple) else str(kind)


def _kind(word: str) -> types.Type:
    """The type that a word stands for."""
    parts = re.fullmatch(r"([a-z]+[0-9]*)(?:\[(\d+)\]|x(\d+))?", word)
    assert parts, word
    number = types.boolean if parts[1] == "bool" else getattr(types, parts[1])
    if parts[2]:
        return types.Array(number, int(parts[2]), "C")
    return types.UniTuple(number, int(parts[3])) if parts[3] else number


def _read(lines: SimpleQueue[str]) -> None:
    """End this process, in the middle of a kernel if need be, as soon as who started it has ended."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def main() -> None:
    """What a process does: compile what standard input names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started this
    lines: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read, args=[lines], daemon=True).start()
    while True:
        device, op, name, *words = lines.get().split()
        kernel = Kernel(device, op, name, tuple(map(_kind, words)))
        kernel.function.compile(kernel.signature)
        if not cached(kernel.function, kernel.signature):
            break  # all would be in vain
        print("ready", flush=True)


if __name__ == "__main__":
    main()
