"""Every function of kernels/<op>/cuda.py agrees with the reference, on an emulator that finds races and stray accesses.

The arguments are those of the CPU's tests (tests/kernel_cases), with fewer elements in the largest vectors.
"""

from __future__ import annotations

import pytest
from emulator import Emulator
from kernel_cases.comparing import assert_close, module, parameters
from on_emulator import FOLDERS, KERNELS, cuda_cases, launched, reference, run
from quick import quick
from sass import read

TARGETS = ((8, 0), (9, 0))
# What other types and GPUs are tried with by default. Convolutions take long, and are made as products are.
SAMPLE = quick(KERNELS, ("matmul", "tn"), *(one for one in KERNELS[::9] if one[0] != "conv"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_device_table_is_the_same(folder: str) -> None:
    assert sorted(module(folder, "cuda").__all__) == sorted(module(folder, "reference").__all__)
    for kernel in module(folder, "cuda").__all__:
        assert parameters(folder, kernel, "cuda") == parameters(folder, kernel), kernel


@pytest.mark.parametrize(("folder", "kernel"), KERNELS)
def test_kernel_agrees_with_its_reference(folder: str, kernel: str) -> None:
    """Nor do its bits depend on the order of blocks or on alignment, and registers hold all its values."""
    for number, arguments in enumerate(cuda_cases(folder, kernel, "float32")):
        expected = reference(folder, kernel, arguments)
        found = run(folder, kernel, arguments, expected, Emulator())
        assert_close(found, expected, "float32", kernel)
        if number % 3 == 0:  # an emulated call takes long
            shuffled = run(folder, kernel, arguments, expected, Emulator(order="shuffled"), offset=1)
            for p, array in found.items():
                assert array.tobytes() == shuffled[p].tobytes(), p
    registers_hold_everything(folder, kernel, "float32", TARGETS[0])


@pytest.mark.parametrize(("folder", "kernel"), SAMPLE)
def test_in_float64(folder: str, kernel: str) -> None:
    for arguments in cuda_cases(folder, kernel, "float64"):
        expected = reference(folder, kernel, arguments)
        assert_close(run(folder, kernel, arguments, expected, Emulator()), expected, "float64", kernel)
    registers_hold_everything(folder, kernel, "float64", TARGETS[0])


@pytest.mark.parametrize(("folder", "kernel"), SAMPLE)
def test_on_the_newer_target(folder: str, kernel: str) -> None:
    for dtype in ("float32", "float64"):
        registers_hold_everything(folder, kernel, dtype, TARGETS[1])


def registers_hold_everything(folder: str, kernel: str, dtype: str, cc: tuple[int, int]) -> None:
    for found, signature in launched(folder, kernel, dtype):
        code = read(found, signature, cc).compiled
        assert code.spills == 0, found.name
        assert code.stack == 0, found.name
