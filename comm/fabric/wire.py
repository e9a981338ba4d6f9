"""What vectors of collectives look like in messages: as they are, or as the codes of a codec.

A sum of codes has the same bits on all ranks. A rank encodes each element once for each sum: on the way to the rank
that adds it up, or there, when it is complete. What its code loses remains in the rank's `Feedback`, and is a part of
its next sum (Tang, Yu, Lian, Zhang, Liu: "DoubleSqueeze", ICML 2019, with a server in place of a tree or a ring).
"""

from __future__ import annotations

import numpy as np

from minidl.comm.codecs.feedback import Feedback
from minidl.engine.device import Device, address
from minidl.kernels.elementwise.stream import SERIAL


class Wire:
    """Vectors are sent as they are. `part` is a contiguous part of the vector of a collective.

    summand: this part of what the rank adds to a sum, or of the sum so far: `part` itself, or a vector that stays as
    it is. sending, copying: the passes of `sent` and `copy` over a part, for a simulated clock; `add` is one. What is
    received as it is needs none: a message ends where it is needed.
    """

    sending = copying = 0

    def sent(self, summand: np.ndarray, part: np.ndarray) -> np.ndarray:
        """Return what this rank sends for a summand. A complete sum is `part`, and becomes what receivers read."""
        return summand

    def add(self, received: np.ndarray, part: np.ndarray, summand: np.ndarray) -> None:
        """part <- summand + what was received, on one thread: the others may compute a gradient meanwhile."""
        for i in range(0, part.size, SERIAL):
            piece = slice(i, i + SERIAL)
            Device("cpu").elementwise.add(summand[piece], received[piece], part[piece])

    def copy(self, received: np.ndarray, part: np.ndarray) -> np.ndarray:
        """part <- what was received. Returns what this rank sends on; `received` is not needed for it."""
        part[...] = received
        return part


class Coded(Wire):
    """Codes are sent. vector: the whole vector of the collective. key: see `Codec.encode`; the same on all ranks.

    start: the place in the vectors of `feedback` where this vector begins.
    """

    sending, copying = 3, 1  # add what was lost, encode, decode; decode

    def __init__(self, feedback: Feedback, vector: np.ndarray, start: int, key: int) -> None:
        self.feedback, self.codec, self.key = feedback, feedback.codec, key
        self.first, self.itemsize, self.start = address(vector), vector.itemsize, start

    def sent(self, summand: np.ndarray, part: np.ndarray) -> np.ndarray:
        start = self.start + (address(part) - self.first) // self.itemsize
        code = self.feedback.encode(summand, (self.key << 32) + start, start)
        self.codec.decode(code, part)
        return code

    def add(self, received: np.ndarray, part: np.ndarray, summand: np.ndarray) -> None:
        if summand is not part:
            part[...] = summand
        self.codec.add(received, 1.0, part)

    def copy(self, received: np.ndarray, part: np.ndarray) -> np.ndarray:
        code = received.copy()
        self.codec.decode(code, part)
        return code


EXACT = Wire()
