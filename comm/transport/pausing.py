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
from typing import Protocol

import numpy as np

from minidl.comm.transport.messages import Column, State


class Pause(Exception):
    """All members pause before the next step."""


class Member(Protocol):
    """The parts of a Transport that this file uses."""

    rank: int
    status: np.ndarray
    step: int
    paused: int
    fail_fast: bool

    def set_status(self, column: Column, value: float) -> None: ...

    def state(self, peer: int) -> State: ...

    def survivors(self) -> list[int]: ...


def consider(member: Member) -> None:
    """If a newcomer waits, or another member wants a pause, write the number of this rank."""
    if not member.fail_fast or member.step <= member.paused or wanted(member):
        return
    status = member.status
    if (status[:, Column.STATE] == State.ARRIVED).any() or status[:, Column.PAUSE].max() > 1 + member.paused:
        member.set_status(Column.PAUSE, 1 + member.step)


def wanted(member: Member) -> bool:
    """Return whether this rank has written a number for the next pause."""
    return bool(member.status[member.rank, Column.PAUSE] > 1 + member.paused)


def agreed(member: Member) -> float | None:
    """Return the step after which all pause, or None while a member may still begin another one.

    Infinity: there is no pause, because a member has stopped training before it noticed the newcomer. Then all stop.
    """
    numbers = {rank: member.status[rank, Column.PAUSE] for rank in member.survivors()}
    late = [rank for rank, number in numbers.items() if number <= 1 + member.paused]
    if any(member.state(rank) >= State.PAUSED for rank in late):
        return inf
    return None if late else float(max(numbers.values())) - 1
