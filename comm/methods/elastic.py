r"""Elastic averaging: what its methods share (Zhang, Choromanska, LeCun: NeurIPS 2015; You, Buluc, Demmel: SC 2017).

The replicas and a center c pull each other, as if springs connected them. With all right-hand sides before the step:

    d_i = eta * rho * (x_i - c)              the pull of replica i, in every tau-th step, tau = --period
    x_i <- x_i - eta * g_i(x_i) - d_i
    c   <- c + sum_i d_i

        x_0 ──/\/\/\──┐
        x_1 ──/\/\/\── c        a replica is free to explore, but not to run away; the center is what the run finds
        x_2 ──/\/\/\──┘

The methods differ in when d_i reaches the center: all d_i in the same step (sync_easgd.py), one replica at a time in
the order of the ranks (easgd.py), or whenever a replica comes (async_easgd.py, eamsgd.py). With momentum (--momentum),
the step of the optimizer takes the place of -eta * g_i. The paper calls these variants MSGD and MEASGD.

P replicas pull the center P times as strongly as one, so a constant rho becomes unstable as P grows. The default is the
rho with P * eta * rho = 0.9, where eta is --lr. With sgd it is lowered where the loss is so curved that this rho would
diverge (stability.py). It changes if replicas die or join.

The steps of a replica are counted from 0, and step t has a pull if tau divides t. So the first step has one. It changes
nothing, because all begin with equal weights. With --adaptive (adaptive.py), a step has a pull only if x_i has changed
enough since the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

import numpy as np

from minidl.comm import codecs, memory, stability
from minidl.comm.fabric.base import Channel, Column, Header, PeerLost, State
from minidl.comm.methods import adaptive
from minidl.comm.methods.base import Batch, BufferSpec, Fabric, Mapping, Message, Replica, View
from minidl.comm.methods.reconstruction import NOTHING, Reconstructions
from minidl.comm.methods.succession import Home, Succession
from minidl.run.config import Config

OPTIONS = {
    "rho": {
        "default": None,
        "min": 0,
        "help": "strength of the pull between a replica and the center; 0: none (default: 0.9 / (P lr), P replicas, "
                "or less if that would diverge)",
    },
    "period": {"default": 1, "min": 1, "help": "steps between two exchanges with the center"},
    "center": {
        "default": "beside",
        "choices": {"rank": "in a rank of its own, which does not train", "beside": "in the process of replica 0"},
        "help": "where the center lives",
    },
}
UNKNOWN = -1.0  # instead of a curvature
LARGEST = 1e30  # a curvature, instead of infinity: a checkpoint contains no infinity


class Elastic(adaptive.Adaptive):
    """A replica with a pull. center: c, or what this replica knows of it. d: the pull d_i of the present step.

    order: in which order replicas visit the center, one of `parabola.KINDS`. curvature: of the loss, (1,) float64.
    """

    order: ClassVar[str]
    together: ClassVar[bool] = False  # whether all replicas pull in the same steps, also with --adaptive
    per_pull = 1  # how many vectors a replica sends for a pull: what --adaptive saves

    def __init__(self, replica: Replica, fabric: Fabric, config: Config) -> None:
        super().__init__(replica, fabric, config)
        self.center, self.d = replica.theta.copy(), np.zeros_like(replica.theta)
        self.curvature = np.array([UNKNOWN])
        self.trigger = adaptive.build(replica, config, together=self.together)
        self.pulling = False  # whether the present step has a pull
        self.choose_rho(fabric.view)

    def examine(self, curvature: Callable[[], float]) -> tuple[str, str]:
        """Choose rho for the curvature of the loss, or warn if the given one may diverge.

        No bound is known for optimizers other than sgd.
        """
        config, replicas = self.config, len(self.fabric.view.members)
        if config.rho == 0 or config.optimizer != "sgd":
            return "", ""
        if self.curvature[0] == UNKNOWN:
            self.curvature[0] = min(curvature(), LARGEST)
        self.choose_rho(self.fabric.view)
        note, usual, curved = "", stability.USUAL / (replicas * config.lr), float(self.curvature[0])
        if config.rho is None:
            lowered = f", lowered from {usual:.4g}" if self.rho < usual else ""
            note = (f"rho = {self.rho:.4g}{lowered}: P eta rho = {replicas * config.lr * self.rho:.3g}, and the loss "
                    f"has an estimated curvature h = {curved:.3g}")  # fmt: skip
        about = self.order, config.lr, self.rho, replicas, config.period, config.momentum, curved
        return note, stability.warning(*about) or ""

    def choose_rho(self, view: View) -> None:
        """Set rho: the option, or the default for the present number of replicas and the curvature, if it is known."""
        config, replicas, curved = self.config, len(view.members), float(self.curvature[0])
        if config.rho is not None:
            self.rho: float = config.rho
        elif curved == UNKNOWN:
            self.rho = stability.USUAL / (replicas * config.lr)
        else:
            self.rho = stability.default_rho(
                replicas, config.lr, curved, config.period, config.momentum, self.order
            )  # fmt: skip

    def on_membership(self, view: View) -> None:
        self.choose_rho(view)

    @property
    def weight(self) -> float:
        """eta * rho, with the learning rate of this step."""
        return self.replica.lr * self.rho

    @property
    def due(self) -> bool:
        """Whether the step that begins has a pull. Read this once in each step: with --adaptive it decides."""
        if self.replica.steps % self.config.period:
            return False
        if self.trigger is None:
            return True
        if due := self.trigger.due(self.per_pull):
            self.trigger.exchanged()
        return bool(due)

    def compute_pull(self, start: int = 0, stop: int | None = None) -> None:
        """d_i = eta * rho * (x_i - c), of the elements start to stop"""
        part = slice(start, stop)
        self.replica.pull(self.replica.theta[part], self.center[part], self.weight, out=self.d[part])

    def apply_pull(self) -> None:
        """x_i <- x_i - d_i. Without a pull (rho = 0), no bit of x_i changes."""
        if self.weight:
            self.replica.axpy(-1.0, self.d, self.replica.theta)

    def center_of_run(self) -> np.ndarray:
        return self.center

    def restart(self, saved: Mapping[str, np.ndarray] | None = None) -> None:
        """Begin with the saved center if there is one."""
        super().restart(saved)
        self.center[:] = self.replica.theta if saved is None else saved["center"]

    def vectors(self) -> dict[str, np.ndarray]:
        return {**super().vectors(), "center": self.center, "curvature": self.curvature}

    def restore(self, vectors: Mapping[str, np.ndarray], numbers: Mapping[str, int | float]) -> None:
        super().restore(vectors, numbers)
        self.choose_rho(self.fabric.view)


class Served(Elastic):
    """Elastic averaging in which replicas visit the center one after the other.

        replica i    x_i, eta * rho ──────>  the center: the reply is c as it is; then c <- c + eta * rho * (x_i - c)
                     d_i       <────── c

    The center lives in the last rank of the job (--center rank) or beside replica 0, which answers while it waits for
    something else. If this rank dies, another replica begins a new center (succession.py). With --compress, codes of
    differences are sent instead of x_i and c (reconstruction.py). version: the number of updates of the center; at
    another rank, as of its last visit.
    """

    def __init__(self, replica: Replica, fabric: Fabric, config: Config) -> None:
        super().__init__(replica, fabric, config)
        self.reply, self.version = np.empty_like(replica.theta), 0
        codec = codecs.build(config.compress)
        self.codes = codec and Reconstructions(replica, fabric, codec)
        self.succession = Succession(fabric, fabric.servers[-1] if config.center == "rank" else 0)
        if not fabric.newcomer:
            self.begin_to_answer()

    @classmethod
    def buffers(cls, size: int, config: Config) -> BufferSpec:
        codecs.build(config.compress)
        adaptive.checked(config)
        serving = (0,) if config.center == "beside" else ()
        return BufferSpec(nbytes=4 * size, mail=1, call=True, serving=serving, heirs=True)

    @property
    def is_center(self) -> bool:
        """Whether the center lives at this rank."""
        return self.succession.here

    @property
    def per_pull(self) -> int:  # type: ignore[override]
        return 0 if self.is_center else 1

    def step(self, batch: Batch) -> float:
        if not self.synchronous:
            self.find_center()
        return super().step(batch)

    # -- visits --------------------------------------------------------------------------------------------

    def start_visit(self) -> Callable[[], None]:
        """Give x_i to the center. The function that is returned waits for c as it was before, and computes d_i.

        x_i must not change in between. If the center dies meanwhile, an asynchronous replica visits the next one.
        """
        if self.is_center:
            self.compute_pull()
            self.update_center(self.replica.theta, self.weight)
            return lambda: None
        try:
            wait_for_reply = self.call_center(self.weight)
        except PeerLost as lost:
            return self.visit_next_center(lost)

        def finish() -> None:
            try:
                wait_for_reply()
                self.compute_pull()
            except PeerLost as lost:
                self.visit_next_center(lost)()

        return finish

    def visit(self) -> None:
        """Give x_i to the center, and compute d_i from c as it was before."""
        self.start_visit()()

    def visit_next_center(self, lost: PeerLost) -> Callable[[], None]:
        """The center has died: start a visit to the next one. With a synchronous method, raise the error."""
        if self.synchronous:
            raise lost
        self.find_center()
        return self.start_visit()

    def call_center(self, weight: float) -> Callable[[], None]:
        """Send x_i to the center. The function that is returned waits for the reply: c. Both raise PeerLost."""
        to = self.succession
        header = Header(weight=weight, round=self.version, marker=not to.introduced)
        sent, out = self.replica.theta, self.center
        if self.codes:
            self.codes.introduce(to.home, exactly=not to.introduced)
            sent, out = self.codes.request(), self.codes.reply
        reply = self.fabric.call_start(to.home.rank, (sent,), out, header)
        to.introduced = True

        def wait_for_reply() -> None:
            self.version = reply.wait().round
            if self.codes:
                self.codes.receive(self.center)

        return wait_for_reply

    def update_center(self, x: np.ndarray, weight: float) -> None:
        """At the center: c <- c + weight * (x - c)"""
        self.replica.mix_into(self.center, x, weight)
        self.version += 1

    def handle(self, request: Message) -> tuple[tuple[np.ndarray], Header]:
        """Return c or its code as the reply: the final c if the request is empty, else c before this visit."""
        if not request.vector.size:
            self.reply[:] = self.center
            return (self.reply,), Header(round=self.version)
        if self.codes and self.codes.note(request):
            return (NOTHING,), Header()
        reply = self.answer(request)
        return (reply,), Header(round=self.version)

    def answer(self, visit: Message) -> np.ndarray:
        """At the center: return c, or its code; then update c."""
        header, codes = visit.header, self.codes
        x, reply = codes.read(visit) if codes else visit.vector, self.reply
        if not self.is_center:  # the sender has noticed first that the last home is dead
            self.move_center(self.succession.own)
        if self.succession.averages(visit):
            self.replica.mix_into(self.center, x, 1 / self.succession.averaged)
        else:
            self.fabric.stats.stale(self.version - header.round)
        if codes:
            reply = codes.encode_center(self.center, visit.sender, self.version)
        else:
            self.replica.copy(self.center, reply)
        if header.weight:
            self.update_center(x, header.weight)
        return reply

    def begin_to_answer(self) -> None:
        """Answer requests from now on, whether or not the center lives here now."""
        self.fabric.register(self.handle)
        if self.is_center and not self.synchronous:
            self.fabric.set_status(Column.SERVER, memory.REPLACED)

    # -- the death of the center ---------------------------------------------------------------------------

    def find_center(self) -> None:
        """If the home of the center has died, find the next one."""
        if self.succession.changed:
            self.move_center(self.succession.next_home())

    def move_center(self, home: Home) -> None:
        """Take this process as the home. If it is this one, begin a new center."""
        self.succession.move(home)
        if self.is_center:
            self.center[:] = self.replica.theta
            self.begin_to_answer()

    def renew_center(self, total: np.ndarray) -> None:
        """With a synchronous method, after a death: if the home has died, the next one begins a new center.

        total (n,): the sum of all members' weights. It is overwritten. All members call this.
        """
        if self.succession.changed:
            self.succession.move(self.succession.next_home())
            self.succession.awaited.clear()
            self.succession.introduced = True
            if self.is_center:
                self.replica.scale(total, 1 / len(self.fabric.replicas), out=self.center)
        if self.codes:
            self.codes.knows = None  # the death may have interrupted a visit
        self.begin_to_answer()

    # -- the end -------------------------------------------------------------------------------------------

    def serve(self) -> None:
        self.get_final_center()

    def pause(self) -> None:
        self.get_final_center()

    def get_final_center(self) -> None:
        """Answer until all replicas have stopped training, get the final center, and answer until all have got it."""
        fabric = self.fabric
        fabric.serve(self.handle)
        self.begin_to_answer()
        while (rank := fabric.wait(self.next_to_call, (), "the final center")) != fabric.rank:
            with suppress(PeerLost):
                if rank in self.informed():
                    self.version = fabric.call(rank, (NOTHING,), self.center).round
                    break
                self.call_center(0.0)()
        fabric.set_status(Column.CENTER, 1)
        all_informed = lambda: len(self.informed()) == len(self.live_ranks()) or None  # noqa: E731
        fabric.wait(all_informed, (), "others to get the final center")
        fabric.register(None)

    def next_to_call(self) -> int | None:
        """Return a rank that has the final center; this rank, if its center is final; a home that lacks x_i; or None.

        When all have stopped training, a center is final if it contains the weights of all live replicas.
        """
        succession = self.succession
        for rank in self.informed():
            return rank
        self.find_center()
        if self.is_center:
            return self.fabric.rank if succession.complete() else None
        return None if succession.introduced else succession.home.rank

    def informed(self) -> list[int]:
        """Return the live ranks that have the final center."""
        return [rank for rank in self.live_ranks() if self.fabric.status[rank, Column.CENTER]]

    def live_ranks(self) -> list[int]:
        return [rank for rank in (*self.fabric.servers, *self.fabric.replicas) if self.fabric.alive(rank)]

    def restart(self, saved: Mapping[str, np.ndarray] | None = None) -> None:
        super().restart(saved)
        if self.codes:
            self.codes.restart(self.center)

    def vectors(self) -> dict[str, np.ndarray]:
        return {**super().vectors(), **(self.codes.vectors() if self.codes else {})}

    def numbers(self) -> dict[str, int | float]:
        return {"version": self.version}

    def restore(self, vectors: Mapping[str, np.ndarray], numbers: Mapping[str, int | float]) -> None:
        super().restore(vectors, numbers)
        self.version = int(numbers["version"])
        self.begin_to_answer()  # also a newcomer, which answers from now on


__all__ = [
    "Batch", "BufferSpec", "Channel", "Elastic", "Fabric", "Header", "Mapping", "Replica", "Served", "State", "View",
]  # fmt: skip
