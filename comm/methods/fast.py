"""FAST: neighbours on a ring or a torus exchange gradients or models. Within an epoch, no replica waits for another.

    --exchange gradients    each step of replica i:
        for each gradient g_j that has arrived:     x_i <- x_i - eta * g_j          one more step of the optimizer
        x_i <- x_i - eta * g_i(x_i)
        i sends g_i to each neighbour. While its last message to a neighbour is in flight, it adds up what it sends next
                            at the end of each epoch:
        x_i <- x_b                                  b: the replica with the best accuracy in this epoch

    --exchange models       each step of replica i:
        x_i <- W_ii * x_i + sum_j W_ij * x_j        j: the neighbours whose models have arrived
        x_i <- x_i - eta * g_i(x_i)
        i sends x_i to each neighbour, unless its last message to this neighbour is in flight

The exchange of gradients is FAST (Viviani: "Deep Learning at Scale with Nearest Neighbours Communications", thesis,
2019). A replica sums the gradients of its neighbourhood, I + A for the graph's adjacency matrix A. Its eigenvalues on a
torus with even sides reach -3, so differences between replicas grow by up to 1 + 3 * eta * h in a step (h: curvature)
until they restart from one of them. Choose a learning rate for 5 gradients in a step. The exchange of models is D-PSGD
(Lian et al. 2017) on the same graph, one step late. W brings the replicas together, so it needs no restart.

A message that is older than --max-age steps of its sender is dropped. The replicas meet at the end of an epoch, for at
most one step of the slowest. There the accuracy on an epoch's training batches costs nothing; a replica with less than
half of the average number of images does not count. What was sent before a restart is dropped.
"""

from __future__ import annotations

import numpy as np

from minidl.comm.fabric.base import Column, Header, State
from minidl.comm.methods.base import Batch, BufferSpec, Fabric, Mapping, Message, Method, Replica, Sequence, View
from minidl.run.config import Config

OPTIONS = {
    "exchange": {
        "default": "gradients",
        "choices": {
            "gradients": "gradients, which their receivers apply; all restart from the best replica after each epoch",
            "models": "models, which their receivers mix; no restart",
        },
        "help": "what a replica sends to its neighbours",
    },
    "topology": {
        "like": "base",
        "default": "ring",
        "choices": ["ring", "torus", "torus:RxC"],
        "help": "the neighbours of a replica",
    },
    "max_age": {"default": 8, "min": 1, "max": 1000000, "help": "steps of its sender after which a message is dropped"},
}
DEGREES = {"ring": 2}  # neighbours of a replica; on a torus 4


