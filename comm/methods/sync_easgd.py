"""Elastic averaging, synchronous: in a step with a pull, all replicas and the center pull each other.

    d_i = eta * rho * (x_i - c)              in every tau-th step, tau = --period
    x_i <- x_i - eta * g_i(x_i) - d_i        every step; without d_i in the other steps
    c   <- c + sum_i d_i

        d_0 ──┐                   ┌──> c + sum
        d_1 ──┴─┐               ┌─┴──> c + sum        a tree of messages adds up the pulls, and returns the sum:
                ├── sum of d_i ─┤                     a replica waits for about log P messages, and not for P
        d_2 ──┬─┘               └─┬──> c + sum
        d_3 ──┘                   └──> c + sum

This is the Sync EASGD of You, Buluc, Demmel (SC 2017). There, c goes down the tree, and the sum of x_i goes up. Here
the sum of the pulls goes up and down. It has the same length, and with it every replica keeps a copy of c. So the next
pull waits for no message, and a rank that dies takes nothing with it. Where the sum is made (--center):

    rank      in a rank of its own, which does not train              Sync EASGD 1
    beside    at replica 0                                            Sync EASGD 2
    copies    on all replicas, by the all-reduce of the fabric: for long vectors on more than two nodes, each node
              adds up a part of the vectors

--overlap begins the sum before the gradient, and ends it afterwards (Sync EASGD 3). This changes no bit, because d_i
does not depend on g_i. With --messages buckets:MB, the sum of a bucket begins when its part of d_i is computed, before
the other parts are.

    gradient      [ g_i(x_i)                       ]
    sums       [ d_i, bucket 1 ][ d_i, bucket 2 ]      then: x_i <- x_i - eta * g_i - d_i,  c <- c + sum

The order of the sum is fixed, so its bits depend neither on timing nor on the transport.

With --compress, the sum is that of codes. What the code of d_i loses is a part of the next sum (comm/codecs). Copies
of c stay equal, because all replicas add the same codes.

With --adaptive, all replicas decide together: by the mean of their changes, a sum of one number in every tau-th step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from minidl.comm.fabric.base import PeerLost, Pending
from minidl.comm.methods import adaptive, compression
from minidl.comm.methods.allreduce import MEGABYTE, buckets, complete
from minidl.comm.methods.compression import Compressed
from minidl.comm.methods.elastic import (
    Batch,
    BufferSpec,
    Channel,
    Elastic,
    Fabric,
    Header,
    Mapping,
    Replica,
    State,
    View,
)
from minidl.run.config import Config

OPTIONS = {
    "rho": {"like": "elastic"},
    "period": {"like": "elastic"},
    "center": {
        "default": "copies",
        "choices": {
            "rank": "in a rank of its own, which does not train",
            "beside": "in the process of replica 0",
            "copies": "a copy on every replica",
        },
        "help": "where the center lives, and where the pulls are added up",
    },
    "overlap": {"default": False, "help": "exchange with the center while the gradient is computed"},
    "messages": {
        "default": "packed",
        "choices": {
            "packed": "all layers in one sum",
            "layers": "a sum for each layer",
            "buckets:MB": "a sum for each group of layers with at least so many MB",
        },
        "help": "how the pulls are divided into sums",
    },
    "reduce": {
        "like": "allreduce",
        "choices": {
            "tree": "along a tree, bit-identical on every transport",
            "ring": "along a ring, bit-identical on every transport: no replica sends more than another",
        },
        "needs": {"center": "copies"},
    },
    "compress": {"like": "compression", "needs": {"center": ["beside", "copies"]}},
    "adaptive": {"all_of": "adaptive"},
    "on_death": {"like": "base", "needs": {"center": ["beside", "copies"]}},
}
CALL = np.zeros(0, np.float32)


class SyncEASGD(Elastic):
    servers = 1
    alone = True
    order = "sync"
    together = True

    def __init__(self, replica: Replica, fabric: Fabric, config: Config) -> None:
        super().__init__(replica, fabric, config)
        self.sum, self.compressed = np.zeros_like(replica.theta), Compressed(config, replica.theta, fabric)
        self.parts = divided(replica, config.messages)  # which make a sum each
        self.sent: list[Pending[None]] = []  # with --overlap: the sums in progress
        self.interrupted = False  # whether a death has interrupted the last sum
        self.pulled = 0  # the step of the last complete sum

    @classmethod
    def buffers(cls, size: int, config: Config) -> BufferSpec:
        compression.checked(config)
        adaptive.checked(config)
        return BufferSpec(nbytes=8, mail=1) if config.center == "rank" else BufferSpec()

    def local(self, batch: Batch) -> float:
        """x_i <- x_i - eta * g_i(x_i) - d_i"""
        self.pulling = self.due
        if self.pulling:
            self.call_center()
            for start, stop in self.parts:
                self.compute_pull(start, stop)
                if self.config.overlap:
                    self.sent.append(self.fabric.concurrently(partial(self.add_up, start, stop)))
        loss = super().local(batch)
        if self.pulling:
            self.apply_pull()
        return loss

    def exchange(self) -> None:
        """c <- c + sum_i d_i"""
        if not self.pulling:
            return
        self.interrupted, sent, self.sent = True, self.sent, []
        if self.config.overlap:
            complete(sent)
        else:
            self.add_all_up()
        self.update_center()
        self.interrupted, self.pulled = False, self.replica.steps - 1

    def add_all_up(self) -> None:
        for start, stop in self.parts:
            self.add_up(start, stop)

    def add_up(self, start: int, stop: int) -> None:
        """sum[start:stop] = the sum of these elements of all d_i, on all ranks. d is 0 if a rank does not train."""
        fabric, center, part, d = self.fabric, self.config.center, self.sum[start:stop], self.d[start:stop]
        wire = self.compressed.wire(self.sum, start, self.replica.steps)
        group = fabric.group((*fabric.servers, *fabric.replicas))
        if center == "copies":
            group.allreduce(part, wire, self.config.reduce == "ring", own=d)
        else:
            group.reduce(part, wire, own=d)
            group.broadcast(part, group.ranks[0], wire)

    def update_center(self) -> None:
        self.replica.axpy(1.0, self.sum, self.center)

    # -- a center in a rank of its own ---------------------------------------------------------------------

    def call_center(self) -> None:
        """Replica 0 tells the center that a step with a pull begins."""
        fabric, center = self.fabric, self.fabric.servers
        if center and fabric.rank == fabric.replicas[0]:
            called = lambda: fabric.post(Channel.MAIL, center, (CALL,), Header(round=self.replica.steps)) or None  # noqa: E731
            fabric.wait(called, center, "the center")

    def serve(self) -> None:
        """Take part in each sum, until all replicas have stopped training or one has died."""
        try:
            while self.fabric.wait(self.called, (), "a step with a pull"):
                self.add_all_up()
                self.update_center()
        except PeerLost:
            return  # the replicas notice it, too: they stop, and are saved

    def called(self) -> bool | None:
        """Return True if a step with a pull begins, False if all replicas have stopped training, else None."""
        fabric = self.fabric
        stopped = all(fabric.state(rank) >= State.PAUSED for rank in fabric.replicas)
        message = fabric.take(Channel.MAIL)
        if message is not None:
            message.release()
            return True
        return False if stopped else None

    # -- deaths --------------------------------------------------------------------------------------------

    def on_membership(self, view: View) -> None:
        """Continue with the center of the first member: a death may have interrupted a sum on some of them only."""
        super().on_membership(view)
        self.fabric.group(self.fabric.replicas).broadcast(self.center, self.fabric.replicas[0])
        if self.trigger:
            self.trigger.agree()

    def known_steps(self) -> int:
        """Return the step of the last sum: what a dead replica has trained since then is lost."""
        if self.trigger:
            return self.pulled
        last = max(0, self.replica.steps - 1)
        last -= last % self.config.period
        return max(0, last - self.config.period * self.interrupted)

    # -- checkpoints ---------------------------------------------------------------------------------------

    def vectors(self) -> dict[str, np.ndarray]:
        return {**super().vectors(), **self.compressed.vectors()}

    def restore(self, vectors: Mapping[str, np.ndarray], numbers: Mapping[str, int | float]) -> None:
        super().restore(vectors, numbers)
        self.pulled = int(self.trigger.last[0]) if self.trigger else 0


def divided(replica: Replica, messages: str) -> Sequence[tuple[int, int]]:
    """Return the ranges (start, stop) of theta that --messages sends one by one, beginning with the last layer."""
    if messages == "packed":
        return [(0, replica.theta.size)]
    least = 0 if messages == "layers" else int(messages.partition(":")[2]) * MEGABYTE / replica.theta.itemsize
    cuts = buckets(replica.layers(), least)
    return [*pairwise(cuts)][::-1]
