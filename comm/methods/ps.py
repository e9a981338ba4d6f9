"""A parameter server: asynchronous SGD with a center (Dean et al.: NeurIPS 2012, "Downpour").

    worker i      computes g_i(x_i), sends it, and waits for the reply: x_i <- c
    server        handles one request at a time: c <- c - eta / max(1, s) * g_i, then replies with c
                  (--staleness ignore: c <- c - eta * g_i)

        worker 0 ──g_0──>┌────────┐<──g_1── worker 1          g_i was computed from a center older than c, by about
                 <───c───│ center │────c──>                   P - 1 steps if all P workers are equally fast
                         └────────┘

Only the server runs the optimizer, so the server holds the momentum. A worker sends its learning rate with each
gradient. The last rank that the job begins with is the server.

A gradient is late by s steps if the server has made s steps since it sent the weights from which the gradient was
computed. On a quadratic function with curvature h, late gradients are stable for eta h < 2 sin(pi / (4 s + 2)) without
momentum, and for about eta h < (1 - mu) / s with momentum mu (from the roots of the recurrence). Both limits fall like
1 / s. So the server divides the rate of a step by the s of its gradient (Zhang, Gupta, Lian, Liu: IJCAI 2016,
"Staleness-aware Async-SGD"). Without this (--staleness ignore, as published by Dean et al.), the MLP diverges on MNIST
at the default rate: with 4 workers in step 42, with 8 in step 17.

With --compress, a worker sends the code of its gradient. What the code loses is a part of its next gradient
(comm/codecs). The reply is the code of c - x_i, where x_i is the last reply to this worker as the worker has
reconstructed it. The server keeps these weights of each worker. The first reply to a worker is c itself.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from minidl.comm.fabric.base import Channel, Header
from minidl.comm.methods import compression
from minidl.comm.methods.base import Batch, BufferSpec, Fabric, Mapping, Message, Method, Replica, Roles
from minidl.comm.methods.compression import Compressed, DifferenceCodes
from minidl.errors import ConfigError
from minidl.run.config import Config

OPTIONS = {
    "staleness": {
        "default": "divide",
        "choices": {
            "divide": "the rate of a step is divided by the age of its gradient, in steps of the server",
            "ignore": "the rate does not depend on the age",
        },
        "help": "what the server does with a late gradient",
    },
    "compress": {"like": "compression"},
}


class ParameterServer(Method):
    synchronous = False
    servers = 1

    def __init__(self, replica: Replica, fabric: Fabric, config: Config) -> None:
        super().__init__(replica, fabric, config)
        self.version = 0  # number of updates of the center before this worker received it
        self.compressed = Compressed(config, replica.grad, fabric)
        self.known: dict[int, np.ndarray] | None = None  # at the server, with --compress: x_i of each worker
        self.introduced = True  # whether the server knows x_i
        if self.compressed.feedback:
            self.known, self.introduced = {}, False
            self.codes = DifferenceCodes(replica, fabric, self.compressed.feedback.codec)
            self.reply = self.codes.empty_code()

    @classmethod
    def roles(cls, ranks: int, config: Config) -> Roles:
        if ranks < 2:
            raise ConfigError("the parameter server needs a separate rank: expected 2 ranks or more for ps, got 1")
        return super().roles(ranks, config)

    @classmethod
    def buffers(cls, size: int, config: Config) -> BufferSpec:
        compression.checked(config)
        return BufferSpec(nbytes=4 * size, mail=1, call=True)

    @property
    def server(self) -> int:
        return self.fabric.servers[-1]

    def local(self, batch: Batch) -> float:
        """Compute g_i. The server makes the update."""
        return self.replica.gradient(batch)

    def exchange(self) -> None:
        """Send g_i and wait for the reply: x_i <- c"""
        replica = self.replica
        header = Header(weight=replica.lr, round=self.version, marker=not self.introduced)
        out = self.reply if self.known is not None and self.introduced else replica.theta
        sent = self.compressed.sent(replica.grad, replica.steps)
        self.version = self.fabric.call(self.server, (sent,), out, header).round
        if out is not replica.theta:
            self.codes.add_code(out, 1.0, replica.theta)
        self.introduced = True
        replica.steps += 1
        replica.touch()

    def serve(self) -> None:
        self.fabric.serve(self.answer)
        header = Header(round=self.replica.optimizer_steps)
        for vector in self.center():  # all workers have stopped: send the final center to each
            self.fabric.wait(partial(self.tell, vector, header), what="workers to receive the center")

    def tell(self, vector: np.ndarray, header: Header) -> bool | None:
        """Try to send a vector to all live workers. Returns True if it was sent, else None."""
        return self.fabric.post(Channel.MAIL, self.fabric.survivors(), (vector,), header) or None

    def answer(self, message: Message) -> tuple[tuple[np.ndarray], Header]:
        """c <- c - eta / max(1, s) * g_i, or c - eta * g_i. Returns c, or the code of c - x_i, as the reply."""
        center, header = self.replica, message.header
        late = center.optimizer_steps - header.round
        self.fabric.stats.stale(late)
        self.compressed.read(message.vector, center.grad)
        center.lr = header.weight / (max(1, late) if self.config.staleness == "divide" else 1)
        center.update()
        reply, worker = center.theta, message.sender
        if self.known is not None and header.marker:
            self.known[worker] = np.empty_like(reply)
            center.copy(reply, self.known[worker])
        elif self.known is not None:
            reply = self.codes.encode_difference(reply, self.known[worker], self.reply, center.optimizer_steps)
        return (reply,), Header(round=center.optimizer_steps)

    def center(self) -> list[np.ndarray]:
        """Return theta and the optimizer's state."""
        return [self.replica.theta, *self.replica.state.values()]

    def center_of_run(self) -> np.ndarray:
        return self.replica.theta  # which is the center after `pause`, and at the server

    def pause(self) -> None:
        """Receive the final weights and optimizer state, which `serve` sends when all workers have stopped."""
        for vector in self.center():
            center = self.fabric.wait(lambda: self.fabric.take(Channel.MAIL, self.server), (self.server,), "the center")
            with center:
                vector[:] = center.vector
                self.version = self.replica.optimizer_steps = center.header.round
        self.replica.touch()

    def vectors(self) -> dict[str, np.ndarray]:
        return self.compressed.vectors()

    def numbers(self) -> dict[str, int | float]:
        return {"version": self.version}

    def offer(self) -> tuple[dict[str, np.ndarray], dict[str, int | float]]:
        return self.compressed.none_lost(), self.numbers()

    def restore(self, vectors: Mapping[str, np.ndarray], numbers: Mapping[str, int | float]) -> None:
        super().restore(vectors, numbers)
        self.version = int(numbers["version"])
