"""What a rank does in bench/comm.py: `python -m bench.comm_rank SCENARIO OPTIONS`, started by comm_jobs.py.

A scenario is a function of options (JSON); what it returns goes into the file RANK.json of the folder "results".
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

from minidl.cli.job import Job, find_job
from minidl.comm.fabric.base import Column, Fabric, Letter, Needs, Note
from minidl.run.config import Config
from minidl.run.options import parse
from minidl.run.signals import Signals
from minidl.training.session import Session

if TYPE_CHECKING:
    from minidl.training.trainer import Entry, Trainer


WARM = 50  # steps


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
    """Seconds for one vector to be copied and mixed.

    between, alone      rank 0 publishes, then rank 1 mixes; or rank 0 copies and mixes by itself, by the same kernels
    both, both_alone    both ranks do both at once: each copies its own and mixes the other's; or its own
    """
    from minidl.comm import launch
    from minidl.comm.mailbox import _copy
    from minidl.engine.device import Device, aligned

    fabric, elements = job.join({}), int(options["bytes"]) // 4
    fabric.join(Needs(elements=elements, publish=True), "handoff")
    launch.settle()
    theta, other, mix = aligned(elements, np.float32), aligned(elements, np.float32), Device("cpu").mix.mix
    theta[:], other[:] = fabric.rank, 0.5
    peer = 1 - fabric.rank

    def take() -> None:
        with fabric.wait(lambda: fabric.latest(peer), (peer,), "what is published") as letter:
            mix(theta, letter.vector, 0.5)

    def publish() -> None:
        fabric.publish((theta,), Note())

    def by_itself() -> None:
        _copy(theta, other)
        mix(theta, other, 0.5)

    def turn(work: Callable[[], None]) -> tuple[float, float]:
        fabric.barrier()
        began = fabric.now()
        work()
        ended = fabric.now()
        fabric.barrier()
        return began, ended

    works: dict[str, list[Callable[[], None]]] = {  # for rank 0, rank 1
        "between": [publish, take],
        "alone": [by_itself, lambda: None],
        "both": [lambda: (publish(), take())[0]] * 2,
        "both_alone": [by_itself] * 2,
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(options["turns"] + 2):
        for name, work in works.items():
            spans = np.zeros((2, 2))
            spans[fabric.rank] = turn(work[fabric.rank])
            flat = spans.ravel()
            fabric.allreduce(flat)
            ends = flat.reshape(2, 2)
            used = ends[:1] if name == "alone" else ends
            if number >= 2:
                began = used[0, 0] if name == "between" else used[:, 0].min()  # of rank 0: when it began to publish
                times[name].append(float(used[:, 1].max() - began))
    return times


def torn(job: Job, options: dict[str, Any]) -> dict[str, int]:
    """All publish, look and send as fast as they can; every vector has a checksum, which is looked at twice."""
    fabric, elements = job.join({}), int(options["elements"])
    fabric.join(Needs(elements=elements, mail=3, publish=True), "torn")
    random = np.random.default_rng(fabric.rank)
    table = random.integers(0, 2**31, 16 * elements, np.int32).view(np.float32)
    peers = [peer for peer in range(fabric.size) if peer != fabric.rank]
    counts = {"seen": 0, "torn": 0, "published": 0, "sent": 0, "missed": 0}

    def look(letter: Letter) -> None:
        counts["seen"] += 1
        counts["torn"] += any(zlib.crc32(letter.vector) != letter.note.weight for _ in range(2))

    draws = random.integers(0, 15 * elements, 4096).tolist()
    lengths = random.integers(elements // 2, elements + 1, 4096).tolist()
    step = 0
    while fabric.board[:, Column.SPEED].sum() < options["exchanges"]:
        start, length = draws[step % 4096], lengths[step % 4096]
        step += 1
        own = table[start : start + length]
        note = Note(weight=float(zlib.crc32(own)))
        fabric.publish((own,), note)
        counts["published"] += 1
        for peer in peers:
            counts["sent"] += fabric.send(peer, own, note=note)
            letter = fabric.latest(peer)
            if letter is not None:
                with letter:
                    look(letter)
        for letter in fabric.poll():
            look(letter)
        if step % 64 == 0:
            fabric.announce(Column.SPEED, counts["seen"])
    fabric.drain(look)
    counts["missed"] = fabric.meter.misses
    return counts


# -- training ----------------------------------------------------------------------------------------------------------


class Steps:
    """What a replica did: the loss of each step, and, every so many, its weights and when that was."""

    def __init__(self, trainer: Trainer, every: int = 0) -> None:
        self.losses: list[str] = []
        self.taken: list[tuple[float, np.ndarray]] = []
        self.began = self.off = 0.0  # off: seconds that are off the clock
        self.ends: list[float] = []  # of each step
        step = trainer.method.step

        def watched(batch: Any) -> float:
            self.began = self.began or time.monotonic()
            loss = step(batch)
            self.losses.append(float(loss).hex())
            self.ends.append(time.monotonic() - self.off)
            if every and len(self.losses) % every == 0:
                self.taken.append((time.monotonic() - self.off, trainer.replica.theta.copy()))
            return loss

        trainer.method.step = watched  # type: ignore[method-assign]

    def speed(self, batch: int) -> float:
        """Images/s, without the first steps: kernels are loaded when they are first used."""
        warm = min(WARM, len(self.ends) // 2)
        steps, seconds = len(self.ends) - 1 - warm, self.ends[-1] - self.ends[warm]
        return steps * batch / seconds if seconds else 0.0


class Watched(Session):
    """A run whose epochs' ends (gathering all replicas, a checkpoint) are off the clock."""

    steps: Steps

    def _epoch_done(self, entry: Entry) -> None:
        began = time.monotonic()
        super()._epoch_done(entry)
        self.steps.off += time.monotonic() - began


def train(job: Job | None, options: dict[str, Any]) -> dict[str, Any]:
    """A training run as the command line makes it. options: argv, every (see Steps), keep (the folder for weights)."""
    from minidl.run.config import resolve
    from minidl.run.folder import RunFolder

    given = parse(Config, [*options["argv"], "--quiet", "--out", options["results"] + "/run"], "bench")
    with Signals() as signals:
        fabric: Fabric | None = job.join(given) if job else None
        if fabric is None:
            from minidl.comm.fabric.alone import Alone
            from minidl.comm.meter import Meter

            fabric = Alone(Meter())
        session = Watched(resolve(given), signals, fabric)
        session.steps = steps = Steps(session.trainer, options.get("every", 0))
        with session.output.opened(lambda: RunFolder.create(session.config)):
            summary = session.train()
    if steps.taken and options.get("keep"):
        np.save(Path(options["keep"]) / f"{fabric.rank}.npy", np.array([theta for _, theta in steps.taken]))
    return {
        "losses": steps.losses if not options.get("every") else [],
        "began": steps.began,
        "times": [moment for moment, _ in steps.taken],
        "speed": steps.speed(session.config.batch_size),
        "summary": summary,
    }


if __name__ == "__main__":
    main()
