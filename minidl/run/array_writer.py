"""Write a .safetensors file array by array, so that no more than one array is in memory.

    length | header (JSON), spaces | array | array | ...

The header is at the beginning and is written last, because the metadata may not be known before. Until then, its place
is kept free. So the arrays are laid out first, from their names, types and shapes, and may be written in any order.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

TYPES = {"BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
         "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8"}  # fmt: skip
NAMES = {np.dtype(numpy): name for name, numpy in TYPES.items()}
ALIGNED = 8  # bytes: the arrays begin at a multiple of it
BLOCK = 1 << 20  # bytes that are moved at a time


class Layout(NamedTuple):
    """The type and the shape of an array."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def layouts(arrays: Mapping[str, np.ndarray]) -> dict[str, Layout]:
    """Return the layouts of arrays."""
    return {name: Layout(array.dtype, array.shape) for name, array in arrays.items()}


class ArrayWriter:
    """Writes the arrays of `planned` to a file. Its functions raise OSError if the disk is full, for example.

    spare: bytes that the metadata may grow by until `finish`.
    """

    def __init__(self, path: Path, planned: Mapping[str, Layout], metadata: Mapping[str, str], spare: int = 0) -> None:
        # Larger items first: so each array is aligned.
        self.planned = {name: planned[name] for name in sorted(planned, key=lambda n: (-planned[n].dtype.itemsize, n))}
        self.path, self._written = path, set[str]()
        self._begin = 8 + _aligned(len(self._header(metadata)) + spare)
        self._at, at = {}, self._begin
        for name, layout in self.planned.items():
            self._at[name] = at
            at += layout.nbytes

    def __enter__(self) -> ArrayWriter:
        self._file: BinaryIO = open(self.path, "w+b")
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, name: str, array: np.ndarray) -> None:
        """Write an array. It must have the layout that was planned."""
        assert Layout(array.dtype, array.shape) == self.planned[name], f"{name} is {array.dtype} {array.shape}"
        self._file.seek(self._at[name])
        self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self._written.add(name)

    def read(self, name: str) -> np.ndarray:
        """Read an array that was written."""
        layout = self.planned[name]
        self._file.seek(self._at[name])
        return np.frombuffer(self._file.read(layout.nbytes), layout.dtype).reshape(layout.shape)

    def discard(self, name: str) -> None:
        """Leave out an array, whether it was written or not."""
        self._written.discard(name)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write the header and sync the file to disk. Arrays that were planned and not written are left out."""
        self.planned = {name: layout for name, layout in self.planned.items() if name in self._written}
        end = self._begin
        for name, layout in self.planned.items():
            self._move(self._at[name], end, layout.nbytes)
            end += layout.nbytes
        header = self._header(metadata)
        assert len(header) <= self._begin - 8, "the metadata has grown by more than `spare` bytes"
        self._file.truncate(end)
        self._file.seek(0)
        self._file.write((self._begin - 8).to_bytes(8, "little") + header.ljust(self._begin - 8))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _move(self, source: int, target: int, size: int) -> None:
        """Move bytes towards the beginning of the file, if an array before them was left out."""
        for at in range(0, size if source != target else 0, BLOCK):
            self._file.seek(source + at)
            block = self._file.read(min(BLOCK, size - at))
            self._file.seek(target + at)
            self._file.write(block)

    def _header(self, metadata: Mapping[str, str]) -> bytes:
        """Return the header's JSON. The metadata are sorted, so that equal runs have equal files."""
        header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
        at = 0
        for name, layout in self.planned.items():
            offsets = [at, at + layout.nbytes]
            header[name] = {"dtype": NAMES[layout.dtype], "shape": list(layout.shape), "data_offsets": offsets}
            at += layout.nbytes
        return json.dumps(header, separators=(",", ":")).encode()


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write a .safetensors file with these arrays. Raises OSError."""
    with ArrayWriter(path, layouts(arrays), metadata) as file:
        for name, array in arrays.items():
            file.write(name, array)
        file.finish(metadata)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
