"""Replicas begin with the same weights, on the same data, with the same options.

    agree_on_weights(fabric, arena)       every rank gets the weights of rank 0: for a script that builds its own model
    require_agreement(trainer)            refuses a job whose ranks differ: for `python -m minidl.train`
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from minidl.comm.fabric.base import Fabric
from minidl.engine.arena import Arena
from minidl.errors import ConfigError
from minidl.run.config import FREE
from minidl.run.config_file import saved
from minidl.training.replica_state import broadcast_text, gather_numbers
from minidl.training.trainer import Trainer

DIGITS = 12  # of a hash in a message


def agree_on_weights(fabric: Fabric, *arenas: Arena) -> None:
    """Copy the values of rank 0 to all ranks. All ranks must call this, after `fabric.join` and before training."""
    for arena in arenas:
        fabric.broadcast(arena.theta)
        arena.touch()


def facts(trainer: Trainer) -> dict[str, str]:
    """Return what must be the same on all ranks, as texts: the options, the training data, the initial weights."""
    config, data, engine = trainer.config, trainer.data, trainer.engine
    return {
        **{f"--{name.replace('_', '-')}": repr(getattr(config, name)) for name in saved(config) if name not in FREE},
        "training images": f"{data.x_train.dtype} {data.x_train.shape}",
        "training labels": _digest(data.y_train),
        "initial weights": _digest(engine.arena.theta),
    }


def require_agreement(trainer: Trainer) -> None:
    """Raise ConfigError if a rank has other options, data or initial weights than the first one.

    All ranks must call this, after `fabric.join` and before the first step. The leader compares the replicas. Each
    server compares itself with replica 0, because `gather` does not include servers.
    """
    fabric, own = trainer.fabric, facts(trainer)
    trains = fabric.rank in fabric.replicas
    for rank, theirs in gather_numbers(trainer, own) if trains else ():
        _compare(rank, theirs, fabric.rank, own)
    whole = _digest(np.frombuffer(repr(own).encode(), np.uint8))
    first = broadcast_text(fabric, whole)
    if not trains:
        _compare(fabric.rank, {"options, data or initial weights": whole}, 0,
                 {"options, data or initial weights": first})  # fmt: skip


def _compare(rank: int, theirs: Mapping[str, str], reference: int, own: Mapping[str, str]) -> None:
    for name in [*own, *theirs]:
        found, expected = theirs.get(name, "none"), own.get(name, "none")
        if found != expected:
            raise ConfigError(f"replica {rank} has other {name} than replica {reference}: {found} against {expected}; "
                              "start all ranks with the same program, options and data")  # fmt: skip


def _digest(array: np.ndarray) -> str:
    """Return the beginning of a hash of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(array).data.cast("B")).hexdigest()[:DIGITS]
