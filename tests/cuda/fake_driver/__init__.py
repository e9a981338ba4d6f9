"""A fake driver in place of NVIDIA's, for tests of the host code without a GPU (driver.py).

    with installed(Settings(captures=False)) as fake: ...      in this process
    environment(Settings(...))                                 variables for a process that gets a fake driver

Both replace what `ctypes.CDLL("libcuda.so.1")` returns to minidl, whose code stays as it is.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .driver import FakeDriver, Settings

HERE = Path(__file__).parent
VARIABLE = "MINIDL_TEST_CUDA"
_CDLL = ctypes.CDLL


def replace_library(settings: dict[str, Any]) -> None:
    """Let this process find a fake driver. It is made at the first use, since it imports minidl."""

    def library(name: Any, *arguments: Any, **options: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        if name != "libcuda.so.1" or caller != "minidl.engine.cuda_driver":  # numba-cuda looks for a driver, too
            return _CDLL(name, *arguments, **options)
        from .driver import FakeDriver, Settings

        fake = FakeDriver(Settings(**settings | {"capability": tuple(settings["capability"])}))
        fakes.append(fake)
        if fake.settings.definition:
            from .by_definition import by_definition

            _kept.append(by_definition(fake, fake.settings.definition))
            _kept[-1].__enter__()  # until the process ends
        return fake

    ctypes.CDLL = library  # type: ignore[assignment,misc]


fakes: list[Any] = []
_kept: list[Any] = []


@contextmanager
def installed(settings: Settings) -> Iterator[FakeDriver]:
    """Let minidl find a fake driver inside the `with` block."""
    from minidl.engine import cuda_cache, cuda_device, cuda_driver

    load = cuda_cache.load
    replace_library(asdict(settings))
    cuda_driver.load.cache_clear()
    cuda_device.open_gpu.cache_clear()
    cuda_device._current.gpu = None
    try:
        cuda_driver.load()
        yield fakes[-1]
    finally:
        ctypes.CDLL, cuda_cache.load = _CDLL, load  # type: ignore[misc]
        cuda_driver.load.cache_clear()
        cuda_device.open_gpu.cache_clear()
        cuda_device._current.gpu = None


def environment(settings: Settings) -> dict[str, str]:
    """Return variables with which Python imports site/sitecustomize.py, which calls `replace_library`."""
    path = [str(HERE / "site"), str(HERE.parent), str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path)), VARIABLE: json.dumps(asdict(settings))}
