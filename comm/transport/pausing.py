"""All members of a synchronous method pause after the same step. Then a newcomer joins them (training/newcomer.py).

They agree on the step as they agree on the last step of a run that is asked to stop (Fabric.agreed_stop). A member that
notices a newcomer writes 1 + s into Column.PAUSE of the status table, where s is the number of the step that it began
last. Before its next step, it waits until all have written such a number. All pause after step number max(s).

    member 0    step 7 | notices the newcomer: 8 | waits            | step 8 | pause
    member 1    step 7 | step 8, in which it waits for member 0: 9  |        | pause

Numbers up to 1 + `Transport.paused` are from an earlier pause. After a pause, the members make a step before the next.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from minidl.comm.transport.messages import Column, State

if TYPE_CHECKING:
    from minidl.comm.transport.base import Transport


class Pause(Exception):
    """All members pause before the next step."""


def consider(transport: Transport) -> None:
    """If a newcomer waits, or another member wants a pause, write the number of this rank."""
    if not transport.fail_fast or transport.step <= transport.paused or wanted(transport):
        return
    status = transport.status
    if (status[:, Column.STATE] == State.ARRIVED).any() or status[:, Column.PAUSE].max() > 1 + transport.paused:
        transport.set_status(Column.PAUSE, 1 + transport.step)


def wanted(transport: Transport) -> bool:
    """Return whether this rank has written a number for the next pause."""
    return bool(transport.status[transport.rank, Column.PAUSE] > 1 + transport.paused)


def agreed(transport: Transport) -> float | None:
    """Return the step after which all pause, or None while a member may still begin another one.

    Infinity: there is no pause, because a member has stopped training before it noticed the newcomer. Then all stop.
    """
    numbers = {rank: transport.status[rank, Column.PAUSE] for rank in transport.survivors()}
    late = [rank for rank, number in numbers.items() if number <= 1 + transport.paused]
    if any(transport.state(rank) >= State.PAUSED for rank in late):
        return inf
    return None if late else float(max(numbers.values())) - 1
