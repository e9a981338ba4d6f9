"""Codes on a GPU have the bits of those on the CPU, transfer each byte once, and broken kernels are found."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from emulator import Emulator, KernelError
from kernel_cases.comparing import call, module
from on_emulator import cuda_cases, launched, mutated, reference, run
from sample import each, each_row
from sass import read
from test_cuda_kernels import TARGETS

from minidl.engine.cuda import to_ptx

KERNELS = module("codec", "cuda").__all__
BYTES = {"bfloat16": 2, "int8": 1, "sign": 1 / 8}  # of an element's code
QUADS = {"int8_encode": 4, "sign_encode": 4}  # of a thread, if not 1


def agrees_with_cpu(kernel: str, dtype: str) -> None:
    for arguments in cuda_cases("codec", kernel, dtype):
        expected = call("codec", "cpu", kernel, arguments)
        found = run("codec", kernel, arguments, reference("codec", kernel, arguments), Emulator())
        for p, array in found.items():
            assert array.tobytes() == expected[p].tobytes(), p


@pytest.mark.parametrize("dtype", each(2, ["float32", "float64"]))
@pytest.mark.parametrize("kernel", KERNELS)
def test_bits_are_those_of_the_cpu(kernel: str, dtype: str) -> None:
    agrees_with_cpu(kernel, dtype)


SPECIAL_KERNELS = ("bfloat16_encode", "int8_encode", "sign_encode", "topk_encode")
SPECIAL = [0, -0.0, 1, -1, 1e-42, -1e-45, 3e38, -3.4028235e38, 1.00390625, 1.01171875, 127.5, np.inf, -np.inf, np.nan]


def agrees_on_special_numbers(kernel: str, count: int) -> None:
    arguments = next(a for a in cuda_cases("codec", kernel, "float32") if a["rest"].size > 4096)
    arguments["rest"][100 : 100 + count] = np.float32(SPECIAL[:count])
    with np.errstate(all="ignore"):
        expected = call("codec", "cpu", kernel, arguments)
        found = run("codec", kernel, arguments, expected, Emulator())
    for p, array in found.items():
        np.testing.assert_array_equal(array, expected[p], p)


@pytest.mark.parametrize("kernel", each(4, SPECIAL_KERNELS))
@pytest.mark.parametrize("count", [11, 13, 14])  # ordinary numbers; with infinity; with NaN
def test_special_numbers(kernel: str, count: int) -> None:
    agrees_on_special_numbers(kernel, count)


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel.split("_")[0] in BYTES])
def test_each_byte_is_transferred_once(kernel: str) -> None:
    arguments = cuda_cases("codec", kernel, "float32")[-1]
    size, emulator = max(v.size for v in arguments.values() if isinstance(v, np.ndarray)), Emulator(counting=True)
    run("codec", kernel, arguments, reference("codec", kernel, arguments), emulator)
    assert emulator.counts is not None
    ideal = size * (8 + BYTES[kernel.split("_")[0]])
    costs = emulator.counts.costs.items()  # a byte of signs is stored by one thread, but read by two
    transferred = 32 * sum(cost.units for (_, array, *_), cost in costs if array != "shared")
    assert ideal <= transferred <= 1.05 * ideal


@pytest.mark.parametrize("cc", each(2, TARGETS))
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel.split("_")[0] in BYTES])
def test_loads_and_stores_have_16_bytes(kernel: str, cc: tuple[int, int]) -> None:
    for found, signature in launched("codec", kernel, "float32"):
        sass = read(found, signature, cc)
        assert (sass.count("LDG", "128"), sass.count("STG", "128")) == (QUADS.get(kernel, 1), QUADS.get(kernel, 1))
        assert sass.blocks_per_sm() >= (3 if kernel == "sign_encode" else 4)  # it adds in float64


@pytest.mark.parametrize("dtype", each(2, ["float32", "float64"]))
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_product_can_be_merged_with_a_sum(kernel: str, dtype: str) -> None:
    """NVIDIA's assembler may merge `mul` and `add` to one multiply-add, which rounds once, but not `mul.rn`."""
    for found, signature in launched("codec", kernel, dtype):
        assert not re.search(r"\b(mul|fma(\.rn)?)\.f(32|64)", to_ptx(found, signature, TARGETS[0]))


MUTANTS = [  # (kernel, piece, replacement)
    ("bfloat16_encode", "int32(upper & 1)", "int32(1)"),
    ("bfloat16_encode", "int32(0x7FFF)", "int32(0x8000)"),
    ("bfloat16_decode", "int32(c[j]) << 16", "int32(c[j]) << 15"),
    ("int8_encode", "& ABSOLUTE))\n    largest", "))\n    largest"),
    ("int8_encode", "    cuda.syncthreads()\n    for warp in range(WARPS):", "    for warp in range(WARPS):"),
    ("int8_encode", "cuda.libdevice.rintf(float32(x[k, j]) / scale)", "float32(x[k, j]) / scale"),
    ("int8_decode", "get(scales, i // BLOCK)\n        for", "get(scales, 0)\n        for"),
    ("sign_encode", "int32(negative) << j", "int32(negative) << (3 - j)"),
    ("sign_encode", "cuda.shfl_xor_sync(ALL, half, 1) << QUAD", "cuda.shfl_xor_sync(ALL, half, 2) << QUAD"),
    ("sign_encode", "block_sum(total, sums) / size", "block_sum(total, sums) / BLOCK"),
    ("sign_decode", ">> i % 8", ">> 0"),
    ("topk_encode", "int32(1 << 30)", "int32(1 << 29)"),
    ("topk_encode", "_count(keys, int32(threshold | bit), sums) >=", "_count(keys, bit, sums) >="),
    ("topk_encode", "and s < equal)", "and s <= equal)"),
    ("topk_encode", "a + min(s, equal)", "a + s"),
    ("topk_encode", "if lane >= distance else int32(0)", ""),
    ("topk_encode", "    cuda.syncthreads()  # the previous sums have been read\n", ""),
    ("topk_encode", "for warp in range(int32(cuda.threadIdx.x) // WARP):", "for warp in range(WARPS):"),
    ("topk_encode", "last if block == int32(cuda.gridDim.x) - 1 else keep", "keep"),
    ("topk_decode", "at // keep * BLOCK", "at // (keep + 1) * BLOCK"),
    ("randk_encode", "at % keep * step", "at % keep + step"),
    ("randk_encode", "if a == 1:", "if a > 0:"),
    ("randk_decode", "length = min(int32(BLOCK), int32(size - block * BLOCK))", "length = int32(BLOCK)"),
]


@pytest.mark.parametrize(("kernel", "old", "new"), each_row(5, MUTANTS))
def test_a_broken_code_is_found(kernel: str, old: str, new: str) -> None:
    found: tuple[Any, ...] = (KernelError, AssertionError)
    with mutated("codec", "codec/cuda.py", old, new), pytest.raises(found):
        agrees_with_cpu(kernel, "float32")
        if kernel in SPECIAL_KERNELS:
            agrees_on_special_numbers(kernel, 11)
