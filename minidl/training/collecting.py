"""The states of all replicas are collected into a checkpoint, one vector at a time.

    every replica     its numbers, then each of its vectors ──> leader ──> state.safetensors
    leader            reads the weights again, one replica at a time: their mean, their consensus distance

So the memory that the leader needs does not depend on the number of replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minidl.run import checkpoint as files
from minidl.run.array_writer import ArrayWriter, layouts
from minidl.training.replica_state import gather_numbers, mean_and_distance, own_state
from minidl.training.resume import STATS, state_of_run
from minidl.training.trainer import Trainer

SPARE = 4096  # bytes by which the state of the run may grow while its file is written


@dataclass
class Replicas:
    """The states of all live replicas without their vectors.

    members: each replica's numbers, by rank. theta: the mean of their weights, float32 (parameters,). distance: their
    consensus distance.
    """

    members: dict[int, dict[str, Any]]
    theta: np.ndarray
    distance: float


def send_state(trainer: Trainer) -> None:
    """Send the state of this replica to the leader, which calls `collected` at the same time."""
    own = own_state(trainer)
    for _ in gather_numbers(trainer, own.numbers):
        pass
    for name in [*own.vectors, STATS]:
        vector = own.vectors[name] if name != STATS else trainer.fabric.stats.vector()
        for _ in trainer.fabric.gather(vector.reshape(-1)):
            pass


@contextmanager
def collected(trainer: Trainer, folder: Path) -> Iterator[Replicas]:
    """Collect the states of all live replicas, and write them to the file `files.STATE` in this folder.

    The file is complete after the `with` block: the block may change the position of the run, which the file contains.
    """
    own = own_state(trainer)
    members = dict(sorted(gather_numbers(trainer, own.numbers)))
    planned = {f"{rank}/{name}": layout for rank in members
               for name, layout in layouts(own.vectors | {STATS: trainer.fabric.stats.vector()}).items()}  # fmt: skip
    metadata = files.state_metadata(state_of_run(trainer, members))
    with ArrayWriter(folder / files.STATE, planned, metadata, SPARE) as file:
        for name in [*own.vectors, STATS]:
            vector = own.vectors[name] if name != STATS else trainer.fabric.stats.vector()
            received = []
            for rank, values in trainer.fabric.gather(vector.reshape(-1)):
                if rank in members:
                    file.write(f"{rank}/{name}", values.reshape(vector.shape))
                    received.append(rank)
            for rank in set(members) - set(received):  # the replica has died meanwhile
                del members[rank]
                for one in own.vectors:
                    file.discard(f"{rank}/{one}")
        theta, distance = mean_and_distance(file.read(f"{rank}/theta") for rank in members)
        yield Replicas(members, theta, distance)
        file.finish(files.state_metadata(state_of_run(trainer, members)))
