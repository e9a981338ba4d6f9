"""counting.py with a checksum behind each code of a difference. The job fails if sender and receiver do not agree.

The checksum is that of what the receiver knows after it has read the code, as the sender computed it. Each check writes
a line into the file FILE.checks: the rank, and whether it read the code as the home of the center or as a replica.
"""

from __future__ import annotations

import os
import runpy
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from minidl.comm.methods.compression import DifferenceCodes
from minidl.comm.methods.reconstruction import Reconstructions

LENGTH = 4  # bytes of a checksum
checks = os.open(sys.argv[1] + ".checks", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
created, encode, add = Reconstructions.__init__, DifferenceCodes.encode_difference, DifferenceCodes.add_code


def create(codes: Reconstructions, *arguments: Any) -> None:
    created(codes, *arguments)
    codes.reply = np.empty(codes.reply.size + LENGTH, np.uint8)


def checksum(vector: np.ndarray) -> np.ndarray:
    return np.frombuffer(zlib.crc32(vector).to_bytes(LENGTH, "little"), np.uint8)


def encode_with_checksum(codes: DifferenceCodes, vector: np.ndarray, known: np.ndarray, key: int) -> np.ndarray:
    code = encode(codes, vector, known, key)
    return np.concatenate([code, checksum(known)])


def add_and_check(codes: Reconstructions, code: np.ndarray, weight: float, out: np.ndarray) -> None:
    add(codes, code[:-LENGTH].copy(), weight, out)
    assert np.array_equal(code[-LENGTH:], checksum(out)), "sender and receiver know different vectors"
    home = any(np.may_share_memory(out, pair) for pair in codes.of.values())
    os.write(checks, f"{codes.fabric.rank} {'home' if home else 'replica'}\n".encode())


Reconstructions.__init__ = create  # type: ignore[assignment,method-assign]
DifferenceCodes.encode_difference = encode_with_checksum  # type: ignore[method-assign]
DifferenceCodes.add_code = add_and_check  # type: ignore[assignment,method-assign]
runpy.run_path(str(Path(__file__).with_name("counting.py")), run_name="__main__")
