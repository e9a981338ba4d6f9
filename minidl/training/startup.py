"""The start of a training of several replicas."""

from __future__ import annotations

from collections.abc import Callable

from minidl.comm.fabric.base import Column, Fabric, PeerLost, State

COMPILING = 300.0  # seconds after which a replica prints that it still waits for kernels


def begin_together(fabric: Fabric, prepare: Callable[[], None]) -> None:
    """Compile the kernels in the first live rank of each node; the other ranks then load them from the cache.

    prepare: compiles, or loads. All live ranks leave this function together. A rank that dies or is left out does not
    delay the others; with `fail_fast`, they raise PeerLost if it dies.
    """
    here = [rank for rank in range(fabric.size) if fabric.nodes[rank] == fabric.nodes[fabric.rank]]

    def compiled() -> bool | None:
        first = next(rank for rank in here if fabric.alive(rank) and not fabric.left_out(rank))
        return first == fabric.rank or fabric.state(first) >= State.READY or None

    fabric.wait(compiled, (), "the compiled kernels", COMPILING)
    prepare()
    fabric.set_status(Column.STATE, State.TRAINING)

    def ready() -> bool | None:
        late = [rank for rank in range(fabric.size) if fabric.state(rank) < State.TRAINING]  # DEAD is more
        return all(fabric.left_out(rank) for rank in late) or None

    fabric.wait(ready, (), "all to be ready")
    if (dead := fabric.transport.lost(())) is not None:
        raise PeerLost(dead, "all to be ready")
