"""Make a checkpoint of a trainer, and restore a trainer from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from minidl.comm.staleness import BINS
from minidl.comm.stats import NUMBERS, from_vector
from minidl.errors import CheckpointError, ConfigError
from minidl.nn import random_state, set_random_state
from minidl.reading import blaming
from minidl.run.array_writer import layouts
from minidl.run.checkpoint import Checkpoint, layouts_of, require_finite
from minidl.run.checkpoint_state import RESUMABLE
from minidl.run.config import FREE, LENGTH, Config, resolve
from minidl.run.config_file import from_toml, saved, to_toml
from minidl.run.model_file import is_own
from minidl.run.progress import BEST, Progress, length, require_position
from minidl.run.trained import difference
from minidl.schema import LARGEST, Mismatch, named
from minidl.training.balanced import Balanced, part_before
from minidl.training.replica_state import METHOD, ReplicaState, mean_and_distance, restore_replica, without_method
from minidl.training.trainer import Trainer
from minidl.training.work import Claimed

STATS = "communication"  # in a checkpoint, the name of a replica's communication statistics
NEWEST = ("exchanges", "exchanges_suppressed", "bytes_suppressed")
LACKING = (NEWEST, ("data", "reads_overlapped", *NEWEST))  # numbers that these lack in earlier versions: they are 0


def make_checkpoint(trainer: Trainer, states: Sequence[ReplicaState] = ()) -> Checkpoint:
    """Return a checkpoint of everything that `restore` needs. Raises DivergedError if a weight is not finite.

    states: with several replicas, the states to save. The saved weights are those of the model: usually the average.
    """
    vectors = trainer.replica.bound_engine().optimizer.state_dict()[0]
    if trainer.fabric.size == 1:
        vectors |= {METHOD + name: vector for name, vector in trainer.method.vectors().items()}
    if states:
        vectors = {f"{one.rank}/{name}": vector for one in states for name, vector in one.vectors.items()}
        vectors |= {f"{one.rank}/{STATS}": one.stats for one in states if one.stats is not None}
    state = state_of_run(trainer, {one.rank: one.numbers for one in states})
    return Checkpoint(finite_weights(trainer), vectors, state, about(trainer))


def state_of_run(trainer: Trainer, members: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON values of a checkpoint. members: with several replicas, the numbers of each one, by rank."""
    return {
        "progress": asdict(trainer.progress),
        "optimizer": trainer.replica.bound_engine().optimizer.state_dict()[1],
        "random": random_state(),
        "layout": trainer.engine.arena.layout_hash,
        "batches": trainer.work.own_batches,
        "work": trainer.work.state(),
        "config": to_toml(trainer.config),
    } | ({"members": {str(rank): numbers for rank, numbers in members.items()}} if members else {})


def finite_weights(trainer: Trainer) -> dict[str, np.ndarray]:
    """Return the model's weights. Raises DivergedError if a value is not finite."""
    weights = trainer.model.state_dict()
    for name, values in weights.items():
        if not np.isfinite(values).all():
            raise trainer.diverged(f"{name} holds values that are not finite", trainer.progress.step)
    return weights


def about(trainer: Trainer) -> dict[str, str]:
    """Return the metadata that `load` and --evaluate need in addition to the weights: see run/trained.py."""
    data = trainer.data
    own = {"model_hash": trainer.config.model_hash} if trainer.config.model_hash else {}
    described = {
        "classes": data.classes,
        "input_shape": data.input_shape,  # (H, W, C)
        "mean": data.mean.tolist(),
        "std": data.std.tolist(),
        "seed": trainer.config.seed,  # the split of the data
        "validation": trainer.config.validation,
    }
    names = {"model": trainer.config.model, **own, "data": data.name}
    return names | {name: json.dumps(value) for name, value in described.items()}


def restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Restore the trainer from a checkpoint. Raises CheckpointError: see Restoration."""
    Restoration(trainer, checkpoint).apply(trainer)


class Restoration:
    """A checkpoint that fits a run. It restores each of the run's trainers, as if the run had never stopped.

    If the run has become longer, its schedule is stretched: the learning rate continues with the value that the
    schedule of the longer run has at this position. So it rises again at the end of a finished run.
    If the replicas are not the same as before, all begin with the average weights at the average position.
    Raises CheckpointError if the checkpoint is from another run, model or layout. trainer: any one of the run.
    """

    def __init__(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        self.checkpoint, state = checkpoint, checkpoint.state
        self.batches, members = state["batches"], state.get("members", {})
        self.members: dict[int, dict[str, Any]] = {int(rank): member for rank, member in members.items()}
        self.then = then = _options_then(trainer.config, state["config"])
        with blaming("its state does not fit the run", CheckpointError):
            RESUMABLE(state)
            planned = _require_work(trainer, state, then)
            require_position(Progress(**state["progress"]), self.batches, then, "progress", planned)
            for rank, member in members.items():
                at = Progress(**member["progress"])
                require_position(at, self.batches, then, f"members.{rank}.progress", planned)
        now, claimed = trainer.config, isinstance(trainer.work, Claimed)
        self.total = _pieces(state["work"], then, now, self.batches) if claimed else length(now, self.batches)
        if self.total < (state["work"]["total"] if claimed else length(then, self.batches)):
            was, is_now = ((one.steps, "steps") if one.steps else (one.epochs, "epochs") for one in (then, now))
            raise CheckpointError(f"the run has {was[0]:,} {was[1]}, and can only become longer: {is_now[0]:,} "
                                  f"{is_now[1]} are fewer")  # fmt: skip
        alike = list(self.members) == list(trainer.fabric.replicas) if members else trainer.fabric.size == 1
        # Whether the replicas are the same as before. If others have joined and died, the work was divided among more.
        parts = trainer.sampler.replicas
        self.same = alike and then.workers == now.workers and state.get("work", {}).get("replicas", parts) == parts
        if (self.same or claimed) and self.batches != trainer.work.own_batches:
            raise CheckpointError(f"an epoch had {self.batches} batches, and now has {trainer.work.own_batches}: the "
                                  "data set has changed")  # fmt: skip
        if state["layout"] != trainer.engine.arena.layout_hash:
            raise CheckpointError("the checkpoint is from a model with another layout of parameters")
        with blaming("its metadata", CheckpointError):
            changed = difference(checkpoint.about, trainer.data, 1e-4)  # the same data, perhaps on another CPU
        if changed:
            raise CheckpointError("the data set has changed: its {} was {}, and is {}".format(*changed))
        _check_arrays(trainer, checkpoint)
        for name in [f"{rank}/{kind}" for rank in self.members for kind in ("theta", STATS)]:
            if name not in checkpoint.vectors:
                raise CheckpointError(f"the checkpoint has no vector {name}")

    def apply(self, trainer: Trainer) -> None:
        """Restore a trainer. It reads only what its own replica needs. Raises CheckpointError if a value is invalid."""
        checkpoint, state, claimed = self.checkpoint, self.checkpoint.state, isinstance(trainer.work, Claimed)
        trainer.progress = Progress(**state["progress"])
        if claimed:
            trainer.go_on_with(self.total, state["work"]["first"], state["work"]["left"])
        elif self.same and "parts" in state.get("work", {}):
            with blaming("its state does not fit the run", CheckpointError):
                trainer.sampler.divide_again(state["work"]["epoch"], state["work"]["parts"])
        trainer.model.load_state_dict(checkpoint.weights)
        trainer.replica.take_model()
        if self.same and not self.members:
            vectors = {name: _vector(checkpoint, name) for name in checkpoint.vectors}
            trainer.engine.optimizer.load_state_dict(without_method(vectors), state["optimizer"])
            trainer.replica.steps = trainer.progress.step
            _restore_method(trainer, {name: vectors[name] for name in vectors.keys() - without_method(vectors).keys()})
            set_random_state(state["random"])
        elif self.same:
            self._restore_same_replicas(trainer)
        else:
            self._restore_other_replicas(trainer)
        if self.same and not claimed and self.total > length(self.then, self.batches):
            _reopen_epoch(trainer.progress, self.batches)

    def _restore_same_replicas(self, trainer: Trainer) -> None:
        """Restore a replica from its saved state, and a server from the state of replica 0."""
        fabric, checkpoint = trainer.fabric, self.checkpoint
        rank = fabric.rank if fabric.rank in self.members else 0
        prefix = f"{rank}/"
        vectors = {name.removeprefix(prefix): _vector(checkpoint, name) for name in self._names[rank]}
        numbers, stats = self.members[rank], _stats(checkpoint, rank)
        if rank == fabric.rank:
            if stats.size != fabric.stats.vector().size:
                raise CheckpointError(f"{prefix}{STATS} is not for {fabric.size} ranks")
            fabric.stats.go_on(stats)
        restore_replica(trainer, ReplicaState(rank, vectors, numbers))
        if isinstance(trainer.work, Balanced) and (balance := checkpoint.state["work"].get("balance")):
            with blaming("its state does not fit the run", CheckpointError):
                trainer.work.restore(balance, numbers.get("measured", []))
        shared = {name: checkpoint.state["progress"][name] for name in BEST}
        trainer.progress = Progress(**numbers["progress"] | shared)

    def _restore_other_replicas(self, trainer: Trainer) -> None:
        """Restore a replica from the average of all."""
        members, work = self.members, self.checkpoint.state.get("work", {})
        before = [Progress(**member["progress"]) for member in members.values()] or [trainer.progress]
        if isinstance(trainer.work, Claimed):
            _continue_claims(trainer, trainer.work, before)
        else:
            stopped = {rank: (at.epoch, at.batch) for rank, at in zip(members or [0], before)}
            known = min((one["known"] for one in members.values() if "known" in one), default=LARGEST)
            _continue_from(trainer, before, self.batches)
            _divide_again(trainer, stopped, known, work)
        if members:
            trainer.replica.theta[:] = self._average
            trainer.replica.touch()
        trainer.method.restart(self._vectors_of_method(trainer))
        if members and trainer.fabric.rank == 0:
            trainer.fabric.stats.take_over([_stats(self.checkpoint, rank) for rank in members])

    @cached_property
    def _names(self) -> dict[int, list[str]]:
        """The names of each replica's vectors, except its statistics."""
        found: dict[int, list[str]] = {rank: [] for rank in self.members}
        for name in self.checkpoint.vectors:
            rank, _, vector = name.partition("/")
            if rank.isdecimal() and int(rank) in found and vector != STATS:
                found[int(rank)].append(name)
        return found

    def _vectors_of_method(self, trainer: Trainer) -> dict[str, np.ndarray] | None:
        """Return the saved vectors of the method: those of the replica that knows the newest center. None: unknown.

        Raises CheckpointError if they are not those of the method.
        """
        known = {rank: member["method"] for rank, member in self.members.items() if member["method"] is not None}
        prefix = METHOD
        if self.members:
            if not known:  # local snapshots
                return None
            prefix = f"{max(known, key=lambda rank: known[rank].get('version', 0))}/{METHOD}"
        names = {name.removeprefix(prefix) for name in self.checkpoint.vectors if name.startswith(prefix)}
        if names != trainer.method.vectors().keys():  # a single replica may have trained, or trains now, with `local`
            return None
        return _of_method(trainer, {name: _vector(self.checkpoint, prefix + name) for name in names})

    @cached_property
    def _average(self) -> np.ndarray:
        """The mean of the replicas' weights."""
        return mean_and_distance(_vector(self.checkpoint, f"{rank}/theta") for rank in self.members)[0]


