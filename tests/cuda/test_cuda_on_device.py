"""All functions of all `cuda.py` on a GPU, against the reference in float64. They are skipped where there is no GPU.

`python -m bench.gpu` runs these tests, also under compute-sanitizer.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from kernel_cases.comparing import assert_close
from on_device import find_gpu, run
from on_emulator import KERNELS, cuda_cases, reference
from test_cuda_lenet import TOLERANCE, losses

from minidl.engine.cuda_device import Gpu


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    found, reason = find_gpu()
    if found is None:
        pytest.skip(reason)
    yield found


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("folder", "kernel"), KERNELS)
def test_kernel_agrees_with_its_reference(gpu: Gpu, folder: str, kernel: str, dtype: str) -> None:
    """The bits depend neither on alignment nor on chance."""
    for arguments in cuda_cases(folder, kernel, dtype):
        found = run(gpu, folder, kernel, arguments)
        assert_close(found, reference(folder, kernel, arguments), dtype, kernel)
        for offset in (0, 1):
            again = run(gpu, folder, kernel, arguments, offset)
            for name, array in found.items():
                assert array.tobytes() == again[name].tobytes(), name


def test_lenet(gpu: Gpu) -> None:
    """Twenty steps have the losses of the CPU, at first as single launches, then as graphs."""
    expected = losses("cpu", 20)
    np.testing.assert_allclose(losses(gpu.name, 20), expected, rtol=0, atol=TOLERANCE)
    assert gpu.captures
