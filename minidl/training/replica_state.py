"""All replicas in one place: what an average, a checkpoint and a summary are made of.

    members = collect(trainer)            every replica calls it; the leader gets a list, the others an empty one
    with averaged(trainer, members): ...  the leader's model is the average, with batch norm's statistics made for it
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from minidl.engine.autograd import no_grad
from minidl.engine.tensor import Tensor
from minidl.errors import CheckpointError
from minidl.nn import BatchNorm2d, Module, random_state, set_random_state

if TYPE_CHECKING:
    from minidl.comm.fabric.base import Fabric
    from minidl.training.trainer import Trainer

FRAME = 1 << 14  # bytes that a member's numbers may take
REESTIMATED = 32  # batches
BOOKS = "books"  # the name of a member's in a checkpoint


@dataclass
class Member:
    """A replica's state: with its place in the data, all that its next step depends on."""

    rank: int
    vectors: dict[str, np.ndarray]  # theta, the optimizer's, statistics
    numbers: dict[str, Any]
    books: np.ndarray | None = None  # Meter.vector


def collect(trainer: Trainer) -> list[Member]:
    """The state of every replica that is alive, in order, at the leader."""
    own = member(trainer)
    lengths = {name: vector.size for name, vector in own.vectors.items()}
    vectors = trainer.fabric.gather(np.concatenate(list(own.vectors.values())))
    found = []
    for rank, vector in vectors:
        ends = np.cumsum(list(lengths.values()))[:-1]
        parts = [part.copy() for part in np.split(vector, ends)]
        found.append(Member(rank, dict(zip(lengths, parts, strict=True)), {}))
    numbers = dict(gather_numbers(trainer, own.numbers))
    books = {rank: vector.copy() for rank, vector in trainer.fabric.gather(trainer.fabric.meter.vector())}
    for one in found:
        one.numbers, one.books = numbers.get(one.rank, {}), books.get(one.rank)
    return [one for one in found if one.books is not None]


def member(trainer: Trainer) -> Member:
    """This replica's."""
    replica = trainer.replica
    vectors = {"theta": replica.theta, **replica.state}
    if replica.statistics is not None:
        vectors["statistics"] = replica.statistics
    numbers = {
        "progress": asdict(trainer.progress),
        "optimizer_steps": trainer.engine.optimizer.steps if not replica.own else replica.optimizer_steps,
        "random": replica.random if replica.own else random_state(),
        "images": replica.images,
        "steps": replica.steps,
        "method": _words(*trainer.method.state()),
    }
    return Member(trainer.fabric.rank, vectors, numbers)


def restore(trainer: Trainer, saved: Member) -> None:
    """Let this replica be the one that was saved. Its progress is the caller's business."""
    replica, numbers = trainer.replica, saved.numbers
    own = member(trainer).vectors
    if {name: v.shape for name, v in own.items()} != {name: v.shape for name, v in saved.vectors.items()}:
        raise CheckpointError("checkpoint is of replicas with other vectors: of another optimizer, or another model")
    for name, vector in own.items():
        vector[:] = saved.vectors[name]
    try:
        replica.images, replica.steps = int(numbers["images"]), int(numbers["steps"])
        replica.optimizer_steps = trainer.engine.optimizer.steps = int(numbers["optimizer_steps"])
        replica.random = numbers["random"]
        set_random_state(numbers["random"])
        if numbers["method"]:  # else it begins anew: see local_snapshots.py
            vectors, rest = numbers["method"]
            trainer.method.restore({name: np.array(values) for name, values in vectors.items()}, rest)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint of another version of minidl: {error} is not as expected") from None
    trainer.engine.arena.touch()
    if trainer.engine.statistics is not None:
        trainer.engine.statistics.touch()


def _words(vectors: dict[str, np.ndarray], numbers: dict[str, Any]) -> list[dict[str, Any]]:
    """A method's state: its vectors are a few masses and clocks, JSON gives every bit of them back."""
    return [{name: vector.tolist() for name, vector in vectors.items()}, numbers]


def gather_numbers(trainer: Trainer, numbers: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Of every replica, to the leader: what JSON can say."""
    for rank, vector in trainer.fabric.gather(_frame(json.dumps(numbers))):
        yield rank, json.loads(vector.tobytes())


def tell(fabric: Fabric, words: str) -> str:
    """What the first replica says, to all."""
    frame = _frame(words)
    fabric.broadcast(frame)
    return frame.tobytes().decode().rstrip(" ")


def _frame(words: str) -> np.ndarray:
    """Text as a vector of one length: bytes, whatever they would mean as numbers."""
    content = words.encode()
    if len(content) > FRAME:
        raise CheckpointError(f"a replica's numbers take {len(content)} bytes; expected at most {FRAME}")
    return np.frombuffer(content.ljust(FRAME), np.float64).copy()


def mean(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """Added up in float64, in their order."""
    total = np.zeros(vectors[0].size)
    for vector in vectors:
        total += vector
    return (total / len(vectors)).astype(vectors[0].dtype)


@contextmanager
def averaged(trainer: Trainer, members: Sequence[Member]) -> Iterator[Module]:
    """The model with the mean of the members' weights, while this lasts."""
    engine = trainer.engine
    theta, statistics = engine.arena.theta.copy(), engine.statistics and engine.statistics.theta.copy()
    try:
        engine.arena.theta[:] = mean([one.vectors["theta"] for one in members])
        engine.arena.touch()
        if statistics is not None:
            reestimate(trainer)
        yield trainer.model
    finally:
        engine.arena.theta[:] = theta
        engine.arena.touch()
        if engine.statistics is not None:
            engine.statistics.theta[:] = statistics
            engine.statistics.touch()


def reestimate(trainer: Trainer, batches: int = REESTIMATED) -> None:
    """Batch norm's statistics anew, as the means over some training batches.

    The mean of the replicas' statistics belongs to no model: the averaged weights have activations of their own
    (Izmailov et al. 2018, "Averaging weights leads to wider optima", section 3.2).
    """
    model, random = trainer.model, random_state()
    layers = [layer for _, layer in model.named_modules() if isinstance(layer, BatchNorm2d)]
    momenta, training = [layer.momentum for layer in layers], model.training
    model.train()
    try:
        with no_grad():
            for number, (x, _) in enumerate(trainer.share.sample(batches)):
                for layer in layers:
                    layer.momentum = 1 / (1 + number)
                model(Tensor(x))
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        model.train(training)
        set_random_state(random)


__all__ = [
    "BOOKS", "Member", "averaged", "collect", "gather_numbers", "mean", "member", "reestimate", "restore", "tell",
]  # fmt: skip
