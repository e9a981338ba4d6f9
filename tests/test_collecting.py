"""The states of replicas are collected into a checkpoint: their bits, a death meanwhile, and the leader's memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import job
from sessions import Sessions

from minidl.comm.fabric.base import Fabric
from minidl.run import checkpoint as files
from minidl.training.replica_state import own_state
from minidl.training.trainer import Trainer

SMALL: dict[str, Any] = dict(data="synthetic:120x2x2x1:2", batch_size=8, lr=0.01, epochs=2, optimizer="adam")


def holds_the_mean(checkpoint: files.Checkpoint, ranks: Iterable[int]) -> bool:
    """Return whether the saved weights are the means of these replicas' weights, in any order and without padding."""
    mean = np.mean([checkpoint.vectors[f"{rank}/theta"] for rank in ranks], 0, np.float64).astype(np.float32)
    values = np.concatenate([values.ravel() for values in checkpoint.weights.values()])
    return np.array_equal(np.sort(values[values != 0]), np.sort(mean[mean != 0]))


def test_a_checkpoint_holds_the_state_of_every_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainers: dict[int, Trainer] = {}
    run = Trainer.run
    monkeypatch.setattr(Trainer, "run", lambda self: (trainers.update({self.fabric.rank: self}), run(self))[1])
    last = Sessions(tmp_path, 3, {}, method="gossip", **SMALL).last()
    assert list(last.state["members"]) == ["0", "1", "2"]
    del trainers[0]  # it has loaded the average, to test it
    for rank, trainer in trainers.items():
        for name, vector in own_state(trainer).vectors.items():
            assert np.array_equal(last.vectors[f"{rank}/{name}"], vector), name
    assert len(last.vectors) == 3 * 5, "theta, two moments, the masses and the statistics of communication"
    assert holds_the_mean(last, range(3))


@pytest.mark.parametrize("name", ["theta", "second_moment"])
def test_a_replica_that_dies_while_it_sends_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Replica 1 dies before it sends this vector. Those that it has sent are removed from the file."""
    trainers: dict[int, Trainer] = {}
    run, gather = Trainer.run, Fabric.gather

    def dying(self: Any, vector: np.ndarray) -> Any:
        if self.rank == 1 and self.rank in trainers and np.shares_memory(vector, own_state(trainers[1]).vectors[name]):
            simulation = self.transport.simulation
            simulation.at(simulation.time, simulation.die, 1)
        return gather(self, vector)

    monkeypatch.setattr(Trainer, "run", lambda self: (trainers.update({self.fabric.rank: self}), run(self))[1])
    monkeypatch.setattr(Fabric, "gather", dying)
    sessions = Sessions(tmp_path, 3, {}, method="gossip", **SMALL)
    last = sessions.last()
    assert sessions.summary and list(last.state["members"]) == ["0", "2"]
    assert {name.partition("/")[0] for name in last.vectors} == {"0", "2"}
    assert holds_the_mean(last, (0, 2)), "the average excludes the dead replica"


def test_a_resumed_replica_reads_only_its_own_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Sessions(tmp_path / "whole", 3, {}, method="dpsgd", **SMALL)
    Sessions(tmp_path / "run", 3, {}, stop=0.6 * whole.simulation.time, method="dpsgd", **SMALL)
    read: list[str] = []
    get = files.StoredArrays.__getitem__
    monkeypatch.setattr(files.StoredArrays, "__getitem__", lambda self, name: (read.append(name), get(self, name))[1])
    again = Sessions(tmp_path / "run", 3, {})
    assert again.summary and again.summary["test_loss"] == whole.summary["test_loss"]  # type: ignore[index]
    names = ("theta", "first_moment", "second_moment", "communication")
    assert sorted(read) == sorted(f"{rank}/{name}" for rank in range(3) for name in names)


# The leader of a job whose model has 26 MB saves a checkpoint. It prints by how much its memory grew, in models.
MEMORY = r"""
import json, os, sys
from pathlib import Path
import numpy as np
from minidl import data, nn
from minidl.comm.fabric.base import BufferSpec, Column, Fabric, State
from minidl.comm.stats import Stats
from minidl.comm.transport.shm import ShmTransport
from minidl.run.config import resolve
from minidl.training.output import RunOutput
from minidl.training.trainer import Trainer

fabric = Fabric(ShmTransport.from_environment(Stats()))
config = resolve({"data": "synthetic:96x8x8x1:3", "model": "mlp", "method": "gossip", "optimizer": "adam"})
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 95_000), nn.Linear(95_000, 3))
arena = model.flatten()
fabric.join(BufferSpec(), arena.layout_hash)
trainer = Trainer(model, data.load(config.data, None, 0.0, 0), config, fabric=fabric)
arena.grad[:] = 1
for vector in trainer.replica.state.values():
    vector[:] = fabric.rank
fabric.set_status(Column.STATE, State.PAUSED)
output = RunOutput(trainer, print)
output.folder = Path(sys.argv[1])
if output.leads:
    from minidl.run.folder import RunFolder
    output.run = RunFolder.create(resolve({"out": sys.argv[1]}))
fabric.led_by = 0
fabric.barrier()

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))

Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = memory("VmRSS")
output.save_all(lambda members: None)
grown = (memory("VmHWM") - before) / (4 * arena.size)
os.write(1, json.dumps({"rank": fabric.rank, "result": [grown, 4e-6 * arena.size]}).encode() + b"\n")
fabric.barrier()
fabric.close()
"""


@pytest.mark.slow
def test_the_memory_of_the_leader_does_not_grow_with_the_number_of_replicas(tmp_path: Path) -> None:
    grown = {}
    for ranks in (2, 6):
        code, results, errors = job(ranks, str(tmp_path / str(ranks)), program=("-c", MEMORY))
        assert (code, errors) == (0, "")
        grown[ranks], megabytes = results[0]
        assert megabytes > 25
        [folder] = (tmp_path / str(ranks) / "checkpoints").iterdir()
        assert len(files.load(folder).vectors) == 5 * ranks
    assert grown[6] < grown[2] + 1, grown
