"""The loader: each sample occurs once in an epoch, an epoch can start at any batch, and its thread always ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl.data import AUGMENTATIONS, Loader, from_arrays, parse_augment
from minidl.data.augment import Draw, alternating_flip, cutout, flip, pad_crop, translate
from minidl.data.sampler import Sampler
from minidl.errors import ConfigError, DataError


def samples(n: int, shape: tuple[int, ...] = (9, 8, 2)) -> tuple[np.ndarray, np.ndarray]:
    """Return n images and their labels: image i is filled with i and has label i."""
    x = np.zeros((n, *shape), np.float32) + np.arange(n, dtype=np.float32).reshape(-1, 1, 1, 1)
    return x, np.arange(n)


def same(left: Iterator[Any], right: Iterator[Any]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1]) for a, b in pairs)


OPTIONS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 12),
        "seed": st.integers(0, 2**32 - 1),
        "shuffle": st.booleans(),
        "augment": st.sets(st.sampled_from(list(AUGMENTATIONS))).map(tuple),
    }
)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 40), epoch=st.integers(0, 5), prefetch=st.integers(0, 3), options=OPTIONS)
def test_each_sample_occurs_once_in_an_epoch(n: int, epoch: int, prefetch: int, options: dict[str, Any]) -> None:
    loader = Loader(*samples(n), **options)
    batches = list(loader.epoch(epoch, prefetch=prefetch))
    assert len(batches) == len(loader)
    assert all(len(y) == options["batch_size"] for _, y in batches[:-1])
    assert len(batches[-1][1]) > 1 or options["batch_size"] == 1 or n == 1
    order = np.concatenate([y for _, y in batches])
    assert sorted(order) == list(range(n))
    if not options["shuffle"]:
        assert order.tolist() == list(range(n))
    if not options["augment"]:
        assert all((x[:, 0, 0, 0] == y).all() for x, y in batches)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 40), epoch=st.integers(0, 5), options=OPTIONS, data=st.data())
def test_an_epoch_can_start_at_any_batch(n: int, epoch: int, options: dict[str, Any], data: st.DataObject) -> None:
    whole = list(Loader(*samples(n), **options).epoch(epoch))
    start = data.draw(st.integers(0, len(whole)))
    # Neither the prefetch depth nor an earlier epoch of the other loader changes its batches.
    other = Loader(*samples(n), **options)
    next(other.epoch(epoch + 1))
    assert same(other.epoch(epoch, start, data.draw(st.integers(0, 3))), iter(whole[start:]))


def test_epochs_and_seeds_differ() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return np.concatenate([y for _, y in Loader(*samples(30), 7, seed=seed).epoch(epoch)]).tolist()

    assert order(0, 0) != order(0, 1) != order(1, 0) != order(0, 0)


def test_batches_epochs_and_seeds_are_augmented_differently() -> None:
    x = np.broadcast_to(np.arange(16, dtype=np.float32).reshape(4, 4, 1), (64, 4, 4, 1))

    def flipped(seed: int, epoch: int) -> list[bytes]:
        loader = Loader(x, np.zeros(64, int), 32, seed=seed, augment="flip")
        return [batch.tobytes() for batch, _ in loader.epoch(epoch)]

    assert len({*flipped(0, 0), *flipped(0, 1), *flipped(1, 0), *flipped(1, 1)}) == 8


def test_drop_last_and_indices() -> None:
    indices = np.array([3, 5, 8, 13, 21])
    loader = Loader(*samples(30), 2, indices=indices, drop_last=True)
    batches = list(loader.epoch(0))
    assert [len(y) for _, y in batches] == [2, 2] and len(loader) == 2
    whole = np.concatenate([y for _, y in Loader(*samples(30), 2, indices=indices).epoch(0)])
    assert sorted(whole) == indices.tolist()
    assert np.concatenate([y for _, y in batches]).tolist() == whole[:4].tolist()


def test_a_single_last_image_is_added_to_the_batch_before() -> None:
    assert [len(y) for _, y in Loader(*samples(33), 16).epoch(0)] == [16, 17]
    assert [len(y) for _, y in Loader(*samples(33), 16).epoch(0, start=1)] == [17]
    assert [len(y) for _, y in Loader(*samples(34), 16).epoch(0)] == [16, 16, 2]
    assert [len(y) for _, y in Loader(*samples(33), 16, drop_last=True).epoch(0)] == [16, 16]
    assert [len(y) for _, y in Loader(*samples(3), 1).epoch(0)] == [1, 1, 1]
    assert [len(y) for _, y in Loader(*samples(1), 16).epoch(0)] == [1]


@pytest.mark.parametrize("labels", [np.eye(10, dtype=int), np.arange(10.0), np.zeros((10, 1), int), np.arange(10) - 1])
def test_labels_must_be_classes(labels: np.ndarray) -> None:
    with pytest.raises(DataError, match=r"labels are .*expected whole numbers \(N,\)"):
        Loader(samples(10)[0], labels, 4)


def test_the_data_set_is_not_modified() -> None:
    x, y = samples(20)
    before = x.copy()
    for batch, labels in Loader(x, y, 6, shuffle=False, augment=list(AUGMENTATIONS)).epoch(0):
        batch += 1
        labels += 1
    assert np.array_equal(x, before) and np.array_equal(y, np.arange(20))


@pytest.fixture
def prefetch_threads() -> Callable[[], list[threading.Thread]]:
    """Return a function that returns the prefetch threads that began during the test."""
    before = {*threading.enumerate()}
    return lambda: [new for new in threading.enumerate() if new not in before and "prefetch" in new.name]


def test_the_thread_ends_with_the_iterator(prefetch_threads: Callable[[], list[threading.Thread]]) -> None:
    loader = Loader(*samples(40), 3)
    batches = loader.epoch(0)
    assert not prefetch_threads()
    next(batches)
    assert len(prefetch_threads()) == 1
    batches.close()  # type: ignore[attr-defined]
    assert not prefetch_threads()
    for _ in loader.epoch(0):
        break  # leaving the loop deletes the iterator
    assert not prefetch_threads()
    list(loader.epoch(0))
    assert not prefetch_threads()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_prefetch_is_bounded(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    made: list[int] = []
    original = Loader.batch
    monkeypatch.setattr(Loader, "batch", lambda self, order, e, b: made.append(b) or original(self, order, e, b))
    for taken, _ in enumerate(Loader(*samples(40), 2).epoch(0, prefetch=depth)):
        assert len(made) <= taken + 1 + depth
    assert made == list(range(20))


def test_errors_in_the_thread_reach_the_consumer(prefetch_threads: Callable[[], list[threading.Thread]]) -> None:
    batches = Loader(*samples(10), 2, indices=np.array([0, 1, 2, 99]), shuffle=False).epoch(0)
    next(batches)
    with pytest.raises(IndexError):
        next(batches)
    assert not prefetch_threads()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch size 0"),
        ({"y": np.arange(9)}, "10 images and 9 labels"),
        ({"batch_size": 11, "drop_last": True}, "10 samples make no batch of 11"),
        ({"indices": np.arange(0)}, "0 samples"),
        ({"augment": "pad-crop,flop"}, r"unknown augmentation 'flop'.*Did you mean 'flip'\?"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    x, y = samples(10)
    with pytest.raises(ConfigError, match=message):
        Loader(**{"x": x, "y": y, "batch_size": 4, **options})


def test_positions_out_of_range() -> None:
    with pytest.raises(ConfigError, match="5 batches and cannot start at batch 6"):
        Loader(*samples(10), 2).epoch(0, start=6)
    with pytest.raises(ConfigError, match="seed -1 is out of range"):
        Loader(*samples(10), 2, seed=-1).epoch(0)


def test_parse_augment() -> None:
    assert parse_augment("pad-crop, flip") == ("pad-crop", "flip")
    assert parse_augment("") == parse_augment("none") == parse_augment([]) == ()
    assert parse_augment(["cutout"]) == ("cutout",)


def images(n: int, shape: tuple[int, int, int]) -> np.ndarray:
    return np.random.default_rng(5).uniform(1, 2, (n, *shape)).astype(np.float32)


@pytest.mark.parametrize("shape", [(8, 8, 1), (17, 33, 3), (1, 1, 5), (28, 28, 1)])
def test_pad_crop_moves_the_image_over_the_border(shape: tuple[int, int, int]) -> None:
    x, border = images(64, shape), np.arange(shape[2]) - 9.0
    out = pad_crop(x.copy(), Draw(np.random.default_rng(0), border))
    height, width = shape[:2]
    pad_h, pad_w = height // 8, width // 8
    moves = set()
    for before, after in zip(x, out, strict=True):
        padded = np.pad(before, ((pad_h, pad_h), (pad_w, pad_w), (0, 0)))
        inside = np.pad(np.ones((height, width), bool), ((pad_h, pad_h), (pad_w, pad_w)))
        padded[~inside] = border
        places = [(i, j) for i in range(2 * pad_h + 1) for j in range(2 * pad_w + 1)]
        found = [(i, j) for i, j in places if np.array_equal(padded[i : i + height, j : j + width], after)]
        assert len(found) == 1
        moves.add(found[0])
    assert len(moves) >= min(5, (2 * pad_h + 1) * (2 * pad_w + 1))
    assert out.dtype == np.float32


@pytest.mark.parametrize("shape", [(8, 8, 1), (17, 33, 3), (1, 1, 5), (2, 28, 1), (32, 32, 3)])
def test_translate_moves_the_image_and_mirrors_its_edges(shape: tuple[int, int, int]) -> None:
    x = images(256, shape)
    out = translate(x.copy(), Draw(np.random.default_rng(0)))
    height, width = shape[:2]
    pad_h, pad_w = -(-height // 16), -(-width // 16)
    moves = set()
    for before, after in zip(x, out, strict=True):
        padded = np.pad(before, ((pad_h, pad_h), (pad_w, pad_w), (0, 0)), mode="reflect")
        places = [(i, j) for i in range(2 * pad_h + 1) for j in range(2 * pad_w + 1)]
        found = {(i, j) for i, j in places if np.array_equal(padded[i : i + height, j : j + width], after)}
        assert found
        moves |= found
    assert len(moves) == (2 * pad_h + 1) * (2 * pad_w + 1)  # all moves occur
    assert out.dtype == np.float32


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), replicas=st.integers(1, 4), batch=st.integers(1, 9), n=st.integers(8, 40),
    skip=st.integers(0, 6),
)  # fmt: skip
def test_alternating_flip_mirrors_each_image_in_every_second_epoch(
    seed: int, replicas: int, batch: int, n: int, skip: int
) -> None:
    """Whichever replica trains it, in whichever batch, and from whichever epoch on."""
    x = images(n, (2, 3, 1))
    data = from_arrays((x, np.arange(n) % 2), 0.0, 0)
    flips: dict[int, list[bool | None]] = {image: [] for image in range(n)}
    for epoch in range(skip, skip + 4):
        for place in range(replicas):
            sampler = Sampler(data, batch, seed, place, replicas, augment=("alternating-flip",), prefetch=0)
            for image in (image for batch, _ in sampler.epoch(epoch) for image in batch):
                plain = np.flatnonzero((x == image).all(axis=(1, 2, 3)))
                turned = np.flatnonzero((x[:, :, ::-1] == image).all(axis=(1, 2, 3)))
                number, flipped = (plain[0], False) if len(plain) else (turned[0], True)
                flips[number] += [None] * (epoch - skip - len(flips[number])) + [flipped]  # None: left out
    for seen in flips.values():
        first = {flipped ^ (epoch % 2 == 1) for epoch, flipped in enumerate(seen) if flipped is not None}
        assert len(first) <= 1


def test_half_of_the_images_begin_mirrored_and_seeds_differ() -> None:
    x = images(400, (1, 2, 1))
    begin = []
    for seed in (0, 1):
        out = alternating_flip(x.copy(), Draw(np.random.default_rng(0), images=np.arange(400), seed=seed))
        begin.append((out != x).any(axis=(1, 2, 3)))
        assert 160 < begin[-1].sum() < 240
    assert 140 < (begin[0] ^ begin[1]).sum() < 260
    assert not len(alternating_flip(x[:0], Draw(np.random.default_rng(0))))


def test_flip_mirrors_about_half_of_the_images() -> None:
    x = images(200, (3, 5, 2))
    out = flip(x.copy(), Draw(np.random.default_rng(0)))
    mirrored = (out == x[:, :, ::-1]).all(axis=(1, 2, 3))
    assert ((out == x).all(axis=(1, 2, 3)) ^ mirrored).all()
    assert 70 < mirrored.sum() < 130


@pytest.mark.parametrize("shape", [(8, 8, 1), (32, 32, 3), (9, 15, 2)])
def test_cutout_blanks_one_rectangle(shape: tuple[int, int, int]) -> None:
    x = images(100, shape)
    out = cutout(x.copy(), Draw(np.random.default_rng(0)))
    blank = (out == 0).all(axis=3)
    assert np.array_equal(out[~blank], x[~blank])
    for mask in blank:
        rows, columns = mask.any(axis=1), mask.any(axis=0)
        assert np.array_equal(mask, rows[:, None] & columns[None, :])
        assert shape[0] // 4 <= rows.sum() <= shape[0] // 2 and shape[1] // 4 <= columns.sum() <= shape[1] // 2
    assert blank.sum(axis=(1, 2)).max() == (shape[0] // 2) * (shape[1] // 2)
