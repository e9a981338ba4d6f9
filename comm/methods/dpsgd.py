"""Decentralised parallel SGD (Lian, Zhang, Zhang, Hsieh, Zhang, Liu: NeurIPS 2017).

    adapt, then combine     x_i <- sum_j W_ij * (x_j - eta * g_j(x_j))
    --overlap               x_i <- sum_j W_ij * x_j - eta * g_i(x_i)    the exchange overlaps the gradient

       x_0 - eta * g_0 ──────── W_00 ───> (+) ───> x_0
                        ╲    ╱
                         ╲  ╱  W_01
                          ╳
                         ╱  ╲  W_10
                        ╱    ╲
       x_1 - eta * g_1 ──────── W_11 ───> (+) ───> x_1

W is the topology's mixing matrix for this round, and each step is a round. All replicas make the same number of steps,
but each waits only for its neighbours.

With --weighting mixing, W has the shares of the replicas in the images as its stationary distribution: s @ W = s. Then
the average that mixing preserves is sum_i s_i * x_i. With --weighting share, gradients count by the shares instead.

With --compress, replicas send codes of what has changed since their last message: choco.py.

With --adaptive (adaptive.py), neighbours first tell each other whether their models have changed enough, in empty
messages. They exchange models if one of them has, and otherwise leave W_ij and W_ji to their own models:

    x_i <- x_i + sum_j W_ij * (x_j - x_i)                   over the j with which i exchanges

So W stays symmetric, its columns sum to 1, and the average of all x_i does not change. In EventGraD (arXiv 2103.07454)
a replica mixes in the last model that it has received from a silent neighbour. This draws the average back to old
models. The graph must be undirected, so that both ends of an edge know of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from minidl.comm.fabric.base import Header, PeerLost
from minidl.comm.methods import adaptive, choco, momentum
from minidl.comm.methods.base import Batch, BufferSpec, Fabric, Mapping, Message, Replica, Sequence, View
from minidl.comm.topology import split, weighted
from minidl.errors import ConfigError
from minidl.run.config import Config

if TYPE_CHECKING:
    from minidl.comm.topology import Topology

NOTHING = np.zeros(0, np.float32)
OPTIONS = {
    "topology": {"like": "base"},
    "velocity": {"like": "momentum"},
    "overlap": {"default": False, "help": "exchange models while the next gradient is computed"},
    "compress": {"like": "compression"},
    "gamma": {
        "default": None,
        "above": 0,
        "max": 1,
        "help": "fraction of the way to its neighbours that a replica moves (default: chosen for --compress)",
        "needs": {"compress": ["bf16", "int8", "sign", "topk:SHARE", "randk:SHARE"]},
    },
    "adaptive": {"all_of": "adaptive"},
    "balance": {"like": "base"},
    "shares": {"like": "base"},
    "weighting": {
        "like": "base",
        "choices": {
            "plain": "all count equally",
            "share": "each gradient counts by its replica's share of the images; sgd only",
            "mixing": "each model counts by its replica's share, in the mixing matrix; gradients count equally",
        },
    },
    "on_death": {"like": "base"},
}
UNDIRECTED = tuple(name for name in choco.FIXED if name != "exponential")


class DPSGD(adaptive.Adaptive):
    shares: tuple[float, ...] = ()  # in the mixing matrix

    def __init__(self, replica: Replica, fabric: Fabric, config: Config) -> None:
        super().__init__(replica, fabric, config)
        self.momentum = momentum.kind(config)(replica, config)
        codec = choco.checked(config)
        self.differences = codec and choco.Differences(replica, fabric, codec, config.gamma)
        self.trigger = adaptive.build(replica, config)
        self.choose_graph()
        self.round = 0  # the number of the present step
        self.silent: list[int] = []  # with --adaptive: neighbours whose weight goes to x_i in this step
        self.sent: Callable[[], Iterator[Message]] | None = None  # with --overlap: yields the models to mix in

    @classmethod
    def buffers(cls, size: int, config: Config) -> BufferSpec:
        choco.checked(config)
        if adaptive.checked(config) and (config.overlap or config.compress != "none"):
            raise ConfigError(f"adaptive {config.adaptive} excludes overlap and compress with dpsgd: leave them out")
        _check_weighting(config)
        return BufferSpec(nbytes=4 * size * momentum.kind(config).vectors, mail=2)

    def local(self, batch: Batch) -> float:
        """Adapt. With --overlap, send x_i and compute only the gradient."""
        self.momentum.begin()
        self.round = self.replica.steps
        if self.config.weighting == "mixing" and self.replica.shares != self.shares:
            self.choose_graph()
        if not self.config.overlap:
            return super().local(batch)
        self.sent = self.send(self.round)
        return self.replica.gradient(batch)

    def exchange(self) -> None:
        """Combine. With --overlap, adapt afterwards.

        If a replica dies, W is renormalised for the models that have arrived. Raises PeerLost at the end of the step.
        """
        interrupted, self.interrupted = None, True
        try:
            self.combine(self.sent or self.send(self.round), self.round)
            self.interrupted = False
        except PeerLost as lost:
            interrupted = lost
        self.sent = None
        if self.config.overlap:
            self.replica.update()
        self.momentum.end()
        if interrupted is not None:
            raise interrupted

    def send(self, round: int) -> Callable[[], Iterator[Message]]:
        """Send x_i to the replicas that mix it in this round. Returns a function that yields the models to mix in."""
        ranks = self.fabric.replicas
        sources = [ranks[j] for j in self.graph.sources(self.place, round)]
        targets = [ranks[j] for j in self.graph.targets(self.place, round)]
        if self.trigger:
            talking = self.talking(self.trigger, sources, round)
            self.silent = sorted(set(sources) - set(talking))
            sources = targets = talking
        parts = (self.differences.encode(round),) if self.differences else self.momentum.parts()
        return self.fabric.exchange(sources, targets, *parts, header=Header(round=round))

    def talking(self, trigger: adaptive.Trigger, neighbours: Sequence[int], round: int) -> list[int]:
        """Return the neighbours with which models are exchanged, because here or there the model has changed enough."""
        due = bool(trigger.due(0))
        told = self.fabric.exchange(neighbours, neighbours, NOTHING, header=Header(round=round, marker=due))
        found = [message.sender for message in told() if due or message.header.marker]
        silent, vector = len(neighbours) - len(found), self.momentum.vectors * self.replica.theta.nbytes
        self.fabric.stats.suppressed(0, silent * vector)
        if due:
            trigger.exchanged()
        return found

    def combine(self, messages: Callable[[], Iterator[Message]], round: int) -> None:
        """x_i <- sum_j W_ij * x_j, computed as a running weighted mean of x_i and the models received so far."""
        row = self.graph.weights(self.place, round)
        if self.differences:
            self.combine_differences(self.differences, messages, row)
            return
        seen = row[self.place] + sum(row[self.fabric.replicas.index(rank)] for rank in self.silent)
        for message in messages():
            weight = row[self.fabric.replicas.index(message.sender)]
            seen += weight
            self.stale(message)
            if weight:
                self.momentum.mix(message, weight / seen)

    def combine_differences(
        self, differences: choco.Differences, messages: Callable[[], Iterator[Message]], row: Mapping[int, float]
    ) -> None:
        """x_i <- x_i + gamma * sum_j W_ij * (h_j - h_i)"""
        differences.add(differences.code, row[self.place])
        for message in messages():
            self.stale(message)
            differences.add(message.vector, row[self.fabric.replicas.index(message.sender)])
        differences.move()

    def known_steps(self) -> int:
        """Return the number of steps in which all models have arrived."""
        if self.trigger:
            return self.trigger.known_steps()
        return self.replica.steps - self.interrupted

    def on_membership(self, view: View) -> None:
        self.choose_graph()
        if self.differences:
            ranks, graph, place = self.fabric.replicas, self.graph, self.place
            targets = [ranks[j] for j in graph.targets(place, 0)]
            self.differences.agree(targets, {ranks[j]: weight for j, weight in graph.weights(place, 0).items()})

    def choose_graph(self) -> None:
        self.interrupted = False
        self.graph = self.topology()
        self.place = self.fabric.replicas.index(self.fabric.rank)
        if self.config.weighting == "mixing":
            self.shares = self.replica.shares
            self.graph = weighted(self.graph, self.shares) if self.shares else self.graph
        elif self.config.weighting == "share" and not self.graph.doubly:
            raise ConfigError(f"weighting share: the matrix of topology {self.config.topology} does not preserve the "
                              "average of all replicas; expected an undirected graph, such as ring")  # fmt: skip

    def topology(self, members: Sequence[int] = ()) -> Topology:
        """Return the topology. Raises ConfigError if --adaptive needs an undirected one."""
        graph = super().topology(members)
        if self.config.adaptive not in (None, "none") and not graph.symmetric:
            raise ConfigError(f"adaptive {self.config.adaptive} with dpsgd needs an undirected graph, and topology "
                              f"{self.config.topology} of {graph.size} replicas is not: expected ring, torus, "
                              "complete, star, hypercube or matching")  # fmt: skip
        return graph

    def restart(self, saved: Mapping[str, np.ndarray] | None = None) -> None:
        super().restart(saved)
        if self.differences:
            self.differences.restart()

    def vectors(self) -> dict[str, np.ndarray]:
        return {**super().vectors(), **(self.differences.vectors() if self.differences else {})}

    def require(self, members: Sequence[int]) -> None:
        self.topology(members)


def _check_weighting(config: Config) -> None:
    """Raise ConfigError if models cannot count by the shares of their replicas."""
    family = split(config.topology or "ring")[0]
    if config.weighting == "mixing" and (family not in UNDIRECTED or config.compress not in (None, "none")):
        raise ConfigError(f"weighting mixing needs one undirected graph for all steps, and no compression: expected "
                          f"topology {', '.join(UNDIRECTED)}, got {config.topology}, compress "
                          f"{config.compress}")  # fmt: skip
