"""Complete runs of several replicas on a simulated cluster. A test can kill replicas or send a signal at any time."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from minidl import models
from minidl.cli.commands import execute
from minidl.comm.cluster import parse
from minidl.comm.fabric.base import Fabric
from minidl.comm.transport.sim import Simulation
from minidl.errors import AbortedError, MinidlError
from minidl.run import checkpoint as files
from minidl.run.signals import Signals, Stopped
from minidl.train import read_config
from minidl.training.trainer import Trainer

CLUSTER = """
devices.core = {flops = 1e6, jitter = 0.3}
nodes = [{name = "node", count = 4, devices = ["core"]}]
between = {alpha = 1e-3, rate = 1e8}
"""
# In these runs, `mlp` has 0.4 instead of 270 thousand weights: each test copies, sends, saves and reads them again.
SMALL_MODEL = patch.dict(models.MODELS, mlp=partial(models.mlp, hidden=(16, 16)))
OPTIONS: dict[str, Any] = dict(data="synthetic:48x2x2x1:2", model="mlp", batch_size=8, quiet=True)


def one_folder_at_a_time(place: Path) -> Iterator[Path]:
    """Yield new folders. Delete each one when the next is requested: thousands of runs would fill a disk."""
    for number in count():
        yield place / f"run-{number}"
        shutil.rmtree(place / f"run-{number}", ignore_errors=True)


def count_images(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """Return a counter of the images, as bytes, that all replicas train from now on."""
    seen: Counter[bytes] = Counter()
    step = Trainer.step

    def counted(self: Trainer, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
        made = self.replica.steps
        try:
            return step(self, x, y)
        finally:
            if self.replica.steps > made:  # also if another replica has died during the exchange
                seen.update(image.tobytes() for image in x)

    monkeypatch.setattr(Trainer, "step", counted)
    return seen


class Sessions:
    """A run of several replicas on a virtual clock. Each replica has its own session, as in a real job.

    deaths, joins: {rank: virtual seconds}. Ranks that join are the last ones. stop: the virtual time of a signal, or 0
    for no signal.
    If the folder already contains a run, that run is resumed.
    `results` maps each surviving rank to the value that it returned or the error that it raised.
    """

    def __init__(
        self, folder: Path, ranks: int, deaths: dict[int, float], stop: float = 0.0,
        joins: dict[int, float] | None = None, **options: Any
    ) -> None:  # fmt: skip
        self.folder = folder
        resumed = (folder / "config.toml").exists()
        self.given = {"resume": str(folder), "quiet": True} if resumed else {**OPTIONS, **options, "out": str(folder)}
        events = [f"{name} = [{', '.join(f'{{rank = {rank}, time = {time!r}}}' for rank, time in some.items())}]"
                  for name, some in (("deaths", deaths), ("joins", joins or {}))]  # fmt: skip
        self.simulation = simulation = Simulation(parse(CLUSTER + "\n".join(events)), ranks, flops=1e5)
        self.failed, self.moments = False, set[float]()
        plan = simulation.at

        def at(time: float, call: Callable[..., None], *arguments: Any) -> None:
            self.moments.add(time)
            plan(time, call, *arguments)

        simulation.at = at  # type: ignore[method-assign]
        for transport in simulation.transports:
            transport.close = lambda: None  # type: ignore[method-assign]  # the simulation's own `close` would announce FINISHED
            transport.aborted = lambda: self.failed  # type: ignore[method-assign]
        if stop:
            simulation.at(stop, simulation.stop)
        with SMALL_MODEL:
            self.results: dict[int, Any] = simulation.run({rank: self.main(rank) for rank in range(ranks)})

    def main(self, rank: int) -> Callable[[], Any]:
        def work() -> Any:
            try:
                return execute(read_config(self.given), self.given, Signals(), Fabric(self.simulation.transport(rank)))
            except Stopped as stopped:
                return stopped
            except MinidlError as error:
                self.failed = True  # as in Job.fail
                for transport in self.simulation.transports:
                    transport.wake()
                return error

        return work

    def check(self) -> None:
        """Check that the run has a result, or an error that says how to resume if a checkpoint was saved."""
        if self.summary is not None:
            assert json.loads((self.folder / "summary.json").read_text()) == self.summary
            assert self.summary["steps"] == self.last().state["progress"]["step"]
            assert len(self.last().state["members"]) >= self.summary["replicas_alive"] > 0
            return
        assert self.errors and not (self.folder / "summary.json").exists()
        words = " ".join(self.errors)
        if "saved" in words:
            assert f"python -m minidl.train --resume {self.folder}" in words and self.last()
        else:  # the run failed before the first step
            assert "died while others waited for" in words and not files.last(self.folder / "checkpoints")

    def last(self) -> files.Checkpoint:
        return self.last_of(self.folder)

    @staticmethod
    def last_of(folder: Path, inside: str = "checkpoints") -> files.Checkpoint:
        """Load the newest checkpoint of a run."""
        last = files.last(folder / inside)
        assert last
        return files.load(last)

    @property
    def errors(self) -> list[str]:
        return [str(r) for r in self.results.values() if isinstance(r, MinidlError) and not isinstance(r, AbortedError)]

    @property
    def summary(self) -> dict[str, Any] | None:
        found = [result for result in self.results.values() if isinstance(result, dict)]
        assert len(found) <= 1
        return found[0] if found else None
