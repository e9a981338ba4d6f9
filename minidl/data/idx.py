"""The IDX format: a magic number 00 00 TYPE RANK, RANK sizes (32 bits, most significant byte first), elements.

Source: Y. LeCun, "The MNIST database of handwritten digits", section "File formats".
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np

from minidl.data.files import opened, read_at_most
from minidl.errors import DataError

UNSIGNED_BYTE = 0x08


def read_idx(path: Path, rank: int) -> np.ndarray:
    """Read unsigned bytes from an IDX file (raw, .gz or .xz): rank 3 for images (N, H, W), rank 1 for labels (N,).

    Raises DataError if the magic number, type or rank is wrong or the sizes do not match the file's length exactly.
    """
    with opened(path) as stream:
        magic = bytes(read_at_most(stream, 4))
        expected = bytes([0, 0, UNSIGNED_BYTE, rank])
        if magic != expected:
            raise DataError(
                f"{path} begins with {magic.hex(' ') or 'nothing'}, expected {expected.hex(' ')} "
                f"(IDX, unsigned bytes, rank {rank}): this is another kind of file"
            )
        header = read_at_most(stream, 4 * rank)
        if len(header) < 4 * rank:
            raise DataError(f"{path} ends inside its header: get the file again")
        shape = struct.unpack(f">{rank}I", header)
        size = math.prod(shape)
        if not size:
            raise DataError(f"{path} is empty: its header says {_by(shape)}")
        data = read_at_most(stream, size + 1)
    if len(data) != size:
        found = "more" if len(data) > size else f"only {len(data)}"
        raise DataError(
            f"{path} contains {found} bytes after a header that says {_by(shape)} = {size}: get the file again"
        )
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
