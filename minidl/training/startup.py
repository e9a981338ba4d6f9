"""The start of a training of several replicas."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minidl.comm.fabric.base import Column, Fabric, State

COMPILING = 300.0  # seconds after which a replica prints that it still waits for kernels


def begin_together(fabric: Fabric, prepare: Callable[[], None]) -> None:
    """Compile the kernels in the first rank of each node; the other ranks then load them from the cache.

    prepare: compiles, or loads. All ranks leave this function together.
    """
    first = fabric.nodes.index(fabric.nodes[fabric.rank])
    if fabric.rank != first:
        fabric.wait(lambda: fabric.state(first) >= State.READY or None, (first,), "the compiled kernels", COMPILING)
    prepare()
    fabric.set_status(Column.STATE, State.TRAINING)
    # Wait for the last rank that is late. In a simulation ranks begin in order, so each of them waits at most once.
    # Dead ranks do not delay the others: DEAD > TRAINING.
    while (late := np.flatnonzero(fabric.status[:, Column.STATE] < State.TRAINING)).size:
        rank = int(late[-1])
        fabric.wait(lambda: fabric.state(rank) >= State.TRAINING or None, (rank,), "all to be ready")  # noqa: B023
