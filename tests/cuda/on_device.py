"""Calls of kernels/<op>/cuda.py on a GPU, with the arguments of tests/kernel_cases."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from kernel_cases import Arguments
from kernel_cases.comparing import SCRATCH, module, parameters

from minidl.engine.cuda_array import array_at
from minidl.engine.cuda_device import Gpu
from minidl.engine.gpus import open_gpu
from minidl.errors import ConfigError

VARIABLE = "MINIDL_TEST_GPU"  # the GPU to test, such as cuda:1; default: the first
ON_HOST = {"source_strides", "shape", "target_strides"}  # arrays whose values choose a launch


def find_gpu() -> tuple[Gpu | None, str]:
    """Return the GPU to test, or None and the reason."""
    try:
        return open_gpu(os.environ.get(VARIABLE, "cuda:0")), ""
    except ConfigError as error:
        return None, str(error)


def run(gpu: Gpu, folder: str, kernel: str, arguments: Arguments, offset: int = 0) -> dict[str, np.ndarray]:
    """Call a kernel on the GPU. Return the arrays after the call, without scratch.

    offset: by how many elements arrays begin after a boundary of 256 bytes.
    """
    there: dict[str, tuple[Any, np.ndarray]] = {}
    values = dict(arguments)
    for name, array in arguments.items():
        if isinstance(array, np.ndarray) and name not in ON_HOST:
            memory = gpu.allocate((array.size + offset) * array.itemsize)
            place = memory.address + offset * array.itemsize
            gpu.send(np.ascontiguousarray(array), place)
            values[name] = array_at(place, array.shape, array.dtype)
            there[name] = memory, np.empty(array.shape, array.dtype)
    with gpu.running():
        getattr(module(folder, "cuda"), kernel)(*(values[p] for p in parameters(folder, kernel)))
    for memory, array in there.values():
        gpu.fetch(memory.address + offset * array.itemsize, array)
    return {name: array for name, (_, array) in there.items() if name not in SCRATCH}
