"""The data set included in the package: 1,797 handwritten digits of 8x8 pixels. Attribution: digits.LICENSE.md."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from minidl.data.dataset import Splits, stratified_split
from minidl.data.seeds import Purpose, generator

TEST_FRACTION = 0.2


def read_digits(seed: int) -> Splits:
    """Read all images. The test set is a fifth of each class, chosen by `seed`."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.int64)  # (1797, 65): 64 pixels from 0 to 16, label
    images = (table[:, :64] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = table[:, 64]
    train, test = stratified_split(labels, TEST_FRACTION, generator(Purpose.TEST_SPLIT, seed))
    return Splits(images[train], labels[train], images[test], labels[test], classes=10)
