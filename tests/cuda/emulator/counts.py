"""Counts what memory accesses cost on a GPU: sectors of global memory, wavefronts of shared memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

SECTOR = 32  # bytes that global memory transfers at least
BANKS = 32  # words of 4 bytes that shared memory delivers in one wavefront, each from another bank


@dataclass
class Cost:
    """requests: instructions of a warp. units: sectors or wavefronts. least: if no byte were transferred in vain."""

    requests: int = 0
    units: int = 0
    least: int = 0

    @property
    def worst(self) -> float:
        return self.units / self.requests if self.requests else 0.0


@dataclass
class Counts:
    """The costs of launches: {(PTX line, the array or "shared", "read" or "written", bytes per thread): Cost}

    instructions: of PTX, executed by a warp
    """

    costs: dict[tuple[int, str, str, int], Cost] = field(default_factory=lambda: defaultdict(Cost))
    instructions: int = 0
    line: int = 0

    def global_bytes(self) -> int:
        """Return the bytes of all sectors that were transferred, if no cache keeps them between instructions."""
        return SECTOR * sum(cost.units for (_, array, *_), cost in self.costs.items() if array != "shared")

    def shared(self, does: str = "read") -> dict[tuple[int, int], Cost]:
        """Return the costs of reading or writing shared memory by (line, bytes per thread)."""
        return {(k[0], k[3]): cost for k, cost in self.costs.items() if k[1:3] == ("shared", does)}

    def count_global(self, array: str, writes: bool, address: np.ndarray, warp: np.ndarray, nbytes: int) -> None:
        cost = self.costs[self.line, array, "written" if writes else "read", nbytes]
        start = address.astype(np.int64) // SECTOR
        warps = np.unique(warp)
        position = np.searchsorted(warps, warp)
        sectors = start - start.min() + position * (int(start.max() - start.min()) + 1)
        bytes_used = np.unique(address.astype(np.int64) - int(address.min()) + position * (np.ptp(address) + 1))
        cost.requests += warps.size
        cost.units += np.unique(sectors).size
        cost.least += -(-bytes_used.size * nbytes // SECTOR)

    def count_shared(self, writes: bool, offset: np.ndarray, warp: np.ndarray, width: int) -> None:
        """offset: of each thread's first word. The first four warps are counted."""
        cost = self.costs[self.line, "shared", "written" if writes else "read", width * 4]
        for number in np.unique(warp)[:4]:
            words = offset[warp == number]
            cost.requests += 1
            cost.units += wavefronts(words, width)
            cost.least += -(-np.unique(words).size * width // BANKS)


def wavefronts(words: np.ndarray, width: int) -> int:
    """Return how many wavefronts one warp's access takes. words: the first word of each thread, width: 1, 2 or 4 words.

    A wavefront delivers one word from each bank, to any number of threads. Accesses of 8 bytes take a wavefront for
    each half of the warp, accesses of 16 bytes for each quarter. Two neighbouring parts go together if all threads
    share their words with the thread at distance 1, or all with the one at distance 2.
    """
    if width == 1:
        return _conflicts(words, 1)
    size = 64 // width  # threads that may go together: the whole warp, or a half
    total = 0
    for first in range(0, words.size, size):
        part = words[first : first + size]
        together = any(_pairs_agree(part, distance) for distance in (1, 2))
        pieces = (part,) if together else (part[: size // 2], part[size // 2 :])
        total += sum(_conflicts(piece, width) for piece in pieces)
    return total


def _pairs_agree(words: np.ndarray, distance: int) -> bool:
    other = np.arange(words.size) ^ distance
    return bool(words.size and other.max() < words.size and (words == words[other]).all())


def _conflicts(words: np.ndarray, width: int) -> int:
    """Return the largest number of different words in one bank."""
    different = np.unique(words[:, None] + np.arange(width))
    return int(np.bincount(different % BANKS).max()) if different.size else 0
