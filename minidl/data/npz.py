"""The user's own data: one .npz file (NumPy's `savez`) with x_train, y_train, x_test, y_test.

Read without `np.load`, which allocates the size given in a header before it checks the length of the file.
"""

from __future__ import annotations

import math
import zipfile
from pathlib import Path

import numpy as np

from minidl.data.dataset import Splits
from minidl.data.files import read_at_most, reading
from minidl.errors import ConfigError, DataError, nearest

NAMES = ("x_train", "y_train", "x_test", "y_test")
LAYOUTS = ("channels-last", "channels-first")


def read_npz(path: Path, layout: str = "channels-last") -> Splits:
    """Read the four arrays of a .npz file.

    x_train, x_test: images (N, H, W, C) or (N, H, W), with layout="channels-first" (N, C, H, W); or features (N, D).
    y_train, y_test: labels (N,), whole numbers from 0. The number of classes is the largest label in y_train plus 1.
    Returns images as (N, H, W, C) and features as (N, 1, 1, D). Raises ConfigError if the layout is unknown, DataError
    if the file is not as described.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown layout {layout!r}: expected {' or '.join(LAYOUTS)}.{nearest(layout, LAYOUTS)}")
    with reading(path), zipfile.ZipFile(path) as archive:
        held = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
        for name in NAMES:
            if name not in held:
                others = [other for other in held if other not in NAMES]
                raise DataError(
                    f"{path} has no array {name!r}: expected {', '.join(NAMES)}, "
                    f"found {', '.join(map(repr, held[:8])) or 'none'}.{nearest(name, others)}"
                )
        x_train, y_train, x_test, y_test = (_read_array(archive, path, name) for name in NAMES)
    x_train, x_test = (_images(x, path, name, layout) for x, name in ((x_train, "x_train"), (x_test, "x_test")))
    if x_train.shape[1:] != x_test.shape[1:]:
        raise DataError(f"{path}: images of x_train are {x_train.shape[1:]}, of x_test {x_test.shape[1:]} (H, W, C)")
    if x_train.dtype != x_test.dtype:  # each is uint8 or float32
        raise DataError(f"{path}: only one of x_train and x_test holds uint8, which is divided by 255: "
                        "save both in one type")  # fmt: skip
    _check_labels(y_train, len(x_train), path, "y_train", len(x_train), "there cannot be more classes than images")
    classes = int(y_train.max()) + 1
    _check_labels(y_test, len(x_test), path, "y_test", classes, "the classes of y_train")
    return Splits(x_train, y_train, x_test, y_test, classes)


def _read_array(archive: zipfile.ZipFile, path: Path, name: str) -> np.ndarray:
    with archive.open(f"{name}.npy") as stream:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
        else:
            raise DataError(f"{path}: {name} is in .npy format {version}, expected 1.0 or 2.0: save plain numbers")
        if dtype.kind not in "uif":
            raise DataError(f"{path}: {name} holds {dtype}, expected whole or floating-point numbers")
        size = math.prod(shape) * dtype.itemsize
        data = read_at_most(stream, size + 1)
    if min(shape, default=0) < 0 or len(data) != size:
        found = "more" if len(data) > size else f"{len(data)}"
        raise DataError(f"{path}: {name} holds {found} bytes, its header ({shape}, {dtype}) says {size}: save it again")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def _images(x: np.ndarray, path: Path, name: str, layout: str) -> np.ndarray:
    if x.ndim not in (2, 3, 4) or not x.size:
        raise DataError(
            f"{path}: {name} has shape {x.shape}, expected images (N, H, W) or with 4 axes ({layout}), "
            "or features (N, D), and no size of 0"
        )
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


def _check_labels(y: np.ndarray, images: int, path: Path, name: str, limit: int, why: str) -> None:
    if y.shape != (images,) or y.dtype.kind not in "ui":
        raise DataError(
            f"{path}: {name} is {y.dtype} {y.shape}, expected whole numbers ({images},), one for each image"
        )
    for extreme, position in ((y.min(), y.argmin()), (y.max(), y.argmax())):
        if not 0 <= extreme < limit:
            raise DataError(f"{path}: label {extreme} in {name} at {position}, expected 0 to {limit - 1}: {why}")
