"""A data set prepared for training: the validation part is held out and every channel is standardised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import numpy as np

from minidl.checked import shown
from minidl.data.seeds import Purpose, generator
from minidl.data.shard import apportion
from minidl.errors import ConfigError, DataError

RENUMBER = "classes are numbered from 0: np.unique(labels, return_inverse=True)[1] renumbers labels"
CHUNK = 256  # images converted at a time; limits the size of the float64 temporaries


class Splits(NamedTuple):
    """The result of a reader. Images (N, H, W, C): uint8 (0 black, 255 white) or floats of any scale. Labels (N,)."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: int


@dataclass
class Dataset:
    """Images float32 (N, H, W, C), standardised by mean (C,) and std (C,) of the training part; labels int64 (N,).

    mean and std describe the images before standardising, with the values of uint8 images scaled to [0, 1]. The
    validation part is None if nothing was held out.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_validation: np.ndarray | None
    y_validation: np.ndarray | None
    x_test: np.ndarray
    y_test: np.ndarray
    classes: int
    mean: np.ndarray
    std: np.ndarray

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(H, W, C)"""
        height, width, channels = self.x_train.shape[1:]
        return height, width, channels

    @property
    def black(self) -> np.ndarray:
        """A black pixel after standardising (C,): the border for `Augment`."""
        return -self.mean / self.std

    def standardise(self, images: np.ndarray) -> np.ndarray:
        """Standardise images (N, H, W, C) like the training images. They must have the original set's type and scale.

        Raises DataError if they are not an array of numbers, or have another number of channels.
        """
        return standardise(images, self.mean, self.std)


