"""Vectors and texts between the ranks of a job, over the fabric's messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minidl.comm.fabric.base import CHUNK, Channel, Fabric, Header


def hand_out(fabric: Fabric, vector: np.ndarray, leader: int) -> None:
    """vector = the leader's vector, on all live ranks. The death of another rank than the leader changes nothing."""
    others = [rank for rank in range(fabric.size) if rank != leader]
    for part in chunks(vector):
        if fabric.rank == leader:
            sent = lambda: fabric.post(Channel.GATHER, [r for r in others if fabric.alive(r)], (part,), Header())  # noqa: B023, E731
            fabric.wait(lambda: sent() or None, (), "the others to receive the result")  # noqa: B023
        else:
            receive(fabric, leader, part, Channel.GATHER)


def hand_out_text(fabric: Fabric, text: str, leader: int) -> str:
    """Return the leader's text, on all live ranks."""
    content = text.encode()
    length = np.array([float(len(content))])
    hand_out(fabric, length, leader)
    size = int(length[0])
    frame = np.zeros(-(-size // 8))
    if fabric.rank == leader:
        frame = np.frombuffer(content.ljust(8 * frame.size), np.float64).copy()
    hand_out(fabric, frame, leader)
    return frame.tobytes()[:size].decode()


def send(fabric: Fabric, peers: Sequence[int], part: np.ndarray, channel: Channel = Channel.TREE) -> None:
    if peers:
        fabric.wait(lambda: fabric.post(channel, peers, (part,), Header()) or None, peers, "a collective operation")


def receive(fabric: Fabric, peer: int, out: np.ndarray, channel: Channel = Channel.TREE) -> None:
    with fabric.wait(lambda: fabric.take(channel, peer), (peer,), "a collective operation") as message:
        out[...] = message.vector


def chunks(vector: np.ndarray) -> list[np.ndarray]:
    step = CHUNK // vector.itemsize
    return [vector[at : at + step] for at in range(0, vector.size, step)]
