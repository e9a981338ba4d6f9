"""Vectors and texts between the ranks of a job, over the fabric's messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from minidl.comm.fabric.base import CHUNK, Channel, Column, Fabric, Header, PeerLost
from minidl.comm.fabric.group import chunks

T = TypeVar("T")


def led(fabric: Fabric, work: Callable[[int], T]) -> T:
    """Return work(leader), which all live ranks call. If the leader dies meanwhile, all repeat it with the next one.

    It may die when only some ranks have received its result. So none goes on before all have it: each notes in the
    status table that it has. A result is not accepted after the death of its leader. So all see the same notes then.
    With `fail_fast`, the death of any replica raises PeerLost. In a server, the death of all replicas does.
    """
    calls = int(fabric.status[fabric.rank, Column.RESULT]) // fabric.size + 1
    while True:
        fabric.led_by = leader = fabric.leader
        try:
            result = work(leader)
            _wait_for_all(fabric, leader, float(calls * fabric.size + leader))
            return result
        except PeerLost:
            if fabric.fail_fast or fabric.alive(leader) or not fabric.survivors():
                raise
            while (message := fabric.take(Channel.GATHER, leader)) is not None:
                message.release()
        finally:
            fabric.led_by = None


def _wait_for_all(fabric: Fabric, leader: int, number: float) -> None:
    """Wait until all live ranks have a result of this leader. number: of the result; later results have larger ones.

    Raises PeerLost if the leader has died before.
    """

    def received() -> bool | None:
        if all(fabric.status[rank, Column.RESULT] >= number for rank in range(fabric.size) if fabric.alive(rank)):
            return True
        if not fabric.alive(leader):
            raise PeerLost(leader, "the result")
        return None

    if fabric.alive(leader):
        fabric.set_status(Column.RESULT, number)
    fabric.wait(received, (), "the others to receive the result")


def hand_out(fabric: Fabric, vector: np.ndarray, leader: int) -> None:
    """vector = the leader's vector, on all live ranks. The death of another rank than the leader changes nothing."""
    others = [rank for rank in range(fabric.size) if rank != leader]
    for part in chunks(vector, CHUNK):
        if fabric.rank == leader:
            sent = lambda: fabric.post(Channel.GATHER, [r for r in others if fabric.alive(r)], (part,), Header())  # noqa: B023, E731
            fabric.wait(lambda: sent() or None, (), "the others to receive the result")  # noqa: B023
        else:
            with fabric.wait(lambda: fabric.take(Channel.GATHER, leader), (leader,), "the result") as message:
                part[...] = message.vector


def packed(text: str) -> np.ndarray:
    """Return text as a float64 vector, padded with spaces. The text is the vector's bytes; its numbers mean nothing."""
    content = text.encode()
    return np.frombuffer(content.ljust(-(-len(content) // 8) * 8), np.float64).copy()


def hand_out_text(fabric: Fabric, text: str, leader: int) -> str:
    """Return the leader's text, on all live ranks."""
    length = np.array([float(len(text.encode()))])
    hand_out(fabric, length, leader)
    size = int(length[0])
    frame = packed(text) if fabric.rank == leader else np.zeros(-(-size // 8))
    hand_out(fabric, frame, leader)
    return frame.tobytes()[:size].decode()
