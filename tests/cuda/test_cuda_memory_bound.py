"""Kernels that wait for memory transfer each byte once, 16 bytes at a time; broken ones are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulator import Emulator, KernelError
from kernel_cases.comparing import assert_close
from on_emulator import MANY, cuda_cases, launched, mutated, reference, run
from sample import each, each_row
from sass import read
from test_cuda_kernels import TARGETS

from minidl.engine.cuda import launch_with
from minidl.engine.device import aligned
from minidl.kernels.drift import cuda as drift

LARGEST_WASTE = 1.05  # bytes transferred / bytes of the arrays
MEMORY_BOUND = {  # (folder, kernel): vectors that are read, vectors that are written
    ("elementwise", "add"): (2, 1), ("elementwise", "copy"): (1, 1), ("elementwise", "affine"): (1, 1),
    ("elementwise", "accumulate"): (2, 1), ("elementwise", "fill"): (0, 1), ("elementwise", "maximum"): (2, 1),
    ("elementwise", "maximum_backward"): (3, 2), ("elementwise", "sqrt"): (1, 1), ("elementwise", "exp"): (1, 1),
    ("dropout", "dropout"): (1, 1), ("optim", "sgd"): (3, 2), ("optim", "adam"): (4, 3), ("optim", "lars"): (3, 2),
    ("mix", "mix"): (2, 1), ("mix", "axpy"): (2, 1), ("mix", "pull"): (2, 1), ("mix", "elastic"): (2, 2),
    ("activation", "relu"): (1, 1), ("activation", "relu_backward"): (2, 1), ("activation", "gelu"): (1, 1),
    ("activation", "gelu_backward"): (2, 1), ("activation", "tanh"): (1, 1), ("activation", "leaky_relu"): (1, 1),
    ("activation", "silu_backward"): (2, 1), ("activation", "sigmoid"): (1, 1),
}  # fmt: skip


def largest_case(folder: str, kernel: str) -> dict[str, Any]:
    arguments = cuda_cases(folder, kernel, "float32")
    return max(arguments, key=lambda a: max(v.size for v in a.values() if isinstance(v, np.ndarray)))


@pytest.mark.parametrize(("folder", "kernel"), each_row(2, MEMORY_BOUND))
def test_each_byte_is_transferred_once(folder: str, kernel: str) -> None:
    arguments = largest_case(folder, kernel)
    size = max(v.size for v in arguments.values() if isinstance(v, np.ndarray))
    emulator = Emulator(counting=True)
    run(folder, kernel, arguments, reference(folder, kernel, arguments), emulator)
    assert emulator.counts is not None
    ideal = 4 * size * sum(MEMORY_BOUND[folder, kernel])
    costs = emulator.counts.costs.items()  # starts, stops, lr and weight_decay have elements of 8 bytes
    transferred = 32 * sum(cost.units for (*_, nbytes), cost in costs if nbytes != 8)
    assert ideal <= transferred <= LARGEST_WASTE * ideal


@pytest.mark.parametrize("cc", each(2, TARGETS))
@pytest.mark.parametrize(("folder", "kernel"), each_row(2, MEMORY_BOUND))
def test_loads_and_stores_have_16_bytes(folder: str, kernel: str, cc: tuple[int, int]) -> None:
    loads, stores = MEMORY_BOUND[folder, kernel]
    for found, signature in launched(folder, kernel, "float32"):
        sass = read(found, signature, cc)
        assert (sass.count("LDG", "128"), sass.count("STG", "128")) == (loads, stores)
        assert sass.blocks_per_sm() >= (3 if kernel == "lars" else 4)  # the local rate needs registers in float64


def test_drift_reads_each_byte_once() -> None:
    x, before = aligned(MANY, np.float32), aligned(MANY, np.float32)
    x[:], before[:] = 1, 0
    emulator, squares = Emulator(counting=True), np.zeros((1, 3))
    with launch_with(emulator):
        drift.drift(x, before, np.array([0]), np.array([MANY]), np.zeros(drift.drift_partial(1)), squares)
    np.testing.assert_array_equal(squares, [[MANY, 0, MANY]])
    assert emulator.counts is not None
    costs = emulator.counts.costs.items()  # all other arrays have elements of 8 bytes
    transferred = 32 * sum(cost.units for (_, array, _, nbytes), cost in costs if array != "shared" and nbytes != 8)
    assert 8 * MANY <= transferred <= LARGEST_WASTE * 8 * MANY


@pytest.mark.parametrize("cc", each(2, TARGETS))
def test_drift_loads_16_bytes(cc: tuple[int, int]) -> None:
    (sass,) = (read(k, types, cc) for k, types in launched("drift", "drift", "float32") if k.name == "drift")
    assert sass.count("LDG", "128") == 2
    assert sass.blocks_per_sm() >= 4


MUTANTS = [  # (folder, kernel, file, piece, replacement)
    ("elementwise", "add", "elementwise/quads.py", "if i + QUAD <= whole:\n        q", "if i <= whole:\n        q"),
    ("elementwise", "add", "elementwise/quads.py", "if i + j < size else 0", "if i + j <= size else 0"),
    ("elementwise", "add", "elementwise/quads.py", "            if i + j < size:", "            if i + j <= size:"),
    ("elementwise", "add", "elementwise/quads.py", "-(-size // (QUAD * THREADS))", "size // (QUAD * THREADS)"),
    ("elementwise", "add", "elementwise/quads.py", "cuda.threadIdx.x) * QUAD", "cuda.threadIdx.x)"),
    ("optim", "sgd", "optim/cuda.py", "min(max(stop - i, 0), QUAD)", "min(max(stop - i + 1, 0), QUAD)"),
    ("optim", "sgd", "optim/cuda.py", "gradient + momentum * v[j] if nesterov", "gradient if nesterov"),
    ("optim", "sgd", "optim/cuda.py", "(1 - lr * weight_decay, 0.0) if decoupled", "(1.0, weight_decay) if decoupled"),
    ("optim", "adam", "optim/cuda.py", "1 / (1 - beta1**step)", "1 - beta1**step"),
    ("optim", "adam", "optim/cuda.py", "* correction + eps", "* correction"),
    ("optim", "norms", "optim/cuda.py", "max(get(starts, s), begin)", "begin"),
    ("optim", "norms", "reduce/block_sum.py", "    cuda.syncthreads()\n    total", "    total"),
    ("optim", "norms", "reduce/block_sum.py", "    cuda.syncthreads()  # the previous sum has been read\n", ""),
    ("optim", "norms", "reduce/block_sum.py", "shfl_xor_sync(ALL, value, 4)", "shfl_xor_sync(ALL, value, 2)"),
    ("optim", "lars", "optim/cuda.py", "if adapt[s]:", "if not adapt[s]:"),
    ("dropout", "dropout", "dropout/cuda.py", "if uint32(position) == uint32(0):", "if False:"),
    ("dropout", "dropout", "dropout/cuda.py", "uint32(position) + uint32(keys)", "uint32(position)"),
    ("dropout", "dropout", "dropout/cuda.py", "bits >> uint32(1)", "bits >> uint32(2)"),
    ("dropout", "dropout", "dropout/cuda.py", ") >= threshold", ") > threshold + uint32(2**20)"),
    ("mix", "mix", "mix/cuda.py", "weight * (o[j] - t[j])", "weight * (t[j] - o[j])"),
    ("mix", "elastic", "mix/cuda.py", "        c[j] += d", "        c[j] += weight * (v[j] - c[j])"),
    ("mix", "elastic", "mix/cuda.py", "    store(center, i, n, whole, c)\n", ""),
    (
        "mix",
        "pull",
        "mix/cuda.py",
        "    load(center, i, n, whole, c)\n    for j in range(QUAD):\n        v[j] = w",
        "    load(x, i, n, whole, c)\n    for j in range(QUAD):\n        v[j] = w",
    ),
    ("drift", "drift", "drift/cuda.py", "if low <= i + j and i + j < high:", "if low < i + j and i + j < high:"),
    ("drift", "drift", "drift/cuda.py", "if low <= i + j and i + j < high:", "if low <= i + j and i + j <= high:"),
    ("drift", "drift", "drift/cuda.py", "low // QUAD + int32", "low + int32"),
    ("drift", "drift", "drift/cuda.py", "(high + QUAD - 1) // QUAD", "high // QUAD"),
    ("drift", "drift", "drift/cuda.py", "get(stops, s), begin + each)", "get(stops, s), begin + each + 1)"),
    ("drift", "drift", "drift/cuda.py", "        if low < high:", "        if cuda.threadIdx.x < high - low:"),
    ("drift", "drift", "reduce/block_sum.py", "threadIdx.x) * numbers + i", "threadIdx.x) * numbers"),
    ("activation", "relu_backward", "activation/cuda.py", "if y <= 0 else d)", "if y < 0 else d)"),
    ("activation", "sigmoid", "activation/cuda.py", "math.exp(-v))", "math.exp(v))"),
    ("activation", "silu_backward", "activation/cuda.py", "v * (like(v, 1) - s)", "v * (like(v, 1) + s)"),
    ("activation", "gelu", "activation/cuda.py", "math.sqrt(0.5)", "0.707"),
    ("activation", "gelu_backward", "activation/cuda.py", "like(v, -0.5) * v * v", "like(v, -0.5) * v"),
    ("activation", "leaky_relu_backward", "activation/cuda.py", "d[j] if v[j] > 0 else", "d[j] if d[j] > 0 else"),
]


@pytest.mark.parametrize(("folder", "kernel", "file", "old", "new"), each_row(5, MUTANTS))
def test_a_broken_kernel_is_found(folder: str, kernel: str, file: str, old: str, new: str) -> None:
    def check() -> None:
        for offset in (0, 1):
            for arguments in cuda_cases(folder, kernel, "float32"):
                expected = reference(folder, kernel, arguments)
                found = run(folder, kernel, arguments, expected, Emulator(), offset)
                assert_close(found, expected, "float32", kernel)

    with mutated(folder, file, old, new), pytest.raises((KernelError, AssertionError)):
        check()
