"""Named data sets, splits and standardisation. The tests of real data sets are skipped if the files are missing."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import minidl.data
from minidl.data import load
from minidl.data.dataset import Splits, channel_statistics, prepare, stratified_split
from minidl.errors import ConfigError

REAL = Path(os.environ.get("MINIDL_DATA") or Path(__file__).parents[2] / "shared" / "data")


def test_digits_is_the_file_of_scikit_learn() -> None:
    content = Path(minidl.data.__file__).with_name("digits.csv.gz").read_bytes()
    assert hashlib.md5(content).hexdigest() == "9b335364a7bfd63947c7480a5bd51f2d"


def test_digits() -> None:
    data = load("digits", validation=0.1, seed=3)
    assert data.x_validation is not None and data.y_validation is not None
    assert data.input_shape == (8, 8, 1) and data.classes == 10
    assert [len(data.y_train), len(data.y_validation), len(data.y_test)] == [1294, 144, 359]
    for x in (data.x_train, data.x_validation, data.x_test):
        assert x.dtype == np.float32 and x.flags.c_contiguous
        grey = (x * data.std + data.mean) * 16  # back to 0..16
        assert np.abs(grey - grey.round()).max() < 1e-4 and grey.min() > -0.1 and grey.max() < 16.1
    for y, n in ((data.y_validation, 144), (data.y_test, 359)):
        assert y.dtype == np.int64
        assert np.abs(np.bincount(y) - n / 10).max() <= 2  # each class has about a tenth of the images
    assert abs(data.x_train.mean()) < 1e-5 and abs(data.x_train.std() - 1) < 1e-5


def test_no_digit_is_in_two_parts() -> None:
    data = load("digits", validation=0.2)
    assert data.x_validation is not None
    parts = [{image.tobytes() for image in x} for x in (data.x_train, data.x_validation, data.x_test)]
    whole = set.union(*parts)
    assert len(whole) == sum(map(len, parts)) == 1797


def test_the_seed_decides_the_split() -> None:
    first, again, other = (load("digits", seed=seed) for seed in (0, 0, 1))
    assert first.x_validation is None and first.y_validation is None
    assert np.array_equal(first.x_test, again.x_test) and np.array_equal(first.x_train, again.x_train)
    assert not np.array_equal(first.y_test, other.y_test)


def test_holding_out_validation_leaves_the_test_set() -> None:
    whole, part = load("digits"), load("digits", validation=0.3)
    assert np.array_equal(whole.y_test, part.y_test)
    assert not np.array_equal(whole.mean, part.mean)  # statistics of the training images only


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5, 0.99])
def test_stratified_split(fraction: float) -> None:
    labels = np.repeat([0, 1, 2, 5], [1, 10, 100, 33])
    kept, held = stratified_split(labels, fraction, np.random.default_rng(0))
    assert sorted([*kept, *held]) == list(range(144))
    counts = np.bincount(labels[held], minlength=6)[[0, 1, 2, 5]]
    assert np.abs(counts - fraction * np.array([1, 10, 100, 33])).max() <= 1
    assert set(labels[kept]) == {0, 1, 2, 5}


@pytest.mark.parametrize("validation", [-0.1, 1.0, 1.5, float("nan")])
def test_validation_out_of_range(validation: float) -> None:
    with pytest.raises(ConfigError, match="expected a fraction"):
        load("digits", validation=validation)


def test_validation_that_holds_nothing_out() -> None:
    with pytest.raises(ConfigError, match="holds out none"):
        load("synthetic:10x2x2x1:10", validation=0.01)


def test_statistics_in_chunks() -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (2500, 3, 2, 2), dtype=np.uint8)
    chosen = np.flatnonzero(rng.random(2500) < 0.9)
    mean, std = channel_statistics(images, chosen)
    np.testing.assert_allclose(mean, (images[chosen] / 255).mean(axis=(0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(std, (images[chosen] / 255).std(axis=(0, 1, 2)), rtol=1e-6)


def test_constant_channels_become_zero() -> None:
    x = np.random.default_rng(0).integers(0, 256, size=(301, 3, 3, 3), dtype=np.uint8)
    x[..., 1], x[..., 2] = 200, 0  # 200/255 is not a binary fraction: the mean has a rounding error
    labels = np.arange(301) % 2
    data = prepare("constant", Splits(x, labels, x, labels, 2), 0.0, 0)
    assert data.std[1:].tolist() == [1, 1] and np.abs(data.x_train[..., 1:]).max() < 1e-6
    assert np.isfinite(data.x_train).all()


def test_standardise_new_images_and_black() -> None:
    images = np.random.default_rng(0).integers(0, 256, (30, 4, 4, 3), dtype=np.uint8)
    labels = np.arange(30) % 2
    data = prepare("colour", Splits(images, labels, images[:5], labels[:5], 2), 0.0, 0)
    np.testing.assert_array_equal(data.standardise(images[:5]), data.x_test)
    np.testing.assert_allclose(data.standardise(images[:5] / 255), data.x_test, atol=1e-6)
    black = data.standardise(np.zeros((1, 1, 1, 3), np.uint8))
    np.testing.assert_allclose(black[0, 0, 0], data.black, rtol=1e-6)


def test_synthetic() -> None:
    data = load("synthetic:90x5x7x3:4", seed=2)
    assert data.x_train.shape == (90, 5, 7, 3) and data.x_test.shape == (22, 5, 7, 3) and data.classes == 4
    assert np.array_equal(load("synthetic:90x5x7x3:4", seed=2).x_train, data.x_train)
    assert not np.array_equal(load("synthetic:90x5x7x3:4", seed=1).x_train, data.x_train)
    assert load("synthetic").x_train.shape == (4096, 8, 8, 1)
    # Learnable: most test images are closest to the mean of the training images of their class.
    data = load("synthetic:400x8x8x1:10")
    means = np.stack([data.x_train[data.y_train == label].mean(axis=0) for label in range(10)])
    distances = ((data.x_test[:, None] - means) ** 2).sum(axis=(2, 3, 4))
    assert (distances.argmin(axis=1) == data.y_test).mean() > 0.8


@pytest.mark.parametrize("size", ["0x8x8x1:10", "9x8x8x1:10", "10x8x8:10", "10x8x8x1", "-5x8x8x1:2", "x"])
def test_synthetic_sizes(size: str) -> None:
    with pytest.raises(ConfigError, match="must read synthetic:COUNTxHEIGHTxWIDTHxCHANNELS:CLASSES"):
        load(f"synthetic:{size}")


def test_synthetic_beyond_memory() -> None:
    with pytest.raises(ConfigError, match="does not fit into memory"):
        load(f"synthetic:{10**15}x100x100x100:10")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mnsit", r"unknown data 'mnsit'.*Did you mean 'mnist'\?"),
        ("mnist:5", "unknown data 'mnist:5'"),
        ("", "unknown data ''"),
        ("folder/file.csv", "or the path of a .npz file"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(name)


def test_import_loads_no_slow_packages() -> None:
    code = "import sys, minidl.data; print([m for m in ('numba', 'urllib.request', 'tqdm') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "shapes", "mean"),
    [
        ("mnist", ((60000, 28, 28, 1), (10000, 28, 28, 1)), [0.1307]),
        ("fashion-mnist", ((60000, 28, 28, 1), (10000, 28, 28, 1)), [0.2860]),
    ],
)
def test_real_sets(name: str, shapes: tuple, mean: list[float]) -> None:
    if not (REAL / name).is_dir():
        pytest.skip(f"no {REAL / name}")
    data = load(name, data_dir=REAL)
    assert (data.x_train.shape, data.x_test.shape) == shapes
    np.testing.assert_allclose(data.mean, mean, atol=5e-5)
    assert np.bincount(data.y_test).tolist()[:3] == ([980, 1135, 1032] if name == "mnist" else [1000] * 3)


@pytest.mark.slow  # 50,000 images; test_data_cifar.py reads small files of the same format
def test_real_cifar10() -> None:
    if not (REAL / "cifar10").is_dir():
        pytest.skip(f"no {REAL / 'cifar10'}")
    data = load("cifar10", data_dir=REAL)
    assert data.x_test.shape == (10000, 32, 32, 3) and len(data.x_train) % 10000 == 0
    np.testing.assert_allclose(data.mean, [0.49, 0.48, 0.45], atol=0.01)
    assert data.y_test[:5].tolist() == [3, 8, 8, 0, 6]
