"""The end of a run of several replicas: what each has is collected, saved and tested, whoever dies meanwhile.

    a replica     PAUSED ── its state ──┐           ┌──> STOPPED, LOST: exit        ┌──> OVER: exit
                                        v           │                               │
    the leader    PAUSED ────────── collects, saves ┴──> FINISHED: all send scores ─┴ tests, writes

Nobody leaves before the leader has said STOPPED, LOST or OVER. So when the leader dies, all others are still there, and
begin the end anew with the next one; when somebody else dies, the leader does without.
"""

from __future__ import annotations

from contextlib import suppress
from signal import SIGTERM
from typing import TYPE_CHECKING, Any

import numpy as np

from minidl.comm import trace
from minidl.comm.fabric.base import Column, PeerLost, State
from minidl.errors import MinidlError
from minidl.run.signals import Stopped
from minidl.training.replica_state import Member, averaged, collect, gather_numbers, member
from minidl.training.summary import together

if TYPE_CHECKING:
    from minidl.training.session import Session

Ended = Stopped | PeerLost | None  # why a replica trains no longer; None: it has made all steps
VERDICTS = (State.FINISHED, State.STOPPED, State.LOST)
LAST_WORDS = (State.STOPPED, State.LOST, State.OVER)
TESTING = 300.0  # seconds of waiting for the leader's last word after which a replica says so


def end(session: Session, reason: Ended) -> dict[str, Any] | None:
    """What every replica does when it has stopped, wherever it is; the leader returns the summary.

    Raises Stopped, or MinidlError where a death has ended the training: what the others have is saved then.
    """
    fabric = session.fabric
    fabric.fail_fast = False  # the death of one ends only waiting for that one
    fabric.meter.stop()
    fabric.announce(Column.STATE, State.PAUSED)
    with suppress(PeerLost):  # a server: then what this replica has is what there is
        session.trainer.method.pause()
    while True:
        fabric.led_by = fabric.leader
        try:
            members = _save(session, fabric.led_by, reason)
            return _finish(session, members, fabric.led_by)
        except PeerLost:
            if fabric.alive(fabric.led_by):
                raise


def _save(session: Session, leader: int, reason: Ended) -> list[Member]:
    """Save the state of all replicas; the leader returns it. Returns only where all have made all their steps."""
    fabric, trainer = session.fabric, session.trainer
    if fabric.rank == leader:
        members = collect(trainer)
        finished = all(_has_finished(one, trainer.total_steps) for one in members)
        session.keep(members, session.last_epoch if finished else None)
        stopped = fabric.stopping() and not isinstance(reason, PeerLost)
        verdict = State.FINISHED if finished else State.STOPPED if stopped else State.LOST
        fabric.announce(Column.STATE, verdict)
    else:  # it may still train, and collect what belongs to the end of an epoch
        fabric.wait(lambda: fabric.state(leader) >= State.PAUSED or None, (leader,), "the leader to save")
        members = collect(trainer)
        verdict = fabric.wait(lambda: _one_of(VERDICTS, fabric.state(leader)), (leader,), "the leader's verdict")
    if session.journal_error is not None:
        raise session.journal_error
    if verdict == State.STOPPED:
        raise Stopped(session.signals.received or SIGTERM)
    if verdict == State.LOST:
        dead = ", ".join(str(rank) for rank in range(fabric.size) if not fabric.alive(rank))
        what = reason if isinstance(reason, PeerLost) else f"replica {dead} died"
        raise MinidlError(f"{what}; the others are saved: to go on from their average: {session.command}")
    return members


def _finish(session: Session, members: list[Member], leader: int) -> dict[str, Any] | None:
    """The score of the result, and of each replica."""
    fabric, trainer = session.fabric, session.trainer
    session.snapshots.validate(session, members)
    score, speed = session.score(), trainer.progress.images_per_second
    numbers = [words for _, words in gather_numbers(trainer, {"score": score, "speed": speed})]
    books = [vector.copy() for _, vector in fabric.gather(fabric.meter.vector())]
    write_trace(session)
    if fabric.rank != leader:
        over = lambda: _one_of(LAST_WORDS, fabric.state(leader))  # noqa: E731
        fabric.wait(over, (leader,), "the leader to test", TESTING)
        return None
    if session.journal_error is not None:
        raise session.journal_error
    score = session.test()
    summary = session.summary(score) | together(session, members, score, numbers, books)
    session.finish(summary)
    fabric.announce(Column.STATE, State.OVER)
    return summary


def write_trace(session: Session) -> None:
    """RUN/trace.json, a timeline of all replicas, where --trace asked for it."""
    fabric = session.fabric
    if fabric.meter.trace is not None:
        timelines = [trace.from_vector(v) for _, v in fabric.gather(fabric.meter.trace.vector(fabric.rank))]
        if timelines:
            trace.write(session.folder / "trace.json", timelines, fabric.nodes)


def serve(session: Session) -> None:
    """What a server does, to the end of the run. Raises MinidlError where no replica sees it: the center is saved."""
    fabric, trainer, at = session.fabric, session.trainer, session.trainer.progress
    trainer.method.serve()
    over = lambda: not fabric.survivors() or _one_of(LAST_WORDS, fabric.state(fabric.leader)) or None  # noqa: E731
    fabric.wait(over, (), "the leader's last word", TESTING)
    if fabric.survivors():
        return
    begun = fabric.board[list(fabric.replicas), Column.STEP]
    at.step = max(0, int(np.mean(begun)) - 1)
    at.epoch, at.batch = divmod(at.step - at.shift, len(trainer.share))
    with averaged(trainer, [member(trainer)]):  # a server has no statistics of batch norm
        session.write(trainer.checkpoint())
    raise MinidlError(f"all workers have died; the center is saved: to go on from it: {session.command}")


def _one_of(states: tuple[State, ...], state: State) -> State | None:
    return state if state in states else None


def _has_finished(one: Member, total_steps: int) -> bool:
    progress = one.numbers["progress"]
    return bool(progress["step"] >= total_steps and progress["batch"] == 0)
