"""The training images of one replica, in the order in which it trains on them.

A run's work is a number of samples that all replicas train together. There are two ways to hand them out:

    divided   `epoch`: in each epoch, every replica gets an equal part of all images, in advance. At most replicas - 1
              images are left out; the next epoch divides another permutation, so others are left out then
    claimed   `piece`: each epoch's permutation of all images is cut into pieces of one batch, which have numbers over
              the whole run. A replica that is ready claims the next piece (comm/claims.py)

If an epoch is interrupted, and another number of replicas continues, the rest of the epoch is divided again: `parts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from minidl.data.augment import Augment
from minidl.data.dataset import Dataset
from minidl.data.loader import Batch, Loader
from minidl.data.seeds import Purpose, generator
from minidl.data.shard import dirichlet_shards, shard
from minidl.errors import ConfigError


class Sampler:
    """The batches of one replica. replicas: the number of replicas. place: the index of this replica, from 0.

    Divided: each epoch, every replica gets the same number of images, and therefore the same number of batches.

    shards    "iid": the images are shuffled and divided again each epoch; "skewed:ALPHA": each replica has its
              own images in all epochs, and some classes are over-represented in them
    augment   names of AUGMENTATIONS. prefetch: number of batches that a thread prepares in advance

    images: of each replica in an epoch. left_out: images that no replica gets in an epoch. pieces: batches of an epoch
    of all images, for `piece`.

    Raises ConfigError if there are fewer images than replicas.
    """

    def __init__(
        self,
        data: Dataset,
        batch_size: int,
        seed: int,
        place: int = 0,
        replicas: int = 1,
        augment: tuple[str, ...] = (),
        shards: str = "iid",
        prefetch: int = 2,
    ) -> None:
        self.data, self.batch_size, self.run_seed, self.place, self.replicas = data, batch_size, seed, place, replicas
        self.augment, self.prefetch = augment, prefetch
        self.seed = replica_seed(seed, place)
        self.images, self.left_out = divmod(len(data.y_train), replicas)
        if self.images < 1:
            raise ConfigError(f"{len(data.y_train)} training images cannot be divided among {replicas} replicas")
        self.own: np.ndarray | None = None  # the indices of this replica's images; None unless shards are skewed
        self.shares: tuple[float, ...] = ()  # of each replica in all images, unless they are equal
        if shards != "iid" and replicas > 1:
            every = dirichlet_shards(data.y_train, replicas, parse_skew(shards), seed)
            self.own, self.shares = every[place], tuple(len(one) / len(data.y_train) for one in every)
        self.interrupted: tuple[int, list[list[int]]] = -1, []  # arguments of `divide_again`
        self.largest = batch_size + 1  # images of a batch: a single one left over joins the last batch
        self._skipped = 0  # batches that the interrupted epoch has less than others
        self.batches = len(self._loader(None if replicas == 1 else np.arange(self.images)))
        self._all = self._loader(None, seed)
        self.pieces = len(self._all)

    def __len__(self) -> int:
        """Return the number of batches of this replica in an epoch."""
        return self.batches

    def first(self) -> Batch:
        """Return the first batch of the run."""
        return next(self._loader(self._indices(0)).epoch(0, prefetch=0))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Iterate over batches `start`, `start + 1`, ... of an epoch: x (B, H, W, C), y (B,)."""
        if epoch != self.interrupted[0]:
            return self._loader(self._indices(epoch)).epoch(epoch, start, self.prefetch)
        indices = self._part_of_rest()
        return self._loader(indices).epoch(epoch, start - self._skipped, self.prefetch) if indices.size else iter(())

    def piece(self, number: int) -> Batch:
        """Return a piece of the run: x (B, H, W, C), y (B,), the same for every replica."""
        epoch, batch = divmod(number, self.pieces)
        return self._all.batch(whole_order(len(self.data.y_train), self.run_seed, epoch), epoch, batch)

    def divide_again(self, epoch: int, parts: Sequence[Sequence[int]]) -> int:
        """Divide what is left of an epoch among the replicas. Returns the first batch of it, as `epoch` counts them.

        parts: for each earlier division of this epoch, the batch at which each of its replicas stopped. Batches are
        counted such that an epoch always ends at batch len(self).
        Raises ConfigError for shards that are not "iid".
        """
        if self.own is not None:
            raise ConfigError("skewed shards cannot be divided again")
        self.interrupted = epoch, [list(counts) for counts in parts]
        indices = self._part_of_rest()
        self._skipped = self.batches - batches_of(indices.size, self.batch_size)
        return self._skipped

    def part(self, counts: Sequence[int], runs: Sequence[Sequence[int]], epoch: int) -> list[int]:
        """Return a part for `divide_again`. counts: the batch at which each replica stopped."""
        return list(counts)

    def sample(self, batches: int) -> Iterator[Batch]:
        """Yield this number of batches from all training images: the same batches for every replica and call."""
        loader = Loader(self.data.x_train, self.data.y_train, self.batch_size, self.run_seed)
        for _, batch in zip(range(batches), loader.epoch(0, prefetch=0)):
            yield batch

    def _loader(self, indices: np.ndarray | None, seed: int | None = None) -> Loader:
        data = self.data
        return Loader(
            data.x_train, data.y_train, self.batch_size, self.seed if seed is None else seed,
            augment=Augment(self.augment, data.black, self.run_seed), indices=indices,
        )  # fmt: skip

    def _part_of_rest(self) -> np.ndarray:
        """Return the indices of this replica's images in the interrupted epoch."""
        rest = _rest(len(self.data.y_train), self.run_seed, self.batch_size, *self.interrupted)
        images = len(rest) // self.replicas
        return rest[self.place * images : (self.place + 1) * images]

    def _indices(self, epoch: int) -> np.ndarray | None:
        """Return the indices of this replica's images in an epoch; None: all."""
        if self.replicas == 1:
            return None
        if self.own is None:
            lengths = [self.images] * self.replicas
            return shard(len(self.data.y_train), lengths, self.place, self.run_seed, epoch)
        mine = generator(Purpose.SKEWED_SHARD, self.seed, epoch + 1).permutation(self.own)
        return np.resize(mine, self.images)


