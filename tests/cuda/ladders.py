"""The steps of the lessons' GPU ladders with arguments, for facts.py and test_cuda_ladders.py."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from minidl.engine.device import aligned

Case = tuple[str, Callable[..., None], tuple[Any, ...], int]  # a name, a function, its arguments, bytes to move or 0
MANY = 49_991  # elements of a vector: the last block, warp, run and quad are not full


def array(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """Return random numbers at an address that allows all accesses."""
    place = aligned(math.prod(shape), dtype)
    place[:] = np.random.default_rng(seed).standard_normal(place.size)
    return place.reshape(shape)


def matmul() -> Iterator[Case]:
    """Yield the steps of the ladder, then the products of cuda.py: all forms, an odd width, and narrow tiles."""
    from minidl.kernels.matmul import cuda as products
    from minidl.kernels.matmul.cuda_ladder import RUNGS

    rows, depth = 256, 128
    for name, step in RUNGS.items():
        yield name, step, (array(rows, depth), array(depth, 256), array(rows, 256)), 0
    none = array(0)
    for columns in (256, 255, 64, 32, 16, 8):
        rows = 512 if columns <= 64 else 256
        across, along, out = array(depth, columns), array(columns, depth), array(rows, columns)
        yield f"nn, {columns} columns", products.nn, (array(rows, depth), across, none, False, none, none, out), 0
        if columns >= 64:
            yield f"nt, {columns} columns", products.nt, (array(rows, depth), along, none, out), 0
        yield f"tn, {columns} columns", products.tn, (array(depth, rows), across, none, out), 0


def conv() -> Iterator[Case]:
    """Yield the steps of the ladder, then the functions of cuda.py for channels of real networks, on a small image."""
    from minidl.kernels.conv import cuda as convolutions
    from minidl.kernels.conv.cuda_ladder import RUNGS
    from minidl.kernels.matmul import cuda as products

    for name, step in RUNGS.items():
        yield name, step, (array(1, 16, 8, 32), array(3, 3, 32, 128), array(1, 16, 8, 128)), 0
    none = array(0)
    for height, channels, outputs in ((16, 128, 128), (16, 128, 127), (16, 64, 64), (32, 16, 16), (32, 3, 16)):
        x, y = array(1, height, 8, channels), array(1, height, 8, outputs)
        weight, options = array(3, 3, channels, outputs), (1, (1, 1), (1, 1), (1, 1), False)
        scratch = array(convolutions.backward_weight_scratch(x.shape, weight.shape, *options))
        name = f"{channels} -> {outputs}"
        yield f"y, {name}", convolutions.forward, (x, weight, none, none, none, none, False, *options, none, none, y), 0
        if channels > 3:
            yield f"dx, {name}", convolutions.backward_input, (y, weight, none, *options, none, x), 0
        yield f"dweight, {name}", convolutions.backward_weight, (x, y, *options, scratch, weight), 0
    planes = tuple(array(36, rows, 128) for rows in (128, 128, 128))  # V, U and M: 128 tiles
    yield "Winograd's products, 128 -> 128", products.nn, (*planes[:2], none, False, none, none, planes[2]), 0


def _pixels() -> tuple[Any, ...]:
    x, y = array(2, 10, 12, 36), array(2, 5, 6, 36)
    return x.nbytes + y.nbytes + y.size, x, y, array(*y.shape, dtype=np.uint8)


# of kernels that wait for memory: bytes that must be transferred, then the arguments of each step
OF_MEMORY: dict[str, Callable[[], tuple[Any, ...]]] = {
    "elementwise": lambda: (8 * MANY, array(MANY), 0.3, 1.0, array(MANY)),
    "activation": lambda: (8 * MANY, array(MANY), array(MANY)),
    "dropout": lambda: (8 * MANY, array(MANY), 0.3, 7, 2**32 - 5, array(MANY)),
    "mix": lambda: (12 * MANY, array(MANY), array(MANY, seed=1), 0.3),
    "optim": lambda: (20 * MANY, array(MANY), array(MANY, seed=1), array(MANY, seed=2), 0.1, 0.9),
    "drift": lambda: (8 * 800_003, array(800_003), array(800_003, seed=1), array(768, dtype=float),
                      array(3, dtype=float)),
    "codec": lambda: (9 * 131_001, array(131_001), array(32), array(131_001, dtype=np.int8)),
    "softmax": lambda: (8 * 100 * 256, array(100, 256), array(100, 256)),
    "norm": lambda: (8 * 1000 * 64, array(1000, 64), array(64), array(64), array(1000, 64)),
    "group_norm": lambda: (8 * 3 * 300 * 16, array(3, 300, 16), array(16), array(16), array(3, 8), array(3, 8),
                           array(3, 300, 16)),
    "reduce": lambda: (0, array(8192, 64), array(32, 64, dtype=float)),
    "pool": _pixels,
    "movement": lambda: (0, array(200, 188), array(188, 200)),
}  # fmt: skip


def of_memory(family: str) -> Iterator[Case]:
    """Yield the steps of the ladder of a family in OF_MEMORY."""
    for name, step in importlib.import_module(f"minidl.kernels.{family}.cuda_ladder").RUNGS.items():
        moved, *arguments = OF_MEMORY[family]()
        yield name, step, tuple(arguments), moved


def winograd() -> Iterator[Case]:
    """Yield the transforms of Winograd's form for two images of 16 x 16 pixels, 64 -> 64 channels."""
    from minidl.kernels.conv import cuda_winograd as form

    x, weight, u, planes = array(2, 16, 16, 64), array(3, 3, 64, 64), array(36, 64, 64), array(36, 32, 64)
    end = (array(0),) * 4
    yield "weights into planes", form.weight_to_planes, (weight, False, u), 0
    yield "x into planes", form.to_planes, (x, (4, 4), (1, 1), planes), 0
    yield "planes into y", form.from_planes, (planes, *end, False, x), 0


LADDERS: dict[str, Callable[[], Iterator[Case]]] = {"matmul": matmul, "conv": conv, "winograd": winograd}
LADDERS |= {family: partial(of_memory, family) for family in OF_MEMORY}
