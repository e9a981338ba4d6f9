"""The training images of one replica, in the order in which it trains on them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from minidl.data.augment import Augment
from minidl.data.dataset import Dataset
from minidl.data.loader import Batch, Loader
from minidl.data.seeds import Purpose, generator
from minidl.data.shard import dirichlet_shards, shard
from minidl.errors import ConfigError


class Sampler:
    """The batches of one replica. replicas: the number of replicas. place: the index of this replica, from 0.

    Each epoch, every replica gets the same number of images, and therefore the same number of batches.

    shards    "iid": the images are shuffled and divided again each epoch; "skewed:ALPHA": each replica has its
              own images in all epochs, and some classes are over-represented in them
    augment   names of AUGMENTATIONS. prefetch: number of batches that a thread prepares in advance

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
        self.images = len(data.y_train) // replicas
        if self.images < 1:
            raise ConfigError(f"{len(data.y_train)} training images cannot be divided among {replicas} replicas")
        self.own: np.ndarray | None = None  # the indices of this replica's images; None unless shards are skewed
        if shards != "iid" and replicas > 1:
            self.own = dirichlet_shards(data.y_train, replicas, parse_skew(shards), seed)[place]
        self.batches = len(self._loader(0))

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self.batches

    def first(self) -> Batch:
        """Return the first batch of the run."""
        return next(self._loader(0).epoch(0, prefetch=0))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Iterate over batches `start`, `start + 1`, ... of an epoch: x (B, H, W, C), y (B,)."""
        return self._loader(epoch).epoch(epoch, start, self.prefetch)

    def sample(self, batches: int) -> Iterator[Batch]:
        """Yield this number of batches from all training images: the same batches for every replica and call."""
        loader = Loader(self.data.x_train, self.data.y_train, self.batch_size, self.run_seed)
        for _, batch in zip(range(batches), loader.epoch(0, prefetch=0)):
            yield batch

    def _loader(self, epoch: int) -> Loader:
        data = self.data
        return Loader(
            data.x_train, data.y_train, self.batch_size, self.seed,
            augment=Augment(self.augment, data.black), indices=self._indices(epoch),
        )  # fmt: skip

    def _indices(self, epoch: int) -> np.ndarray | None:
        """Return the indices of this replica's images in an epoch; None: all."""
        if self.replicas == 1:
            return None
        if self.own is None:
            lengths = [self.images] * self.replicas
            return shard(len(self.data.y_train), lengths, self.place, self.run_seed, epoch)
        mine = generator(Purpose.SKEWED_SHARD, self.seed, epoch + 1).permutation(self.own)
        return np.resize(mine, self.images)


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
