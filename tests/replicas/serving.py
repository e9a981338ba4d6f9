"""A scenario for shared memory and MPI: ranks that train and answer requests."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl.comm.fabric.base import BufferSpec, Fabric, Header, Message


def mutual(fabric: Fabric) -> list[float]:
    """All ranks train, and serve: in each step a rank sends a request to every rank, itself included.

    The last rank is late: the others answer its requests while they wait for it in `barrier`.
    """
    ranks, served = range(fabric.size), np.zeros(4, np.float32)
    fabric.join(BufferSpec(nbytes=16, call=True, serving=tuple(ranks)), "layout")

    def add(message: Message) -> Any:
        served[:] += message.vector
        return (served,), Header(round=message.header.round + 1)

    fabric.register(add)
    for step in range(50):
        fabric.begin_step(step, synchronous=False)
        outs = np.zeros((fabric.size, 4), np.float32)
        calls = [fabric.call_start(rank, (np.ones(4, np.float32),), outs[rank], Header(round=step)) for rank in ranks]
        assert [call.wait().round for call in calls] == [step + 1] * fabric.size
        assert outs.min() >= step + 1
    if fabric.rank == fabric.size - 1:
        for _ in range(10):
            fabric.call(0, (np.ones(4, np.float32),), outs[0])
    fabric.barrier()
    fabric.register(None)
    return served.tolist()
