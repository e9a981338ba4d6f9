"""counting.py with a checksum behind each code of a difference. The job fails if sender and receiver do not agree.

The checksum is that of what the receiver knows after it has read the code, as the sender computed it. Each check writes
a line into the file FILE.checks: the rank, and whether it read the code as the home of the center or as a replica.
After MEETING steps, replicas wait until all ranks have written such a line: on a busy machine, one rank could otherwise
end before the others begin.
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
from minidl.engine.device import aligned
from minidl.training.trainer import Trainer

LENGTH = 4  # bytes of a checksum
MEETING = 5
checks = os.open(sys.argv[1] + ".checks", os.O_RDWR | os.O_APPEND | os.O_CREAT)
encode, add, step = DifferenceCodes.encode_difference, DifferenceCodes.add_code, Trainer.step


def empty_code(codes: DifferenceCodes) -> np.ndarray:
    return aligned(codes.codec.nbytes(codes.rest.size) + LENGTH, np.uint8)


def checksum(vector: np.ndarray) -> np.ndarray:
    return np.frombuffer(zlib.crc32(vector).to_bytes(LENGTH, "little"), np.uint8)


def encode_with_checksum(codes: DifferenceCodes, vector: Any, known: Any, code: np.ndarray, key: int) -> np.ndarray:
    encode(codes, vector, known, code[:-LENGTH], key)
    code[-LENGTH:] = checksum(known)
    return code


def add_and_check(codes: Reconstructions, code: np.ndarray, weight: float, out: np.ndarray) -> None:
    add(codes, code[:-LENGTH], weight, out)
    assert np.array_equal(code[-LENGTH:], checksum(out)), "sender and receiver know different vectors"
    home = any(np.may_share_memory(out, pair) for pair in codes.of.values())
    os.write(checks, f"{codes.fabric.rank} {'home' if home else 'replica'}\n".encode())


def step_and_meet(trainer: Trainer, x: Any, y: Any) -> tuple[float, int]:
    result, fabric = step(trainer, x, y), trainer.fabric

    def all_have_read() -> bool | None:
        lines = os.pread(checks, os.fstat(checks).st_size, 0).split()
        return len({*lines[::2]}) == fabric.size or None

    if trainer.replica.steps == MEETING:
        fabric.wait(all_have_read, (), "the checks of all ranks")
    return result


DifferenceCodes.empty_code, DifferenceCodes.encode_difference = empty_code, encode_with_checksum  # type: ignore
DifferenceCodes.add_code = add_and_check  # type: ignore[assignment,method-assign]
Trainer.step = step_and_meet  # type: ignore[method-assign]
runpy.run_path(str(Path(__file__).with_name("counting.py")), run_name="__main__")
