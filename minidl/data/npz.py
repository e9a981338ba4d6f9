"""The user's own data: one .npz file (NumPy's `savez`) with x_train, y_train, x_test, y_test.

This module does not use `np.load`, which allocates the memory that a header asks for before it checks the file's size.
"""

from __future__ import annotations

import io
import math
import os
import re
import zipfile
from pathlib import Path

import numpy as np

from minidl.checked import one_of
from minidl.data.dataset import RENUMBER, Splits, check_numbering, check_same_start, label_hint, looks_channels_first
from minidl.data.files import bomb, read_at_most, reading, unpacked_limit
from minidl.errors import DataError, nearest
from minidl.reading import Npy, Unreadable, npy_header
from minidl.reading import opened as open_regular
from minidl.schema import shown

NAMES = ("x_train", "y_train", "x_test", "y_test")
LAYOUTS = ("channels-last", "channels-first")
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # the compression methods of NumPy; others may need much memory
AT_ONCE = 1 << 20  # bytes; limits the directory of an archive, which zipfile reads at once


def read_npz(path: Path, layout: str = "channels-last") -> Splits:
    """Read the four arrays of a .npz file.

    x_train, x_test: images (N, H, W), (N, H, W, C) or, if layout is "channels-first", (N, C, H, W); or features (N, D).
    y_train, y_test: labels (N,), whole numbers from 0. The number of classes is the largest label in y_train plus 1.
    Returns images as (N, H, W, C) and features as (N, 1, 1, D). Raises ConfigError if the layout is unknown, DataError
    if the file is not as described.
    """
    one_of("layout", layout, LAYOUTS)
    with reading(path), open_regular(path) as file, zipfile.ZipFile(_Limited(file)) as archive:
        _require_names(path, [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")])
        limit, arrays = unpacked_limit(file), {}
        for name in NAMES:
            arrays[name] = _read_array(archive, path, name, limit)
            limit -= arrays[name].nbytes
    x_train, y_train, x_test, y_test = arrays.values()
    x_train, x_test = (_images(x, path, name, layout) for x, name in ((x_train, "x_train"), (x_test, "x_test")))
    if x_train.shape[1:] != x_test.shape[1:]:
        raise DataError(f"{path}: images of x_train are {x_train.shape[1:]}, of x_test {x_test.shape[1:]} (H, W, C)")
    if x_train.dtype != x_test.dtype:  # each is uint8 or float32
        raise DataError(f"{path}: only one of x_train and x_test holds uint8, which is divided by 255: "
                        "save both in one type")  # fmt: skip
    for name, y, images in (("y_train", y_train, len(x_train)), ("y_test", y_test, len(x_test))):
        if y.shape != (images,) or y.dtype.kind not in "ui":
            raise DataError(f"{path}: {name} is {y.dtype} {y.shape}, expected whole numbers ({images},), one for each "
                            f"image{label_hint(y)}")  # fmt: skip
    check_same_start(y_train, y_test, f"{path}: ")
    _check_range(y_train, path, "y_train", len(x_train), "there cannot be more classes than images")
    classes = int(y_train.max()) + 1
    _check_range(y_test, path, "y_test", classes, "the classes of y_train")
    check_numbering(y_train, y_test, f"{path}: ")
    return Splits(x_train, y_train, x_test, y_test, classes)


def _require_names(path: Path, held: list[str]) -> None:
    """Raise DataError if an array is missing."""
    for name in NAMES:
        if name not in held:
            others = [other for other in held if other not in NAMES]
            hint = nearest(name, others)
            if len(others) == len(held):  # the file contains none of the four names
                hint = " Save them by name: np.savez(file, x_train=..., y_train=..., x_test=..., y_test=...)"
            raise DataError(f"{path} has no array {name!r}: expected {', '.join(NAMES)}, "
                            f"found {', '.join(repr(other[:40]) for other in held[:8]) or 'none'}.{hint}")  # fmt: skip


class _Limited(io.BufferedReader):
    """A file that refuses a `read` of more than AT_ONCE bytes. zipfile reads the list of all members in one `read`."""

    def __init__(self, file: io.BufferedReader) -> None:
        super().__init__(file.raw)
        self.size = os.fstat(file.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self.size - self.tell())
        if min(left, left if size is None or size < 0 else size) > AT_ONCE:
            raise Unreadable(f"its directory has over {AT_ONCE:,} bytes; expected an .npz file with four arrays")
        return super().read(size)


def _read_array(archive: zipfile.ZipFile, path: Path, name: str, limit: int) -> np.ndarray:
    """Read an array of at most `limit` bytes."""
    if archive.getinfo(f"{name}.npy").compress_type not in METHODS:
        raise DataError(f"{path}: {name} is compressed in another way than NumPy does: save it with NumPy")
    with archive.open(f"{name}.npy") as stream:
        try:
            header = npy_header(stream)
        except Unreadable as error:
            raise DataError(f"{path}: {name} {error}") from None
        dtype = _dtype(header, path, name)
        size = math.prod(header.shape) * dtype.itemsize
        data = read_at_most(stream, min(size, limit) + 1)
    if len(data) > limit:
        raise bomb(path)
    if len(data) != size:
        found = "more" if len(data) > size else f"{len(data)}"
        raise DataError(f"{path}: {name} holds {found} bytes, its header ({header.shape}, {dtype}) says {size}: "
                        "save it again")  # fmt: skip
    return np.frombuffer(data, dtype).reshape(header.shape, order="F" if header.fortran else "C")


def _dtype(header: Npy, path: Path, name: str) -> np.dtype:
    """Return the data type of an array. Raises DataError unless it holds real numbers."""
    try:
        dtype = np.dtype(header.descr) if re.fullmatch(r"[<>|=]?[biufcmMOSUV]\d{0,4}", header.descr) else None
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or dtype.kind not in "uif":
        held = shown(header.descr) if dtype is None else dtype
        raise DataError(f"{path}: {name} holds {held}, expected whole or floating-point numbers")
    return dtype


def _images(x: np.ndarray, path: Path, name: str, layout: str) -> np.ndarray:
    """Return images as (N, H, W, C), as uint8 or float32."""
    if x.ndim not in (2, 3, 4) or not x.size:
        raise DataError(
            f"{path}: {name} has shape {x.shape}, expected images (N, H, W) or with 4 axes ({layout}), "
            "or features (N, D), and no size of 0"
        )
    if layout == "channels-last" and looks_channels_first(x.shape):
        raise DataError(f"{path}: {name} has shape {x.shape}, which looks like (N, C, H, W): give --layout "
                        "channels-first")  # fmt: skip
    if layout == "channels-first" and looks_channels_first((0, x.shape[-1], *x.shape[1:-1])):
        raise DataError(f"{path}: {name} has shape {x.shape}, which looks like (N, H, W, C): leave out --layout "
                        "channels-first")  # fmt: skip
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
        if not np.isfinite(x).all():
            first = int(np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(axis=1))[0])
            raise DataError(f"{path}: {name} has NaN or infinity in image {first} (as float32): clean the data")
    if x.ndim == 2:
        x = x[:, np.newaxis, np.newaxis, :]
    elif x.ndim == 3:
        x = x[..., np.newaxis]
    elif layout == "channels-first":
        x = x.transpose(0, 2, 3, 1)
    return np.ascontiguousarray(x)


def _check_range(y: np.ndarray, path: Path, name: str, limit: int, why: str) -> None:
    for label, position in ((y.min(), y.argmin()), (y.max(), y.argmax())):
        if not 0 <= label < limit:
            raise DataError(f"{path}: label {label} in {name} at {position}, expected 0 to {limit - 1}: "
                            f"{RENUMBER if label < 0 else why}")  # fmt: skip
