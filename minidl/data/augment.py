"""Augmentation: random changes of training images that keep their labels. Each function processes a whole batch.

x (N, H, W, C): standardised images, which the function may overwrite. border: the value of a black pixel. The padding
and the cutout square are proportional to the image; for 32x32 images they have the sizes in the papers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from minidl.checked import one_of, shown
from minidl.errors import ConfigError

Augmentation = Callable[[np.ndarray, np.random.Generator, np.ndarray | float], np.ndarray]


def pad_crop(x: np.ndarray, rng: np.random.Generator, border: np.ndarray | float) -> np.ndarray:
    """Pad by an eighth of the side (4 for 32) and crop to the original size at a random position (He et al. 2015, 4.2).

    The padding is black, as if the images were padded before standardising (torchvision's recipe). Zeros would be a
    grey frame around MNIST's black images, which reveals how far the digit was moved.
    """
    n, height, width, channels = x.shape
    pad_h, pad_w = height // 8, width // 8
    padded = np.empty((n, height + 2 * pad_h, width + 2 * pad_w, channels), dtype=x.dtype)
    padded[:] = border
    padded[:, pad_h : pad_h + height, pad_w : pad_w + width] = x
    rows = rng.integers(0, 2 * pad_h + 1, size=(n, 1)) + np.arange(height)  # (N, H)
    columns = rng.integers(0, 2 * pad_w + 1, size=(n, 1)) + np.arange(width)  # (N, W)
    return padded[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]


def flip(x: np.ndarray, rng: np.random.Generator, border: np.ndarray | float) -> np.ndarray:
    """Mirror each image from left to right with probability 1/2."""
    chosen = rng.random(len(x)) < 0.5
    x[chosen] = x[chosen, :, ::-1]
    return x


def cutout(x: np.ndarray, rng: np.random.Generator, border: np.ndarray | float) -> np.ndarray:
    """Set a square, centred on a random pixel, to 0, the mean colour (DeVries and Taylor 2017, 3.2).

    The side of the square is half that of the image (16 for 32). The square may extend beyond the image.
    """
    n, height, width, _ = x.shape
    top = rng.integers(0, height, size=(n, 1)) - height // 4
    left = rng.integers(0, width, size=(n, 1)) - width // 4
    rows, columns = np.arange(height), np.arange(width)
    in_rows = (rows >= top) & (rows < top + height // 2)  # (N, H)
    in_columns = (columns >= left) & (columns < left + width // 2)  # (N, W)
    x[in_rows[:, :, None] & in_columns[:, None, :]] = 0
    return x


AUGMENTATIONS: dict[str, Augmentation] = {"pad-crop": pad_crop, "flip": flip, "cutout": cutout}


class Augment(NamedTuple):
    """names: of AUGMENTATIONS, in the order of application. border: the value of a black pixel, a number or (C,)."""

    names: str | Sequence[str] = ()
    border: np.ndarray | float = 0.0


def parse_augment(names: str | Sequence[str]) -> tuple[str, ...]:
    """Convert "pad-crop,flip" or a sequence of names to a tuple in the same order; "" and "none" give ().

    Raises ConfigError if a name is unknown.
    """
    if isinstance(names, str):
        names = [] if names in ("", "none") else [name.strip() for name in names.split(",")]
    if not isinstance(names, Sequence):
        raise ConfigError(f"augment: {shown(names)}; expected names separated by commas, or a list of them")
    return tuple(one_of("augmentation", name, AUGMENTATIONS) for name in names)
