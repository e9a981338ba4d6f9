"""Copies tiles of a and b from global to shared memory, in the background (cp.async).

A tile is DEPTH deep and `length` wide. Shared memory holds its element (k, i) at k * stride + i; i counts rows of a or
columns of b. Elements outside the matrix become 0, so the sums need no bounds. There are four ways to copy a tile:

- `across`: i is contiguous in global memory, too (b in nn and tn, a in tn). A copy has 16 bytes. This needs an address
  and a width of the matrix that are multiples of 16 bytes.
- `elements`: the same for any width. A copy has one element; neighbouring threads copy neighbours.
- `along`: k is contiguous in global memory (a in nn and nt, b in nt). The tile is transposed on its way: a thread
  copies four successive k of one i.
- `by_rows`: the same, but the four k stay together, so a copy has 16 bytes. Element (k, i) is at i * stride + k, or at
  i * stride + (k xor 4) if i & 4: then 8 rows with the same k, and 4 whole rows, lie in 32 different banks.

Each returns (stride, first, fetch, fetch_part):

    k, i = first(thread)                                       the thread's first element in the tile
    fetch(shared, to, source, at, step, k, i, size, depth)     copy the thread's elements of a tile

to and at are the indices of the first element in shared and in global memory. step leads from k to k + 1 in global
memory, for `along` and `by_rows` from i to i + 1. Only elements with i < size are in the matrix. fetch_part copies a
tile of which only k < depth are in the matrix; `fetch` ignores depth, and `by_rows` size.
"""

from __future__ import annotations

from typing import Any

from numpy import ndarray

from minidl.engine.cuda import device
from minidl.engine.cuda_memory import copy_16_if, copy_if, shifted

THREADS = 256
DEPTH = 8  # k in a tile
SUCCESSIVE = 4  # k that a thread copies in `along` and `by_rows`
PADDING = 4  # elements after a row of a tile that is transposed: a warp then writes to 32 different banks
Loader = tuple[int, Any, Any, Any]


def across(length: int, item: int, threads: int = THREADS) -> Loader:
    """item: bytes of an element; threads: of a block"""
    vector = 16 // item
    lanes = min(32, length // vector)  # threads that copy one k
    pieces = length // (vector * lanes)  # copies of each of them
    rows = threads // lanes  # k that all threads copy at once
    copies = -(-DEPTH // rows)

    @device
    def first(thread: int) -> tuple[int, int]:
        return thread // lanes, thread % lanes * vector

    def fetches(part: bool) -> Any:
        @device
        def fetch(
            shared: ndarray, to: int, source: ndarray, at: int, step: int, k: int, i: int, size: int, depth: int
        ) -> None:
            if rows <= DEPTH or k < DEPTH:
                for j in range(copies):
                    row = shifted(source, at + rows * step * j)  # its pieces are at constant distances
                    for q in range(pieces):
                        more = q * lanes * vector
                        wanted = i + more < size and (not part or k + rows * j < depth)
                        copy_16_if(shared, to + rows * length * j + more, row, more, wanted)

        return fetch

    return length, first, fetches(False), fetches(True)


def elements(length: int, item: int, threads: int = THREADS) -> Loader:
    lanes = min(32, length)  # threads that copy one k
    pieces = length // lanes
    rows = threads // lanes
    copies = -(-DEPTH // rows)

    @device
    def first(thread: int) -> tuple[int, int]:
        return thread // lanes, thread % lanes

    def fetches(part: bool) -> Any:
        @device
        def fetch(
            shared: ndarray, to: int, source: ndarray, at: int, step: int, k: int, i: int, size: int, depth: int
        ) -> None:
            if rows <= DEPTH or k < DEPTH:
                for j in range(copies):
                    for q in range(pieces):
                        wanted = i + lanes * q < size and (not part or k + rows * j < depth)
                        target, origin = to + rows * length * j + lanes * q, at + rows * step * j + lanes * q
                        copy_if(shared, target, source, origin, wanted)

        return fetch

    return length, first, fetches(False), fetches(True)


def _successive(threads: int) -> tuple[int, Any]:
    """Return how many i all threads copy at once, and where each begins: it copies SUCCESSIVE k of one i."""
    lanes = DEPTH // SUCCESSIVE  # threads that copy one i

    @device
    def first(thread: int) -> tuple[int, int]:
        return thread % lanes * SUCCESSIVE, thread // lanes

    return threads // lanes, first


def along(length: int, item: int, threads: int = THREADS) -> Loader:
    stride = length + PADDING
    columns, first = _successive(threads)
    copies = -(-length // columns)

    def fetches(part: bool) -> Any:
        @device
        def fetch(
            shared: ndarray, to: int, source: ndarray, at: int, step: int, k: int, i: int, size: int, depth: int
        ) -> None:
            if columns <= length or i < length:
                for j in range(copies):
                    for q in range(SUCCESSIVE):
                        wanted = i + columns * j < size and (not part or k + q < depth)
                        copy_if(shared, to + stride * q + columns * j, source, at + q + columns * step * j, wanted)

        return fetch

    return stride, first, fetches(False), fetches(True)


def by_rows(length: int, item: int, threads: int = THREADS) -> Loader:
    """k must be contiguous, each row must begin at a multiple of 16 bytes, and all rows must be in the matrix."""
    rows, first = _successive(threads)
    copies = length // rows

    def fetches(part: bool) -> Any:
        @device
        def fetch(
            shared: ndarray, to: int, source: ndarray, at: int, step: int, k: int, i: int, size: int, depth: int
        ) -> None:
            for j in range(copies):
                copy_16_if(shared, to + DEPTH * rows * j, source, at + rows * step * j, not part or k < depth)

        return fetch

    return DEPTH, first, fetches(False), fetches(True)