@lru_cache(maxsize=4)
def whole_order(images: int, seed: int, epoch: int) -> np.ndarray:
    """Return all images in the order of an epoch. All replicas of a simulation share it."""
    return generator(Purpose.ORDER, seed, epoch).permutation(images)


def _rest(images: int, seed: int, batch_size: int, epoch: int, parts: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the images of an epoch that no replica has trained, in the order in which they are divided again.

    parts: see `Sampler.divide_again`.
    """
    alone = bool(parts) and len(parts[0]) == 1  # a single replica does not divide the images
    rest = np.arange(images) if alone else generator(Purpose.SHARD, seed, epoch).permutation(images)
    for counts in parts:
        length = len(rest) // len(counts)
        skipped = batches_of(images // len(counts), batch_size) - batches_of(length, batch_size)
        left = [rest[len(counts) * length :]]
        for place, count in enumerate(counts):
            own = rest[place * length : (place + 1) * length]
            left.append(generator(Purpose.ORDER, replica_seed(seed, place), epoch).permutation(own)[
                _trained(max(0, count - skipped), length, batch_size) :])  # fmt: skip
        rest = np.concatenate(left)
    return rest


def batches_of(images: int, batch_size: int) -> int:
    """Return the number of batches of this many images, as Loader makes them."""
    full, rest = divmod(images, batch_size)
    return full + (rest > 1 or images == rest == 1)


def _trained(batches: int, images: int, batch_size: int) -> int:
    """Return the number of images in the first batches of a part. A single image joins the batch before it."""
    trained = batches * batch_size
    return images if batches and images % batch_size == 1 and trained == images - 1 else trained


def replica_seed(seed: int, place: int) -> int:
    """Return the seed of the replica at this place. The first replica has the run's seed."""
    return seed if place == 0 else int(generator(Purpose.REPLICA, seed, place).integers(2**32))


def parse_skew(text: str) -> float:
    """Return the number 0.3 for "skewed:0.3". Raises ConfigError if the text has another form."""
    try:
        alpha = float(text.removeprefix("skewed:"))
    except ValueError:
        alpha = 0.0
    if not 0 < alpha < float("inf"):
        raise ConfigError(f"shards: expected iid or skewed:ALPHA with a number above 0, got {text!r}")
    return alpha
