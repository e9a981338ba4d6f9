"""What replicas that never wait for each other keep on the way, should all be killed at once.

    checkpoints/step-00000480/           the leader, at the end of an epoch
    checkpoints/parts/2/step-00000470/   what replica 2 had when it came to the end of that epoch, or of the one before

Each writes its own part, and nobody asks for it: parts are of different moments. Messages that were on their way are
lost, so push-sum's mass would not add up; it begins anew with 1 for each. When all have stopped, one checkpoint holds
all replicas, and parts are deleted.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from minidl.run import checkpoint as files
from minidl.training.replica_state import Member, member

if TYPE_CHECKING:
    from minidl.training.trainer import Trainer

FOLDER = "parts"


def own(trainer: Trainer) -> Member:
    """This replica."""
    found = member(trainer)
    return replace(found, numbers=found.numbers | {"method": None}, books=trainer.fabric.meter.vector())


def save(checkpoints: Path, trainer: Trainer) -> None:
    """Keep this replica, in place of what it kept before."""
    folder = checkpoints / FOLDER / str(trainer.fabric.rank)
    folder.mkdir(parents=True, exist_ok=True)
    part = trainer.checkpoint([own(trainer)])
    files.save(folder, trainer.progress.step, replace(part, weights={}))
    files.prune(folder, keep=1, best=-1)


def add(checkpoints: Path, checkpoint: files.Checkpoint) -> files.Checkpoint:
    """The leader's checkpoint, and the parts of others that lie beside it, if any. Raises CheckpointError."""
    vectors, members = dict(checkpoint.vectors), dict(checkpoint.state.get("members", {}))
    for folder in (checkpoints / FOLDER).glob("[0-9]*"):
        last = files.last(folder)
        part = files.load(last) if last and folder.name not in members else None
        if part and part.state["batches"] == checkpoint.state["batches"]:  # of a run with as many replicas
            vectors |= part.vectors
            members |= part.state["members"]
    ordered = {rank: members[rank] for rank in sorted(members, key=int)}
    return replace(checkpoint, vectors=vectors, state=checkpoint.state | ({"members": ordered} if ordered else {}))


def exist(checkpoints: Path) -> bool:
    return (checkpoints / FOLDER).is_dir()


def remove(checkpoints: Path, ranks: Sequence[int] | None = None) -> None:
    """Delete the parts of these ranks, or of all."""
    folder = checkpoints / FOLDER
    for each in [folder] if ranks is None else [folder / str(rank) for rank in ranks]:
        shutil.rmtree(each, ignore_errors=True)
