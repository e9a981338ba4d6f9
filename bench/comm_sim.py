"""The cost of a simulation (bench/comm.py, part `sim`): time per event without training, and the memory of a run."""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from minidl import data, models, nn
from minidl.comm.cluster import uniform
from minidl.comm.fabric.base import Column, Fabric, State
from minidl.comm.methods import method
from minidl.comm.replica import Batch, Engine, Replica
from minidl.comm.transport.sim import Simulation
from minidl.run.config import resolve
from minidl.run.folder import RunFolder
from minidl.run.signals import Signals
from minidl.training.simulated import Parts, SimulatedRun

SHAPE, CLASSES = (4, 4, 1), 4
LINK = {"alpha": 1e-4, "beta": 1e-9}


class IdleReplica(Replica):
    """A replica that computes nothing: its gradients and updates only advance the virtual clock."""

    def gradient_parts(self, batch: Batch, cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
        cuts = cuts or (0, self.grad.size)
        for start, stop in zip(cuts[-2::-1], cuts[:0:-1]):
            with self.fabric.working("gradient", len(batch[1]) * (stop - start) / self.grad.size):
                pass
            yield start, stop

    def update(self) -> None:
        with self.fabric.working("update", self.theta.size):
            self.steps += 1


def event_cost(ranks: int, name: str, steps: int) -> tuple[float, int]:
    """Run simulator, fabric and method with a model of 25 parameters. Return (microseconds per event, events)."""
    config = resolve({"method": name, "quiet": True})
    nn.seed(0)
    engine = Engine(models.mlp(SHAPE, CLASSES, hidden=(1,)), config)
    clock = Simulation(uniform(ranks, 2, **LINK), ranks, 0, flops=1e6)
    batch = np.zeros((8, *SHAPE), np.float32), np.zeros(8, np.int64)
    kind = method(name)
    methods = []
    fabrics = [Fabric(transport) for transport in clock.transports]
    for fabric in fabrics:
        replica = IdleReplica(engine, fabric, own=True)
        fabric.join(kind.buffers(replica.theta.size, config), engine.arena.layout_hash)
        methods.append(kind(replica, fabric, config))

    def work(rank: int) -> Callable[[], None]:
        fabric = fabrics[rank]

        def train() -> None:
            fabric.set_status(Column.STATE, State.TRAINING)
            for step in range(steps):
                fabric.begin_step(step, kind.synchronous)
                methods[rank].step(batch)
            fabric.set_status(Column.STATE, State.PAUSED)
            methods[rank].pause()

        return train

    began = time.perf_counter()
    clock.run({rank: work(rank) for rank in range(ranks)})
    return 1e6 * (time.perf_counter() - began) / clock.happened, clock.happened


def main() -> None:
    """`python -m bench.comm_sim RANKS`: simulate a run of a model with 10,021 parameters and print its cost."""
    ranks = int(sys.argv[1])

    with tempfile.TemporaryDirectory() as folder, Signals() as signals:
        config = resolve({"data": f"synthetic:{10 * ranks}x4x4x1:4", "model": "mlp", "batch_size": 8, "steps": 3,
                          "method": "gossip", "quiet": True, "out": f"{folder}/run"})  # fmt: skip
        dataset = data.load(config.data)
        nn.seed(0)
        parts = Parts(config, built=(dataset, models.mlp(dataset.input_shape, dataset.classes, hidden=(477,))))
        session = SimulatedRun(config, uniform(ranks, 2, **LINK), ranks, signals, parts)
        result = session.begin(lambda: RunFolder.create(session.config))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"peak": peak, **{name: result[name] for name in ("parameters", "events", "real_seconds")}}))


if __name__ == "__main__":
    main()
