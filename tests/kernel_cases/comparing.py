"""Compares a kernel of kernels/<op>/cpu.py or cuda.py with the reference, computed in float64."""

from __future__ import annotations

import copy
import importlib
import inspect
from types import ModuleType

import numpy as np

from kernel_cases import Arguments, Arrays, Cases

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}  # relative to the largest element
# Arguments whose content after the call does not matter.
SCRATCH = {"columns", "packed", "partial", "scratch", "transposed"}


def module(folder: str, file: str) -> ModuleType:
    return importlib.import_module(f"minidl.kernels.{folder}.{file}")


def all_cases(folder: str, arrays: Arrays) -> Cases:
    return importlib.import_module(f"kernel_cases.{folder}").cases(arrays)


def cases(folder: str, kernel: str, arrays: Arrays) -> list[Arguments]:
    return [arguments for name, arguments in all_cases(folder, arrays) if name == kernel]


def call(folder: str, file: str, kernel: str, arguments: Arguments) -> dict[str, np.ndarray]:
    """Call the kernel with copies of the arguments. Return the copied arrays after the call, without scratch."""
    arguments = copy.deepcopy(arguments)
    getattr(module(folder, file), kernel)(*(arguments[p] for p in parameters(folder, kernel)))
    return {p: v for p, v in arguments.items() if isinstance(v, np.ndarray) and p not in SCRATCH}


def parameters(folder: str, kernel: str, file: str = "reference") -> list[str]:
    function = getattr(module(folder, file), kernel)
    return list(inspect.signature(getattr(function, "py_func", function)).parameters)


def in_float64(arguments: Arguments) -> Arguments:
    """Return the arguments in float64, so that the reference computes without float32's rounding."""
    return {
        p: v.astype(np.float64) if isinstance(v, np.ndarray) and v.dtype.kind == "f" else v
        for p, v in arguments.items()
    }


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], dtype: str, kernel: str) -> None:
    """Compare the arrays after a call with those of the reference."""
    for p, array in found.items():
        largest = np.max(abs(expected[p]), where=np.isfinite(expected[p]), initial=0)
        tolerance = TOLERANCE[dtype] * largest if array.dtype.kind == "f" else 0
        np.testing.assert_allclose(array, expected[p], rtol=0, atol=tolerance, err_msg=f"{kernel}: {p}")
