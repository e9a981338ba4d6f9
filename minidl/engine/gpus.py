"""GPUs by name, for code that also runs without one: it imports no CUDA package before a GPU is asked for."""

from __future__ import annotations

import re
from typing import Any

from minidl.checked import one_of
from minidl.errors import ConfigError

PRECISIONS = {  # what the matrix products of a GPU multiply. Their sums are float32
    "float32": "float32, on the ordinary units",
    "tf32": "float32 rounded to 10 bits of fraction, on tensor cores",
    "bf16": "float32 rounded to 7 bits of fraction, on tensor cores",
}


def open_gpu(name: str, precision: str = "float32") -> Any:
    """Return the GPU with a name such as cuda:0 (cuda_device.py), or None for "cpu".

    Raises ConfigError for another name or precision, and if the GPU cannot be used.
    """
    one_of("precision", precision, PRECISIONS)
    if name == "cpu":
        if precision != "float32":
            raise ConfigError(f"precision {precision} needs the tensor cores of a GPU, and the device is cpu: use "
                              "cuda:0, or leave the precision out")  # fmt: skip
        return None
    if not isinstance(name, str) or not re.fullmatch("cuda(:[0-9]{1,4})?", name):
        raise ConfigError(f"unknown device {name!r}: expected cpu, or cuda:0 for the first GPU")
    from minidl.engine import cuda_device

    return cuda_device.open_gpu(name if ":" in name else f"{name}:0", precision)


def count_gpus() -> int:
    """Return the number of GPUs. Raises ConfigError if there is none."""
    from minidl.engine.cuda_driver import load

    return load().get("cuDeviceGetCount")
