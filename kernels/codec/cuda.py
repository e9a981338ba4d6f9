"""Compressed vectors on a GPU, with the same bits as cpu.py: a block of 256 threads for each BLOCK elements.

A thread loads quads of four neighbouring elements (../elementwise/quads.py), 16 bytes at a time: quads t, t + 256, ...
of the block. In `sign` and `topk`, threads exchange counts by shuffles and shared memory. Products are rounded before
they are added (`rounded_product`), as on the CPU. A scale of `sign` may differ in its last bit, as the order of its sum
differs.
"""

from __future__ import annotations

import numpy as np
from numba import float32, float64, int32, int64, uint64
from numpy import ndarray

from minidl.engine.cuda import cuda, device, kernel, launch
from minidl.engine.cuda_memory import get, put
from minidl.engine.cuda_numbers import bits_of, of_bits, rounded_product

from ..dropout import cpu as dropout
from ..elementwise.quads import QUAD, blocks, first, load, store, whole
from ..reduce.block_sum import ALL, THREADS, WARP, WARPS, block_sum
from .reference import BLOCK, kept
from .reference import __all__ as __all__

QUADS = BLOCK // (QUAD * THREADS)  # of a thread
ABSOLUTE, INFINITE, QUIET = 0x7FFFFFFF, 0x7F800000, 0x40  # bits of float32: without sign; infinity; not a number
GOLDEN = dropout.GOLDEN

mix64 = device(dropout._mix64.py_func)


