"""A scenario for shared memory and MPI: frozen ranks do not read their messages."""

from __future__ import annotations

import os
import signal

import numpy as np

from minidl.comm.fabric.base import BufferSpec, Channel, Column, Fabric, Freeze, Header, State
from minidl.comm.launch.monitor import main_thread

FROZEN = (2, 3)
VECTOR = np.ones(20_000, np.float32)  # too long for MPI to send it before the receiver asks for it


def receivers(fabric: Fabric) -> float:
    """Rank 0 has two slots. Each of them holds a message that a frozen rank has not read. It sends more, to rank 1.

    Then the frozen ranks wake. Each message halves the sender's mass. Returns the mass of this rank at the end.
    """
    fabric.join(BufferSpec(nbytes=VECTOR.nbytes, mail=len(FROZEN)), "layout")
    fabric.handle_freezes(Freeze.LEAVE_OUT)
    fabric.stall, mass = 1.0, 1.0
    fabric.set_status(Column.STATE, State.TRAINING)
    if fabric.rank in FROZEN:
        fabric.wait(lambda: fabric.status[0, Column.SPEED] or None, (0,), "rank 0")
        os.kill(os.getpid(), signal.SIGSTOP)
    if fabric.rank == 0:
        fabric.wait(lambda: min(map(fabric.state, FROZEN)) >= State.TRAINING or None, (), "others to train")
        fabric.set_status(Column.SPEED, 1)
        processes = [int(fabric.status[rank, Column.PID]) for rank in FROZEN]
        fabric.wait(lambda: all(main_thread(process)[1] == "T" for process in processes) or None, (), "the freezes")
        for peer in FROZEN:
            assert send(fabric, peer, mass)
            mass /= 2
        fabric.wait(lambda: all(map(fabric.suspected, FROZEN)) or None, (), "the suspicion")
        for _ in range(10):
            fabric.wait(lambda: send(fabric, 1, mass) or None, (1,), "a free slot")  # noqa: B023
            mass /= 2
        for process in processes:
            os.kill(process, signal.SIGCONT)
        fabric.wait(lambda: not any(map(fabric.suspected, FROZEN)) or None, (), "the others to wake")
    for _ in range(10 if fabric.rank == 1 else 0):
        with fabric.wait(lambda: fabric.take(Channel.MAIL, 0), (0,), "a message") as message:
            assert (message.vector == VECTOR).all()
            mass += message.header.weight
    fabric.set_status(Column.STATE, State.PAUSED)
    taken: list[float] = []
    fabric.drain(lambda message: taken.append(message.header.weight))
    return mass + sum(taken)


def send(fabric: Fabric, peer: int, mass: float) -> bool:
    return fabric.send(peer, VECTOR, header=Header(weight=mass / 2))
