"""Kernels by their definition: the fake driver runs kernels/<op>/reference.py instead of the emulator.

    with installed(Settings()) as fake, by_definition(fake): ...
    with installed(Settings()) as fake, by_definition(fake, "cpu"): ...        kernels/<op>/cpu.py, for large networks

Nothing is compiled, so tests of the host code take seconds. A call of an op is then one launch, whose parameters are
its arrays, their shapes, and its numbers. Programs, memory, copies, streams and graphs are minidl's, as they are.
"""

from __future__ import annotations

import ctypes
import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from minidl.engine import cuda_device
from minidl.engine.cuda import DATA, Kernel, launch
from minidl.engine.device import Device

from .driver import FakeDriver, Function, Work

VECTOR = 7  # words of a vector


@contextmanager
def by_definition(fake: FakeDriver, device: str = "reference") -> Iterator[None]:
    """Replace the kernels of all ops inside the `with` block by those of this device."""

    def function(gpu: cuda_device.Gpu, kernel: Kernel, signature: Any) -> int:
        words = sum(VECTOR if hasattr(kind, "ndim") else 1 for kind in signature)
        work = partial(_run, fake, kernel.function, Device(device))
        return fake.add(Function(kernel.name, "", [8] * words, work))

    with (
        patch.object(cuda_device, "kernels", _kernels),
        patch.object(cuda_device.Gpu, "function", cache(function)),
        patch.object(cuda_device.Gpu, "has", lambda *_: True),
    ):
        yield


@cache
def _kernels(file: str) -> Any:
    """Return a stand-in for a file of kernels, such as matmul.cuda. Functions that are no kernels are the CPU's."""
    op = file.split(".")[0]
    names = importlib.import_module(f"minidl.kernels.{op}.reference").__all__
    others = vars(importlib.import_module(f"minidl.kernels.{op}.cpu"))
    return SimpleNamespace(**others | {name: _kernel(op, name) for name in names} | {"__all__": names})


def _kernel(op: str, name: str) -> Callable[..., None]:
    parameters = getattr(getattr(Device("cpu"), op), name).py_func

    def call(*arguments: Any) -> None:
        flat: list[Any] = []
        layout: list[Any] = []
        for a in arguments:
            if isinstance(a, np.ndarray):
                flat += [a.reshape(-1), *map(np.int64, a.shape)]
                layout.append((a.dtype, a.ndim))
            elif isinstance(a, tuple):
                flat += map(np.int64, a)
                layout.append(len(a))
            else:
                flat.append(a if isinstance(a, bool | float | np.generic) else np.int64(a))
                layout.append(np.asarray(flat[-1]).dtype)
        launch(_made(op, name, tuple(layout)), 1, *flat)

    call.__wrapped__ = parameters  # type: ignore[attr-defined]  # whose parameters the recorder reads
    return call


@cache
def _made(op: str, name: str, layout: tuple[Any, ...]) -> Kernel:
    def definition(device: Device, words: list[int], host: Callable[[int, int], int]) -> None:
        arguments: list[Any] = []
        at = 0
        for kind in layout:
            if isinstance(kind, tuple):
                dtype, axes = kind
                shape = tuple(words[at + VECTOR : at + VECTOR + axes])
                nbytes = math.prod(shape) * dtype.itemsize
                raw: Any = (ctypes.c_char * nbytes).from_address(host(words[at + DATA], nbytes) if nbytes else 0)
                arguments.append(np.ndarray(shape, dtype, raw) if nbytes else np.empty(shape, dtype))
                at += VECTOR + axes
            elif isinstance(kind, int):
                arguments.append(tuple(words[at : at + kind]))
                at += kind
            else:
                arguments.append(np.array(words[at : at + 1], np.int64).view(kind)[0].item())
                at += 1
        if op == "dropout" and isinstance(arguments[2], np.ndarray):  # (seed, start), in the GPU's memory
            seed, start = map(int, arguments[2])
            arguments[2:4] = seed, start + arguments[3]
        getattr(getattr(device, op), name)(*arguments)

    definition.__name__ = f"{op}.{name}"
    return Kernel(definition, 32, 1)


def _run(fake: FakeDriver, definition: Any, device: Device, words: list[int]) -> Work:
    return partial(definition, device, words, fake._host)
