"""Make a checkpoint of a trainer, and restore a trainer from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any

import numpy as np

from minidl.comm.stats import from_vector
from minidl.errors import CheckpointError, ConfigError
from minidl.nn import random_state, set_random_state
from minidl.reading import blaming
from minidl.run.checkpoint import RESUMABLE, Checkpoint, require_finite
from minidl.run.config import FREE, LENGTH, resolve
from minidl.run.config_file import from_toml, saved, to_toml
from minidl.run.model_file import is_own
from minidl.run.progress import BEST, Progress, length, require_position
from minidl.schema import LARGEST, named
from minidl.training.replica_state import ReplicaState, mean, restore_replica
from minidl.training.trainer import Trainer

STATS = "communication"  # in a checkpoint, the name of a replica's communication statistics


def make_checkpoint(trainer: Trainer, states: Sequence[ReplicaState] = ()) -> Checkpoint:
    """Return a checkpoint of everything that `restore` needs. Raises DivergedError if a weight is not finite.

    states: with several replicas, the states to save. The saved weights are those of the model: usually the average.
    """
    weights = trainer.model.state_dict()
    for name, values in weights.items():
        if not np.isfinite(values).all():
            raise trainer.diverged(f"{name} holds values that are not finite", trainer.progress.step)
    vectors, numbers = trainer.engine.optimizer.state_dict()
    state = {
        "progress": asdict(trainer.progress),
        "optimizer": numbers,
        "random": random_state(),
        "layout": trainer.engine.arena.layout_hash,
        "batches": len(trainer.sampler),
        "config": to_toml(trainer.config),
    }
    if states:
        vectors = {f"{one.rank}/{name}": vector for one in states for name, vector in one.vectors.items()}
        vectors |= {f"{one.rank}/{STATS}": one.stats for one in states if one.stats is not None}
        state["members"] = {str(one.rank): one.numbers for one in states}
    return Checkpoint(weights, vectors, state, _about(trainer))


def _about(trainer: Trainer) -> dict[str, str]:
    """Return the metadata that `load` and --evaluate need in addition to the weights: see run/trained.py."""
    data = trainer.data
    own = {"model_hash": trainer.config.model_hash} if trainer.config.model_hash else {}
    about = {
        "classes": data.classes,
        "input_shape": data.input_shape,  # (H, W, C)
        "mean": data.mean.tolist(),
        "std": data.std.tolist(),
        "seed": trainer.config.seed,  # the split of the data
        "validation": trainer.config.validation,
    }
    return {"model": trainer.config.model, **own, "data": data.name} | {n: json.dumps(v) for n, v in about.items()}


def restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Restore the trainer from a checkpoint, so that the run continues as if it had never stopped.

    If the run has become longer, its schedule is stretched: the learning rate continues with the value that the
    schedule of the longer run has at this position. So it rises again at the end of a finished run.
    If the replicas are not the same as before, all begin with the average weights at the average position.
    Raises CheckpointError if the checkpoint is from another run, model or layout.
    """
    state = checkpoint.state
    before, layout, batches = state["config"], state["layout"], state["batches"]
    members = {int(rank): member for rank, member in state.get("members", {}).items()}
    try:
        then = resolve(from_toml(before))
    except ConfigError as error:
        raise CheckpointError(f"the options in the checkpoint are not valid: {error}") from None
    now = trainer.config
    moved = ("model", "model_hash") if is_own(then.model) and is_own(now.model) else ()  # see run/model_file.py
    for name in saved(then) | saved(now):
        was, is_now = getattr(then, name), getattr(now, name)
        if name not in (*FREE, *LENGTH, *moved) and was != is_now:
            raise CheckpointError(f"the checkpoint was made with {name} = {was!r}, not {is_now!r}")
    if length(now, batches) < length(then, batches):
        was, is_now = ((one.steps, "steps") if one.steps else (one.epochs, "epochs") for one in (then, now))
        raise CheckpointError(f"the run has {was[0]:,} {was[1]}, and can only become longer: {is_now[0]:,} "
                              f"{is_now[1]} are fewer")  # fmt: skip
    with blaming("its state does not fit the run", CheckpointError):
        RESUMABLE(state)
        require_position(Progress(**state["progress"]), batches, then, "progress")
        for rank, member in members.items():
            require_position(Progress(**member["progress"]), batches, then, f"members.{rank}.progress")
    alike = list(members) == list(trainer.fabric.replicas) if members else trainer.fabric.size == 1
    same = alike and then.workers == now.workers
    if same and batches != len(trainer.sampler):
        raise CheckpointError(f"an epoch had {batches} batches, and now has {len(trainer.sampler)}: the data set has "
                              "changed")  # fmt: skip
    if layout != trainer.engine.arena.layout_hash:
        raise CheckpointError("the checkpoint is from a model with another layout of parameters")
    _check_arrays(trainer, checkpoint)
    for name in [f"{rank}/{kind}" for rank in members for kind in ("theta", STATS)]:
        if name not in checkpoint.vectors:
            raise CheckpointError(f"the checkpoint has no vector {name}")
    trainer.progress = Progress(**state["progress"])
    trainer.model.load_state_dict(checkpoint.weights)
    if same and not members:
        trainer.engine.optimizer.load_state_dict(checkpoint.vectors, state["optimizer"])
        set_random_state(state["random"])
        trainer.replica.steps = trainer.progress.step
    elif same:
        _restore_same_replicas(trainer, checkpoint, members)
    else:
        _restore_other_replicas(trainer, checkpoint, members, batches)


