"""CIFAR-10: batch files, and their extraction from the published archive."""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pytest

from minidl.data import cifar, files, load
from minidl.data.cifar import RECORD, TEST, TRAIN, extract, read_batch
from minidl.errors import DataError


def batch(count: int, seed: int = 0) -> bytes:
    records = np.random.default_rng(seed).integers(0, 256, (count, RECORD), dtype=np.uint8)
    records[:, 0] = np.arange(count) % 10
    return records.tobytes()


def write_archive(path: Path, members: dict[str, bytes], links: dict[str, str] | None = None) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)


@pytest.fixture(autouse=True)
def no_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MINIDL_DATA", raising=False)


def test_planes_become_channels(tmp_path: Path) -> None:
    content = batch(3)
    (tmp_path / "b.bin").write_bytes(content)
    images, labels = read_batch(tmp_path / "b.bin")
    assert images.shape == (3, 32, 32, 3) and labels.tolist() == [0, 1, 2]
    # Pixel (row 5, column 7) of image 2, green plane.
    assert images[2, 5, 7, 1] == content[2 * RECORD + 1 + 1024 + 5 * 32 + 7]


@pytest.mark.parametrize("folder", [".", "cifar10", "cifar-10-batches-bin"])
def test_load_uses_the_training_batches_that_exist(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "data_batch_2.bin").write_bytes(batch(11))
    (tmp_path / folder / "data_batch_4.bin.gz").write_bytes(gzip.compress(batch(12)))
    with pytest.raises(DataError, match=r"but not test_batch\.bin"):
        load("cifar10", data_dir=tmp_path)
    (tmp_path / folder / "test_batch.bin.xz").write_bytes(lzma.compress(batch(5)))
    data = load("cifar10", data_dir=tmp_path)
    assert data.x_train.shape == (23, 32, 32, 3) and data.x_test.shape == (5, 32, 32, 3)
    assert data.y_train.tolist() == [*range(10), 0, *range(10), 0, 1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("b.bin", b"", "contains 0 bytes, expected whole records of 3073"),
        ("b.bin", batch(2)[:-1], "contains 6145 bytes"),
        ("b.bin", batch(2) + b"\x0a" + bytes(3072), "label 10 in record 2"),
        ("b.bin.gz", gzip.compress(batch(2))[:-9], "damaged or cut short"),
        ("b.bin.xz", lzma.compress(batch(2))[:-40], "damaged or cut short"),
        ("b.bin.xz", batch(2), "damaged or cut short"),
        ("b.bin.gz", batch(2), "get the file again"),
        ("b.bin.xz", lzma.compress(bytes(60_001 * RECORD), preset=0), "unpacks to more than 8 MB and 50 times"),
    ],
)
def test_damaged_batches(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as info:
        read_batch(tmp_path / name)
    assert str(tmp_path / name) in str(info.value) and "\n" not in str(info.value)


def test_only_expected_members_are_extracted(tmp_path: Path) -> None:
    folder, archive = tmp_path / "out", tmp_path / "a.tar.gz"
    folder.mkdir()
    wanted = {f"cifar-10-batches-bin/{name}": batch(2, seed) for seed, name in enumerate([TEST, *TRAIN])}
    strangers = {"../evil.bin": b"x", "/tmp/evil.bin": b"x", "cifar-10-batches-bin/readme.html": b"x", TEST: b"x"}
    write_archive(archive, {**strangers, **wanted}, links={"cifar-10-batches-bin/link": "/etc/passwd"})
    paths = extract(archive, folder)
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(["a.tar.gz", "out", TEST, *TRAIN])
    assert paths[TEST].read_bytes() == wanted[f"cifar-10-batches-bin/{TEST}"]


def test_a_set_that_is_extracted_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process writes the files while `search` looks for them. `search` must find all of them or none."""
    find, asked = files._find, []

    def finding(folder: Path, stem: str) -> Path | None:
        asked.append(stem)
        if len(asked) == 3:
            for name in [*TRAIN, TEST]:
                (folder / name).write_bytes(batch(1))
        return find(folder, stem)

    (tmp_path / "minidl" / "data" / "cifar10").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MINIDL_DATA", raising=False)
    monkeypatch.setattr(files, "_find", finding)
    found = files.search("cifar10", cifar.GROUPS, None)
    assert found is None or sorted(found) == sorted([*TRAIN, TEST])


def test_archives_that_lack_a_batch(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    wanted = {f"cifar-10-batches-bin/{name}": batch(1) for name in TRAIN}
    write_archive(archive, wanted, links={f"cifar-10-batches-bin/{TEST}": "data_batch_1.bin"})
    with pytest.raises(DataError, match=r"does not contain test_batch\.bin"):
        extract(archive, tmp_path)
    archive.write_bytes(archive.read_bytes()[:200])
    with pytest.raises(DataError, match="damaged or cut short"):
        extract(archive, tmp_path)
    assert not (tmp_path / TEST).exists()