class Fast(Method):
    """waiting (degree, n): for each neighbour, the sum of the gradients that could not be sent yet.
    queued (degree, 2): their number, and the step of the oldest. epoch: that began with the last restart."""

    synchronous = False
    counters = ("accumulated", "dropped")

    def __init__(self, replica: Replica, fabric: Fabric, config: Config) -> None:
        super().__init__(replica, fabric, config)
        self.gradients = config.exchange == "gradients"
        degree = DEGREES.get(config.topology, 4) if self.gradients else 0
        self.waiting, self.queued = np.zeros((degree, replica.theta.size), replica.theta.dtype), np.zeros((degree, 2))
        self.accumulated = self.dropped = self.epoch = 0
        self.restarts: dict[int, int] = {}  # replica -> the last epoch after which this one took its weights
        self.neighbours: list[int] = []
        self.weights: Mapping[int, float] = {}  # row i of W
        if not fabric.newcomer:
            self.topology()  # raises ConfigError if there is none for these replicas
            self.find_neighbours(fabric.replicas)
        fabric.set_status(Column.EPOCH, 0)  # an earlier training of this job may have left another number

    @classmethod
    def buffers(cls, size: int, config: Config) -> BufferSpec:
        return BufferSpec(4 * size, mail=DEGREES.get(config.topology, 4), publish=cls.meets(config))

    def local(self, batch: Batch) -> float:
        """Apply or mix what has arrived, then train."""
        self.total = self.weights.get(self.fabric.rank, 1.0)
        for message in self.fabric.poll():
            self.receive(message)
        return super().local(batch)

    def receive(self, message: Message) -> None:
        """x_i <- x_i - eta * g_j, or mix x_j in. The models that arrive together enter a weighted mean one by one."""
        header, weight = message.header, self.weights.get(message.sender, 0.0)
        if self.age(message) > self.config.max_age or (self.gradients and header.clock < self.epoch):
            self.dropped += int(header.weight)
            return
        self.stale(message)
        if self.gradients:
            self.replica.apply(message.vector)
        elif weight:
            self.total += weight
            self.replica.mix(message.vector, weight / self.total)

    def exchange(self) -> None:
        """Send g_i or x_i to each neighbour."""
        replica = self.replica
        for place, peer in enumerate(self.neighbours):
            if self.gradients:
                self.send_gradient(place, peer)
            else:
                self.fabric.send(peer, replica.theta, header=Header(round=replica.steps))

    def send_gradient(self, place: int, peer: int) -> None:
        """Send g_i, and with it the gradients that wait for this edge. If the edge is busy, g_i waits, too."""
        replica, waiting = self.replica, self.waiting[place]
        if self.queued[place, 0] and replica.steps - self.queued[place, 1] > self.config.max_age:
            self.drop(place)
        if not self.queued[place, 0]:
            if self.fabric.send(peer, replica.grad, header=self.header(1, replica.steps)):
                return
            replica.scale(replica.grad, 1.0, out=waiting)
            self.queued[place] = 1, replica.steps
        else:
            replica.axpy(1.0, replica.grad, waiting)
            self.queued[place, 0] += 1
            if self.fabric.send(peer, waiting, header=self.header(*self.queued[place])):
                self.queued[place] = 0
                return
        self.accumulated += 1

    def header(self, count: float, oldest: float) -> Header:
        """Return the header of a sum of gradients: their number, the epoch, and the step of the oldest."""
        return Header(weight=float(count), clock=float(self.epoch), round=int(oldest))

    def drop(self, place: int) -> None:
        """Drop the gradients that wait for an edge."""
        self.dropped += int(self.queued[place, 0])
        self.queued[place] = 0

    # -- the end of an epoch -----------------------------------------------------------------------------

    @classmethod
    def meets(cls, config: Config) -> bool:
        return bool(config.exchange == "gradients")

    def meet(self, epoch: int, images: int, accuracy: float, loss: float) -> None:
        """x_i <- x_b, when all that still train have finished the epoch."""
        fabric, replica = self.fabric, self.replica
        header = Header(round=epoch)
        fabric.wait(lambda: fabric.publish((replica.theta,), header) or None, (), "free memory for its weights")
        results = {Column.IMAGES: images, Column.ACCURACY: accuracy, Column.LOSS: loss, Column.EPOCH: epoch}
        for column, value in results.items():
            fabric.set_status(column, value)

        def restarted() -> bool | None:
            members = np.array(fabric.look().members)
            late = fabric.status[members, Column.EPOCH] < epoch
            if (late & (fabric.status[members, Column.STATE] < State.PAUSED)).any():
                return None
            best = self.best(members[~late].tolist())
            if best == fabric.rank or self.restarts.get(best, 0) >= epoch:
                return True
            published = fabric.latest(best)
            if published is None:
                return None
            with published:
                if published.header.round < epoch:  # it was requested earlier
                    return None
                replica.scale(published.vector, 1.0, out=replica.theta)
                self.restarts[best] = published.header.round
            return True

        fabric.wait(restarted, (), "the others to finish the epoch")
        self.epoch = epoch
        for place in range(len(self.queued)):
            self.drop(place)

    def best(self, ranks: Sequence[int]) -> int:
        """Return the rank with the highest accuracy in its last epoch; of equal ones, that with the lowest loss."""
        status = self.fabric.status
        enough = status[ranks, Column.IMAGES].mean() / 2

        def merit(rank: int) -> tuple[bool, float, float]:
            row = status[rank]
            return bool(row[Column.IMAGES] >= enough), row[Column.ACCURACY], -row[Column.LOSS]

        return max(ranks, key=merit)

    # -- deaths, newcomers, stops ------------------------------------------------------------------------

    def on_membership(self, view: View) -> None:
        """Find the neighbours among the present members. Drop what waits for others."""
        self.find_neighbours(view.members)

    def find_neighbours(self, members: Sequence[int]) -> None:
        graph, place = self.topology_or_ring(members), members.index(self.fabric.rank)
        self.weights = {members[j]: weight for j, weight in graph.weights(place, 0).items()}
        before = {peer: place for place, peer in enumerate(self.neighbours[: len(self.queued)])}
        self.neighbours = [members[j] for j in graph.neighbours(place)]
        kept = [before.get(peer) for peer in self.neighbours][: len(self.queued)]
        for old in range(len(self.queued)):
            if old not in kept:
                self.drop(old)
        free = [old for old in range(len(self.queued)) if old not in kept]
        kept += [None] * (len(self.queued) - len(kept))
        order = [free.pop() if old is None else old for old in kept]
        if order != sorted(order):
            self.waiting, self.queued = self.waiting[order], self.queued[order]

    def restart(self, saved: Mapping[str, np.ndarray] | None = None) -> None:
        for place in range(len(self.queued)):
            self.drop(place)

    def pause(self) -> None:
        """Apply or mix what is still in flight. What waits for an edge is saved."""
        self.total = self.weights.get(self.fabric.rank, 1.0)
        self.fabric.drain(self.receive)

    def offer(self) -> tuple[dict[str, np.ndarray], dict[str, int | float]]:
        """Offer the epoch only: the gradients that wait are sent by this replica."""
        nothing = {name: np.zeros_like(vector) for name, vector in self.vectors().items()}
        return nothing, {"accumulated": 0, "dropped": 0, "epoch": self.epoch}

    def vectors(self) -> dict[str, np.ndarray]:
        return {"waiting": self.waiting, "queued": self.queued} if self.gradients else {}

    def numbers(self) -> dict[str, int | float]:
        return {"accumulated": self.accumulated, "dropped": self.dropped, "epoch": self.epoch}

    def restore(self, vectors: Mapping[str, np.ndarray], numbers: Mapping[str, int | float]) -> None:
        if self.gradients and ((queued := vectors["queued"]) != np.clip(queued // 1, 0, self.replica.steps)).any():
            raise ValueError("the gradients that wait: expected whole numbers from 0 to the number of steps")
        super().restore(vectors, numbers)
        self.accumulated, self.dropped, self.epoch = (int(numbers[name]) for name in self.numbers())
