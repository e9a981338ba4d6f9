"""IDX files, and the folders in which mnist and fashion-mnist are searched for."""

from __future__ import annotations

import gzip
import lzma
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl.data import load
from minidl.data.idx import read_idx
from minidl.errors import DataError

WRITE = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_set(folder: Path, train: int = 6, test: int = 3, side: tuple[int, int] = (5, 4), suffix: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for prefix, count in (("train", train), ("t10k", test)):
        images, labels = rng.integers(0, 256, (count, *side)), rng.integers(0, 10, count)
        (folder / f"{prefix}-images-idx3-ubyte{suffix}").write_bytes(WRITE[suffix](idx(images)))
        (folder / f"{prefix}-labels-idx1-ubyte{suffix}").write_bytes(WRITE[suffix](idx(labels)))


@pytest.fixture(autouse=True)
def no_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MINIDL_DATA", raising=False)


@settings(max_examples=30, deadline=None)
@given(shape=SHAPES, suffix=st.sampled_from(list(WRITE)), seed=st.integers(0, 9))
def test_idx_round_trip(tmp_path_factory: pytest.TempPathFactory, shape: tuple, suffix: str, seed: int) -> None:
    array = np.random.default_rng(seed).integers(0, 256, shape)
    path = tmp_path_factory.mktemp("idx") / f"images{suffix}"
    path.write_bytes(WRITE[suffix](idx(array)))
    np.testing.assert_array_equal(read_idx(path, rank=3), array)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), shape=SHAPES, suffix=st.sampled_from(list(WRITE)))
def test_damaged_idx_raises_or_gives_an_array_of_the_same_size(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shape: tuple, suffix: str
) -> None:
    content = bytearray(WRITE[suffix](idx(np.zeros(shape))))
    kind = data.draw(st.sampled_from(["cut", "extend", "change"]))
    if kind == "cut":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    elif kind == "extend":
        content += data.draw(st.binary(min_size=1, max_size=9))
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("idx") / f"images{suffix}"
    path.write_bytes(content)
    try:
        array = read_idx(path, rank=3)
    except DataError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        # Only a changed pixel, or bytes outside the compressed data, can remain undetected.
        assert array.size == np.prod(shape) and (kind == "change" or suffix)


def test_header_that_claims_more_than_memory(tmp_path: Path) -> None:
    for suffix, write in WRITE.items():
        path = tmp_path / f"huge{suffix}"
        path.write_bytes(write(bytes([0, 0, 8, 3]) + b"\xff" * 12 + bytes(100)))
        with pytest.raises(DataError, match="only 100 bytes after a header that says 4294967295 x"):
            read_idx(path, rank=3)


def test_compressed_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.xz"
    path.write_bytes(lzma.compress(idx(np.zeros((1, 2, 3))) + bytes(200_000_000), preset=0))
    with pytest.raises(DataError, match=r"more bytes after a header that says 1 x 2 x 3"):
        read_idx(path, rank=3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with nothing, expected 00 00 08 03"),
        (b"\x1f\x8b\x08\x00", "begins with 1f 8b 08 00"),
        (idx(np.zeros(4)), "begins with 00 00 08 01"),
        (b"\0\0\x0d\x03" + bytes(12), "begins with 00 00 0d 03"),
        (b"\0\0\x08\x03\0\0", "ends inside its header"),
        (idx(np.zeros((0, 2, 2))), "is empty"),
    ],
)
def test_messages_for_wrong_headers(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / "file", rank=3)


@pytest.mark.parametrize("suffix", list(WRITE))
@pytest.mark.parametrize("place", ["data_dir", "subfolder", "environment", "cache"])
def test_sets_of_any_size_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, suffix: str) -> None:
    folder = tmp_path / {"cache": "cache/minidl/data/mnist", "subfolder": "mine/mnist"}.get(place, "mine")
    write_set(folder, suffix=suffix)
    if place == "environment":
        monkeypatch.setenv("MINIDL_DATA", str(folder))
    data = load("mnist", data_dir=tmp_path / "mine" if place in ("data_dir", "subfolder") else None)
    assert data.x_train.shape == (6, 5, 4, 1) and data.x_test.shape == (3, 5, 4, 1) and data.classes == 10


def test_data_dir_comes_before_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_set(tmp_path / "one", train=7)
    write_set(tmp_path / "two", train=9)
    monkeypatch.setenv("MINIDL_DATA", str(tmp_path / "one"))
    assert len(load("mnist").x_train) == 7
    assert len(load("mnist", data_dir=tmp_path / "two").x_train) == 9


def test_the_folder_of_another_set_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_set(tmp_path / "mnist")
    monkeypatch.setattr("minidl.data.mnist.MIRRORS", {"fashion-mnist": []})
    with pytest.raises(DataError, match="could not download train-images"):
        load("fashion-mnist", data_dir=tmp_path / "mnist")


def test_inconsistent_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data folder .* does not exist"):
        load("mnist", data_dir=tmp_path / "missing")
    write_set(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte"
    labels.write_bytes(idx(np.zeros(5)))
    with pytest.raises(DataError, match=r"has 6 images, .* 5 labels"):
        load("mnist", data_dir=tmp_path)
    labels.write_bytes(idx(np.array([0, 1, 10, 2, 3, 4])))
    with pytest.raises(DataError, match="label 10 at index 2, expected 0 to 9"):
        load("mnist", data_dir=tmp_path)
    labels.unlink()
    with pytest.raises(DataError, match="but not train-labels-idx1-ubyte"):
        load("mnist", data_dir=tmp_path)
    write_set(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(np.zeros((3, 5, 5))))
    with pytest.raises(DataError, match="must have one size"):
        load("mnist", data_dir=tmp_path)
