"""The start of a training of several replicas."""

from __future__ import annotations

from collections.abc import Callable

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
    # Dead ranks do not delay the others: DEAD > TRAINING.
    fabric.wait(lambda: bool(fabric.status[:, Column.STATE].min() >= State.TRAINING) or None, (), "all to be ready")
