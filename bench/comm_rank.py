"""One rank of bench/comm.py: `python -m bench.comm_rank SCENARIO OPTIONS`, started by comm_jobs.py.

A scenario is a function of this module. Its arguments are the job and OPTIONS (JSON). The result of the scenario is
written to the file RANK.json in the folder options["results"].
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minidl.comm.fabric.base import BufferSpec, Column, Fabric, Header, Message
from minidl.run.config import Config
from minidl.run.options import parse
from minidl.run.signals import Signals
from minidl.training.job import Job, find_job
from minidl.training.session import Session

if TYPE_CHECKING:
    from minidl.training.trainer import Entry, Trainer

WARMUP = 50  # steps


def main() -> None:
    scenario, options = sys.argv[1], json.loads(sys.argv[2])
    job = find_job()
    result = globals()[scenario](job, options)
    rank = job.rank if job else 0
    if job and job.fabric:
        job.fabric.close()
    (Path(options["results"]) / f"{rank}.json").write_text(json.dumps(result))


# -- one vector between two processes ----------------------------------------------------------------------------------


def handoff(job: Job, options: dict[str, Any]) -> dict[str, list[float]]:
    """Measure the seconds to copy and mix one vector.

    between       rank 0 publishes its vector, then rank 1 mixes it
    alone         rank 0 copies and mixes in one process, with the same kernels
    both          each rank publishes its vector, then mixes the other rank's; both ranks do so at the same time
    both_alone    each rank copies and mixes its own vector; both ranks do so at the same time

    options: `bytes`, the size of the vector; `turns`, the number of measurements. Returns {name: seconds of each turn}.
    """
    from minidl.comm.launch import local
    from minidl.comm.transport.messages import _copy
    from minidl.engine.device import Device, aligned

    fabric, elements = job.join(Config()), int(options["bytes"]) // 4
    fabric.join(BufferSpec(nbytes=4 * elements, publish=True), "handoff")
    local.settle()
    theta, other, mix = aligned(elements, np.float32), aligned(elements, np.float32), Device("cpu").mix.mix
    theta[:], other[:] = fabric.rank, 0.5
    peer = 1 - fabric.rank

    def mix_latest() -> None:
        with fabric.wait(lambda: fabric.latest(peer), (peer,), "a published vector") as message:
            mix(theta, message.vector, 0.5)

    def publish() -> None:
        fabric.publish((theta,), Header())

    def copy_and_mix() -> None:
        _copy(theta, other)
        mix(theta, other, 0.5)

    def run_turn(work: Callable[[], None]) -> tuple[float, float]:
        fabric.barrier()
        began = fabric.now()
        work()
        ended = fabric.now()
        fabric.barrier()
        return began, ended

    works: dict[str, list[Callable[[], None]]] = {  # name: [work of rank 0, work of rank 1]
        "between": [publish, mix_latest],
        "alone": [copy_and_mix, lambda: None],
        "both": [lambda: (publish(), mix_latest())[0]] * 2,
        "both_alone": [copy_and_mix] * 2,
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(options["turns"] + 2):
        for name, work in works.items():
            spans = np.zeros((2, 2))
            spans[fabric.rank] = run_turn(work[fabric.rank])
            flat = spans.ravel()
            fabric.allreduce(flat)
            ends = flat.reshape(2, 2)
            used = ends[:1] if name == "alone" else ends
            if number >= 2:
                began = used[0, 0] if name == "between" else used[:, 0].min()  # "between" starts when rank 0 publishes
                times[name].append(float(used[:, 1].max() - began))
    return times


def torn(job: Job, options: dict[str, Any]) -> dict[str, int]:
    """Publish, read and send vectors as fast as possible on all ranks; count the torn vectors.

    Every vector has a checksum, which the reader verifies twice. options: `elements`, the largest length of a
    vector; `exchanges`, the number of vectors that all ranks together must verify.
    """
    fabric, elements = job.join(Config()), int(options["elements"])
    fabric.join(BufferSpec(nbytes=4 * elements, mail=3, publish=True), "torn")
    random = np.random.default_rng(fabric.rank)
    table = random.integers(0, 2**31, 16 * elements, np.int32).view(np.float32)
    peers = [peer for peer in range(fabric.size) if peer != fabric.rank]
    counts = {"seen": 0, "torn": 0, "published": 0, "sent": 0, "reads_missed": 0}

    def verify(message: Message) -> None:
        counts["seen"] += 1
        counts["torn"] += any(zlib.crc32(message.vector) != message.header.weight for _ in range(2))

    draws = random.integers(0, 15 * elements, 4096).tolist()
    lengths = random.integers(elements // 2, elements + 1, 4096).tolist()
    step = 0
    while fabric.status[:, Column.SPEED].sum() < options["exchanges"]:
        start, length = draws[step % 4096], lengths[step % 4096]
        step += 1
        own = table[start : start + length]
        header = Header(weight=float(zlib.crc32(own)))
        fabric.publish((own,), header)
        counts["published"] += 1
        for peer in peers:
            counts["sent"] += fabric.send(peer, own, header=header)
            message = fabric.latest(peer)
            if message is not None:
                with message:
                    verify(message)
        for message in fabric.poll():
            verify(message)
        if step % 64 == 0:
            fabric.set_status(Column.SPEED, counts["seen"])
    fabric.drain(verify)
    counts["reads_missed"] = fabric.stats.misses
    return counts


# -- training ----------------------------------------------------------------------------------------------------------


class StepRecorder:
    """Records each step's loss. At intervals of `every` steps (0: never): time, weights, bytes sent to other nodes.

    On a single node the bytes are those to all ranks.
    """

    def __init__(self, trainer: Trainer, every: int = 0) -> None:
        self.losses: list[str] = []
        self.snapshots: list[tuple[float, np.ndarray, int]] = []  # (time, theta, bytes)
        self.began = self.excluded = 0.0  # began: start of the first step; excluded: seconds that do not count
        self.ends: list[float] = []  # time at the end of each step
        step, fabric = trainer.method.step, trainer.replica.fabric
        others = [rank for rank in range(fabric.size) if fabric.nodes[rank] != fabric.nodes[fabric.rank]]
        others = others or list(range(fabric.size))

        def recorded(batch: Any) -> float:
            self.began = self.began or time.monotonic()
            loss = step(batch)
            self.losses.append(float(loss).hex())
            self.ends.append(time.monotonic() - self.excluded)
            if every and len(self.losses) % every == 0:
                sent = sum(fabric.stats.sent_bytes[rank] for rank in others)
                self.snapshots.append((time.monotonic() - self.excluded, trainer.replica.theta.copy(), sent))
            return loss

        trainer.method.step = recorded  # type: ignore[method-assign]

    def speed(self, batch: int) -> float:
        """Return images/s without the first steps, in which kernels are loaded; 0 for a server."""
        if not self.ends:
            return 0.0
        warmup = min(WARMUP, len(self.ends) // 2)
        steps, seconds = len(self.ends) - 1 - warmup, self.ends[-1] - self.ends[warmup]
        return steps * batch / seconds if seconds else 0.0


class TimedSession(Session):
    """A run whose time excludes the work at the end of an epoch (gathering all replicas, saving a checkpoint)."""

    recorder: StepRecorder

    def _epoch_done(self, entry: Entry) -> None:
        began = time.monotonic()
        super()._epoch_done(entry)
        self.recorder.excluded += time.monotonic() - began


def train(job: Job | None, options: dict[str, Any]) -> dict[str, Any]:
    """Run training as the command line does. options: argv, every (see StepRecorder), keep (folder for the weights)."""
    from minidl.run.config import resolve
    from minidl.run.folder import RunFolder

    config = resolve(parse(Config, [*options["argv"], "--quiet", "--out", options["results"] + "/run"]))
    with Signals() as signals:
        fabric: Fabric | None = job.join(config) if job else None
        if fabric is None:
            from minidl.comm.stats import Stats
            from minidl.comm.transport.loopback import LoopbackTransport

            fabric = Fabric(LoopbackTransport(Stats()))
        session = TimedSession.of_process(config, signals, fabric)
        session.recorder = recorder = StepRecorder(session.trainer, options.get("every", 0))
        with session.output.opened(lambda: RunFolder.create(session.config)):
            summary = session.train()
    if recorder.snapshots and options.get("keep"):
        np.save(Path(options["keep"]) / f"{fabric.rank}.npy", np.array([theta for _, theta, _ in recorder.snapshots]))
    return {
        "losses": recorder.losses if not options.get("every") else [],
        "began": recorder.began,
        "times": [seconds for seconds, _, _ in recorder.snapshots],
        "between": [sent for _, _, sent in recorder.snapshots],
        "speed": recorder.speed(session.config.batch_size),
        "summary": summary,
    }


if __name__ == "__main__":
    main()
