"""Batches in a shuffled order that can be taken up again anywhere, prepared one step ahead by a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from minidl.data.augment import AUGMENTATIONS, parse_augment
from minidl.data.dataset import check_labels
from minidl.data.seeds import Purpose, generator
from minidl.errors import ConfigError

Batch = tuple[np.ndarray, np.ndarray]


class Loader:
    """Batches of x (N, H, W, C) and y (N,).

    The order of an epoch depends on (seed, epoch) alone and the augmentation of a batch on (seed, epoch, batch), so
    a loader has no state: `loader.epoch(e, start=b)` goes on exactly where a run stopped.

    A last batch of one image joins the one before it: one image has no variance, which batch norm divides by.

    augment: names of AUGMENTATIONS, applied in turn; `border` is the black that they pad with (`Dataset.black`).
    indices: the samples to use (a replica's shard); all of them when None.
    prefetch: how many batches the thread prepares ahead; 0 prepares each when it is asked for.
    """

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        augment: str | Sequence[str] = (),
        drop_last: bool = False,
        indices: np.ndarray | None = None,
        prefetch: int = 2,
        border: np.ndarray | float = 0.0,
    ) -> None:
        if len(x) != len(y):
            raise ConfigError(f"{len(x)} images and {len(y)} labels: there must be one label for each image")
        check_labels(y)
        if batch_size < 1:
            raise ConfigError(f"batch size {batch_size}: expected at least 1")
        self.x, self.y, self.batch_size = x, y, batch_size
        self.seed, self.shuffle, self.prefetch, self.border = seed, shuffle, prefetch, border
        self.augment = parse_augment(augment)
        self.indices = np.arange(len(x)) if indices is None else np.asarray(indices)
        samples = len(self.indices)
        self.drop_last = drop_last
        self._batches, rest = divmod(samples, batch_size)
        if not drop_last and (rest > 1 or samples == 1):
            self._batches += 1
        if not self._batches:
            raise ConfigError(f"{samples} samples make no batch of {batch_size}: use a smaller batch or keep the last")

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self._batches

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Batches `start`, `start + 1`, ... of this epoch: x (B, H, W, C), y (B,), both fresh copies.

        The thread ends with the iterator: when it is exhausted, closed or forgotten.
        """
        if not 0 <= start <= len(self):
            raise ConfigError(f"epoch {epoch} has {len(self)} batches and cannot start at batch {start}")
        order = self.indices
        if self.shuffle:
            order = generator(Purpose.ORDER, self.seed, epoch).permutation(order)
        if not self.prefetch:
            return (self._batch(order, epoch, number) for number in range(start, len(self)))
        return self._prefetched(order, epoch, start)

    def _prefetched(self, order: np.ndarray, epoch: int, start: int) -> Iterator[Batch]:
        waiting: deque[Future[Batch]] = deque()
        thread = ThreadPoolExecutor(1, thread_name_prefix="minidl-prefetch")
        try:
            for number in range(start, len(self)):
                waiting.append(thread.submit(self._batch, order, epoch, number))
                if len(waiting) > self.prefetch:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            thread.shutdown(cancel_futures=True)

    def _batch(self, order: np.ndarray, epoch: int, number: int) -> Batch:
        full = self.drop_last or number + 1 < len(self)
        chosen = order[number * self.batch_size : (number + 1) * self.batch_size if full else None]
        x = self.x.take(chosen, axis=0)
        rng = generator(Purpose.AUGMENT, self.seed, epoch, number)
        for name in self.augment:
            x = AUGMENTATIONS[name](x, rng, self.border)
        return x, self.y.take(chosen)
