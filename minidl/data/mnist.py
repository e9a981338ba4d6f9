"""MNIST (LeCun, Cortes, Burges 1998) and Fashion-MNIST (Xiao, Rasul, Vollgraf 2017).

Both consist of four IDX files with the same names.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from minidl.data.dataset import Splits
from minidl.data.download import Published, download, filling
from minidl.data.files import cache_folder, search
from minidl.data.idx import read_idx
from minidl.errors import DataError

CLASSES = 10
FILES = {
    "mnist": [
        Published("train-images-idx3-ubyte.gz", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        Published("train-labels-idx1-ubyte.gz", 28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
        Published("t10k-images-idx3-ubyte.gz", 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
        Published("t10k-labels-idx1-ubyte.gz", 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
    ],
    "fashion-mnist": [
        Published("train-images-idx3-ubyte.gz", 26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        Published("train-labels-idx1-ubyte.gz", 29_515, "25c81989df183df01b3e8a0aad5dffbe"),
        Published("t10k-images-idx3-ubyte.gz", 4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
        Published("t10k-labels-idx1-ubyte.gz", 5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
    ],
}
GROUPS = {name: [[file.name.removesuffix(".gz")] for file in files] for name, files in FILES.items()}  # for `search`
MIRRORS = {
    "mnist": [
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ],
    "fashion-mnist": [
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ],
}


def read_mnist(name: str, data_dir: str | Path | None) -> Splits:
    """Read the set `name` ("mnist" or "fashion-mnist") from the user's folders or the cache, or download it."""
    paths = search(name, GROUPS[name], data_dir)
    stems = [stem for (stem,) in GROUPS[name]]
    if paths is None:
        folder = cache_folder() / name
        with filling(folder):
            paths = {stem: download(file, MIRRORS[name], folder) for stem, file in zip(stems, FILES[name], strict=True)}
    train, test = (_read_pair(paths[images], paths[labels]) for images, labels in (stems[:2], stems[2:]))
    if train[0].shape[1:] != test[0].shape[1:]:
        raise DataError(
            f"{paths[stems[0]]} has images of size {train[0].shape[1:3]}, {paths[stems[2]]} of {test[0].shape[1:3]}: "
            "training and test images must have one size"
        )
    return Splits(*train, *test, classes=CLASSES)


def _read_pair(image_file: Path, label_file: Path) -> tuple[np.ndarray, np.ndarray]:
    images, labels = read_idx(image_file, rank=3), read_idx(label_file, rank=1)
    if len(images) != len(labels):
        raise DataError(
            f"{image_file} has {len(images)} images, {label_file} {len(labels)} labels: they do not belong together"
        )
    if labels.max() >= CLASSES:
        raise DataError(f"{label_file}: label {labels.max()} at index {labels.argmax()}, expected 0 to {CLASSES - 1}")
    return images[..., np.newaxis], labels
