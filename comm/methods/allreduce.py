"""Synchronous SGD: every replica makes the same step, with the mean gradient of all batches.

    g <- 1/P sum_i g_i(x),        x <- x - eta g        x is the same everywhere, at all times

It equals one replica with a batch P times as large (Goyal et al. 2017: multiply the learning rate accordingly). The
gradient of the last layer is known first: while the backward pass goes on towards the first layer, buckets of gradient
that are final are added up already (Li et al., PyTorch Distributed: VLDB 2020).

    backward pass    [ layer 4 ][ layer 3 ][ layer 2 ][ layer 1 ]
    sums                        [ bucket 4, 3      ]   [ bucket 2 ][ bucket 1 ]
                                                                              then: update

The sums are taken in a fixed order, so the bits depend neither on placement nor on timing.
"""

from __future__ import annotations

import numpy as np

from minidl.comm.methods.base import Batch, Fabric, Method, Replica, Sequence
from minidl.run.config import Config

MEGABYTE = 1_000_000


class AllReduce(Method):
    def __init__(self, replica: Replica, fabric: Fabric, config: Config) -> None:
        super().__init__(replica, fabric, config)
        self.cuts = buckets(replica.layers(), config.bucket * MEGABYTE / replica.grad.itemsize)

    def step(self, batch: Batch) -> float:
        replica, grad = self.replica, self.replica.grad
        sums = []
        for start, stop in replica.gradient_parts(batch, self.cuts):
            sums.append(self.fabric.allreduce_start(grad[start:stop]))
        for sum in sums:
            sum.wait()
        with self.fabric.working("mix", grad.size):
            np.multiply(grad, 1 / len(self.fabric.replicas), out=grad)
        replica.update()
        return replica.loss


def buckets(layers: Sequence[tuple[int, int]], least: float) -> list[int]:
    """Where buckets begin and end: whole layers, collected from the last one on until they are `least` elements."""
    cuts = [layers[-1][1]]
    for start, _ in reversed(layers):
        if cuts[-1] - start >= least or start == 0:
            cuts.append(start)
    return cuts[::-1]
