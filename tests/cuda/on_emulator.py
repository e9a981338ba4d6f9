"""Calls of kernels/<op>/cuda.py on the emulator, with the arguments of tests/kernel_cases."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from emulator import Emulator, KernelError
from kernel_cases import Arguments, Arrays
from kernel_cases.comparing import SCRATCH, assert_close, call, cases, in_float64, module, parameters

from minidl.engine.cuda import Grid, Kernel, launch_with, types_of
from minidl.engine.device import aligned

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(file.parent.name for file in ROOT.glob("kernels/*/cuda.py"))
KERNELS = [(folder, name) for folder in FOLDERS for name in module(folder, "cuda").__all__]
MANY = 2_500  # elements of a large vector: three blocks of 256 threads with four elements each


def cuda_cases(folder: str, kernel: str, dtype: str) -> list[Arguments]:
    return cases(folder, kernel, Arrays(dtype, MANY, "cuda"))


def placed(array: np.ndarray, offset: int) -> np.ndarray:
    """Return a copy that begins `offset` elements after a boundary of 64 bytes."""
    place = aligned(array.size + offset, array.dtype)[offset:].reshape(array.shape)
    place[...] = array
    return place


def run(
    folder: str, kernel: str, arguments: Arguments, expected: dict[str, np.ndarray], emulator: Emulator, offset: int = 0
) -> dict[str, np.ndarray]:
    """Call the kernel on the emulator. Return the arrays after the call, without scratch.

    expected: the arrays after a call of the reference. Those that the reference changes in none of the cases are
    inputs, so the kernel must not write to them. offset: by how many elements arrays begin after a boundary of 64
    bytes.
    """
    arrays = {p: placed(v, offset) for p, v in arguments.items() if isinstance(v, np.ndarray)}
    for p, array in arrays.items():
        if p not in SCRATCH and p not in outputs(folder, kernel):
            array.flags.writeable = not np.array_equal(array, expected[p].astype(array.dtype), True)
    with launch_with(emulator):
        getattr(module(folder, "cuda"), kernel)(*((arguments | arrays)[p] for p in parameters(folder, kernel)))
    return {p: v for p, v in arrays.items() if p not in SCRATCH}


@cache
def outputs(folder: str, kernel: str) -> set[str]:
    """Return the arrays that the reference changes. A single case may leave one unchanged: theta += 0 * other."""
    changed = set()
    for arguments in cuda_cases(folder, kernel, "float64"):
        after = call(folder, "reference", kernel, arguments)
        changed |= {p for p, array in after.items() if not np.array_equal(array, arguments[p], array.dtype.kind == "f")}
    return changed


def reference(folder: str, kernel: str, arguments: Arguments) -> dict[str, np.ndarray]:
    return call(folder, "reference", kernel, in_float64(arguments))


def launched(folder: str, kernel: str, dtype: str) -> set[tuple[Kernel, tuple[Any, ...]]]:
    """Return the kernels, with the types of their arguments, that the cases of a function launch."""
    found = set()

    def note(launched_kernel: Kernel, grid: Grid, arguments: tuple[Any, ...]) -> None:
        found.add((launched_kernel, types_of(arguments)))

    with launch_with(note):
        for arguments in cuda_cases(folder, kernel, dtype):
            getattr(module(folder, "cuda"), kernel)(*(arguments[p] for p in parameters(folder, kernel)))
    return found


@contextmanager
def mutated(folder: str, file: str, old: str, new: str) -> Iterator[ModuleType]:
    """Replace a piece of a file under kernels/. Yield the module cuda.py of the folder, which uses the changed file.

    old must occur in the file exactly once.
    """
    source = (ROOT / "kernels" / file).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {file}"
    before = dict(sys.modules)
    changed = ModuleType(f"minidl.kernels.{file.removesuffix('.py').replace('/', '.')}")
    changed.__package__ = changed.__name__.rpartition(".")[0]
    users = tuple(f"minidl.kernels.{one}.cuda" for one in {folder, file.partition("/")[0]})
    for name in [name for name in before if name.startswith(users)]:
        package, _, last = name.rpartition(".")
        vars(before[package]).pop(last, None)
        del sys.modules[name]  # imported again below, or by the changed file
    _place(changed.__name__, changed)
    try:
        exec(compile(source.replace(old, new), changed.__name__, "exec"), vars(changed))
        yield module(folder, "cuda")
    finally:
        for name in set(sys.modules) - set(before):
            if name.startswith("minidl."):
                del sys.modules[name]
        for name in [name for name in before if name.startswith(users) or name == changed.__name__]:
            _place(name, before[name])


def _place(name: str, module: ModuleType) -> None:
    """Make both `import package.name` and `from package import name` find this module."""
    package, _, last = name.rpartition(".")
    sys.modules[name] = module
    setattr(sys.modules[package], last, module)


@cache
def _expected(folder: str, kernel: str) -> list[tuple[Arguments, dict[str, np.ndarray]]]:
    return [(arguments, reference(folder, kernel, arguments)) for arguments in cuda_cases(folder, kernel, "float32")]


def assert_found(folder: str, kernel: str, file: str, old: str, new: str) -> None:
    """Break a kernel as in `mutated`. The emulator, or a comparison with the reference, must find this."""

    def check() -> None:
        for offset in (0, 1):
            for arguments, expected in _expected(folder, kernel):
                found = run(folder, kernel, arguments, expected, Emulator(fuse=False), offset)
                assert_close(found, expected, "float32", kernel)

    with mutated(folder, file, old, new), pytest.raises((KernelError, AssertionError)):
        check()
