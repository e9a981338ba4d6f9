"""What methods with --compress share: codes of gradients, sums and differences. The codecs are in comm/codecs."""

from __future__ import annotations

import numpy as np

from minidl.comm import codecs
from minidl.comm.codecs import Codec, Feedback
from minidl.comm.fabric.base import Fabric
from minidl.comm.fabric.wire import EXACT, Coded, Wire
from minidl.comm.replica import Replica
from minidl.engine.device import aligned
from minidl.run.config import Config

OPTIONS = {
    "compress": {
        "default": "none",
        "choices": {
            "none": "vectors are sent as they are",
            "bf16": "8 significant bits of each number: half of the bytes",
            "int8": "whole numbers from -127 to 127 for each number: a quarter of the bytes",
            "sign": "the sign of each number: a thirtieth of the bytes",
            "topk:SHARE": "the largest numbers, such as 1% of them with topk:0.01",
            "randk:SHARE": "random numbers, such as 1% of them with randk:0.01",
        },
        "help": "what vectors look like in messages; what a code loses is sent later",
    },
}


def checked(config: Config) -> Codec | None:
    """Return the codec of --compress, if any. Raises ConfigError for a codec that does not exist."""
    return codecs.build(config.compress or "none")


class Compressed:
    """Vectors like `like` (n,), with --compress. feedback: what the codes of this rank have lost so far, if any."""

    def __init__(self, config: Config, like: np.ndarray, fabric: Fabric) -> None:
        codec, self.fabric = checked(config), fabric
        self.feedback = codec and Feedback(codec, np.zeros_like(like))
        if codec:
            codec.compile()

    def sent(self, vector: np.ndarray, key: int) -> np.ndarray:
        """Return what is sent for a vector: the vector itself, or its code."""
        if not self.feedback:
            return vector
        with self.fabric.working("mix", vector.size, passes=2):
            return self.feedback.encode(vector, key)

    def read(self, received: np.ndarray, out: np.ndarray) -> None:
        """out <- what was received"""
        if not self.feedback:
            out[:] = received
            return
        with self.fabric.working("mix", out.size):
            self.feedback.codec.decode(received, out)

    def wire(self, vector: np.ndarray, start: int, step: int) -> Wire:
        """Return what vector[start:] looks like in the messages of a sum."""
        return Coded(self.feedback, vector[start:], start, step) if self.feedback else EXACT

    def vectors(self) -> dict[str, np.ndarray]:
        """Return what a checkpoint must contain."""
        return {"error": self.feedback.error} if self.feedback else {}

    def none_lost(self) -> dict[str, np.ndarray]:
        """Return `vectors` for a newcomer, which has lost nothing yet."""
        return {name: np.zeros_like(vector) for name, vector in self.vectors().items()}


class DifferenceCodes:
    """Codes of a vector (n,) like theta as its difference to what the receiver knows of it."""

    def __init__(self, replica: Replica, fabric: Fabric, codec: Codec) -> None:
        self.replica, self.fabric, self.codec = replica, fabric, codec
        self.rest = np.empty_like(replica.theta)
        codec.compile()

    def empty_code(self) -> np.ndarray:
        """Return memory for a code."""
        return aligned(self.codec.nbytes(self.rest.size), np.uint8)

    def encode_difference(self, vector: np.ndarray, known: np.ndarray, code: np.ndarray, key: int) -> np.ndarray:
        """code <- the code q of vector - known, known <- known + q. Returns `code`."""
        self.replica.pull(vector, known, 1.0, out=self.rest)
        with self.fabric.working("mix", known.size, passes=2):
            self.codec.encode(self.rest, code, key)
            self.codec.add(code, 1.0, known)
        return code

    def add_code(self, code: np.ndarray, weight: float, out: np.ndarray) -> None:
        """out <- out + weight * q"""
        with self.fabric.working("mix", out.size):
            self.codec.add(code, weight, out)
