"""Pooling and movement on the emulator: each byte is transferred once, by 16 bytes where both sides allow it; broken
kernels are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulator import Emulator
from kernel_cases.comparing import module, parameters
from on_emulator import assert_found, placed
from sample import each_row
from sass import read
from test_cuda_kernels import TARGETS

from minidl.engine.cuda import Grid, Kernel, launch_with, types_of

LARGEST_WASTE = 1.05  # bytes transferred / bytes of the arrays
WINDOW = dict(kernel=(2, 2), stride=(2, 2), padding=(0, 0))
IMAGE, OUTPUT = (1, 8, 32, 16), (1, 4, 16, 16)
PLACE = np.zeros(OUTPUT, np.uint8)


def ones(*shape: int) -> np.ndarray:
    return placed(np.ones(shape, np.float32), 0)


def copied(source: list[int], shape: list[int], target: list[int]) -> dict[str, Any]:
    """Return the arguments of a copy with these strides."""
    size = int(np.prod(shape))
    return dict(
        source=ones(size), source_offset=0, source_strides=np.array(source), shape=np.array(shape),
        target_offset=0, target_strides=np.array(target), target=ones(size),
    )  # fmt: skip


TRANSFERS: list[tuple[str, str, int, dict[str, Any]]] = [  # folder, kernel, bits of its loads, arguments
    ("pool", "max_pool", 128, WINDOW | dict(x=ones(*IMAGE), y=ones(*OUTPUT), place=PLACE)),
    ("pool", "max_pool_backward", 128, WINDOW | dict(dy=ones(*OUTPUT), place=PLACE, dx=ones(*IMAGE))),
    ("pool", "average_pool", 128, WINDOW | dict(x=ones(*IMAGE), y=ones(*OUTPUT))),
    ("pool", "average_pool_backward", 128, WINDOW | dict(dy=ones(*OUTPUT), dx=ones(*IMAGE))),
    ("movement", "copy", 128, copied([64, 16, 1], [16, 4, 16], [64, 16, 1])),
    ("movement", "copy", 32, copied([64 * 96, 1, 64], [2, 64, 96], [64 * 96, 96, 1])),
    ("movement", "take", 128, dict(x=ones(64, 256), rows=np.arange(64), out=ones(64, 256))),
]  # fmt: skip


@pytest.mark.parametrize(("folder", "kernel", "bits", "arguments"), TRANSFERS)
def test_each_byte_is_transferred_once(folder: str, kernel: str, bits: int, arguments: dict[str, Any]) -> None:
    used: list[tuple[Kernel, tuple[Any, ...]]] = []
    emulator = Emulator(fuse=False, counting=True)

    def launcher(launched: Kernel, grid: Grid, values: tuple[Any, ...]) -> None:
        used.append((launched, types_of(values)))
        emulator(launched, grid, values)

    with launch_with(launcher):
        getattr(module(folder, "cuda"), kernel)(*(arguments[p] for p in parameters(folder, kernel)))
    of_kernel = [v for v in arguments.values() if isinstance(v, np.ndarray) and v.size > 8]
    assert emulator.counts is not None
    ideal = sum(array.nbytes for array in of_kernel)
    assert ideal <= emulator.counts.global_bytes() <= LARGEST_WASTE * ideal
    widths = {8 * nbytes for _, array, _, nbytes in emulator.counts.costs if array != "shared"}
    assert bits in widths
    for launched, signature in used:
        for cc in TARGETS:
            sass = read(launched, signature, cc)
            assert sass.blocks_per_sm() >= 3  # a window of any size needs registers
            assert bits == 32 or (sass.count("LDG", "128") and sass.count("STG", "128"))


def test_a_transposed_tile_has_no_bank_conflicts() -> None:
    emulator = Emulator(counting=True)
    arguments = copied([1, 64], [64, 96], [96, 1])
    with launch_with(emulator):
        module("movement", "cuda").copy(*(arguments[p] for p in parameters("movement", "copy")))
    assert emulator.counts is not None
    for does in ("read", "written"):
        costs = emulator.counts.shared(does).values()
        assert costs and all(cost.units == cost.requests for cost in costs)


MUTANTS = [  # (folder, kernel, file, piece, replacement)
    ("pool", "max_pool", "pool/cuda.py", " or v[j] != v[j]:", ":"),
    ("pool", "max_pool", "pool/cuda.py", "elif first or v[j] > best[j]", "elif v[j] > best[j]"),
    ("pool", "max_pool", "pool/cuda.py", "v[j] > best[j]", "v[j] >= best[j]"),
    ("pool", "max_pool", "pool/cuda.py", "range(max(top, 0), min(top", "range(max(top, 1), min(top"),
    ("pool", "max_pool", "pool/cuda.py", "range(max(left, 0), min", "range(left, min"),
    ("pool", "max_pool", "pool/cuda.py", "(channels + QUAD - 1) // QUAD", "channels // QUAD"),
    ("pool", "max_pool_backward", "pool/cuda.py", "- kernel + stride", "- kernel"),
    ("pool", "max_pool_backward", "pool/cuda.py", "// stride + 1, outputs)", "// stride, outputs)"),
    ("pool", "max_pool_backward", "pool/cuda.py", "if oh < out_height and ow < out_width:", "if oh < out_height:"),
    ("pool", "average_pool", "pool/cuda.py", "best[j] *= factor", "best[j] *= 1"),
    ("pool", "average_pool_backward", "pool/cuda.py", "total[j] += d[j]\n        if", "total[j] = d[j]\n        if"),
    ("pool", "average_pool_backward", "pool/cuda.py", " and padding == (0, 0)", ""),
    ("pool", "average_pool_backward", "pool/cuda.py", "int32(ow * kernel_width)", "int32(ow * kernel_height)"),
    ("movement", "copy", "movement/cuda.py", "    cuda.syncthreads()\n", ""),
    ("movement", "copy", "movement/cuda.py", "tile[x * STEP + k])", "tile[k * STEP + x])"),
    ("movement", "copy", "movement/cuda.py", "s0 + plane % n1", "s0 + plane // n1"),
    ("movement", "copy", "movement/cuda.py", "(axis.s * axis.n, axis.t * axis.n)", "(before.s, axis.t * axis.n)"),
    ("movement", "copy", "movement/cuda.py", "i2, rest = rest % n2, rest // n2", "i2, rest = rest // n2, rest % n2"),
    ("movement", "copy", "movement/cuda.py", "s + i * axes[0].s", "s"),
    ("movement", "copy", "movement/cuda.py", " and wide(last.n, source, target)", ""),
    ("movement", "take", "movement/cuda.py", "get(rows, i) * channels", "i * channels"),
    ("movement", "take_backward", "movement/cuda.py", "k < count and ", ""),
    ("movement", "take_backward", "movement/cuda.py", "found = others", "found = uint32(0)"),
    ("movement", "take_backward", "movement/cuda.py", "range(0, count, WARP)", "range(0, WARP, WARP)"),
    ("movement", "take_backward", "movement/cuda.py", "number % strips * WARP", "0 * WARP"),
]


@pytest.mark.parametrize(("folder", "kernel", "file", "old", "new"), each_row(5, MUTANTS))
def test_a_broken_kernel_is_found(folder: str, kernel: str, file: str, old: str, new: str) -> None:
    assert_found(folder, kernel, file, old, new)
