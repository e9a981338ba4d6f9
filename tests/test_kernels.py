"""All compiled kernels agree with their references, and their results do not depend on the number of threads.

Each folder kernels/<op> is found automatically. kernel_cases/<op>.py contains the arguments for its kernels.
"""

from __future__ import annotations

from pathlib import Path

import numba
import numpy as np
import pytest
from kernel_cases import Arguments, Arrays
from kernel_cases.comparing import (
    TOLERANCE,
    all_cases,
    assert_close,
    call,
    cases,
    in_float64,
    module,
    parameters,
)
from quick import quick

from minidl.engine.jit import _folder as CACHE

FOLDERS = sorted(file.parent.name for file in Path(__file__).parents[1].glob("kernels/*/cpu.py"))
KERNELS = [(folder, name) for folder in FOLDERS for name in module(folder, "cpu").__all__]


def check(folder: str, kernel: str, dtype: str, arguments: Arguments) -> dict[str, np.ndarray]:
    """Compare the compiled kernel with the reference in float64; return the compiled kernel's arrays."""
    expected = call(folder, "reference", kernel, in_float64(arguments))
    found = call(folder, "cpu", kernel, arguments)
    assert_close(found, expected, dtype, kernel)
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_both_files_have_the_same_kernels(folder: str) -> None:
    assert sorted(module(folder, "cpu").__all__) == sorted(module(folder, "reference").__all__)
    for kernel in module(folder, "cpu").__all__:
        assert parameters(folder, kernel, "cpu") == parameters(folder, kernel), kernel


def test_every_kernel_has_a_case() -> None:
    with_case = {(folder, name) for folder in FOLDERS for name, _ in all_cases(folder, Arrays("float32"))}
    assert [f"{folder}.{name}" for folder, name in sorted(set(KERNELS) - with_case)] == []


@pytest.mark.parametrize("dtype", quick(TOLERANCE, "float32"))  # the same code for both types
@pytest.mark.parametrize(("folder", "kernel"), KERNELS)
def test_kernel_agrees_with_its_reference(folder: str, kernel: str, dtype: str) -> None:
    for arguments in cases(folder, kernel, Arrays(dtype)):
        check(folder, kernel, dtype, arguments)


@pytest.mark.skipif(numba.get_num_threads() < 2, reason="needs two cores")
@pytest.mark.parametrize(("folder", "kernel"), KERNELS)
def test_bits_do_not_depend_on_the_number_of_threads(folder: str, kernel: str) -> None:
    before = numba.get_num_threads()
    try:
        for arguments in cases(folder, kernel, Arrays("float32")):
            numba.set_num_threads(1)
            alone = call(folder, "cpu", kernel, arguments)
            numba.set_num_threads(2)
            together = call(folder, "cpu", kernel, arguments)
            for p, array in alone.items():
                assert array.tobytes() == together[p].tobytes(), p
    finally:
        numba.set_num_threads(before)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_kernel_makes_a_process_load_scipy(folder: str) -> None:
    """A kernel in the cache names the modules of Numba that it has code from. This one imports SciPy, in 0.2 s."""
    for kernel in module(folder, "cpu").__all__:
        call(folder, "cpu", kernel, cases(folder, kernel, Arrays("float32"))[0])
    assert CACHE, "the tests need a cache of kernels"
    files = [file for file in CACHE.iterdir() if file.name.startswith(f"minidl.kernels.{folder}.")]
    assert [file.name for file in files if b"numba.np.arraymath" in file.read_bytes()] == []


PASS_NAN_ON = {
    "activation": ("relu", "leaky_relu", "gelu", "silu", "tanh", "sigmoid"),
    "elementwise": ("maximum", "sqrt", "exp"),
    "group_norm": ("group_norm",),
    "norm": ("affine", "batch_norm", "layer_norm"),
    "pool": ("max_pool", "average_pool"),
    "reduce": ("sum", "maximum"),
    "softmax": ("softmax", "log_softmax", "cross_entropy"),
}


@pytest.mark.parametrize(("folder", "kernel"), [(f, k) for f, kernels in PASS_NAN_ON.items() for k in kernels])
def test_nan_propagates(folder: str, kernel: str) -> None:
    for arguments in cases(folder, kernel, Arrays("float32")):
        x = arguments[parameters(folder, kernel)[0]]
        x.flat[:: max(5, x.size // 9)] = np.nan
        found = check(folder, kernel, "float32", arguments)
        output = next(p for p in ("y", "out", "loss") if p in found)
        assert np.isnan(found[output]).any()