def prepare(name: str, splits: Splits, validation: float, seed: int) -> Dataset:
    """Hold out the fraction `validation` of the training images of each class, chosen by seed; standardise all parts.

    Raises the errors of `check_classes` and `hold_out`.
    """
    check_classes(splits.y_train)
    train, held = hold_out(splits.y_train, validation, seed)
    mean, std = channel_statistics(splits.x_train, train)

    def part(x: np.ndarray, y: np.ndarray, chosen: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        return standardise(x[chosen], mean, std), y[chosen].astype(np.int64)

    x_train, y_train = part(splits.x_train, splits.y_train, train)
    x_validation, y_validation = part(splits.x_train, splits.y_train, held) if len(held) else (None, None)
    x_test, y_test = part(splits.x_test, splits.y_test, slice(None))
    return Dataset(name, x_train, y_train, x_validation, y_validation, x_test, y_test, splits.classes, mean, std)


def from_arrays(arrays: Sequence[np.ndarray], validation: float, seed: int) -> Dataset:
    """Make a Dataset from (x, y) or (x, y, x_test, y_test). Images are not standardised: mean is 0, std is 1.

    Raises DataError for invalid images or labels, ConfigError for a wrong number of arrays or labels, or if
    `validation` is out of range.
    """
    if not isinstance(arrays, tuple | list):
        raise ConfigError(f"{shown(arrays)} in place of arrays; expected (x, y) or (x, y, x_test, y_test)")
    if len(arrays) not in (2, 4):
        raise ConfigError(f"{len(arrays)} arrays were given; expected (x, y) or (x, y, x_test, y_test)")
    pairs = [_pair(x, y) for x, y in zip(arrays[::2], arrays[1::2], strict=True)]
    x, y = pairs[0]
    x_test, y_test = pairs[1] if len(pairs) == 2 else (x[:0], y[:0])
    if not len(x):
        raise DataError(f"there are no training images: x has shape {x.shape}")
    if x.shape[1:] != x_test.shape[1:]:
        raise DataError(f"training images are {x.shape[1:]}, test images {x_test.shape[1:]}: expected one shape")
    check_classes(y)
    check_same_start(y, y_test, "")
    check_numbering(y, y_test, "")
    train, held = hold_out(y, validation, seed)
    x_validation, y_validation = (x[held], y[held]) if len(held) else (None, None)
    if len(held):
        x, y = x[train], y[train]
    classes, channels = int(max(y.max(), y_test.max(initial=0))) + 1, x.shape[-1]
    mean, std = np.zeros(channels, np.float32), np.ones(channels, np.float32)
    return Dataset("arrays", x, y, x_validation, y_validation, x_test, y_test, classes, mean, std)


def _pair(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return images as float32 and their labels, checked."""
    try:
        x, y = np.asarray(x, np.float32), np.asarray(y)
    except (TypeError, ValueError) as error:
        raise DataError(f"images and labels must be arrays of numbers: {error}") from None
    check_labels(y)
    if x.ndim < 2:
        raise DataError(f"images have shape {x.shape}; expected (N, H, W, C), or features (N, D)")
    if len(x) != len(y):
        raise ConfigError(f"{len(x)} images and {len(y)} labels: there must be one label for each image")
    if looks_channels_first(x.shape):
        raise DataError(f"images have shape {x.shape}, which looks like (N, C, H, W); expected (N, H, W, C): give "
                        "x.transpose(0, 2, 3, 1)")  # fmt: skip
    return x, y


def looks_channels_first(shape: Sequence[int]) -> bool:
    """Return whether a shape is (N, C, H, W): 1 to 4 channels, then a square of at least 5 pixels."""
    return len(shape) == 4 and 1 <= shape[1] <= 4 and shape[2] == shape[3] > 4


def label_hint(labels: np.ndarray) -> str:
    """Return a clause that says how to make labels valid, or "" if there is no common mistake."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        return ": they have an axis of length 1; give labels[:, 0]"
    if labels.ndim == 2 and labels.dtype.kind in "uifb" and _is_one_hot(labels):
        return ": they are one-hot; give labels.argmax(axis=1)"
    if labels.ndim == 1 and labels.dtype.kind in "fb" and (labels == np.floor(labels)).all():
        return ": give labels.astype(int)"
    if labels.ndim == 1 and labels.dtype.kind in "US":
        return ": np.unique(labels, return_inverse=True)[1] numbers them"
    return ""


def _is_one_hot(labels: np.ndarray) -> bool:
    return bool(((labels == 0) | (labels == 1)).all() and (labels.sum(axis=1) == 1).all())


def check_same_start(train: np.ndarray, test: np.ndarray, where: str) -> None:
    """Raise DataError if one of two arrays of labels (N,) has the classes 0 to K - 1, and the other 1 to K.

    where: the beginning of the message.
    """
    own, other = np.unique(train), np.unique(test)
    if len(own) == len(other) > 0 and sorted([own[0], other[0]]) == [0, 1] and (own - own[0] == other - other[0]).all():
        raise DataError(f"{where}labels of y_train go from {own[0]} to {own[-1]}, of y_test from {other[0]} to "
                        f"{other[-1]}: number both from 0")  # fmt: skip


def check_numbering(train: np.ndarray, test: np.ndarray, where: str) -> None:
    """Raise DataError if labels (N,) are numbered from 1, or if the largest label is rare and there is a gap below it.

    where: the beginning of the message.
    """
    values, counts = np.unique(np.concatenate([train, test]).astype(np.int64), return_counts=True)
    if len(values) > 1 and values[0] == 1 and values[-1] == len(values):
        raise DataError(f"{where}labels go from 1 to {values[-1]}: subtract 1, because classes are numbered from 0")
    if len(values) > 2 and values[-1] - values[-2] > 1 and counts[-1] <= max(1, counts.sum() // 1000):
        raise DataError(f"{where}label {values[-1]} in y_train at {train.argmax()}, but the others go from {values[0]} "
                        f"to {values[-2]}: correct it, or number the classes from 0 without gaps")  # fmt: skip


def check_labels(labels: np.ndarray) -> None:
    """Raise DataError unless labels are whole numbers (N,) of 0 or more."""
    lowest = labels.min(initial=0) if labels.ndim == 1 and labels.dtype.kind in "iu" else None
    if lowest is None or lowest < 0:
        found, hint = ("", label_hint(labels)) if lowest is None else (f" down to {lowest}", f": {RENUMBER}")
        raise DataError(f"labels are {labels.dtype} {labels.shape}{found}; expected whole numbers (N,) of 0 or more, "
                        f"the class of each image{hint}")  # fmt: skip


def check_classes(labels: np.ndarray) -> None:
    """Raise DataError if all labels are equal: there is nothing to classify."""
    if len(labels) and (labels == labels[0]).all():
        raise DataError(f"all training images have the label {labels[0]}; expected at least two classes")


def hold_out(labels: np.ndarray, validation: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return sorted indices (for training, for validation). About the fraction `validation` of each class is held out.

    Raises ConfigError if `validation` is not in [0, 1), or is above 0 but holds out no image.
    """
    if not isinstance(validation, Real) or not 0 <= validation < 1:
        raise ConfigError(f"validation {shown(validation)}: expected a fraction from 0 up to, but not including, 1")
    if not validation:
        return np.arange(len(labels)), np.arange(0)
    train, held = stratified_split(labels, validation, generator(Purpose.VALIDATION_SPLIT, seed))
    if not len(held):
        raise ConfigError(f"validation {validation} of {len(train)} training images holds out none: use a larger one")
    return train, held


def stratified_split(labels: np.ndarray, fraction: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return sorted indices (kept, held out): about `fraction` of every class is held out, never all of it."""
    values, counts = np.unique(labels, return_counts=True)
    wanted = np.minimum(apportion(round(fraction * len(labels)), counts), counts - 1)
    held = np.zeros(len(labels), dtype=bool)
    for value, count in zip(values, wanted, strict=True):
        held[rng.permutation(np.flatnonzero(labels == value))[:count]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def channel_statistics(images: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and standard deviation of every channel of images[chosen], both (C,) float32.

    images (N, H, W, C), uint8 or float. The standard deviation of a constant channel is set to 1.
    """
    chunks = [chosen[start : start + CHUNK] for start in range(0, len(chosen), CHUNK)]
    pixels = len(chosen) * images.shape[1] * images.shape[2]

    def average(power: int, center: np.ndarray | float) -> np.ndarray:
        sums = [((_to_float64(images[chunk]) - center) ** power).sum(axis=(0, 1, 2)) for chunk in chunks]
        return np.sum(sums, axis=0) / pixels

    mean = average(1, 0.0)
    std = np.sqrt(average(2, mean))
    # The standard deviation of a constant channel may be a rounding error, not 0: compare it with the mean.
    constant = std <= 1e-7 * np.abs(mean)
    return mean.astype(np.float32), np.where(constant, 1.0, std).astype(np.float32)


def standardise(images: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Return (images - mean) / std as a new float32 array. uint8 images (N, H, W, C) are first scaled to [0, 1].

    Raises DataError if the images are not an array of numbers, or have another number of channels than mean (C,).
    """
    if not isinstance(images, np.ndarray) or images.dtype.kind not in "fiub" or not images.ndim:
        raise DataError(f"standardise: {shown(images)}; expected an array (N, H, W, {mean.size}) of numbers, of the "
                        "type of the training images: np.asarray(images, np.uint8), or floats")  # fmt: skip
    if mean.size > 1 and images.shape[-1] != mean.size:
        raise DataError(f"standardise: images have the shape {images.shape}; expected (N, H, W, {mean.size})")
    out = np.empty(images.shape, dtype=np.float32)
    for start in range(0, len(images), CHUNK):
        chunk = slice(start, start + CHUNK)
        out[chunk] = (_to_float64(images[chunk]) - mean) / std
    return out


def _to_float64(images: np.ndarray) -> np.ndarray:
    return images.astype(np.float64) / 255 if images.dtype == np.uint8 else images.astype(np.float64)
