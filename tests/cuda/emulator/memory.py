"""Global and shared memory of the emulated device, with checks of bounds, alignment and races.

An address in global memory is the address of an element of a NumPy array that was passed to the launch. An address in
shared memory is an offset in bytes; each block has separate shared memory. Shared memory consists of words of 4 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .checks import IN_FLIGHT, SPAN, GlobalStamps, KernelError, Stamps
from .counts import Counts

WORD = 4  # bytes


@dataclass
class Access:
    """An access of some threads to memory.

    address: in bytes, of each thread; stamp: checks.py; block: the number of each thread's block in the grid;
    row: of each thread's block among the blocks that run together; warp: the number of each thread's warp.
    """

    address: np.ndarray
    stamp: np.ndarray
    block: np.ndarray
    row: np.ndarray
    warp: np.ndarray

    def some(self, wanted: np.ndarray) -> Access:
        return Access(*(value[wanted] for value in vars(self).values()))

    def check_alignment(self, nbytes: int) -> None:
        if (self.address % np.uint64(nbytes)).any():
            raise KernelError(f"an access of {nbytes} bytes at an address that is not a multiple of {nbytes}")


class Region:
    """An array in global memory. Races are looked for if it is writeable; a read-only one must not be written."""

    def __init__(self, array: np.ndarray, name: str) -> None:
        self.array, self.name = array.reshape(-1), name
        self.start = array.__array_interface__["data"][0]
        self.stamps = GlobalStamps(array.size, name) if array.flags.writeable else None


class GlobalMemory:
    def __init__(self, arrays: Sequence[np.ndarray], counts: Counts | None) -> None:
        self.regions = [Region(array, f"argument {i}") for i, array in enumerate(arrays) if array.size]
        self.counts = counts

    def find(self, access: Access, nbytes: int) -> Region:
        """Return the array that all threads access."""
        low, high = int(access.address.min()), int(access.address.max()) + nbytes
        for region in self.regions:
            stop = region.start + region.array.nbytes
            if region.start <= low < stop:
                if high > stop:
                    raise KernelError(f"{region.name}: {high - stop} bytes beyond its end")
                return region
        raise KernelError(f"address {low:#x} is in no argument")

    def load(self, access: Access, kind: type, width: int) -> np.ndarray:
        """Return (threads, width) elements."""
        region, cells = self._cells(access, kind, width, writes=False)
        return region.array.view(kind)[cells]

    def store(self, access: Access, values: np.ndarray) -> None:
        """values (threads, width)"""
        region, cells = self._cells(access, values.dtype.type, values.shape[1], writes=True)
        region.array.view(values.dtype)[cells] = values

    def _cells(self, access: Access, kind: type, width: int, writes: bool) -> tuple[Region, np.ndarray]:
        size = np.dtype(kind).itemsize
        access.check_alignment(size * width)
        region = self.find(access, size * width)
        if region.array.itemsize != size:
            raise KernelError(f"{region.name}: an access of {size} bytes to elements of {region.array.itemsize}")
        if writes and region.stamps is None:
            raise KernelError(f"{region.name} is written, but it is an input")
        first = (access.address - np.uint64(region.start)).astype(np.int64) // size
        cells = first[:, None] + np.arange(width)
        if region.stamps is not None:
            region.stamps.check(cells, access.stamp[:, None], access.block[:, None], writes)
        if self.counts is not None:
            self.counts.count_global(region.name, writes, access.address, access.warp, size * width)
        return region, cells


class SharedMemory:
    """The shared memory of all blocks that run together, (blocks, words)."""

    def __init__(self, blocks: int, nbytes: int, counts: Counts | None) -> None:
        self.words = -(-nbytes // WORD)
        self.data = np.zeros(blocks * self.words, np.uint32)
        self.stamps = Stamps(self.data.size, "shared memory", must_be_written=True)
        self.nbytes, self.counts = nbytes, counts

    def load(self, access: Access, kind: type, width: int) -> np.ndarray:
        cells = self._cells(access, kind, width, writes=False)
        self.stamps.check_read(cells, access.stamp[:, None])
        return self.data[cells].view(kind)

    def store(self, access: Access, values: np.ndarray) -> None:
        cells = self._cells(access, values.dtype.type, values.shape[1], writes=True)
        self.stamps.check_write(cells, access.stamp[:, None])
        self.data[cells] = values.view(np.uint32)

    def _cells(self, access: Access, kind: type, width: int, writes: bool) -> np.ndarray:
        nbytes = np.dtype(kind).itemsize * width
        if np.dtype(kind).itemsize < WORD:
            raise KernelError(f"shared memory: an access of {nbytes} bytes; the emulator knows words of {WORD}")
        access.check_alignment(nbytes)
        if int(access.address.max()) + nbytes > self.nbytes:
            raise KernelError(f"shared memory: address {int(access.address.max())} of {self.nbytes}")
        offset = access.address.astype(np.int64) // WORD
        if self.counts is not None:
            self.counts.count_shared(writes, offset, access.warp, nbytes // WORD)
        return (offset + access.row * self.words)[:, None] + np.arange(nbytes // WORD)


@dataclass
class _Copy:
    """A copy from global to shared memory: each thread's words, and the number of the thread's group of copies."""

    cells: np.ndarray  # (threads, words)
    values: np.ndarray
    threads: np.ndarray
    group: np.ndarray


class Copies:
    """Copies in the background (cp.async). The target has no defined value until the thread waits for the copy."""

    def __init__(self, memory: GlobalMemory, shared: SharedMemory, threads: int) -> None:
        self.memory, self.shared = memory, shared
        self.group = np.zeros(threads, np.int64)  # groups that each thread has committed
        self.pending: list[_Copy] = []

    def start(self, source: Access, target: Access, nbytes: int, read: np.ndarray, threads: np.ndarray) -> None:
        """Begin to copy nbytes per thread. read: bytes to read from the source; the others are 0."""
        if not np.isin(read, (0, nbytes)).all():
            raise KernelError(f"a copy that reads a part of {nbytes} bytes")
        cells = self.shared._cells(target, np.uint32, nbytes // WORD, writes=True)
        self.shared.stamps.check_write(cells, target.stamp[:, None], IN_FLIGHT)
        values, wanted = np.zeros(cells.shape, np.uint32), read > 0
        if wanted.any():
            found = source.some(wanted)
            kind = self.memory.find(found, nbytes).array.dtype
            values[wanted] = self.memory.load(found, kind.type, nbytes // kind.itemsize).view(np.uint32)
        self.pending.append(_Copy(cells, values, threads, self.group[threads]))

    def commit(self, threads: np.ndarray) -> None:
        self.group[threads] += 1

    def wait(self, threads: np.ndarray, left: int, stamp: np.ndarray) -> None:
        """Finish the copies of these threads, but not those of the `left` newest groups. stamp: of each thread."""
        waiting, stamps = np.zeros(self.group.size, bool), np.zeros(self.group.size, np.int64)
        waiting[threads], stamps[threads] = True, stamp
        pending, self.pending = self.pending, []
        for copy in pending:
            done = waiting[copy.threads] & (copy.group < self.group[copy.threads] - left)
            if done.any():
                self.shared.data[copy.cells[done]] = copy.values[done]
                self.shared.stamps.written[copy.cells[done]] = stamps[copy.threads[done]][:, None]
            if not done.all():
                rest = ~done
                self.pending.append(_Copy(*(value[rest] for value in vars(copy).values())))


def stamp_of(epoch: np.ndarray, thread: np.ndarray) -> np.ndarray:
    return epoch.astype(np.int64) * SPAN + thread
