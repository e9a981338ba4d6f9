"""The end of a run of several replicas: their states are collected, saved and tested, even if replicas die meanwhile.

    a replica     PAUSED ── its state ──┐           ┌──> STOPPED, LOST: exit        ┌──> OVER: exit
                                        v           │                               │
    the leader    PAUSED ────────── collects, saves ┴──> FINISHED: all send scores ─┴ tests, writes

No replica exits before the leader's status is STOPPED, LOST or OVER. So if the leader dies, all others can repeat the
shutdown with the next leader. If another replica dies, the leader continues without it.
"""

from __future__ import annotations

from contextlib import suppress
from signal import SIGTERM
from typing import Any

import numpy as np

from minidl.comm.fabric.base import Column, Freeze, PeerLost, State
from minidl.errors import MinidlError
from minidl.run.progress import Progress
from minidl.run.signals import Signals, Stopped
from minidl.training.collecting import Replicas
from minidl.training.epoch_averages import EpochAverages
from minidl.training.output import WRITING, Members, RunOutput
from minidl.training.replica_state import averaged, gather_numbers
from minidl.training.resume import make_checkpoint
from minidl.training.summary import summarise
from minidl.training.trainer import Entry, Trainer

Reason = Stopped | PeerLost | None  # why training ended; None: all steps were made
VERDICTS = (State.FINISHED, State.STOPPED, State.LOST)
LAST_STATES = (State.STOPPED, State.LOST, State.OVER)
TESTING = 300.0  # seconds after which a replica reports that it still waits for the leader's last status


def shut_down(
    output: RunOutput, averages: EpochAverages, signals: Signals, reason: Reason, last_epoch: Entry | None
) -> dict[str, Any] | None:
    """Collect the states of all replicas, save and test them. The leader returns the summary.

    Every replica calls this after training. last_epoch: the entry of the last epoch, if not reported yet.
    Raises Stopped after a signal, MinidlError if a death ended training; both after the states are saved.
    """
    fabric = output.fabric
    fabric.fail_fast = False  # a death now ends only the waits for that replica
    if reason is not None and fabric.on_freeze is Freeze.WAIT:
        fabric.handle_freezes(Freeze.LEAVE_OUT)  # save what can be saved
    fabric.stats.stop()
    output.trainer.work.give_back()
    fabric.set_status(Column.STATE, State.PAUSED)
    with suppress(PeerLost):  # the server died: keep this replica's weights
        output.trainer.method.pause()
    while True:
        fabric.led_by = fabric.leader
        try:
            replicas, verdict = _save(output, fabric.led_by, reason, last_epoch)
            if output.journal_error is not None:
                raise output.journal_error
            if verdict == State.STOPPED:
                raise Stopped(signals.received or SIGTERM)
            if verdict == State.LOST:
                ranks = sorted({*fabric.replicas, *fabric.servers})
                dead = ", ".join(str(rank) for rank in ranks if not fabric.alive(rank))
                what = reason if isinstance(reason, PeerLost) else f"replica {dead} died"
                raise MinidlError(f"{what}; the others are saved; to continue from their average: {output.command}")
            return _finish(output, averages, replicas, fabric.led_by)
        except PeerLost:
            if fabric.alive(fabric.led_by):
                raise


def _save(
    output: RunOutput, leader: int, reason: Reason, last_epoch: Entry | None
) -> tuple[Replicas | None, State]:
    """Collect the states of all replicas; the leader saves them. Return the states and the leader's verdict."""
    fabric, trainer = output.fabric, output.trainer
    if fabric.rank == leader:
        replicas = output.save_all(lambda members: last_epoch if _have_finished(trainer, members) else None)
        assert replicas
        finished = _have_finished(trainer, replicas.members)
        verdict = State.FINISHED if finished else State.STOPPED if fabric.stopping() else State.LOST
        fabric.set_status(Column.STATE, verdict)
        return replicas, verdict
    # Wait until the leader is PAUSED: before, it may still be collecting states for the end of an epoch.
    fabric.wait(lambda: fabric.state(leader) >= State.PAUSED or None, (leader,), "the checkpoint")
    output.save_all(lambda members: None)
    return None, fabric.wait(lambda: _one_of(VERDICTS, fabric.state(leader)), (leader,), "the verdict")


def _finish(
    output: RunOutput, averages: EpochAverages, replicas: Replicas | None, leader: int
) -> dict[str, Any] | None:
    """Test the result and each replica. The leader writes and returns the summary."""
    fabric, trainer = output.fabric, output.trainer
    if fabric.rank == leader:
        averages.validate(replicas)
    own = {"rank": fabric.rank, "score": output.score_of_replica(), "speed": trainer.progress.images_per_second}
    results = [result for _, result in gather_numbers(trainer, own)]
    statistics = [vector.copy() for _, vector in fabric.gather(fabric.stats.vector())]
    if fabric.rank == leader:
        of_servers = fabric.group((leader, *fabric.servers)).gather(fabric.stats.vector())
        statistics += [vector.copy() for rank, vector in of_servers if rank != leader]
    output.write_trace()
    if fabric.rank != leader:
        over = lambda: _one_of(LAST_STATES, fabric.state(leader))  # noqa: E731
        fabric.wait(over, (leader,), "the final test", TESTING)
        return None
    if output.journal_error is not None:
        raise output.journal_error
    assert replicas
    score = output.test()
    center = output.test_center(score)
    summary = output.summary(score) | summarise(output, replicas, score, results, statistics) | center
    with fabric.busy(WRITING):
        output.finish(summary)
    fabric.set_status(Column.STATE, State.OVER)
    return summary


def serve(output: RunOutput) -> None:
    """Run a server to the end of the run. Its statistics become a part of the summary.

    If all replicas die, save the center (the server's weights) and raise MinidlError.
    """
    fabric, trainer, at = output.fabric, output.trainer, output.trainer.progress
    fabric.fail_fast = False  # a server goes on until all replicas have stopped
    trainer.method.serve()
    told = -1  # the leader that has this server's statistics
    while fabric.survivors():
        leader = fabric.leader
        states = (State.DEAD, *LAST_STATES, *(() if told == leader else (State.FINISHED,)))
        over = lambda: _one_of(states, fabric.state(leader))  # noqa: B023, E731
        state = fabric.wait(over, (), "the end of the run", TESTING)
        if state in LAST_STATES:
            return
        if state is State.FINISHED:
            told = leader
            with suppress(PeerLost):  # the leader has died; the next one asks again
                for _ in fabric.group((leader, fabric.rank)).gather(fabric.stats.vector()):
                    pass
    begun = fabric.status[list(fabric.replicas), Column.STEP]
    trainer.work.estimate(at, max(0, int(np.mean(begun)) - 1))
    center = trainer.method.center_of_run()
    with averaged(trainer, trainer.replica.theta if center is None else center):  # estimates batch norm statistics
        output.write(make_checkpoint(trainer))
    raise MinidlError(f"all workers have died; the center is saved; to continue from it: {output.command}")


def _one_of(states: tuple[State, ...], state: State) -> State | None:
    return state if state in states else None


def _have_finished(trainer: Trainer, members: Members) -> bool:
    """Return whether all replicas have finished their work."""
    return all(trainer.work.finished(Progress(**numbers["progress"])) for numbers in members.values())
