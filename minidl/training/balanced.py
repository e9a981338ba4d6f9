"""The work of synchronous replicas that divide each global batch by their speed: --balance static, dynamic.

A step trains the same images as with equal batches, whatever the division (data/shared.py). So each image is trained
once in an epoch, and an epoch always has the same number of steps. comm/balance.py chooses the divisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from minidl.comm.balance import REVIEW, Balancer
from minidl.comm.fabric.base import Fabric
from minidl.data.loader import Batch
from minidl.data.shared import Division, SharedSampler, part
from minidl.run.config import Config
from minidl.run.progress import Progress
from minidl.run.shares import parse_shares
from minidl.schema import Mismatch
from minidl.training.work import Divided


class Balanced(Divided):
    """Each replica has its share of every global batch."""

    sampler: SharedSampler

    def __init__(self, sampler: SharedSampler, config: Config, fabric: Fabric) -> None:
        super().__init__(sampler, config, fabric.replicas)
        self.fabric = fabric
        given = parse_shares(config.shares or "", 0)
        mean = sum(given) / max(1, len(given))  # of replicas that have joined
        shares = [given[rank] if rank < len(given) else mean for rank in self.members] if given else None
        self.balancer = Balancer(config.batch_size, sampler.replicas, shares, once=config.balance == "static")
        self.runs: list[list[int]] = []  # (steps, sizes) of `runs_of`, an epoch, since it was divided
        self.runs_of = -1

    def epoch(self, at: Progress) -> Iterator[Batch]:
        balancer, sampler, step, epoch = self.balancer, self.sampler, at.batch, at.epoch
        pool = ThreadPoolExecutor(1, thread_name_prefix="minidl-prefetch") if sampler.prefetch else None
        upcoming: tuple[Division, Future[Batch]] | None = None
        try:
            while step < len(sampler) and at.step < self.planned + at.shift:
                if not balancer.constant and not balancer.due:
                    self._review()
                if upcoming and upcoming[0] == balancer.division:
                    batch = upcoming[1].result()
                else:
                    batch = sampler.batch(epoch, step, balancer.division)
                step += 1
                if pool and step < len(sampler):
                    division = balancer.coming if balancer.due == 1 else balancer.division
                    upcoming = division, pool.submit(sampler.batch, epoch, step, division)
                yield batch
        finally:
            if pool:
                pool.shutdown(cancel_futures=True)

    def _review(self) -> None:
        """Exchange times with all replicas. Raises PeerLost if one has died; then nothing has changed."""
        balancer = self.balancer
        table = np.zeros((self.sampler.replicas, REVIEW))
        table[self.sampler.place, : len(balancer.measured)] = balancer.measured
        self.fabric.allreduce(table.reshape(-1))
        balancer.review(table)

    def settle(self, at: Progress, images: int, correct: int, loss_sum: float) -> bool:
        if self.runs_of != at.epoch:
            self.runs, self.runs_of = [], at.epoch
        division = [*self.balancer.division]
        if not self.runs or self.runs[-1][1:] != division:
            self.runs.append([0, *division])
        self.runs[-1][0] += 1
        self.balancer.stepped(self.seconds, images == division[self.sampler.place])
        return super().settle(at, images, correct, loss_sum)

    def weight(self, at: Progress, images: int) -> float:
        return self.sampler.replicas * images / self.sampler.images_of(at.epoch, at.batch)

    def shares(self) -> tuple[float, ...]:
        return tuple(size / self.sampler.whole for size in self.balancer.division)

    def first_batches(self) -> list[Batch]:
        return [self.sampler.batch(0, 0, division) for division in self.balancer.known]

    def samples(self, at: Progress) -> int:
        sampler = self.sampler
        done = sampler.images if at.batch == len(sampler) else min(at.batch * sampler.whole, sampler.images)
        return at.epoch * sampler.images + done

    def runs_from(self, epoch: int) -> list[list[int]]:
        """Return the runs of an epoch since it was divided, with those that come: others may be ahead."""
        balancer = self.balancer
        past = self.runs if self.runs_of == epoch else []
        if balancer.constant:
            return [*past, [len(self.sampler), *balancer.division]]
        return [*past, [max(0, balancer.due), *balancer.division], [REVIEW, *balancer.coming]]

    def state(self) -> dict[str, Any]:
        runs: dict[str, Any] = {}
        if self.runs:
            skipped = self.sampler.skipped(self.runs_of)
            runs = {"runs": self.runs, "runs_of": self.runs_of, "skipped": skipped}
        return super().state() | {"balance": self.balancer.state() | runs}

    def own_numbers(self) -> list[float]:
        return [*self.balancer.measured]

    def restore(self, saved: Mapping[str, Any], numbers: Sequence[float]) -> None:
        """Continue with the same replicas as before. Raises Mismatch if the values do not fit."""
        self.balancer.restore(saved)
        self.runs, self.runs_of = [[*run] for run in saved.get("runs", [])], saved.get("runs_of", -1)
        if any(len(run) != 1 + self.sampler.replicas for run in self.runs):
            raise Mismatch(f"a run of steps has {len(self.runs[0]) - 1} sizes, for {self.sampler.replicas} replicas")
        if len(numbers) > REVIEW:
            raise Mismatch(f"a replica has measured {len(numbers)} steps; expected at most {REVIEW}")
        self.balancer.measured = [*numbers]


def part_before(balance: Mapping[str, Any], counts: Sequence[int], epoch: int) -> list[int]:
    """Return the part for `SharedSampler.divide_again` of a saved run, whose replicas stopped at these steps."""
    present = balance.get("runs_of") == epoch
    skipped = balance.get("skipped", 0) if present else 0
    runs = [*(balance["runs"] if present else []), [balance["due"], *balance["division"]], [REVIEW, *balance["coming"]]]
    return part(counts, runs, skipped)
