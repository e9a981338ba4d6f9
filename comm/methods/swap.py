"""Exchanges of gossip that preserve the average of all models (--exchange swap).

    i asks j to send, if j is on another node; then, each as soon as it can:
        i: s_i <- x_i, send s_i                             j: s_j <- x_j, send s_j
        ... both go on training ...
        when s_j arrives: x_i <- x_i + 1/2 * (s_j - s_i)    when s_i arrives: x_j <- x_j + 1/2 * (s_i - s_j)

Both move by opposite amounts, so the average of all models does not change, however long the messages take. With push,
the receiver mixes a model that is some steps old with its own model of now: it loses half of the progress of these
steps. AD-PSGD (Lian, Zhang, Zhang, Liu: ICML 2018) preserves the average because it averages two models atomically.
The rule above is our form of it for messages with a delay.

A replica that receives a model and has sent none sends x_j at once. Within a node messages are fast, so nobody asks.

With --compress bf16 or int8, s_i and s_j are on both sides what the codes stand for, so the average stays the same.

If a replica dies, its unfinished swaps are dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minidl.comm.codecs import Codec
from minidl.comm.fabric.base import Column, Fabric, Message
from minidl.comm.methods import compression, peers
from minidl.comm.methods.momentum import Momentum
from minidl.engine.device import aligned
from minidl.errors import ConfigError
from minidl.run.config import Config

NOTHING = np.zeros(0, np.float32)
CODES = ("none", "bf16", "int8")


def checked(config: Config) -> Codec | None:
    """Return the codec of --compress, or None. Raises ConfigError for options that swaps exclude."""
    if config.exchange != "swap":
        return None
    if config.block == "layers":
        raise ConfigError("exchange swap excludes block layers: it is for whole models; expected block whole")
    if config.compress not in (None, *CODES):
        raise ConfigError(f"compress {config.compress} keeps too little of a whole model, which a swap sends; expected "
                          f"{', '.join(CODES)}")  # fmt: skip
    return compression.checked(config)


class Swaps:
    """The unfinished swaps of a replica. They end when training stops, so a checkpoint has none.

    push(peer, vector, reply): sends a model or its code; returns whether it could. reply: the header's marker, for an
    answer. sent: by peer, the model that was sent, and for which none has come. owed: by peer, a model or code that has
    come and for which none could be sent yet; None: none has come, but one of the two asks for a swap.
    """

    def __init__(
        self, fabric: Fabric, momentum: Momentum, push: Callable[[int, np.ndarray, bool], bool],
        codec: Codec | None = None,
    ) -> None:  # fmt: skip
        self.fabric, self.momentum, self.push, self.codec = fabric, momentum, push, codec
        if codec:
            codec.compile()
        self.sent: dict[int, np.ndarray] = {}
        self.owed: dict[int, np.ndarray | None] = {}
        self.incarnations = fabric.status[:, Column.INCARNATION].copy()

    def unfinished(self) -> bool:
        """Whether a swap with a replica that trains is unfinished."""
        return bool(np.isin([*self.sent, *self.owed], peers.present(self.fabric)).any())

    def begin(self, peer: int) -> bool:
        """Begin a swap; return whether that was possible: it is not while one with a replica that trains is unfinished.

        Several at a time would move x_i too far: each of them adds half of a difference to the same s_i.
        """
        if self.unfinished():
            return False
        if self.inside(peer):
            return self.send(peer)
        if not self.fabric.send(peer, NOTHING):
            return False
        self.owed[peer] = None
        return True

    def send(self, peer: int, reply: bool = False) -> bool:
        """Send the model and keep what the receiver will know of it, if possible."""
        vector = np.concatenate(self.momentum.outgoing())
        if not self.push(peer, self.encode(vector), reply):
            return False
        self.sent[peer] = vector
        return True

    def encode(self, vector: np.ndarray) -> np.ndarray:
        """Return what is sent for a vector (n,): itself, or its code. vector <- what the code stands for."""
        if not self.codec:
            return vector
        code = aligned(self.codec.nbytes(vector.size), np.uint8)
        with self.fabric.working("mix", vector.size, passes=3):
            self.codec.encode(vector.copy(), code)
            self.codec.decode(code, vector)
        return code

    def send_owed(self) -> None:
        """Send the models that are owed, if possible. One that was only asked for waits for the present swap."""
        for peer, received in tuple(self.owed.items()):
            if (received is not None or not self.sent) and self.send(peer, received is not None):
                del self.owed[peer]
                if received is not None:
                    self.finish(peer, received)

    def receive(self, message: Message) -> None:
        """Finish a swap with a model. A model for which none was sent is answered first."""
        peer = message.sender
        if not message.vector.size:
            if peer not in self.sent:
                self.owed.setdefault(peer, None)
        elif peer in self.sent:
            self.finish(peer, message.vector)
        elif message.header.marker:
            return  # the answer of one that has died: the swap is dropped
        elif self.send(peer, reply=True):
            self.owed.pop(peer, None)
            self.finish(peer, message.vector)
        else:
            self.owed[peer] = message.vector.copy()

    def finish(self, peer: int, received: np.ndarray) -> None:
        sent = self.sent.pop(peer)
        if self.codec:
            code, received = received, np.empty_like(sent)
            with self.fabric.working("mix", sent.size):
                self.codec.decode(code, received)
        self.momentum.move(received, sent, 0.5)

    def end(self, message: Message) -> None:
        """Training has stopped: finish a swap for which this replica has sent its model, and begin none."""
        if message.sender in self.sent and message.vector.size:
            self.finish(message.sender, message.vector)

    def drop(self) -> None:
        """Forget all swaps."""
        self.sent.clear()
        self.owed.clear()

    def on_membership(self) -> None:
        """Forget the swaps with the dead. A frozen replica finishes its swaps when it wakes."""
        now = self.fabric.status[:, Column.INCARNATION]
        for swaps in (self.sent, self.owed):
            for peer in [peer for peer in swaps if not self.fabric.alive(peer) or now[peer] != self.incarnations[peer]]:
                del swaps[peer]
        self.incarnations = now.copy()

    def inside(self, peer: int) -> bool:
        return self.fabric.nodes[peer] == self.fabric.nodes[self.fabric.rank]

