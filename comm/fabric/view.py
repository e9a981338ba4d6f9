"""A change of the view: all members leave what they were doing together, and no message of it is left.

    member 0    ... sum |  drops what arrives, until its messages are delivered  | keeps what arrives | new view
    member 1    ... sum |  drops ...                                             | keeps ...          | new view
                      FLUSHED                                                  QUIET
                      written when the own messages are delivered              written when all are FLUSHED

When all members are FLUSHED, no message of the old view exists. A member that is QUIET drops nothing any more. So when
all are QUIET, each may send messages of the new view: they do not meet older ones, on any channel.

Both are written into Column.VIEW, with the number of the view: 2 * number, and 2 * number + 1. A further death starts
the change again, with a larger number.
"""

from __future__ import annotations

from minidl.comm.fabric.base import Column, Fabric, State


def enter(fabric: Fabric, number: int) -> bool:
    """Wait until all replicas in `fabric.replicas` enter the view with this number; drop all older messages.

    All of them must call this, when none of their concurrent operations is in progress. Returns False, without
    waiting for all, if one of them has stopped training: it will not enter any view.
    Raises PeerLost if one of them dies.
    """
    transport = fabric.transport
    flushed, quiet = 2 * number, 2 * number + 1

    def delivered() -> bool | None:
        transport.drop_messages()
        return transport.delivered() or None

    def reached(word: int) -> bool | None:
        if word == flushed:
            transport.drop_messages()
        late = [rank for rank in fabric.replicas if fabric.status[rank, Column.VIEW] < word]
        if any(State.PAUSED <= fabric.state(rank) != State.DEAD for rank in late):
            return False
        return None if late else True

    fabric.wait(delivered, (), "others to leave the old view")
    for word in (flushed, quiet):
        fabric.set_status(Column.VIEW, word)
        if not fabric.wait(lambda: reached(word), (), "others to enter the new view"):  # noqa: B023 (used at once)
            return False
    return True
