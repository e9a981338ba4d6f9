"""CIFAR-10 (Krizhevsky 2009), the binary version: a record is a label byte and 3 planes of 32x32 bytes (R, G, B)."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import numpy as np

from minidl.data.dataset import Splits
from minidl.data.download import Published, download, filling
from minidl.data.files import cache_folder, opened, read_at_most, reading, search
from minidl.errors import DataError

RECORD = 1 + 3 * 32 * 32
CLASSES = 10
LARGEST = 60_000 * RECORD  # all of CIFAR-10: no file can be larger
TRAIN = [f"data_batch_{number}.bin" for number in range(1, 6)]
TEST = "test_batch.bin"
GROUPS = [[TEST], TRAIN]  # `search` looks for TEST first; `extract` writes it last, so if it exists, all others do
ARCHIVE = Published("cifar-10-binary.tar.gz", 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530")
MIRRORS = [
    "https://www.cs.toronto.edu/~kriz/",
    "https://cave.cs.toronto.edu/kriz/",
    "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/",
]


def read_cifar10(data_dir: str | Path | None) -> Splits:
    """Read CIFAR-10 from the user's folders or the cache, or download it.

    The training set consists of the batch files that are present: at least one, at most five.
    """
    paths = search("cifar10", GROUPS, data_dir)
    if paths is None:
        folder = cache_folder() / "cifar10"
        with filling(folder):
            # Another process may have downloaded the files while this one waited for the lock.
            paths = search("cifar10", GROUPS, data_dir) or _download(folder)
    train = [read_batch(paths[name]) for name in TRAIN if name in paths]
    images, labels = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
    return Splits(images, labels, *read_batch(paths[TEST]), classes=CLASSES)


def read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read one batch file (raw, .gz or .xz): images uint8 (N, 32, 32, 3) and labels uint8 (N,)."""
    with opened(path) as stream:
        data = read_at_most(stream, LARGEST + 1)
    if not data or len(data) % RECORD or len(data) > LARGEST:
        size = f"over {LARGEST}" if len(data) > LARGEST else len(data)
        raise DataError(f"{path} contains {size} bytes, expected whole records of {RECORD} bytes: get the file again")
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, RECORD)
    labels = records[:, 0]
    if labels.max() >= CLASSES:
        raise DataError(f"{path}: label {labels.max()} in record {labels.argmax()}, expected 0 to {CLASSES - 1}")
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels


def _download(folder: Path) -> dict[str, Path]:
    archive = download(ARCHIVE, MIRRORS, folder)
    paths = extract(archive, folder)
    archive.unlink()
    return paths


def extract(archive: Path, folder: Path) -> dict[str, Path]:
    """Extract the six batch files of the official archive into `folder`. Other members of the archive are ignored."""
    members = {f"cifar-10-batches-bin/{name}": folder / name for name in [*TRAIN, TEST]}
    contents: dict[Path, bytes] = {}
    with reading(archive), tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            path = members.get(member.name)
            source = tar.extractfile(member) if path and member.isfile() and member.size <= LARGEST else None
            if path and source:
                contents[path] = source.read()
    missing = [path.name for path in members.values() if path not in contents]
    if missing:
        raise DataError(f"{archive} does not contain {', '.join(missing)}: get the file again")
    for path in members.values():  # the test batch comes last: without it, later runs treat the set as incomplete
        part = path.with_name(path.name + ".part")
        part.write_bytes(contents[path])
        os.replace(part, path)
    return {path.name: path for path in contents}
