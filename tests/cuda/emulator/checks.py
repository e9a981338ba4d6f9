"""Which thread touched which element of memory, to find races. A race is reported as a KernelError.

Two accesses to an element conflict if different threads make them, at least one of them writes, and no barrier of
their block lies between them. Threads of different blocks have no barrier in common.

For each element, two stamps are kept: of the last write, and of the last read. A stamp is
epoch * SPAN + thread, where the epoch counts the barriers of the block: it tells accesses before a barrier from
accesses after it. Several readers within an epoch have the stamp epoch * SPAN + SEVERAL.
"""

from __future__ import annotations

import numpy as np

SPAN = 2048  # more than the threads of a block
SEVERAL = SPAN - 1
NEVER = -1
IN_FLIGHT = np.int64(2**62)  # a write that a copy in the background has not finished


class KernelError(AssertionError):
    """A kernel does what CUDA does not define. The message names the line of the PTX."""


class Stamps:
    """The stamps of a shared memory, or of an array in global memory."""

    def __init__(self, size: int, name: str, must_be_written: bool) -> None:
        self.name, self.must_be_written = name, must_be_written
        self.written, self.read = np.full(size, NEVER, np.int64), np.full(size, NEVER, np.int64)

    def check_read(self, cells: np.ndarray, stamp: np.ndarray) -> None:
        """cells (threads, elements per thread); stamp (threads, 1)"""
        written = self.written[cells]
        if self.must_be_written and (written == NEVER).any():
            raise KernelError(f"{self.name} is read before it is written")
        self._no_other("read", "write", written, stamp)
        before = self.read[cells]
        first = stamp - stamp % SPAN
        mine = np.where((before >= first) & (before != stamp), first + SEVERAL, stamp)
        self.read[cells] = mine
        again = self.read[cells] != mine  # several threads read the element in this instruction
        if again.any():
            self.read[cells[again]] = np.broadcast_to(first + SEVERAL, cells.shape)[again]

    def check_write(self, cells: np.ndarray, stamp: np.ndarray, final: np.int64 | None = None) -> None:
        """final: the stamp to leave, if not that of the thread."""
        self._no_other("written", "write", self.written[cells], stamp)
        self._no_other("written", "read", self.read[cells], stamp)
        stamps = np.broadcast_to(stamp, cells.shape)
        self.written[cells] = stamps
        if (self.written[cells] != stamps).any():
            raise KernelError(f"{self.name} is written by two threads at once")
        if final is not None:
            self.written[cells] = final

    def _no_other(self, does: str, did: str, before: np.ndarray, stamp: np.ndarray) -> None:
        recent = before >= stamp - stamp % SPAN
        if not recent.any() or not (recent & (before != stamp)).any():
            return
        if (before == IN_FLIGHT).any():
            raise KernelError(f"{self.name} is {does} before a copy to it is waited for")
        raise KernelError(f"{self.name} is {does} after another thread's {did}, without a barrier between them")


class GlobalStamps:
    """The stamps of an array in global memory: accesses of other blocks conflict at any time."""

    def __init__(self, size: int, name: str) -> None:
        self.within = Stamps(size, name, must_be_written=False)
        self.name = name
        self.writer, self.reader = np.full(size, NEVER, np.int64), np.full(size, NEVER, np.int64)

    def check(self, cells: np.ndarray, stamp: np.ndarray, block: np.ndarray, writes: bool) -> None:
        """block (threads, 1): the number of each thread's block"""
        writer, reader = self.writer[cells], self.reader[cells]
        if ((writer != NEVER) & (writer != block)).any():
            raise KernelError(f"{self.name} is {'written' if writes else 'read'} after another block wrote it")
        if writes and ((reader != NEVER) & (reader != block)).any():
            raise KernelError(f"{self.name} is written after another block read it")
        if writes:
            self.writer[cells] = block
            if (self.writer[cells] != block).any():
                raise KernelError(f"{self.name} is written by two blocks")
            self.within.check_write(cells, stamp)
        else:
            blocks = np.broadcast_to(block, cells.shape)
            mine = np.where((reader != NEVER) & (reader != blocks), SEVERAL_BLOCKS, blocks)
            self.reader[cells] = mine
            again = self.reader[cells] != mine
            self.reader[cells[again]] = SEVERAL_BLOCKS
            self.within.check_read(cells, stamp)


SEVERAL_BLOCKS = -2
