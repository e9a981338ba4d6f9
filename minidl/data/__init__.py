"""Data: named data sets and the user's own files, loaded as a `Dataset`.

    data = load("mnist", data_dir="../shared/data", validation=0.1, seed=0)
    loader = Loader(data.x_train, data.y_train, batch_size=128, augment=Augment("pad-crop", data.black))
    for x, y in loader.epoch(0): ...
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from minidl.checked import shown
from minidl.data.augment import AUGMENTATIONS, Augment, parse_augment
from minidl.data.cifar import read_cifar10
from minidl.data.dataset import Dataset, Splits, from_arrays, prepare
from minidl.data.digits import read_digits
from minidl.data.loader import Loader
from minidl.data.mnist import read_mnist
from minidl.data.npz import read_npz
from minidl.data.shard import apportion, dirichlet_shards, equal_lengths, shard
from minidl.data.synthetic import read_synthetic
from minidl.data.views import VIEWS
from minidl.errors import ConfigError, nearest

# name -> reader of (text after the colon, data_dir, seed)
DATASETS: dict[str, Callable[[str, str | Path | None, int], Splits]] = {
    "digits": lambda size, data_dir, seed: read_digits(seed),
    "mnist": lambda size, data_dir, seed: read_mnist("mnist", data_dir),
    "fashion-mnist": lambda size, data_dir, seed: read_mnist("fashion-mnist", data_dir),
    "cifar10": lambda size, data_dir, seed: read_cifar10(data_dir),
    "synthetic": lambda size, data_dir, seed: read_synthetic(size, seed),
}


def load(
    name: str | Path,
    data_dir: str | Path | None = None,
    validation: float = 0.0,
    seed: int = 0,
    layout: str = "channels-last",
) -> Dataset:
    """Load a data set: a name of DATASETS, "synthetic:4096x32x32x3:10" or the path of a .npz file.

    data_dir: the first folder to search for the files of mnist, fashion-mnist and cifar10 (see `files.search`).
    validation: the fraction of the training images of each class that is held out.
    seed: determines the held-out images (validation, and the test set of digits) and the synthetic images.
    layout: "channels-last" or "channels-first", the order of axes in a .npz file.

    Raises ConfigError if the name is unknown or an option is out of range, DataError if a file is missing, damaged or
    in another format.
    """
    splits = read(name, data_dir, seed, layout)
    text = str(name)
    return prepare(Path(text).stem if text.endswith(".npz") else text, splits, validation, seed)


def read(name: str | Path, data_dir: str | Path | None = None, seed: int = 0, layout: str = "channels-last") -> Splits:
    """Return the images of a data set as its files contain them: see `load`, which also standardises them."""
    if not isinstance(name, str | Path):
        raise ConfigError(f"data: {shown(name)}; expected the name of a data set or the path of a .npz file")
    if data_dir is not None and not isinstance(data_dir, str | Path):
        raise ConfigError(f"data_dir = {shown(data_dir)}; expected the path of a folder")
    text = str(name)
    if text.endswith(".npz"):
        return read_npz(Path(text), layout)
    base, colon, size = text.partition(":")
    if base not in DATASETS or (colon and base != "synthetic"):
        raise ConfigError(
            f"unknown data {text!r}: expected {', '.join(DATASETS)} or the path of a .npz file."
            f"{nearest(base, list(DATASETS))}"
        )
    return DATASETS[base](size, data_dir, seed)


__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "VIEWS",
    "Augment",
    "Dataset",
    "Loader",
    "apportion",
    "dirichlet_shards",
    "equal_lengths",
    "from_arrays",
    "load",
    "parse_augment",
    "read",
    "shard",
]
