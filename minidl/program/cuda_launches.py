"""The launches that a call of kernels/<op>/cuda.py makes, and their compilation by several processes.

A call is (file, kernel, arguments). Its arrays are addresses: the functions of cuda.py choose kernels and blocks by
shapes, types and alignment. Worker processes (`python -m minidl.program.cuda_launches`) read a line of JSON for each
kernel to compile, with the call that launches it; this process then loads the kernel from the cache.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from minidl.engine import cuda_cache, cuda_device
from minidl.engine.cuda import Grid, Kernel, launch_with, types_of
from minidl.engine.cuda_array import OnDevice, array_at
from minidl.engine.cuda_device import Gpu
from minidl.engine.device import address
from minidl.program.precompile import OnProgress, compile_in_processes, serve, worker_limit

BOUNDARY = 256  # bytes: the alignment of memory on a GPU
APART = 1 << 48  # bytes between the regions of a step; addresses of the host are below

Call = tuple[str, str, Sequence[Any]]  # file of kernels such as matmul.cuda, kernel, arguments


class Launch(NamedTuple):
    """A launch: the arguments of a launcher (engine/cuda.py)."""

    kernel: Kernel
    grid: Grid
    arguments: tuple[Any, ...]

    @property
    def key(self) -> tuple[Kernel, tuple[Any, ...]]:
        """The kernel, and the types of its arguments."""
        return self.kernel, types_of(self.arguments)


Key = tuple[Kernel, tuple[Any, ...]]


def launches_of(file: str, name: str, arguments: Sequence[Any]) -> list[Launch]:
    """Return the launches of a call."""
    found: list[Launch] = []
    with launch_with(lambda *launch: found.append(Launch(*launch))):
        getattr(cuda_device.kernels(file), name)(*arguments)
    return found


def compile_all(gpu: Gpu, calls: Sequence[Call], progress: OnProgress) -> None:
    """Compile the kernels of these calls that are not in the cache. progress: called with (kernels ready, all)."""
    first: dict[Key, tuple[Call, int]] = {}  # kernel and types -> a call that launches it, and its number there
    for call in calls:
        for number, launch in enumerate(launches_of(*call)):
            first.setdefault(launch.key, (call, number))
    missing = [key for key in first if not (gpu.has(*key) or cuda_cache.contains(*key, gpu.capability))]
    ready = len(first) - len(missing)
    progress(ready, len(first))
    if len(missing) > 1 and worker_limit() > 1:
        requests = [_encode(gpu.capability, *first[key]) for key in missing]
        with suppress(OSError):  # no process can be started
            compile_in_processes(
                "minidl.program.cuda_launches", requests, lambda more: progress(ready + more, len(first))
            )  # fmt: skip
    for key in first:
        gpu.function(*key)
    progress(len(first), len(first))


def _encode(cc: tuple[int, int], call: Call, number: int) -> str:
    file, name, arguments = call
    return json.dumps([cc, file, name, [_described(argument) for argument in arguments], number])


def _described(argument: Any) -> Any:
    if isinstance(argument, OnDevice):
        return {"shape": argument.shape, "dtype": argument.dtype.name, "at": address(argument) % BOUNDARY}
    if isinstance(argument, np.ndarray):
        return {"values": argument.tolist(), "dtype": argument.dtype.name}
    if isinstance(argument, np.generic):
        return {"number": argument.item(), "dtype": argument.dtype.name}
    return argument


def _argument(described: Any, position: int) -> Any:
    if not isinstance(described, dict):
        return tuple(described) if isinstance(described, list) else described
    dtype = np.dtype(described["dtype"])
    if "values" in described:
        return np.array(described["values"], dtype)
    if "number" in described:
        return dtype.type(described["number"])
    return array_at((position + 1) * APART + described["at"], tuple(described["shape"]), dtype)


def _compile_one(line: str) -> bool:
    cc, file, name, described, number = json.loads(line)
    arguments = [_argument(argument, position) for position, argument in enumerate(described)]
    kernel, signature = launches_of(file, name, arguments)[number].key
    cuda_cache.load(kernel, signature, (cc[0], cc[1]))
    return cuda_cache.contains(kernel, signature, (cc[0], cc[1]))


if __name__ == "__main__":
    serve(_compile_one)
