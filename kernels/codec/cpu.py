"""Compressed vectors, compiled. A block is copied to a small array of float32, which stays in the L1 cache.

All kernels run on the calling thread: it communicates while the other threads compute a gradient.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import helper, jit

from ..dropout.cpu import GOLDEN, _mix64
from .reference import BLOCK
from .reference import __all__ as __all__

HALF, ONE, SIXTEEN = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)
ABSOLUTE, INFINITE, QUIET = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint32(0x40)
LOW, SHIFT32 = np.uint64(2**32 - 1), np.uint64(32)


@helper
def _kept(elements: int, keep: int) -> int:
    return (keep * elements + BLOCK - 1) // BLOCK


@helper
def _load(rest: ndarray, start: int, x: ndarray) -> int:
    """Copy the block that begins at `start` to x, float32 (BLOCK,). Returns its number of elements."""
    size = min(BLOCK, rest.size - start)
    for i in range(size):
        x[i] = np.float32(rest[start + i])
    return size


@jit
def bfloat16_encode(rest: ndarray, codes: ndarray) -> None:
    x = np.empty(BLOCK, np.float32)
    bits = x.view(np.uint32)
    for start in range(0, rest.size, BLOCK):
        size = _load(rest, start, x)
        for i in range(size):  # add half of the last place that is kept, or a little less if that place is even
            b = bits[i]
            rounded = np.uint32(np.uint32(b + HALF) + np.uint32((b >> SIXTEEN) & ONE)) >> SIXTEEN
            if np.uint32(b & ABSOLUTE) > INFINITE:  # not a number
                rounded = np.uint32((b >> SIXTEEN) | QUIET)
            codes[start + i] = rounded
            bits[i] = np.uint32(rounded << SIXTEEN)
        for i in range(size):
            rest[start + i] -= x[i]


@jit
def bfloat16_decode(codes: ndarray, weight: float, out: ndarray) -> None:
    factor, x = out.dtype.type(weight), np.empty(BLOCK, np.float32)
    bits = x.view(np.uint32)
    for start in range(0, out.size, BLOCK):
        size = min(BLOCK, out.size - start)
        for i in range(size):
            bits[i] = np.uint32(np.uint32(codes[start + i]) << SIXTEEN)
        for i in range(size):
            out[start + i] += factor * x[i]


@jit
def int8_encode(rest: ndarray, scales: ndarray, codes: ndarray) -> None:
    x = np.empty(BLOCK, np.float32)
    for block in range(scales.size):
        start = block * BLOCK
        size = _load(rest, start, x)
        largest = nothing = np.float32(0)
        for i in range(size):
            largest = max(largest, abs(x[i]))
            nothing += x[i] * np.float32(0)  # not a number if x[i] is infinite or not a number
        scale = np.float32(largest + nothing) / np.float32(127)
        scales[block] = scale
        for i in range(size):
            code = np.rint(x[i] / scale) if np.float32(0) < scale < np.inf else np.float32(0)
            codes[start + i] = np.int8(code)
            rest[start + i] -= code * scale


@jit
def int8_decode(scales: ndarray, codes: ndarray, weight: float, out: ndarray) -> None:
    factor = out.dtype.type(weight)
    for block in range(scales.size):
        start = block * BLOCK
        for i in range(start, min(start + BLOCK, out.size)):
            out[i] += factor * (np.float32(codes[i]) * scales[block])


@jit
def sign_encode(rest: ndarray, scales: ndarray, bits: ndarray) -> None:
    x = np.empty(BLOCK, np.float32)
    for block in range(scales.size):
        start = block * BLOCK
        size = _load(rest, start, x)
        total = 0.0
        for i in range(size):
            total += abs(x[i])
        scale = np.float32(total / size)
        scales[block] = scale
        for byte in range((size + 7) // 8):
            packed = 0
            for i in range(byte * 8, min(byte * 8 + 8, size)):
                negative = x[i] < 0
                packed |= np.int64(negative) << (i % 8)  # type: ignore[assignment]
                rest[start + i] -= -scale if negative else scale
            bits[start // 8 + byte] = packed


@jit
def sign_decode(scales: ndarray, bits: ndarray, weight: float, out: ndarray) -> None:
    factor = out.dtype.type(weight)
    for i in range(out.size):
        scale = factor * scales[i // BLOCK]
        out[i] += -scale if (bits[i // 8] >> (i % 8)) & 1 else scale


@helper
def _threshold(keys: ndarray, size: int, keep: int, counts: ndarray) -> tuple[int, int]:
    """Return the keep-th largest of keys[:size], and how many of the keys equal to it are among the `keep` largest.

    It is found eight bits at a time, beginning with the highest: a histogram of those eight bits tells which value
    they have (radix select). counts: scratch (256,).
    """
    found = mask = 0
    for shift in (24, 16, 8, 0):
        counts[:] = 0
        for i in range(size):
            if keys[i] & mask == found:
                counts[(keys[i] >> shift) & 255] += 1
        digit = 255
        while counts[digit] < keep:
            keep -= counts[digit]
            digit -= 1
        found |= digit << shift
        mask |= 255 << shift
    return found, keep


@jit
def topk_encode(rest: ndarray, keep: int, indices: ndarray, values: ndarray) -> None:
    x, keys, counts = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.int64), np.empty(256, np.int64)
    bits, at = x.view(np.uint32), 0
    for start in range(0, rest.size, BLOCK):
        size = _load(rest, start, x)
        for i in range(size):
            keys[i] = bits[i] & ABSOLUTE  # bits of absolute values are in the order of the values
        threshold, equal = _threshold(keys, size, _kept(size, keep), counts)
        for i in range(size):
            if keys[i] > threshold or (keys[i] == threshold and equal > 0):
                equal -= keys[i] == threshold
                indices[at], values[at] = i, x[i]
                rest[start + i] -= x[i]
                at += 1


@jit
def topk_decode(indices: ndarray, values: ndarray, keep: int, weight: float, out: ndarray) -> None:
    factor, at = out.dtype.type(weight), 0
    for start in range(0, out.size, BLOCK):
        for _ in range(_kept(min(BLOCK, out.size - start), keep)):
            out[start + np.int64(indices[at])] += factor * values[at]
            at += 1


@helper
def _first_and_step(block: int, size: int, key: int) -> tuple[int, int]:
    """Return the first place that randk keeps in a block, and the distance to the next one (reference.py)."""
    number = _mix64(np.uint64(key) + np.uint64(block + 1) * GOLDEN)
    first, step = np.int64(number & LOW) % size, 1 + np.int64(number >> SHIFT32) % size
    while True:
        a, b = size, step
        while b:
            a, b = b, a % b  # type: ignore[assignment]
        if a == 1:
            return first, step  # type: ignore[return-value]
        step += 1


@jit
def randk_encode(rest: ndarray, keep: int, key: int, values: ndarray) -> None:
    at = 0
    for start in range(0, rest.size, BLOCK):
        size = min(BLOCK, rest.size - start)
        place, step = _first_and_step(start // BLOCK, size, key)
        for _ in range(_kept(size, keep)):
            values[at] = np.float32(rest[start + place])
            rest[start + place] -= values[at]
            place = (place + step) % size
            at += 1


@jit
def randk_decode(values: ndarray, keep: int, key: int, weight: float, out: ndarray) -> None:
    factor, at = out.dtype.type(weight), 0
    for start in range(0, out.size, BLOCK):
        size = min(BLOCK, out.size - start)
        place, step = _first_and_step(start // BLOCK, size, key)
        for _ in range(_kept(size, keep)):
            out[start + place] += factor * values[at]
            place = (place + step) % size
            at += 1
