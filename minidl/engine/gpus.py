"""GPUs by name, for code that also runs without one: it imports no CUDA package before a GPU is asked for."""

from __future__ import annotations

import re
from typing import Any

from minidl.errors import ConfigError


def open_gpu(name: str) -> Any:
    """Return the GPU with a name such as cuda:0 (cuda_device.py), or None for "cpu".

    Raises ConfigError for another name, and if the GPU cannot be used.
    """
    if name == "cpu":
        return None
    if not isinstance(name, str) or not re.fullmatch("cuda(:[0-9]{1,4})?", name):
        raise ConfigError(f"unknown device {name!r}: expected cpu, or cuda:0 for the first GPU")
    from minidl.engine import cuda_device

    return cuda_device.open_gpu(name if ":" in name else f"{name}:0")


def count_gpus() -> int:
    """Return the number of GPUs. Raises ConfigError if there is none."""
    from minidl.engine.cuda_driver import load

    return load().get("cuDeviceGetCount")
