"""Snapshots that replicas of asynchronous methods take on their own, in case all are killed at the same time.

    checkpoints/step-00000480/           written by the leader at the end of its epoch
    checkpoints/parts/2/step-00000470/   the state of replica 2 at the end of that epoch, or of the epoch before

Each replica writes its own snapshot, without any communication, so snapshots are of different moments. Messages in
flight are lost. Push-sum's mass would then no longer add up, so it starts again with 1 for each replica. Once all
replicas have stopped, one checkpoint holds the states of all, and the snapshots are deleted.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from minidl.run import checkpoint as files
from minidl.training.replica_state import ReplicaState, own_state
from minidl.training.resume import make_checkpoint
from minidl.training.trainer import Trainer

FOLDER = "parts"


def snapshot(trainer: Trainer) -> ReplicaState:
    """The state of this replica, without the method's: masses and clocks start again."""
    state = own_state(trainer)
    return replace(state, numbers=state.numbers | {"method": None}, meter=trainer.fabric.meter.vector())


def save(checkpoints: Path, trainer: Trainer) -> None:
    """Write this replica's snapshot; it replaces the one before."""
    folder = checkpoints / FOLDER / str(trainer.fabric.rank)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = make_checkpoint(trainer, [snapshot(trainer)])
    files.save(folder, trainer.progress.step, replace(checkpoint, weights={}))
    files.prune(folder, keep=1, best=-1)


def add(checkpoints: Path, checkpoint: files.Checkpoint) -> files.Checkpoint:
    """The leader's checkpoint with the snapshots of the other replicas added, if there are any.

    Raises CheckpointError for a damaged snapshot.
    """
    vectors, members = dict(checkpoint.vectors), dict(checkpoint.state.get("members", {}))
    for folder in (checkpoints / FOLDER).glob("[0-9]*"):
        last = files.last(folder)
        part = files.load(last) if last and folder.name not in members else None
        if part and part.state["batches"] == checkpoint.state["batches"]:  # the number of replicas was the same
            vectors |= part.vectors
            members |= part.state["members"]
    ordered = {rank: members[rank] for rank in sorted(members, key=int)}
    return replace(checkpoint, vectors=vectors, state=checkpoint.state | ({"members": ordered} if ordered else {}))


def exist(checkpoints: Path) -> bool:
    """Whether there are any snapshots."""
    return (checkpoints / FOLDER).is_dir()


def remove(checkpoints: Path, ranks: Sequence[int] | None = None) -> None:
    """Delete the snapshots of these ranks, or of all."""
    folder = checkpoints / FOLDER
    for each in [folder] if ranks is None else [folder / str(rank) for rank in ranks]:
        shutil.rmtree(each, ignore_errors=True)
