"""The nodes of an MPI job: which of its ranks share memory, and the segment that they share.

MPI reports which ranks form a node (Split_type). If these ranks cannot all map one memory segment, they too use MPI.
MINIDL_NODE=NAME overrides the node that MPI reports, and MINIDL_MPI_ONLY=1 sends everything through MPI.
"""

from __future__ import annotations

import contextlib
import os

import numpy as np

from minidl.comm import memory
from minidl.comm.transport.progress_engine import ProgressEngine
from minidl.errors import ConfigError

WORD = 256  # bytes: length of the texts that ranks exchange at the start
MARK = 7  # index of a word in the control area: a random number that identifies the segment


def everyone(engine: ProgressEngine, word: str) -> list[str]:
    """Send an ASCII text to all ranks; return the texts of all ranks, in order."""
    own = np.zeros(WORD, np.uint8)
    own[: len(word)] = np.frombuffer(word.encode("ascii", "replace"), np.uint8)
    every = np.zeros((engine.size, WORD), np.uint8)
    engine.collective(lambda: engine.world.Iallgather(own, every)).wait()
    return [bytes(row).rstrip(b"\0").decode() for row in every]


def words(segment: memory.Segment, size: int) -> np.ndarray:
    """Map the control area of a segment for `size` ranks, as int64."""
    return np.frombuffer(segment.map(memory.control_size(size)), np.int64)


class Nodes:
    """The nodes of a job. All its ranks create this object together.

    numbers[r]: the node of rank r. groups[r]: the first rank with which rank r shares memory. segment: the memory that
    this rank shares with its group.
    """

    def __init__(self, engine: ProgressEngine) -> None:
        self.engine, self.rank, self.size = engine, engine.rank, engine.size
        first = engine.ask(engine.first_of_node)
        name = os.environ.get("MINIDL_NODE")
        # Each network namespace of a machine counts as a node, so that tests can imitate nodes.
        own = f"name {name}"[:WORD] if name else f"{first} {os.stat('/proc/self/ns/net').st_ino}"
        places = everyone(engine, own)
        self.groups = [places.index(place) for place in places]
        self.numbers = [sorted(set(self.groups)).index(group) for group in self.groups]
        self.segment = self._share()

    def _share(self) -> memory.Segment:
        """Open the memory of this rank's group. If one rank cannot, each rank of the group becomes a separate group."""
        head = self.groups[self.rank]
        own, mark = None, 0
        if head == self.rank:
            own = memory.Segment.create(memory.control_size(self.size))
            words(own, self.size)[MARK] = mark = int.from_bytes(os.urandom(7), "little") + 1
        paths = everyone(self.engine, f"/proc/{os.getpid()}/fd/{own.fd} {mark}" if own else "")
        if own is None and os.environ.get("MINIDL_MPI_ONLY") != "1":
            own = self._open(*paths[head].split())
        found = everyone(self.engine, "found" if own else "")
        apart = {group for group, word in zip(self.groups, found, strict=True) if not word}
        self.groups = [rank if group in apart else group for rank, group in enumerate(self.groups)]
        if own is None or (head in apart and head != self.rank):
            own = memory.Segment.create(memory.control_size(self.size))
        return own

    def _open(self, path: str, mark: str) -> memory.Segment | None:
        """Open a segment; return None if it cannot be opened or `mark` differs.

        In another PID namespace the path does not exist, or leads to a file of another process.
        """
        with contextlib.suppress(ConfigError, OSError, ValueError):
            segment = memory.Segment.open(path)
            if words(segment, self.size)[MARK] == int(mark):
                return segment
            segment.close()
        return None
