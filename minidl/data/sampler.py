"""A replica's share of the training images, in the order in which it learns from them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from minidl.comm.fabric.base import Fabric
from minidl.data import Augment, Dataset, Loader
from minidl.data.loader import Batch
from minidl.data.seeds import Purpose, generator
from minidl.data.shard import dirichlet_shards, shard
from minidl.errors import ConfigError
from minidl.run.config import Config


class Share:
    """Batches for one of the fabric's replicas. One that is alone has all images.

    Each epoch every replica gets the same number of images, so all make the same number of batches: of those dealt out
    anew (iid), or of its own, over and over (skewed: mostly of some classes, as on machines that do not share data).
    """

    def __init__(self, data: Dataset, config: Config, fabric: Fabric, prefetch: int = 2) -> None:
        self.data, self.config, self.prefetch = data, config, prefetch
        self.replicas = len(fabric.replicas)
        self.place = fabric.replicas.index(fabric.rank) if fabric.rank in fabric.replicas else 0  # a server has none
        self.seed = replica_seed(config.seed, self.place)
        self.images = len(data.y_train) // self.replicas
        if self.images < 1:
            raise ConfigError(f"{len(data.y_train)} training images cannot be divided among {self.replicas} replicas")
        self.own: np.ndarray | None = None
        if config.shards != "iid" and self.replicas > 1:
            alpha = parse_skew(config.shards)
            self.own = dirichlet_shards(data.y_train, self.replicas, alpha, config.seed)[self.place]
        self.batches = len(self._loader(0))

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.batches

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        return self._loader(epoch).epoch(epoch, start, self.prefetch)

    def sample(self, batches: int) -> Iterator[Batch]:
        """Some batches of all training images, always the same."""
        loader = Loader(self.data.x_train, self.data.y_train, self.config.batch_size, self.config.seed)
        for _, batch in zip(range(batches), loader.epoch(0, prefetch=0)):
            yield batch

    def _loader(self, epoch: int) -> Loader:
        data, config = self.data, self.config
        return Loader(
            data.x_train, data.y_train, config.batch_size, self.seed, augment=Augment(config.augment, data.black),
            indices=self._indices(epoch),
        )  # fmt: skip

    def _indices(self, epoch: int) -> np.ndarray | None:
        if self.replicas == 1:
            return None
        if self.own is None:
            lengths = [self.images] * self.replicas
            return shard(len(self.data.y_train), lengths, self.place, self.config.seed, epoch)
        mine = generator(Purpose.SKEWED_SHARD, self.seed, epoch + 1).permutation(self.own)
        return np.resize(mine, self.images)


def replica_seed(seed: int, place: int) -> int:
    """The seed of the replica at this place; the first one's is the run's."""
    return seed if place == 0 else int(generator(Purpose.REPLICA, seed, place).integers(2**32))


def parse_skew(words: str) -> float:
    """0.3 of "skewed:0.3"."""
    try:
        alpha = float(words.removeprefix("skewed:"))
    except ValueError:
        alpha = 0.0
    if not 0 < alpha < float("inf"):
        raise ConfigError(f"shards: expected iid or skewed:ALPHA with a number above 0, got {words!r}")
    return alpha
