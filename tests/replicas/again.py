"""A scenario of mpi.py: two joins of a fabric, where messages of the first arrive after the second."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from minidl.comm.fabric.base import BufferSpec, Column, Fabric, Header, State
from minidl.comm.transport.mpi import ASK, MpiTransport


def again(fabric: Fabric) -> list[Any]:
    """Join twice. What the engine has sent for the first join is sent again, late, after the second join."""
    peer, buffers, late = 1 - fabric.rank, BufferSpec(nbytes=4000, publish=True, mail=1), []
    assert isinstance(fabric.transport, MpiTransport)
    engine, tickets = fabric.transport.engine, []
    send = engine.send

    def recording(to: int, tag: int, data: np.ndarray, *rest: Any) -> None:
        if tag >= ASK:
            late.append((to, tag, data.copy()))
        send(to, tag, data, *rest)

    def claim() -> int:
        fabric.transport.claims.request(2, tickets.append)
        return fabric.wait(lambda: tickets.pop() if tickets else None, (), "a claim")

    for round in (7, 8):
        engine.send = recording if round == 7 else send
        fabric.join(buffers, "layout")
        if round == 8:
            for message in late:
                send(*message)
            fabric.barrier()
            states = fabric.state(peer), fabric.latest(peer) is None
            time.sleep(0.2)
            states += (fabric.latest(peer) is None,)
            fabric.barrier()
        ticket = claim()
        fabric.transport.claims.begin(ticket)
        fabric.transport.claims.settle(ticket)
        fabric.publish((np.ones(1000, np.float32),), Header(round=round))
        with fabric.wait(lambda: fabric.latest(peer), (peer,), "a state") as message:
            newest = message.header.round
        fabric.set_status(Column.STATE, State.FINISHED)
        fabric.barrier()
    return [*states, newest, ticket >= 0]
