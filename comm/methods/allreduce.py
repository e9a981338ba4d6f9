"""Synchronous SGD: every replica makes the same step, with the mean gradient of all batches.

    g <- 1/P * sum_i g_i(x),      x <- x - eta * g      x is always the same on all replicas

Without batch norm and dropout, this equals (up to rounding) one replica with a batch P times as large. For such a
batch Goyal et al. 2017 recommend a learning rate P times as large; this method leaves the rate unchanged, also if a
replica dies and the others continue (--on-death).

The backward pass completes the gradient of the last layer first. Layers are grouped into buckets. A complete bucket is
summed over the replicas during the rest of the backward pass (Li et al., PyTorch Distributed: VLDB 2020).

    backward pass    [ layer 4 ][ layer 3 ][ layer 2 ][ layer 1 ]
    sums                        [ bucket 4, 3      ]   [ bucket 2 ][ bucket 1 ]
                                                                              then: update

The order of each sum is fixed, so its bits depend neither on placement nor on timing (except with --reduce fast).

With --compress, a sum is that of codes. What the codes of a rank lose is a part of its next sum, so no gradient is lost
(comm/codecs). If a replica dies, those whose step was interrupted take what another one has lost for their own.
"""

from __future__ import annotations

import numpy as np

from minidl.comm.fabric.base import PeerLost, Pending
from minidl.comm.methods import compression
from minidl.comm.methods.base import Batch, BufferSpec, Fabric, Method, Replica, Sequence
from minidl.comm.methods.compression import Compressed
from minidl.run.config import Config

OPTIONS = {
    "bucket": {"default": 1.0, "above": 0, "help": "MB of gradient per message"},
    "reduce": {
        "default": "tree",
        "choices": {
            "tree": "by minidl, along a tree, bit-identical on every transport",
            "ring": "by minidl, along a ring, bit-identical on every transport: no replica sends more than another",
            "fast": "by MPI, if there is one",
        },
        "help": "how sums over all replicas are computed",
    },
    "compress": {"like": "compression", "needs": {"reduce": ["tree", "ring"]}},
    "balance": {"like": "base"},
    "shares": {"like": "base"},
    "weighting": {"like": "base"},
    "on_death": {"like": "base", "needs": {"reduce": ["tree", "ring"]}},
}
MEGABYTE = 1_000_000


class AllReduce(Method):
    lockstep = True

    def __init__(self, replica: Replica, fabric: Fabric, config: Config) -> None:
        super().__init__(replica, fabric, config)
        self.cuts = buckets(replica.layers(), config.bucket * MEGABYTE / replica.grad.itemsize)
        self.sums: list[Pending[None]] = []  # of the present step
        self.compressed = Compressed(config, replica.grad, fabric)

    @classmethod
    def buffers(cls, size: int, config: Config) -> BufferSpec:
        compression.checked(config)
        return BufferSpec()

    def local(self, batch: Batch) -> float:
        """Compute g_i. The sum of each bucket starts as soon as the bucket is complete."""
        replica, ring = self.replica, self.config.reduce == "ring"
        for start, stop in replica.gradient_parts(batch, self.cuts):
            wire = self.compressed.wire(replica.grad, start, replica.steps)
            self.sums.append(self.fabric.allreduce_start(replica.grad[start:stop], wire, ring))
        return replica.loss

    def exchange(self) -> None:
        """g <- 1/P * sum_i g_i, x <- x - eta * g"""
        sums, self.sums = self.sums, []
        complete(sums)
        self.replica.scale(self.replica.grad, 1 / len(self.fabric.replicas))
        self.replica.update()
        if self.compressed.feedback:
            self.replica.grad[:] = 0  # codes also change the gaps between parameters, which no gradient overwrites

    def vectors(self) -> dict[str, np.ndarray]:
        return self.compressed.vectors()

    def offer(self) -> tuple[dict[str, np.ndarray], dict[str, int | float]]:
        return self.compressed.none_lost(), {}


def complete(sums: Sequence[Pending[None]]) -> None:
    """Wait until all sums have ended. Raises PeerLost if a death has interrupted one."""
    interrupted = None
    for sum in sums:
        try:
            sum.wait()
        except PeerLost as lost:
            interrupted = lost  # the other sums end soon, too; until then they write into their vectors
    if interrupted is not None:
        raise interrupted


def buckets(layers: Sequence[tuple[int, int]], least: float) -> list[int]:
    """Return the boundaries of the buckets in the gradient, ascending.

    Beginning with the last layer, a bucket collects complete layers until it has at least `least` elements. The bucket
    that contains the first layer may have fewer.
    """
    cuts = [layers[-1][1]]
    for start, _ in reversed(layers):
        if cuts[-1] - start >= least or start == 0:
            cuts.append(start)
    return cuts[::-1]