def _check_arrays(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a value is not finite, or if a vector has another type or shape than in this run."""
    theta, statistics = trainer.engine.arena.theta, trainer.engine.statistics
    require_finite(checkpoint.weights)
    require_finite(checkpoint.vectors)
    for name, vector in checkpoint.vectors.items():
        kind = name.rpartition("/")[2]
        own = statistics.theta if kind == "statistics" and statistics is not None else theta
        if kind == STATS:
            _check_stats(name, vector)
        elif vector.dtype != own.dtype or vector.shape != own.shape:
            raise CheckpointError(f"{named(name)} is {vector.dtype} {vector.shape}; expected {own.dtype} {own.shape}")


def _check_stats(name: str, vector: np.ndarray) -> None:
    """Raise CheckpointError unless a vector may be a replica's statistics of communication."""
    try:
        if vector.dtype != np.float64 or vector.ndim != 1 or (vector > LARGEST).any() or (vector < -1).any():
            raise ConfigError(f"{vector.dtype} {vector.shape}; expected float64 (N,) of 0 to {LARGEST:,}")
        if name != f"{from_vector(vector)['rank']}/{STATS}":
            raise ConfigError(f"expected the statistics of this rank, found those of rank {vector[0]:.0f}")
    except ConfigError as error:
        raise CheckpointError(f"{name}: {error}") from None


def _restore_same_replicas(trainer: Trainer, checkpoint: Checkpoint, members: dict[int, dict[str, Any]]) -> None:
    """Restore each replica from its saved state, and a server from the state of replica 0."""
    fabric = trainer.fabric
    rank = fabric.rank if fabric.rank in members else 0
    prefix = f"{rank}/"
    vectors = {n.removeprefix(prefix): v for n, v in checkpoint.vectors.items() if n.startswith(prefix)}
    numbers, stats = members[rank], vectors.pop(STATS)
    if rank == fabric.rank:
        if stats.size != fabric.stats.vector().size:
            raise CheckpointError(f"{prefix}{STATS} is not for {fabric.size} ranks")
        fabric.stats.go_on(stats)
    restore_replica(trainer, ReplicaState(rank, vectors, numbers))
    shared = {name: checkpoint.state["progress"][name] for name in BEST}
    trainer.progress = Progress(**numbers["progress"] | shared)
    trainer.furthest = max(member["progress"]["epoch"] for member in members.values())


def _restore_other_replicas(
    trainer: Trainer, checkpoint: Checkpoint, members: dict[int, dict[str, Any]], batches: int
) -> None:
    """Restore all replicas from the average. batches: the steps of an epoch before the stop."""
    before = [Progress(**member["progress"]) for member in members.values()] or [trainer.progress]
    _continue_from(trainer, before, batches)
    if members:
        trainer.replica.theta[:] = mean([checkpoint.vectors[f"{rank}/theta"] for rank in members])
        trainer.replica.touch()
    if members and trainer.fabric.rank == 0:
        trainer.fabric.stats.take_over([checkpoint.vectors[f"{rank}/{STATS}"] for rank in members])


def _continue_from(trainer: Trainer, before: Sequence[Progress], batches: int) -> None:
    """Continue at the average of the positions in `before`, measured in passes over the data.

    batches: the steps of a pass before the stop. With --steps, the schedule continues after the average number of
    steps. `step` becomes the largest in `before`, so that no replica's `step` decreases.
    """
    at, own, count = trainer.progress, len(trainer.sampler), len(before)
    passes = Fraction(sum(one.epoch * batches + one.batch for one in before), batches * count)
    made = sum(one.step - one.shift for one in before) // count
    at.step, at.epoch, at.batch = max(one.step for one in before), int(passes), int(passes % 1 * own)
    at.shift = at.step - (made if trainer.config.steps else at.epoch * own + at.batch)
    at.loss_sum, at.correct, at.images = 0.0, 0, 0
    trainer.replica.steps = at.step
