"""Vectors and texts between the ranks of a job, over the fabric's messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from minidl.comm.fabric.base import CHUNK, Channel, Fabric, Header, PeerLost
from minidl.comm.fabric.group import chunks

T = TypeVar("T")


def led(fabric: Fabric, work: Callable[[int], T]) -> T:
    """Return work(leader), which all live ranks call. If the leader dies meanwhile, all repeat it with the next one.

    With `fail_fast`, the death of any replica raises PeerLost.
    """
    while True:
        fabric.led_by = leader = fabric.leader
        try:
            return work(leader)
        except PeerLost:
            if fabric.fail_fast or fabric.alive(leader):
                raise
        finally:
            fabric.led_by = None


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