def _blocks(vector: ndarray) -> int:
    return -(-vector.size // BLOCK)


@device
def _own(k: int) -> int:
    """Return the index of this thread's quad k."""
    return int32(int32(cuda.blockIdx.x) * BLOCK + (k * THREADS + int32(cuda.threadIdx.x)) * QUAD)


# -- bfloat16 ---------------------------------------------------------------------------------------------------------


@device
def _nearest(x: float) -> int:
    """Return the upper half of x, rounded to even: add half of the last bit that is kept, less a little if it is 0."""
    bits = bits_of(x)
    upper = int32(bits >> 16)
    if int32(bits & ABSOLUTE) > INFINITE:  # not a number
        return int32(upper | QUIET)
    return int32(int32(bits + int32(0x7FFF) + int32(upper & 1)) >> 16)


@kernel()
def _bfloat16_encode(rest: ndarray, codes: ndarray, whole: int) -> None:
    i, n = first(), int32(rest.size)
    x, c = cuda.local.array(QUAD, rest.dtype), cuda.local.array(QUAD, codes.dtype)
    load(rest, i, n, whole, x)
    for j in range(QUAD):
        upper = _nearest(float32(x[j]))
        c[j] = upper
        x[j] -= of_bits(int32(upper << 16))
    store(codes, i, n, whole, c)
    store(rest, i, n, whole, x)


def bfloat16_encode(rest: ndarray, codes: ndarray) -> None:
    launch(_bfloat16_encode, blocks(rest.size), rest, codes, whole(rest, codes))


@kernel()
def _bfloat16_decode(codes: ndarray, weight: float, out: ndarray, whole: int) -> None:
    i, n, number = first(), int32(out.size), out.dtype.type
    x, c = cuda.local.array(QUAD, out.dtype), cuda.local.array(QUAD, codes.dtype)
    load(codes, i, n, whole, c)
    load(out, i, n, whole, x)
    for j in range(QUAD):
        x[j] += rounded_product(weight, number(of_bits(int32(int32(c[j]) << 16))))
    store(out, i, n, whole, x)


def bfloat16_decode(codes: ndarray, weight: float, out: ndarray) -> None:
    launch(_bfloat16_decode, blocks(out.size), codes, out.dtype.type(weight), out, whole(out, codes))


# -- int8 -------------------------------------------------------------------------------------------------------------


@device
def _largest(key: int, keys: ndarray) -> int:
    """Return the largest key of the block's threads. keys: shared memory for WARPS numbers."""
    for distance in (16, 8, 4, 2, 1):
        key = max(key, cuda.shfl_xor_sync(ALL, key, distance))
    if cuda.threadIdx.x % WARP == 0:
        keys[cuda.threadIdx.x // WARP] = key
    cuda.syncthreads()
    for warp in range(WARPS):
        key = max(key, keys[warp])
    return key


@kernel(threads=THREADS)
def _int8_encode(rest: ndarray, scales: ndarray, codes: ndarray, whole: int) -> None:
    keys = cuda.shared.array(WARPS, int32)
    n, key = int32(rest.size), int32(0)
    x, c = cuda.local.array((QUADS, QUAD), rest.dtype), cuda.local.array(QUAD, codes.dtype)
    for k in range(QUADS):
        load(rest, _own(k), n, whole, x[k])
        for j in range(QUAD):  # bits of absolute values are in the order of the values, and NaN is the largest
            key = max(key, int32(bits_of(float32(x[k, j])) & ABSOLUTE))
    largest = of_bits(_largest(key, keys))
    scale = (largest + rounded_product(largest, float32(0))) / float32(127)  # not a number if one is infinite
    usable = scale > float32(0) and scale < float32(np.inf)
    if cuda.threadIdx.x == 0:
        put(scales, int32(cuda.blockIdx.x), scale)
    for k in range(QUADS):
        for j in range(QUAD):
            code = cuda.libdevice.rintf(float32(x[k, j]) / scale) if usable else float32(0)
            c[j] = int32(code)
            x[k, j] -= rounded_product(code, scale)
        store(codes, _own(k), n, whole, c)
        store(rest, _own(k), n, whole, x[k])


def int8_encode(rest: ndarray, scales: ndarray, codes: ndarray) -> None:
    launch(_int8_encode, _blocks(rest), rest, scales, codes, whole(rest, codes))


@kernel()
def _int8_decode(scales: ndarray, codes: ndarray, weight: float, out: ndarray, whole: int) -> None:
    i, n, number = first(), int32(out.size), out.dtype.type
    x, c = cuda.local.array(QUAD, out.dtype), cuda.local.array(QUAD, codes.dtype)
    load(codes, i, n, whole, c)
    load(out, i, n, whole, x)
    if i < n:
        scale = get(scales, i // BLOCK)
        for j in range(QUAD):
            x[j] += rounded_product(weight, number(rounded_product(float32(c[j]), scale)))
    store(out, i, n, whole, x)


def int8_decode(scales: ndarray, codes: ndarray, weight: float, out: ndarray) -> None:
    launch(_int8_decode, blocks(out.size), scales, codes, out.dtype.type(weight), out, whole(out, codes))


# -- sign -------------------------------------------------------------------------------------------------------------


@kernel(threads=THREADS)
def _sign_encode(rest: ndarray, scales: ndarray, bits: ndarray, whole: int) -> None:
    sums = cuda.shared.array(WARPS, float64)
    n, total = int32(rest.size), float64(0)
    x = cuda.local.array((QUADS, QUAD), rest.dtype)
    for k in range(QUADS):
        load(rest, _own(k), n, whole, x[k])
        for j in range(QUAD):
            total += abs(float32(x[k, j]))
    size = min(int32(BLOCK), int32(n - int32(cuda.blockIdx.x) * BLOCK))
    scale = float32(block_sum(total, sums) / size)
    if cuda.threadIdx.x == 0:
        put(scales, int32(cuda.blockIdx.x), scale)
    for k in range(QUADS):
        half = int32(0)  # of a byte; a thread with an even number stores its own half and its neighbour's
        for j in range(QUAD):
            negative = float32(x[k, j]) < float32(0)
            half |= int32(negative) << j
            x[k, j] -= -scale if negative else scale
        byte = half | cuda.shfl_xor_sync(ALL, half, 1) << QUAD
        i = _own(k)
        if cuda.threadIdx.x % 2 == 0 and i < n:
            put(bits, i // 8, bits.dtype.type(byte))
        store(rest, i, n, whole, x[k])


def sign_encode(rest: ndarray, scales: ndarray, bits: ndarray) -> None:
    launch(_sign_encode, _blocks(rest), rest, scales, bits, whole(rest))


@kernel()
def _sign_decode(scales: ndarray, bits: ndarray, weight: float, out: ndarray, whole: int) -> None:
    i, n = first(), int32(out.size)
    x = cuda.local.array(QUAD, out.dtype)
    load(out, i, n, whole, x)
    if i < n:
        scale = rounded_product(weight, out.dtype.type(get(scales, i // BLOCK)))
        half = int32(get(bits, i // 8)) >> i % 8
        for j in range(QUAD):
            x[j] += -scale if half >> j & 1 else scale
    store(out, i, n, whole, x)


def sign_decode(scales: ndarray, bits: ndarray, weight: float, out: ndarray) -> None:
    launch(_sign_decode, blocks(out.size), scales, bits, out.dtype.type(weight), out, whole(out))


# -- topk -------------------------------------------------------------------------------------------------------------


@device
def _count(keys: ndarray, least: int, sums: ndarray) -> int:
    """Return how many keys of the block are at least this."""
    mine = int32(0)
    for k in range(QUADS):
        for j in range(QUAD):
            mine += int32(keys[k, j] >= least)
    return block_sum(mine, sums)


@device
def _before(value: int, sums: ndarray) -> int:
    """Return the sum of `value` over the threads before this one. sums: shared memory for WARPS numbers."""
    lane, total = int32(cuda.threadIdx.x) % WARP, value
    for distance in (1, 2, 4, 8, 16):
        other = cuda.shfl_up_sync(ALL, total, distance)
        total += other if lane >= distance else int32(0)
    cuda.syncthreads()  # the previous sums have been read
    if lane == WARP - 1:
        sums[cuda.threadIdx.x // WARP] = total
    cuda.syncthreads()
    for warp in range(int32(cuda.threadIdx.x) // WARP):
        total += sums[warp]
    return total - value


@kernel(threads=THREADS)
def _topk_encode(rest: ndarray, keep: int, last: int, indices: ndarray, values: ndarray, whole: int) -> None:
    """Find the smallest key that is kept bit by bit, from the highest: is the number of keys with this bit enough?

    last: how many elements of the last block are kept. Elements beyond the end of the vector have the key 0, and are
    never kept: of equal keys, the first ones are.
    """
    sums = cuda.shared.array(WARPS, int32)
    n, block = int32(rest.size), int32(cuda.blockIdx.x)
    wanted = last if block == int32(cuda.gridDim.x) - 1 else keep
    x, keys = cuda.local.array(QUAD, rest.dtype), cuda.local.array((QUADS, QUAD), int32)
    for k in range(QUADS):
        load(rest, _own(k), n, whole, x)
        for j in range(QUAD):
            keys[k, j] = int32(bits_of(float32(x[j])) & ABSOLUTE)
    threshold, bit = int32(0), int32(1 << 30)
    while bit > 0:
        if _count(keys, int32(threshold | bit), sums) >= wanted:
            threshold = int32(threshold | bit)
        bit = int32(bit >> 1)
    equal = int32(wanted - _count(keys, int32(threshold + 1), sums))  # so many of those equal to the threshold
    above, same = int32(0), int32(0)  # so many were found before
    for k in range(QUADS):
        mine = int32(0)  # those above in the upper 16 bits, those equal in the lower
        for j in range(QUAD):
            mine += int32(keys[k, j] > threshold) << 16 | int32(keys[k, j] == threshold)
        before = _before(mine, sums)
        a, s, i = int32(above + (before >> 16)), int32(same + (before & 0xFFFF)), _own(k)
        for j in range(QUAD):
            if keys[k, j] > threshold or (keys[k, j] == threshold and s < equal):
                at = int32(block * keep + a + min(s, equal))
                value = float32(get(rest, i + j))
                put(indices, at, indices.dtype.type(i + j - block * BLOCK))
                put(values, at, value)
                put(rest, i + j, get(rest, i + j) - value)
            a += int32(keys[k, j] > threshold)
            s += int32(keys[k, j] == threshold)
        found = block_sum(mine, sums)
        above, same = int32(above + (found >> 16)), int32(same + (found & 0xFFFF))


def topk_encode(rest: ndarray, keep: int, indices: ndarray, values: ndarray) -> None:
    last = kept(rest.size - (_blocks(rest) - 1) * BLOCK, keep)
    launch(_topk_encode, _blocks(rest), rest, keep, last, indices, values, whole(rest))


@kernel()
def _topk_decode(indices: ndarray, values: ndarray, keep: int, weight: float, out: ndarray) -> None:
    at = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
    if at < values.size:
        i = int32(at // keep * BLOCK + int32(get(indices, at)))
        put(out, i, get(out, i) + rounded_product(weight, out.dtype.type(get(values, at))))


def topk_decode(indices: ndarray, values: ndarray, keep: int, weight: float, out: ndarray) -> None:
    launch(_topk_decode, -(-values.size // THREADS), indices, values, keep, out.dtype.type(weight), out)


# -- randk ------------------------------------------------------------------------------------------------------------


@device
def _first_and_step(block: int, size: int, key: int) -> tuple[int, int]:
    """Return the first place that randk keeps in a block, and the distance to the next one (reference.py)."""
    number = mix64(key + uint64(block + 1) * GOLDEN)
    place = int32(int64(number & uint64(2**32 - 1)) % size)
    step = int32(1 + int64(number >> uint64(32)) % size)
    while True:
        a, b = int32(size), step
        while b > 0:
            a, b = b, int32(a % b)
        if a == 1:
            return place, step
        step = int32(step + 1)


@device
def _place(at: int, keep: int, key: int, size: int) -> int:
    """Return the index of the element that is number `at` of all kept ones. size: elements of the vector."""
    block = int32(at // keep)
    length = min(int32(BLOCK), int32(size - block * BLOCK))
    place, step = _first_and_step(block, length, key)
    return int32(block * BLOCK + int32(place + at % keep * step) % length)


@kernel()
def _randk_encode(rest: ndarray, keep: int, key: int, values: ndarray) -> None:
    at = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
    if at < values.size:
        i = _place(at, keep, key, int32(rest.size))
        value = float32(get(rest, i))
        put(values, at, value)
        put(rest, i, get(rest, i) - value)


def randk_encode(rest: ndarray, keep: int, key: int, values: ndarray) -> None:
    launch(_randk_encode, -(-values.size // THREADS), rest, keep, np.uint64(key), values)


@kernel()
def _randk_decode(values: ndarray, keep: int, key: int, weight: float, out: ndarray) -> None:
    at = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
    if at < values.size:
        i = _place(at, keep, key, int32(out.size))
        put(out, i, get(out, i) + rounded_product(weight, out.dtype.type(get(values, at))))


def randk_decode(values: ndarray, keep: int, key: int, weight: float, out: ndarray) -> None:
    launch(_randk_decode, -(-values.size // THREADS), values, keep, np.uint64(key), out.dtype.type(weight), out)
