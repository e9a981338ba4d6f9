"""Topologies: sequences of mixing matrices, which define who reads from whom and with which weight.

Four replicas in a ring mix their weights x in one round: x_i <- sum_j W[i, j] x_j.

                                     reads from
        0 ───── 1                   0    1    2    3
        │       │              0 ( 1/3  1/3   .   1/3 )      x_0 <- (x_0 + x_1 + x_3) / 3
        │       │              1 ( 1/3  1/3  1/3   .  )
        3 ───── 2              2 (  .   1/3  1/3  1/3 )
                               3 ( 1/3   .   1/3  1/3 )

Row i says which replicas i reads from, and with which weight. W must have three properties:

- No weight is negative, and every row sums to 1: replicas that agree do not change.
- Every column sums to 1, too ("doubly stochastic"): all replicas count equally, so the average of all replicas never
  changes, and all replicas converge to it.
- There is a path from every replica to every other: otherwise each part would agree only within itself.

Then every round brings the replicas closer together. In the long run their distance from the average shrinks by the
factor |lambda_2| per round, the second largest |eigenvalue| of W (the largest is 1: agreement is preserved). The
spectral gap is 1 - |lambda_2|. A gap of 0 means that they never agree, a gap of 1 that they agree exactly after one
round. A ring of 64 replicas has 0.0032, a complete graph 1.

A topology is a SEQUENCE of such matrices, W(0), W(1), ... It can be far better to read from one other replica per
round, but from a different one each time, than from the same two every time: with partners at distance 1, 2, 4, ...
all replicas hold the exact average after log2 P rounds. `python -m minidl.topology ring 8` prints and draws topologies.
"""

from minidl.comm.topology.build import TOPOLOGIES, build, from_matrix, metropolis_hastings, split
from minidl.comm.topology.mixing import DENSE, Topology

__all__ = ["DENSE", "TOPOLOGIES", "Topology", "build", "from_matrix", "metropolis_hastings", "split"]
