"""Beside a product of planes, the tiles request every line of all places, once for each k, and in turns."""

from __future__ import annotations

import numba
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minidl.kernels.matmul.blocks import NR
from minidl.kernels.matmul.product import count_of_tiles, product_panel, tile_columns
from minidl.kernels.matmul.requests import MOST_PLACES, add_place, distance, divide_places, next_request, no_requests

LINE = 64 // 4
PLACES = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 5000)), max_size=MOST_PLACES)


@numba.njit
def plan(begins: np.ndarray, counts: np.ndarray, soon: np.ndarray, tiles: int, depth: int) -> np.ndarray:
    """Return the first index and the step of each tile's requests: (tiles, 2)."""
    requests, found = no_requests(), np.empty((tiles, 2), np.int64)
    for place in range(begins.size):
        add_place(requests, soon, soon[10:], (begins[place], counts[place]))
    divide_places(requests, tiles, depth)
    for tile in range(tiles):
        found[tile, 0], found[tile, 1] = next_request(requests)
    return found


@given(places=PLACES, tiles=st.integers(1, 200), depth=st.integers(1, 64))
def test_enough_tiles_request_every_line(places: list[tuple[int, int]], tiles: int, depth: int) -> None:
    begins, counts = (np.array([place[i] for place in places], np.int64) for i in (0, 1))
    found = plan(begins, counts, np.zeros(20, np.float32), tiles, depth)
    places = [(begin + 10, count) for begin, count in places if count]  # soon[10:] begins ten numbers later
    if not places:
        assert not found.any()
        return
    each = tiles // len(places)
    for number, (begin, count) in enumerate(places):
        own = found[number :: len(places)]
        part = -(-count // max(1, each))
        assert [first for first, _ in own] == [begin + i * part for i in range(len(own))]
        asked = (own[:, :1] + own[:, 1:] * np.arange(depth)).ravel()
        assert (asked >= begin).all()
        if each and own[0, 1] <= LINE:  # then each line that begins in the place is requested, or the one before it
            assert np.diff(np.append(np.unique(asked[asked < begin + count]), begin + count)).max() <= LINE


@numba.njit
def measured(soon: np.ndarray, other: np.ndarray) -> int:
    return distance(soon, other)


def test_the_distance_of_two_vectors() -> None:
    numbers = np.arange(100, dtype=np.float32)
    assert measured(numbers[7:], numbers[40:]) == 33 and measured(numbers[40:], numbers[7:]) == -33


@numba.njit
def tiles_of(rows: int, columns: int, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[int, int]:
    """Return how many tiles a product has, sums of 3, and how many of them made requests."""
    requests, column = no_requests(), 0
    requests[0], requests[3] = 1, 1  # one place; its next part begins one number later
    while column < columns:
        width = tile_columns(columns - column, a)
        product_panel(rows, width, 3, 3, False, a, 0, 3, 1, b, 0, NR, 3 * NR, c, 0, 4 * NR, b, 0, requests)
        column += width
    return count_of_tiles(rows, columns, a), requests[2]


@given(rows=st.integers(0, 70), columns=st.integers(1, 6 * NR))
def test_the_number_of_tiles(rows: int, columns: int) -> None:
    counted, made = tiles_of(rows, columns, np.ones(300, np.float32), np.ones(8 * NR, np.float32),
                             np.empty(80 * 4 * NR, np.float32))  # fmt: skip
    assert counted == made
