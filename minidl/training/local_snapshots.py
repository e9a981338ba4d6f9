"""Snapshots of single replicas of an asynchronous method, in case all replicas are killed at the same time.

    checkpoints/step-00000480/           the checkpoint of the leader at the end of its last epoch
    checkpoints/parts/2/step-00000470/   the state of replica 2 at the end of its last epoch

Each replica writes its snapshot without communication. So the snapshots are of different moments, and messages in
flight are lost, with the push-sum masses that they carry (comm/methods/weighing.py). The saved masses would not add up
to the number of replicas, so after a resume each mass starts again at 1. When all replicas have stopped, one checkpoint
holds the states of all, and the snapshots are deleted.

The leader's checkpoint also says which batches were not settled when it was written. A resumed run hands them out
again, so those that the replicas had trained between this checkpoint and their death are repeated: up to the batches of
about one epoch.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from minidl.errors import CheckpointError
from minidl.run import checkpoint as files
from minidl.training.replica_state import ReplicaState, own_state, without_method
from minidl.training.resume import make_checkpoint
from minidl.training.trainer import Trainer

FOLDER = "parts"


def snapshot(trainer: Trainer) -> ReplicaState:
    """Return the state of this replica without the method's state: its masses and counters start again."""
    state = own_state(trainer)
    return replace(state, vectors=without_method(state.vectors), numbers=state.numbers | {"method": None},
                   stats=trainer.fabric.stats.vector())  # fmt: skip


def save(checkpoints: Path, trainer: Trainer) -> None:
    """Write this replica's snapshot; it replaces the previous one."""
    folder = checkpoints / FOLDER / str(trainer.fabric.rank)
    for each in (folder.parent, folder):  # without `parents`: the user may have removed the run's folder
        each.mkdir(exist_ok=True)
    trainer.replica.show()
    checkpoint = make_checkpoint(trainer, [snapshot(trainer)])
    files.save(folder, trainer.progress.step, replace(checkpoint, weights={}))
    files.prune(folder, keep=1, best=-1)


def add(checkpoints: Path, checkpoint: files.Checkpoint) -> files.Checkpoint:
    """Return the leader's checkpoint, with the snapshots of the other replicas added if there are any.

    Raises CheckpointError if a snapshot is damaged.
    """
    vectors, members = checkpoint.vectors, dict(checkpoint.state.get("members", {}))
    for folder in folders(checkpoints):
        made = files.steps(folder)
        part = files.load_step(folder, made[-1]) if made and folder.name not in members else None
        if part and list(part.state.get("members", {})) != [folder.name]:
            raise CheckpointError(f"{files.last(folder)}: expected the state of replica {folder.name}")
        # If a snapshot is from another number of replicas, it is older than the checkpoint: ignore it.
        if part and _replicas(part) == _replicas(checkpoint):
            assert isinstance(vectors, files.StoredArrays) and isinstance(part.vectors, files.StoredArrays)
            vectors = vectors | part.vectors
            members |= part.state["members"]
    ordered = {rank: members[rank] for rank in sorted(members, key=int)}
    return replace(checkpoint, vectors=vectors, state=checkpoint.state | ({"members": ordered} if ordered else {}))


def _replicas(checkpoint: files.Checkpoint) -> tuple[int, int]:
    state = checkpoint.state
    return state["batches"], state.get("work", {}).get("replicas", 0)


def folders(checkpoints: Path) -> list[Path]:
    """Return the folder of each replica that has a snapshot."""
    return [each for each in (checkpoints / FOLDER).glob("[0-9]*") if each.is_dir()]


def exist(checkpoints: Path) -> bool:
    """Return whether there are any snapshots."""
    return (checkpoints / FOLDER).is_dir()


def remove(checkpoints: Path, ranks: Sequence[int] | None = None) -> None:
    """Delete the snapshots of these ranks (default: of all)."""
    folder = checkpoints / FOLDER
    for each in [folder] if ranks is None else [folder / str(rank) for rank in ranks]:
        shutil.rmtree(each, ignore_errors=True)
