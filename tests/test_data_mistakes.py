"""Common mistakes in a user's data: each is reported in one line that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minidl.data import load
from minidl.data.dataset import from_arrays
from minidl.data.npz import read_npz
from minidl.errors import DataError

LABELS = np.arange(2000) % 10


def saved(path: Path, shape: tuple[int, ...] = (8, 8), names: tuple[str, ...] = (), **changes: Any) -> Path:
    """Save 2,000 training and 20 test images of this shape. `changes` replaces arrays; `names` renames all four."""
    x = np.zeros((2000, *shape), np.uint8)
    arrays = {"x_train": x, "y_train": LABELS, "x_test": x[:20], "y_test": LABELS[:20], **changes}
    np.savez(path, **{names[i] if names else name: array for i, (name, array) in enumerate(arrays.items())})
    return path


STRAY = np.where(np.arange(2000) == 17, 50, LABELS)


@pytest.mark.parametrize(("changes", "words"), [
    ({"y_train": LABELS + 1, "y_test": LABELS[:20] + 1}, "labels go from 1 to 10: subtract 1"),
    ({"y_train": LABELS + 1}, "labels of y_train go from 1 to 10, of y_test from 0 to 9: number both from 0"),
    ({"y_test": LABELS[:20] + 1}, "labels of y_train go from 0 to 9, of y_test from 1 to 10: number both from 0"),
    ({"y_train": LABELS - 1}, r"label -1 in y_train at 0, .*: classes are numbered from 0: np\.unique\("),
    ({"y_test": LABELS[:20] - 1}, "label -1 in y_test at 0, expected 0 to 9: classes are numbered from 0"),
    ({"y_train": STRAY}, "label 50 in y_train at 17, but the others go from 0 to 9: correct it"),
    ({"y_train": LABELS.astype(float)}, r"y_train is float64 \(2000,\), .*: give labels.astype\(int\)"),
    ({"y_train": LABELS + 0.5}, r"y_train is float64 \(2000,\), expected whole numbers \(2000,\), one for each image$"),
    ({"y_train": np.eye(10)[LABELS]}, r"y_train is float64 \(2000, 10\), .* one-hot; give labels.argmax\(axis=1\)"),
    ({"y_train": np.eye(10, dtype=int)[LABELS]}, "they are one-hot"),
    ({"y_train": LABELS[:, np.newaxis]}, r"y_train is int64 \(2000, 1\), .*give labels\[:, 0\]"),
    ({"y_test": LABELS[:20] + 50}, "label 50 in y_test at 0, expected 0 to 9: the classes of y_train"),
    ({"x_test": np.zeros((20, 8, 9), np.uint8)}, r"x_train are \(8, 8, 1\), of x_test \(8, 9, 1\)"),
    ({"x_train": np.zeros((0, 8, 8), np.uint8), "y_train": LABELS[:0]}, "no size of 0"),
    ({"x_test": np.full((20, 8, 8), np.nan)}, "x_test has NaN or infinity in image 0"),
])  # fmt: skip
def test_mistakes_in_a_file(tmp_path: Path, changes: dict[str, np.ndarray], words: str) -> None:
    path = saved(tmp_path / "a.npz", **changes)
    with pytest.raises(DataError, match=words) as caught:
        read_npz(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("shape", "layout", "words"), [
    ((3, 8, 8), "channels-last", r"\(2000, 3, 8, 8\), which looks like \(N, C, H, W\): give --layout channels-first"),
    ((4, 8, 8), "channels-last", "give --layout channels-first"),
    ((2, 8, 8), "channels-last", "give --layout channels-first"),
    ((1, 8, 8), "channels-last", "give --layout channels-first"),
    ((8, 8, 3), "channels-first", r"looks like \(N, H, W, C\): leave out --layout channels-first"),
])  # fmt: skip
def test_axes_in_the_other_order(tmp_path: Path, shape: tuple[int, ...], layout: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load(saved(tmp_path / "a.npz", shape), layout=layout)
    other = "channels-first" if layout == "channels-last" else "channels-last"
    assert load(saved(tmp_path / "a.npz", shape), layout=other).input_shape == (8, 8, min(shape))


def test_labels_with_gaps_that_are_no_mistake(tmp_path: Path) -> None:
    sevens = np.where(LABELS % 2, 7, 3)  # two classes of another data set
    assert read_npz(saved(tmp_path / "a.npz", y_train=sevens, y_test=sevens[:20])).classes == 8


@pytest.mark.parametrize("names", [("images", "labels", "a", "b"), ("arr_0", "arr_1", "arr_2", "arr_3")])
def test_other_names_of_arrays(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match=r"no array 'x_train'.*found .*Save them by name: np\.savez\(file, x_train="):
        read_npz(saved(tmp_path / "a.npz", names=names))


@pytest.mark.parametrize(("arrays", "words"), [
    ((np.zeros((0, 4)), LABELS[:0]), r"no training images: x has shape \(0, 4\)"),
    ((np.zeros((4, 3, 8, 8)), LABELS[:4]), r"looks like \(N, C, H, W\); .*give x\.transpose\(0, 2, 3, 1\)"),
    ((np.zeros((4, 4, 28, 28)), LABELS[:4]), r"looks like \(N, C, H, W\); .*give x\.transpose\(0, 2, 3, 1\)"),
    ((np.zeros((4, 8, 8, 1)), LABELS[:4] + 1), "^labels go from 1 to 4: subtract 1"),
    ((np.zeros((4, 5)), LABELS[:4] + 1, np.zeros((3, 5)), LABELS[1:4]), "^labels go from 1 to 4: subtract 1"),
    ((np.zeros((4, 5)), LABELS[:4] + 1, np.zeros((4, 5)), LABELS[:4]), "y_train go from 1 to 4, of y_test from 0 to 3"),
    ((np.zeros((4, 5)), LABELS[:4], np.zeros((4, 5)), LABELS[:4] + 1), "y_train go from 0 to 3, of y_test from 1 to 4"),
    ((np.zeros((4, 5)), LABELS[:4] - 1), r"labels are int64 \(4,\) down to -1; .*: classes are numbered from 0: np"),
    ((np.zeros((4, 5)), np.array(["a", "b"] * 2)), r"labels are <U1 \(4,\); .*: np\.unique\(.*\)\[1\] numbers them"),
    ((np.zeros((50, 5)), np.where(np.arange(50) == 7, 255, LABELS[:50])), "label 255 in y_train at 7, but the others"),
    ((np.zeros((4, 8, 8, 1)), LABELS[:4], np.zeros((2, 8, 9, 1)), LABELS[:2]), r"training images are \(8, 8, 1\)"),
    (([[1, 2], [3]], LABELS[:2]), "must be arrays of numbers"),
    ((np.zeros(4), LABELS[:4]), r"images have shape \(4,\)"),
    ((np.zeros((4, 5)), np.eye(10)[:4]), r"one-hot; give labels\.argmax"),
    ((np.zeros((4, 5)), LABELS[:4].astype(float)), r"give labels\.astype\(int\)"),
])  # fmt: skip
def test_mistakes_in_arrays(arrays: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        from_arrays(arrays, 0.0, 0)


@pytest.mark.parametrize("shape", [(4, 28, 28, 1), (5, 8, 8, 3), (2, 4, 4, 4), (2, 2, 16, 24), (6, 28, 28)])
def test_shapes_that_are_channels_last(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape)
    assert from_arrays((x, np.arange(len(x)) % 2), 0.0, 0).x_train.shape == shape


def test_labels_that_are_numbered_alike() -> None:
    x = np.zeros((4, 5))
    assert from_arrays((x, [0, 1, 2, 3], x[:1], [1]), 0.0, 0).classes == 4
    assert from_arrays((x, [0, 1, 2, 0], x[:3], [3, 1, 3]), 0.0, 0).classes == 4  # a class without training images


@pytest.mark.parametrize(("images", "words"), [
    ([[[[1.0, 2.0, 3.0]]]], r"^standardise: a list; expected an array \(N, H, W, 3\) .*np\.asarray\(images, np\.uint8"),
    (np.array([["a"]]), "^standardise: an array"),
    (np.zeros((2, 3, 8, 8), np.uint8), r"\(2, 3, 8, 8\); expected \(N, H, W, 3\)"),
    (np.zeros((2, 8, 8, 1)), r"\(2, 8, 8, 1\); expected \(N, H, W, 3\)"),
])  # fmt: skip
def test_images_that_cannot_be_standardised(images: Any, words: str) -> None:
    dataset = load("synthetic:20x8x8x3:2")
    with pytest.raises(DataError, match=words):
        dataset.standardise(images)
    assert dataset.standardise(np.zeros((8, 8, 3))).shape == (8, 8, 3)
