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
"""

from __future__ import annotations

from minidl.comm.fabric.base import PeerLost, Pending
from minidl.comm.methods.base import Batch, Fabric, Method, Replica, Sequence
from minidl.run.config import Config

OPTIONS = {
    "bucket": {"default": 1.0, "above": 0, "help": "MB of gradient per message"},
    "reduce": {
        "default": "tree",
        "choices": {"tree": "by minidl, bit-identical on every transport", "fast": "by MPI, if there is one"},
        "help": "how sums over all replicas are computed",
    },
    "on_death": {"like": "base", "needs": {"reduce": "tree"}},
}
MEGABYTE = 1_000_000


class AllReduce(Method):
    lockstep = True

    def __init__(self, replica: Replica, fabric: Fabric, config: Config) -> None:
        super().__init__(replica, fabric, config)
        self.cuts = buckets(replica.layers(), config.bucket * MEGABYTE / replica.grad.itemsize)
        self.sums: list[Pending[None]] = []  # of the present step

    def local(self, batch: Batch) -> float:
        """Compute g_i. The sum of each bucket starts as soon as the bucket is complete."""
        grad = self.replica.grad
        for start, stop in self.replica.gradient_parts(batch, self.cuts):
            self.sums.append(self.fabric.allreduce_start(grad[start:stop]))
        return self.replica.loss

    def exchange(self) -> None:
        """g <- 1/P * sum_i g_i, x <- x - eta * g"""
        self.wait_for_sums()
        self.replica.scale(self.replica.grad, 1 / len(self.fabric.replicas))
        self.replica.update()

    def wait_for_sums(self) -> None:
        """Wait until all sums have ended. Raises PeerLost if a death has interrupted one; x has not changed then."""
        sums, self.sums, interrupted = self.sums, [], None
        for sum in sums:
            try:
                sum.wait()
            except PeerLost as lost:
                interrupted = lost  # the other sums end soon, too; until then they write into g
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