def _options_then(now: Config, text: str) -> Config:
    """Return the options in a checkpoint. Raises CheckpointError if an option differs that a resume must keep."""
    try:
        then = resolve(from_toml(text))
    except ConfigError as error:
        raise CheckpointError(f"the options in the checkpoint are not valid: {error}") from None
    moved = {"model", "model_hash"} if is_own(then.model) and is_own(now.model) else set()  # see run/model_file.py
    moved |= {"data"} if then.data.endswith(".npz") and now.data.endswith(".npz") else set()
    for name in saved(then) | saved(now):
        was, is_now = getattr(then, name), getattr(now, name)
        if name not in (*FREE, *LENGTH, *moved) and was != is_now:
            raise CheckpointError(f"the checkpoint was made with {name} = {was!r}, not {is_now!r}")
    return then


def _require_work(trainer: Trainer, state: dict[str, Any], then: Config) -> int:
    """Raise Mismatch if the saved work does not fit the run. Returns the argument `planned` of `require_position`."""
    work, batches = state.get("work", {}), state["batches"]
    if not isinstance(trainer.work, Claimed):
        counts, epoch = work.get("parts", []), work.get("epoch", 0)
        most = max(len(trainer.sampler.data.y_train), int(work.get("replicas", 1)) * then.batch_size)
        if max(map(max, counts), default=0) > most or epoch > state["progress"]["epoch"]:
            raise Mismatch(f"work.parts is {counts} in epoch {epoch}")
        members = work.get("members")
        if members is not None and not len(members) == len(set(members)) == work["replicas"]:
            raise Mismatch(f"work.members is {members[:8]}; expected {work['replicas']} different ranks")
        return 0
    if "total" not in work:
        raise Mismatch(f"it does not say which batches are left, which replicas of {then.method} claim one by one")
    total, first, left = work["total"], work.get("first", 0), work.get("left", [])
    if not then.steps and total != then.epochs * batches:
        raise Mismatch(f"work.total is {total}; expected {then.epochs} epochs of {batches} batches")
    if first > total or left != sorted(set(left)) or max(left, default=-1) >= first:
        raise Mismatch(f"work.first is {first} of {total}, and work.left is {left[:8]}; expected increasing numbers "
                       "below it")  # fmt: skip
    return -(-total // int(work["replicas"]))


def _pieces(work: Mapping[str, Any], then: Config, now: Config, batches: int) -> int:
    """Return how many batches replicas claim in the whole run. work, batches: of the checkpoint.

    With --steps, the number depends on the number of replicas at the start of the run.
    """
    if not now.steps:
        return now.epochs * batches
    return int(work["total"] * now.steps // then.steps if then.steps else work["replicas"] * now.steps)


def _reopen_epoch(at: Progress, batches: int) -> None:
    """Continue in the epoch that --steps has interrupted, if the run has become longer. It was counted as finished."""
    position = at.step - at.shift
    if not at.batch and position < at.epoch * batches:
        at.epoch, at.batch = divmod(position, batches)


def _check_arrays(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a value is not finite, or if a vector has another type or shape than in this run."""
    theta, statistics = trainer.engine.arena.theta, trainer.engine.statistics
    require_finite(checkpoint.weights)
    for name, found in layouts_of(checkpoint.vectors).items():
        kind = name.rpartition("/")[2]
        own = statistics.theta if kind == "statistics" and statistics is not None else theta
        if kind == STATS or kind.startswith(METHOD):
            continue  # `_stats` and `restore_replica` check these
        if found.dtype != own.dtype or found.shape != own.shape:
            raise CheckpointError(f"{named(name)} is {found.dtype} {found.shape}; expected {own.dtype} {own.shape}")


def _vector(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """Read one vector of a checkpoint. Raises CheckpointError if a value is not finite."""
    vector = checkpoint.vectors[name]
    require_finite({name: vector})
    return vector


def _restore_method(trainer: Trainer, vectors: dict[str, np.ndarray]) -> None:
    """Restore the method of a single replica. Raises CheckpointError if the vectors are not those of the method."""
    vectors = {name.removeprefix(METHOD): vector for name, vector in vectors.items()}
    trainer.method.restore(_of_method(trainer, vectors), trainer.method.numbers())


def _of_method(trainer: Trainer, vectors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return vectors that have the names, types and shapes of the method's. Raises CheckpointError if not."""
    if layouts(vectors) != layouts(trainer.method.vectors()):
        raise CheckpointError(f"the vectors of the method in the checkpoint are not those of {trainer.config.method}: "
                              "it is from another method or model")  # fmt: skip
    return vectors


def _stats(checkpoint: Checkpoint, rank: int) -> np.ndarray:
    """Read a replica's statistics of communication. Raises CheckpointError if they are not valid."""
    name = f"{rank}/{STATS}"
    vector = _vector(checkpoint, name)
    for lacking in LACKING:
        if vector.ndim == 1 and (vector.size - len(NUMBERS) + len(lacking) - BINS) % 4 == 0:  # of an earlier version
            places = [NUMBERS.index(added) - number for number, added in enumerate(lacking)]
            vector = np.insert(vector, [place for place in places if place <= vector.size], 0)
            break
    try:
        if vector.dtype != np.float64 or vector.ndim != 1 or (vector > LARGEST).any() or (vector < -1).any():
            raise ConfigError(f"{vector.dtype} {vector.shape}; expected float64 (N,) of 0 to {LARGEST:,}")
        if name != f"{from_vector(vector)['rank']}/{STATS}":
            raise ConfigError(f"expected the statistics of this rank, found those of rank {vector[0]:.0f}")
    except ConfigError as error:
        raise CheckpointError(f"{name}: {error}") from None
    return vector


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


def _continue_claims(trainer: Trainer, work: Claimed, before: Sequence[Progress]) -> None:
    """Continue with the pieces that are left. `step` becomes the largest in `before`, so that it never decreases."""
    at = trainer.progress
    at.step = max(one.step for one in before)
    at.shift = at.step - work.steps(work.first)
    at.batch, at.loss_sum, at.correct, at.images = 0, 0.0, 0, 0
    trainer.replica.steps = at.step


def _divide_again(trainer: Trainer, stopped: dict[int, tuple[int, int]], known: int, work: dict[str, Any]) -> None:
    """Divide the rest of an interrupted epoch among the replicas, if all replicas stopped in this epoch.

    stopped: by rank, the epoch and the batch at which a replica stopped. known: the last batch of a dead replica that
    the weights of all others contain; its later ones are trained again.
    Otherwise (independent replicas, skewed shards) the replicas continue with new parts at the average position.
    """
    sampler, at = trainer.sampler, trainer.progress
    places = work.get("members", range(work.get("replicas", len(stopped))))  # the ranks among which it was divided
    epochs, batches = {epoch for epoch, _ in stopped.values()}, {rank: batch for rank, (_, batch) in stopped.items()}
    if len(epochs) > 1 or sampler.own is not None or not set(stopped) <= set(places):
        return
    [epoch] = epochs
    earlier = work.get("parts", []) if work.get("epoch") == epoch else []
    if not earlier and not any(batches.values()):
        return
    at.epoch = epoch
    last = min(known, *batches.values())
    counts = [batches.get(rank, last) for rank in places]
    if "balance" in work:
        counts = part_before(work["balance"], counts, epoch)
    with blaming("its state does not fit the run", CheckpointError):
        batch = sampler.divide_again(at.epoch, [*earlier, counts])
    at.epoch, at.batch = (at.epoch, batch) if batch < len(sampler) else (at.epoch + 1, 0)
    if not trainer.config.steps:
        at.shift = at.step - at.epoch * len(sampler) - at.batch
