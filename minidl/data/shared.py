"""The training images of one replica where the replicas divide each global batch among them, in unequal parts.

    the order of an epoch    [ global batch 0       ][ global batch 1       ][ global batch 2       ] ...
    division (5, 2, 1)       [ replica 0   | 1  | 2 ]
    division (4, 3, 1)                               [ replica 0 |  1   | 2 ]

A global batch has replicas * batch_size images, the last one of an epoch possibly fewer. So the length of an epoch, and
what is trained in a step, do not depend on the division. A division is a tuple of sizes. They are multiples of a grain:
each size of a batch is recorded separately (program/replay.py), so there must be few.

If an epoch is interrupted, and other replicas continue, `divide_again` gets a part for each earlier division among
replicas: the flat list [P, the steps of each of P replicas, runs...], where a run is [steps, the sizes of P replicas].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from minidl.data.loader import Batch
from minidl.data.sampler import Sampler, batches_of, whole_order
from minidl.data.shard import apportion
from minidl.schema import Mismatch

Division = tuple[int, ...]
MOST_GRAINS = 32  # of a replica's batch, on average


def grain(batch_size: int) -> int:
    """Return the number of images of which the sizes of batches are multiples. It divides the batch size."""
    return next(batch_size // grains for grains in range(MOST_GRAINS, 0, -1) if batch_size % grains == 0)


def divide(batch_size: int, shares: ArrayLike) -> Division:
    """Divide batch_size * P images in proportion to shares (P,), by largest remainder.

    Each replica gets a grain or more, and two images or more if batch_size > 1: batch norm needs two.
    """
    weights, images = np.asarray(shares, np.float64), grain(batch_size)
    least = min(-(-2 // images), batch_size // images)  # grains of a replica
    spare = (batch_size // images - least) * len(weights)
    wanted = np.maximum(weights / weights.sum() * (batch_size // images * len(weights)) - least, 0.0)
    more = apportion(spare, wanted) if spare else np.zeros(len(weights), np.int64)
    return tuple((images * (least + more)).tolist())


def part_of(division: Division, images: int) -> Division:
    """Divide the images of a step. At the end of an epoch they are others than a global batch: no batch has one."""
    if images == sum(division):
        return division
    sizes = 2 * apportion(images // 2, division)
    sizes[sizes.argmax()] += images % 2
    return tuple(sizes.tolist())


class SharedSampler(Sampler):
    """The batches of one replica. Arguments: see Sampler. Shards are always "iid"."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.whole = self.replicas * self.batch_size  # images of a global batch
        self.images, self.left_out, self.largest = len(self.data.y_train), 0, self.whole
        self.batches = max(1, batches_of(self.images, self.whole))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        raise NotImplementedError("divisions are chosen during the run: use `batch`")

    def first(self) -> Batch:
        return self.batch(0, 0, (self.batch_size,) * self.replicas)

    def batch(self, epoch: int, step: int, division: Division) -> Batch:
        """Return this replica's batch of a step: x (B, H, W, C), y (B,). It may be empty at the end of an epoch."""
        chosen = self._global_batch(epoch, step)
        sizes = part_of(division, len(chosen))
        start = sum(sizes[: self.place])
        return self._all.take(chosen[start : start + sizes[self.place]], self.seed, epoch, step)

    def images_of(self, epoch: int, step: int) -> int:
        """Return the number of images of all replicas in a step."""
        return len(self._global_batch(epoch, step))

    def divide_again(self, epoch: int, parts: Sequence[Sequence[int]]) -> int:
        """Divide what is left of an epoch. Returns the first step of it, counted such that an epoch ends at len(self).

        parts: see the text at the beginning of this file. Raises Mismatch if they are not of this form.
        """
        self.interrupted = epoch, [list(part) for part in parts]
        self._skipped = self.batches - batches_of(len(self._order(epoch)), self.whole)
        return self._skipped

    def part(self, counts: Sequence[int], runs: Sequence[Sequence[int]], epoch: int) -> list[int]:
        """Return a part for `divide_again`, of an epoch of this sampler."""
        return part(counts, runs, self.skipped(epoch))

    def skipped(self, epoch: int) -> int:
        """Return the first step of the present division of an epoch."""
        return self._skipped if epoch == self.interrupted[0] else 0

    def _global_batch(self, epoch: int, step: int) -> np.ndarray:
        """Return the indices of the images of a step of all replicas."""
        at = step - self.skipped(epoch)
        return self._order(epoch)[at * self.whole : (at + 1) * self.whole if step + 1 < len(self) else None]

    def _order(self, epoch: int) -> np.ndarray:
        """Return the images of an epoch that were not trained when this division of the epoch began, in order."""
        parts = tuple(map(tuple, self.interrupted[1])) if epoch == self.interrupted[0] else ()
        return _left(len(self.data.y_train), self.run_seed, epoch, self.batch_size, parts)


def part(counts: Sequence[int], runs: Sequence[Sequence[int]], skipped: int) -> list[int]:
    """Return a part for `divide_again`.

    counts: the step at which each replica stopped. runs: (steps, sizes). skipped: see `SharedSampler.skipped`.
    """
    return [len(counts), *(max(0, count - skipped) for count in counts), *(word for run in runs for word in run)]


@lru_cache(maxsize=4)
def _left(images: int, seed: int, epoch: int, batch_size: int, parts: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """Return the images of an epoch that no replica has trained: first those of steps that others have made."""
    rest = whole_order(images, seed, epoch)
    for replicas, *words in parts:
        counts, runs = words[:replicas], words[replicas:]
        whole, made, left = replicas * batch_size, max(counts, default=0), []
        steps = batches_of(len(rest), whole)
        table = [runs[start : start + 1 + replicas] for start in range(0, len(runs), 1 + replicas)]
        if len(counts) < replicas or made > min(steps, sum(run[0] for run in table)) or any(
            len(run) <= replicas or sum(run[1:]) != whole for run in table
        ):
            raise Mismatch(f"the divisions of epoch {epoch} do not describe the steps {counts[:8]} of "
                              f"{replicas} replicas")  # fmt: skip
        divisions = (one for length, *division in table for one in repeat(tuple(division), length))
        for step, division in zip(range(made), divisions):
            chosen = rest[step * whole : (step + 1) * whole if step + 1 < steps else None]
            cuts = np.cumsum(np.array(part_of(division, len(chosen))))[:-1]
            left += [own for count, own in zip(counts, np.split(chosen, cuts), strict=True) if step >= count]
        rest = np.concatenate([*left, rest[made * whole if made < steps else len(rest) :]])
    return rest
