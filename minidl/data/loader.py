"""Batches in a shuffled order that can be resumed at any batch, prepared in advance by a thread."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from minidl.checked import shown, whole
from minidl.data.augment import AUGMENTATIONS, Augment, Draw, parse_augment
from minidl.data.dataset import check_labels
from minidl.data.seeds import Purpose, generator
from minidl.errors import ConfigError

Batch = tuple[np.ndarray, np.ndarray]


class Loader:
    """The batches of x (N, H, W, C) and y (N,).

    The order of an epoch depends only on (seed, epoch), and the augmentation of a batch only on (seed, epoch, batch).
    A loader therefore has no state: `loader.epoch(e, start=b)` continues exactly where a run stopped.

    If the last batch would contain one image, the image is added to the previous batch, because batch norm needs at
    least two values for each channel.

    augment: names of AUGMENTATIONS, applied in this order; `Augment(names, data.black)` also sets the padding colour.
    drop_last: omit the last batch if it is not full.
    indices: the samples to use (a replica's shard); None uses all of them.

    Raises DataError if the labels are not whole numbers (N,), ConfigError if another argument is invalid.
    """

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        augment: Augment | str | Sequence[str] = (),
        drop_last: bool = False,
        indices: np.ndarray | None = None,
    ) -> None:
        for name, array in (("x", x), ("y", y)):
            if not isinstance(array, np.ndarray) or not array.ndim:
                raise ConfigError(f"Loader: {name} is {shown(array)}; expected an array with an element for each image")
        if len(x) != len(y):
            raise ConfigError(f"{len(x)} images and {len(y)} labels: there must be one label for each image")
        check_labels(y)
        if whole("Loader", "batch size", batch_size, -math.inf) < 1:
            raise ConfigError(f"batch size {batch_size}: expected at least 1")
        self.x, self.y, self.batch_size = x, y, batch_size
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        names, self.border, of_run = augment if isinstance(augment, Augment) else Augment(augment)
        self.augment, self.run_seed = parse_augment(names), seed if of_run is None else of_run
        self.indices = np.arange(len(x)) if indices is None else np.asarray(indices)
        if self.indices.ndim != 1 or (self.indices.size and self.indices.dtype.kind not in "iu"):
            raise ConfigError(f"Loader: indices {self.indices.dtype} {self.indices.shape}; expected whole numbers (N,)")
        samples = len(self.indices)
        self._batches, rest = divmod(samples, batch_size)
        if not drop_last and (rest > 1 or samples == rest == 1):
            self._batches += 1
        if not self._batches:
            raise ConfigError(f"{samples} samples make no batch of {batch_size}: use a smaller batch or keep the last")

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self._batches

    def epoch(self, epoch: int, start: int = 0, prefetch: int = 2) -> Iterator[Batch]:
        """Iterate over batches `start`, `start + 1`, ... of this epoch: x (B, H, W, C), y (B,), both new copies.

        prefetch: how many batches a thread prepares in advance; 0 prepares each batch when it is requested. The thread
        ends when the iterator is exhausted, closed or garbage-collected. Raises ConfigError if `start` is out of range.
        """
        if not 0 <= whole("Loader", "start", start, -math.inf) <= len(self):
            raise ConfigError(f"epoch {epoch} has {len(self)} batches and cannot start at batch {start}")
        order = self.order(epoch)
        if not prefetch:
            return (self.batch(order, epoch, number) for number in range(start, len(self)))
        return self._prefetched(order, epoch, start, prefetch)

    def order(self, epoch: int) -> np.ndarray:
        """Return the samples in the order of this epoch: indices (N,)."""
        if not self.shuffle:
            return self.indices
        return generator(Purpose.ORDER, self.seed, epoch).permutation(self.indices)

    def _prefetched(self, order: np.ndarray, epoch: int, start: int, prefetch: int) -> Iterator[Batch]:
        waiting: deque[Future[Batch]] = deque()
        thread = ThreadPoolExecutor(1, thread_name_prefix="minidl-prefetch")
        try:
            for number in range(start, len(self)):
                waiting.append(thread.submit(self.batch, order, epoch, number))
                if len(waiting) > prefetch:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            thread.shutdown(cancel_futures=True)

    def batch(self, order: np.ndarray, epoch: int, number: int) -> Batch:
        """Return one batch of an epoch. order: the result of `order` for this epoch."""
        full = self.drop_last or number + 1 < len(self)
        chosen = order[number * self.batch_size : (number + 1) * self.batch_size if full else None]
        return self.take(chosen, self.seed, epoch, number)

    def take(self, chosen: np.ndarray, seed: int, epoch: int, number: int) -> Batch:
        """Return the batch of these samples. The augmentation depends on the other arguments. number: of the batch."""
        x = self.x.take(chosen, axis=0)
        if self.augment and len(chosen):
            draw = Draw(generator(Purpose.AUGMENT, seed, epoch, number), self.border, chosen, epoch, self.run_seed)
            for name in self.augment:
                x = AUGMENTATIONS[name](x, draw)
        return x, self.y.take(chosen)
