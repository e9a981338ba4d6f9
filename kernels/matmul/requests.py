"""Requests for lines: a product of planes begins to load what later steps read and write.

Winograd's convolution multiplies planes that are in a core's caches, and meanwhile needs nothing from farther away. The
pixels that its next transforms read, and the lines of y that they write, are in L3 or memory. So each tile of the
product requests some of them, a line for each k (`Emitter.prefetch`). Why so evenly: a core waits for 10 to 16 lines at
a time, including those that it loads from L2. Many requests at once would delay the product.

The lines are in several places, such as x and y. Successive tiles take turns: each requests the next part of another
place. A vector of integers holds the state:

    requests = [number of places, place of the next tile, begin, part, step, begin, part, step, ...]

    begin    where the next part of a place begins
    part     how many numbers a tile requests
    step     from a tile's request for k to its request for k + 1

Begin, part and step count numbers of the vector `soon` of the tile. Any vector serves as `soon`: a place in another one
has an index, too (`distance`).
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import helper

from .emitter import prefetch
from .tile import line_of

MOST_PLACES = 4


@helper
def no_requests() -> ndarray:
    """Return requests without places. A tile then requests the first line of `soon` each time."""
    return np.zeros(2 + 3 * MOST_PLACES, np.int64)


@helper
def distance(soon: ndarray, other: ndarray) -> int:
    """Return the index in `soon` that stands for other[0]: vectors of one type, anywhere in memory."""
    return int(np.int64(other.ctypes.data) - np.int64(soon.ctypes.data)) // soon.itemsize


@helper
def add_place(requests: ndarray, soon: ndarray, other: ndarray, place: tuple[int, int]) -> None:
    """Add `count` numbers of a vector, beginning with other[begin]; place: (begin, count). 0 numbers are no place."""
    if place[1] > 0:
        at = 2 + 3 * requests[0]
        requests[at], requests[at + 1] = distance(soon, other) + place[0], place[1]
        requests[0] += 1


@helper
def divide_places(requests: ndarray, tiles: int, depth: int) -> None:
    """Divide all places among `tiles` tiles with sums of `depth` products.

    If these make fewer requests than there are lines, some lines are left out. The CPU loads many of them by itself.
    """
    each = max(1, tiles // max(1, requests[0]))
    for place in range(requests[0]):
        at = 2 + 3 * place
        part = (requests[at + 1] + each - 1) // each
        requests[at + 1], requests[at + 2] = part, (part + depth - 1) // depth


@helper
def next_request(requests: ndarray) -> tuple[int, int]:
    """Return where the requests of the next tile begin, and the step for each k."""
    place = requests[1]
    at = 2 + 3 * place
    begin, step = requests[at], requests[at + 2]
    requests[at] = begin + requests[at + 1]
    requests[1] = place + 1 if place + 1 < requests[0] else 0
    return begin, step


@helper
def request_parts(requests: ndarray, soon: ndarray) -> None:
    """Request the next part of each place at once: beside products whose tiles request nothing."""
    for _ in range(requests[0]):
        part = requests[3 + 3 * requests[1]]
        begin, _ = next_request(requests)
        for at in range(begin, begin + part, line_of(soon)):
            prefetch(soon, at)
