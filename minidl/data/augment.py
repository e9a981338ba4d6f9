"""Augmentation: random changes of training images that keep their labels. Each function processes a whole batch.

x (N, H, W, C): standardised images, which the function may overwrite. Paddings and the cutout square are proportional
to the image; for 32x32 images they have the sizes in the papers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from minidl.checked import one_of, shown
from minidl.data.seeds import Purpose, generator
from minidl.errors import ConfigError


class Draw(NamedTuple):
    """What the changes of a batch depend on.

    rng: of this batch. border: the value of a black pixel, a number or (C,). images (N,): the number of each image in
    the training set. epoch: from 0. seed: of the run, equal for all its replicas.
    """

    rng: np.random.Generator
    border: np.ndarray | float = 0.0
    images: np.ndarray = np.arange(0)
    epoch: int = 0
    seed: int = 0


Augmentation = Callable[[np.ndarray, Draw], np.ndarray]


def pad_crop(x: np.ndarray, draw: Draw) -> np.ndarray:
    """Pad by an eighth of the side (4 for 32) and crop to the original size at a random position (He et al. 2015, 4.2).

    The padding is black, as if the images were padded before standardising (torchvision's recipe). Zeros would be a
    grey frame around MNIST's black images, which reveals how far the digit was moved.
    """
    n, height, width, channels = x.shape
    pad_h, pad_w = height // 8, width // 8
    padded = np.empty((n, height + 2 * pad_h, width + 2 * pad_w, channels), dtype=x.dtype)
    padded[:] = draw.border
    padded[:, pad_h : pad_h + height, pad_w : pad_w + width] = x
    rows = draw.rng.integers(0, 2 * pad_h + 1, size=(n, 1)) + np.arange(height)  # (N, H)
    columns = draw.rng.integers(0, 2 * pad_w + 1, size=(n, 1)) + np.arange(width)  # (N, W)
    return padded[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]


def translate(x: np.ndarray, draw: Draw) -> np.ndarray:
    """Move by up to a sixteenth of the side (2 for 32); the edge is mirrored, without repeating it (Jordan 2024)."""
    n, height, width, _ = x.shape
    most_h, most_w = -(-height // 16), -(-width // 16)
    down = draw.rng.integers(-most_h, most_h + 1, size=(n, 1))
    right = draw.rng.integers(-most_w, most_w + 1, size=(n, 1))
    return shifted(x, down, right)


def shifted(x: np.ndarray, down: np.ndarray | int, right: np.ndarray | int) -> np.ndarray:
    """Return images moved by whole pixels, with mirrored edges. down, right: numbers, or (N, 1) for each image."""
    rows = mirrored(np.arange(x.shape[1]) - down, x.shape[1])  # (N, H) or (H,)
    columns = mirrored(np.arange(x.shape[2]) - right, x.shape[2])
    return x[np.arange(len(x))[:, None, None], np.atleast_2d(rows)[:, :, None], np.atleast_2d(columns)[:, None, :]]


def mirrored(index: np.ndarray, size: int) -> np.ndarray:
    """Return the pixels in [0, size) for indices beyond the edges: -1 -> 1, size -> size - 2."""
    if size == 1:
        return np.zeros_like(index)
    index = np.abs(index) % (2 * (size - 1))
    return np.asarray(np.minimum(index, 2 * (size - 1) - index))


def flip(x: np.ndarray, draw: Draw) -> np.ndarray:
    """Mirror each image from left to right with probability 1/2."""
    return _flipped(x, draw.rng.random(len(x)) < 0.5)


def alternating_flip(x: np.ndarray, draw: Draw) -> np.ndarray:
    """Mirror each image in every second epoch. A coin decides whether it is mirrored in the first one (Jordan 2024).

    So two successive epochs contain both versions of each image. With `flip`, half of the images come twice in one.
    """
    if not len(x):
        return x
    # The coins of all images up to the last one: the coin of an image depends only on its number and the seed.
    coins = generator(Purpose.FLIP, draw.seed).random(int(draw.images.max()) + 1) < 0.5
    return _flipped(x, coins[draw.images] ^ (draw.epoch % 2 == 1))


def _flipped(x: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    x[chosen] = x[chosen, :, ::-1]
    return x


def cutout(x: np.ndarray, draw: Draw) -> np.ndarray:
    """Set a square, centred on a random pixel, to 0, the mean colour (DeVries and Taylor 2017, 3.2).

    The side of the square is half that of the image (16 for 32). The square may extend beyond the image.
    """
    n, height, width, _ = x.shape
    top = draw.rng.integers(0, height, size=(n, 1)) - height // 4
    left = draw.rng.integers(0, width, size=(n, 1)) - width // 4
    rows, columns = np.arange(height), np.arange(width)
    in_rows = (rows >= top) & (rows < top + height // 2)  # (N, H)
    in_columns = (columns >= left) & (columns < left + width // 2)  # (N, W)
    x[in_rows[:, :, None] & in_columns[:, None, :]] = 0
    return x


AUGMENTATIONS: dict[str, Augmentation] = {
    "pad-crop": pad_crop,
    "translate": translate,
    "flip": flip,
    "alternating-flip": alternating_flip,
    "cutout": cutout,
}


class Augment(NamedTuple):
    """What a loader changes.

    names: of AUGMENTATIONS, in the order of application. border: the value of a black pixel, a number or (C,).
    seed: of changes that depend on the image and the epoch, not on the batch: the same for all replicas. None: the
    loader's seed.
    """

    names: str | Sequence[str] = ()
    border: np.ndarray | float = 0.0
    seed: int | None = None


def parse_augment(names: str | Sequence[str]) -> tuple[str, ...]:
    """Convert "pad-crop,flip" or a sequence of names to a tuple in the same order; "" and "none" give ().

    Raises ConfigError if a name is unknown.
    """
    if isinstance(names, str):
        names = [] if names in ("", "none") else [name.strip() for name in names.split(",")]
    if not isinstance(names, Sequence):
        raise ConfigError(f"augment: {shown(names)}; expected names separated by commas, or a list of them")
    return tuple(one_of("augmentation", name, AUGMENTATIONS) for name in names)
