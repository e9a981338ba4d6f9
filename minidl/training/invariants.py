"""What must be true in every scenario (scenario.py), whatever fails.

    Accounts    what the replicas have trained, over all parts of a scenario
    Watch       looks at one part: at each settled batch, each message, each death, and at the end

They only look: they wrap functions of the sessions and of the simulation, and change nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from minidl.comm.claims import Ledger
from minidl.comm.fabric.base import Channel, Column, Header, State
from minidl.comm.methods.gossip import Gossip
from minidl.comm.transport.event_loop import InFlight
from minidl.training.session import Session
from minidl.training.simulated import SimulatedRun
from minidl.training.work import Claimed

Rows = tuple[int, ...]  # the indices of a batch's samples in the training set


class Violation(Exception):
    """An invariant does not hold."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Violation(what)


class Accounts:
    """The batches that count, over all parts of a scenario.

    pieces: of claimed work, the samples of each piece that is settled. samples: of divided work, for each epoch, how
    often each sample was trained. exact, whole: whether no batch was repeated, and none was left out, by a documented
    rule so far. clean: whether the last part saved its end. left_out: how many samples of an epoch may be left out.
    replicas: their number in the last part. mass: of all replicas at the end of the last part; None: unknown.
    """

    def __init__(self) -> None:
        self.pieces: dict[int, Rows] = {}
        self.samples: dict[int, Counter[int]] = {}
        self.exact = self.whole = self.clean = True
        self.left_out = self.replicas = 0
        self.mass: np.ndarray | None = None

    def begin(self, session: Session, again: bool) -> None:
        """Note that a part begins. again: whether it continues a checkpoint.

        Only what a checkpoint calls settled counts, and this must have been trained. If the last part saved its end,
        the checkpoint contains everything.
        """
        work = session.trainer.work
        self.left_out += session.config.workers - 1
        replicas, self.replicas = self.replicas, session.config.workers
        if not isinstance(work, Claimed):
            # Independent replicas that are not the same as before continue with new parts.
            same = session.trainer.method.synchronous or replicas in (0, self.replicas)
            self.exact &= self.clean and same
            self.whole &= self.clean and same
            return
        saved = set(range(work.first)) - set(work.left)
        lost = sorted(saved - self.pieces.keys())
        require(not lost, f"the checkpoint says that pieces {lost[:8]} are settled, but no replica has trained them")
        if again and self.clean:
            missing = sorted(self.pieces.keys() - saved)
            require(not missing, f"pieces {missing[:8]} are settled, but the checkpoint hands them out again")
        self.pieces = {piece: rows for piece, rows in self.pieces.items() if piece in saved}

    def settle(self, session: Session, rows: Rows) -> None:
        work, at = session.trainer.work, session.trainer.progress
        if isinstance(work, Claimed):
            require(work.piece not in self.pieces, f"piece {work.piece} is settled twice")
            self.pieces[work.piece] = rows
        else:
            self.samples.setdefault(at.epoch, Counter()).update(rows)

    def finish(self, session: Session, incomplete: bool) -> None:
        """Compare with the whole work. incomplete: whether the part of a dead replica was not trained."""
        work, config, images = session.trainer.work, session.config, len(session.data.y_train)
        if isinstance(work, Claimed):
            missing = sorted(set(range(work.total)) - self.pieces.keys())
            require(not missing, f"the run has finished, but pieces {missing[:8]} of {work.total} are not settled")
            surplus = sorted(self.pieces.keys() - set(range(work.total)))
            require(not surplus, f"pieces {surplus[:8]} were trained, but the run has only {work.total}")
            for epoch in range(work.total // work.batches):
                pieces = range(epoch * work.batches, (epoch + 1) * work.batches)
                counts = Counter(row for piece in pieces for row in self.pieces[piece])
                require(len(counts) == images and set(counts.values()) == {1},
                        f"epoch {epoch} has {len(counts)} of {images} samples")  # fmt: skip
            return
        for epoch, counts in self.samples.items() if self.exact else ():
            [(sample, most)] = counts.most_common(1)
            require(most == 1, f"sample {sample} was trained {most} times in epoch {epoch}")
        for epoch in range(config.epochs) if self.whole and not config.steps and not incomplete else ():
            left_out = images - len(self.samples.get(epoch, ()))
            require(left_out <= self.left_out,
                    f"{left_out} samples of epoch {epoch} were left out; expected at most {self.left_out}")  # fmt: skip

    def regroup(self, left_out: int) -> None:
        """Note a death. With --on-death continue, the others train again what they do not know of.

        left_out: how many more samples of an epoch may be left out.
        """
        self.exact = False
        self.left_out += left_out


class Watch:
    """Looks at one part of a scenario. run: before it begins. again: whether it continues a checkpoint.

    died: the ranks that have died. stops: whether the run was asked to stop.
    """

    def __init__(self, run: SimulatedRun, accounts: Accounts, index: dict[bytes, int], again: bool) -> None:
        self.run, self.accounts, self.index, self.again = run, accounts, index, again
        self.simulation = simulation = run.simulation
        self.died: set[int] = set()
        self.begun: Counter[int] = Counter()  # by piece, how often a replica has begun it
        self.masses = Masses(self) if run.config.mix == "mass" else None
        self._rows: dict[int, Rows] = {}  # by rank, the samples of its present batch
        self._shared: set[int] = set()  # ranks that have sent a message in their present step
        self._entered = 0  # sessions that have begun to train
        for session in run.sessions:
            self._watch(session)
        die, come, send = simulation.die, simulation._come, simulation.send
        wrap(simulation, "die", lambda rank: self._died(die, rank))
        wrap(simulation, "_come", lambda rank: self._came(come, rank))
        wrap(simulation, "send", lambda message: (self._shared.add(message.sender), send(message)))

    @property
    def live(self) -> list[Session]:
        """The sessions of the live replicas."""
        return [self.run.sessions[rank] for rank in self.run.replicas
                if self.simulation.status[rank, Column.STATE] != State.DEAD]  # fmt: skip

    def finished(self, summary: dict[str, Any]) -> None:
        """Check the end of a run that has a result."""
        live = [session.fabric.rank for session in self.live]
        for session in self.live:
            rank = session.fabric.rank
            require(rank in self.run.results, f"replica {rank} has not ended")
            require(session.trainer.finished, f"the run has a result, but replica {rank} has not finished its work")
        most = len(self.run.replicas)
        require(len(live) <= summary["replicas_alive"] <= most,  # some may have died after their states were saved
                f"the result names {summary['replicas_alive']} replicas; expected {len(live)} to {most}")  # fmt: skip
        leader = self.live[0]
        complete = not self.died or leader.trainer.regroups
        self.accounts.finish(leader, incomplete=not complete)
        if isinstance(leader.trainer.work, Claimed) and not self.simulation.stop_asked:
            twice = sum(self.begun.values()) - len(self.begun)
            repeated = leader.trainer.work.repeated
            require(repeated == twice, f"{repeated} batches count as repeated, but {twice} were begun again")
        self.ended()

    def ended(self) -> None:
        """Check the end of a part that has saved its end."""
        leftovers = [path.name for path in self.run.checkpoints.glob(".*")]
        require(not leftovers, f"{leftovers[:3]} are left in {self.run.checkpoints.name}")
        live = [session.trainer for session in self.live]
        if self.run.config.method == "allreduce" and (not self.died or live[0].regroups):
            first, *others = [trainer.replica.theta for trainer in live]
            require(all((theta == first).all() for theta in others), "replicas of allreduce have different weights")
        if self.masses:
            self.masses.require_balance()
            require(not self.masses.in_flight(), "the run has ended, but messages with mass are in flight")
            self.accounts.mass = self.masses.total()

    # -- what happens ------------------------------------------------------------------------------------

    def _watch(self, session: Session) -> None:
        trainer, rank = session.trainer, session.fabric.rank
        train, step, settle, do = session.train, trainer.step, trainer.work.settle, trainer._settle

        def trained() -> Any:
            if not self._entered:
                self.accounts.begin(session, self.again)
            self._entered += 1
            if self.masses and self._entered == len(self.run.sessions) - len(self.simulation.late):
                self.masses.begin()  # all have their saved masses now
            return train()

        def stepped(x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
            self._rows[rank] = tuple([self.index[row.tobytes()] for row in x])
            self._shared.discard(rank)
            return step(x, y)

        def settled(*counted: Any) -> bool:
            """Settle a claimed piece."""
            counts = bool(settle(*counted))
            if counts:
                self.accounts.settle(session, self._rows[rank])
            return counts

        def done(*counted: Any) -> None:
            """Settle a batch of divided work. `trainer.work` is replaced when members die."""
            self.accounts.settle(session, self._rows.pop(rank))
            do(*counted)

        wrap(session, "train", trained)
        wrap(trainer, "step", stepped)
        if isinstance(trainer.work, Claimed):
            wrap(trainer.work, "settle", settled)
            self._watch_claims(trainer.work, trainer.work.claims)
        else:
            wrap(trainer, "_settle", done)
        if self.masses and isinstance(trainer.method, Gossip):
            self.masses.watch_method(rank, trainer.method)

    def _watch_claims(self, work: Claimed, claims: Any) -> None:
        assert isinstance(claims, Ledger)
        begin = claims.begin

        def began(ticket: int) -> bool:
            granted = begin(ticket)
            if granted:
                self.begun[work._piece(ticket)] += 1
            return granted

        wrap(claims, "begin", began)

    def _died(self, die: Callable[[int], None], rank: int) -> None:
        before = self.simulation.dead
        mass = self.masses.of(rank) if self.masses else None
        die(rank)
        if self.simulation.dead > before:
            self.died.add(rank)
            self.accounts.regroup(len(self.run.replicas))
            session = self.run.sessions[rank]
            if session.trainer.regroups and rank in self._shared and rank in self._rows:
                self.accounts.settle(session, self._rows.pop(rank))  # the others know of the batch, or train it again
            if self.masses and mass is not None:
                self.masses.lose(mass)
            self.simulation.at(self.simulation.time, self._look_who_waits)

    def _came(self, come: Callable[[int], None], rank: int) -> None:
        before = self.simulation.dead
        come(rank)
        if self.masses and self.simulation.dead < before:
            self.masses.lose(-self.masses.of(rank))

    def _look_who_waits(self) -> None:
        """Require that no live rank waits for a dead one. All ranks have had their turn since the death."""
        for transport in self.simulation.transports:
            for task in () if transport.gone else transport.parked:
                dead = [peer for peer in task.peers if peer in self.died]
                require(not dead, f"rank {transport.rank} waits for the dead {dead}: {task.what}")


class Masses:
    """The masses of push-sum (comm/methods/weighing.py): of the live replicas and of the messages in flight.

    expected: their sum. A death takes the mass of a replica, and of the messages from it and to it that are lost.
    sent: the messages in flight, (the identity of the header, receiver) -> (sender, header).
    """

    def __init__(self, watch: Watch) -> None:
        self.watch, simulation = watch, watch.simulation
        self.sent: dict[tuple[int, int], tuple[int, Header]] = {}
        self.blocks: dict[int, int] = {}  # start of a block -> its number
        self.expected: np.ndarray | None = None
        send, release = simulation.send, simulation.release

        def sending(message: InFlight) -> None:
            if message.channel is Channel.MAIL and not message.header.marker:
                for receiver in message.receivers:
                    self.sent[id(message.header), receiver] = message.sender, message.header
            send(message)

        def releasing(message: InFlight, peer: int) -> None:
            lost = self.sent.pop((id(message.header), peer), None) if message.channel is Channel.MAIL else None
            if lost is not None:
                dead = simulation.status[[message.sender, peer], Column.STATE] == State.DEAD
                require(bool(dead.any()), f"a message from {message.sender} to {peer} was dropped with its mass")
                mass = np.zeros(len(self.blocks))
                mass[self.blocks[lost[1].start]] = lost[1].weight
                self.lose(mass)
            release(message, peer)

        wrap(simulation, "send", sending)
        wrap(simulation, "release", releasing)

    def watch_method(self, rank: int, method: Gossip) -> None:
        self.blocks = method.block_at
        weighing = method.weighing
        weight = weighing.weight

        def weighed(header: Header, block: int) -> float:
            require(self.sent.pop((id(header), rank), None) is not None, f"replica {rank} mixed a message twice")
            return weight(header, block)

        wrap(weighing, "weight", weighed)

    def begin(self) -> None:
        self.expected = self.total()
        before = self.watch.accounts.mass
        if before is not None and self.watch.again and self.watch.accounts.clean:
            kept = len(self.expected) == len(before) and np.array_equal(before, self.expected)
            replicas = float(len(self.watch.live))
            require(kept or bool((self.expected == replicas).all()),
                    f"the run continues with mass {self.expected.tolist()}; expected {before.tolist()}")  # fmt: skip

    def of(self, rank: int) -> np.ndarray:
        """Return the mass of a replica; 0 for a dead rank, and for a server."""
        method = self.watch.run.sessions[rank].trainer.method
        assert isinstance(method, Gossip)
        return method.weighing.mass.copy()

    def total(self) -> np.ndarray:
        total = np.sum([self.of(session.fabric.rank) for session in self.watch.live], axis=0)
        for _, header in self.sent.values():
            total[self.blocks[header.start]] += header.weight
        return np.asarray(total)

    def in_flight(self) -> list[tuple[int, int]]:
        """Return (sender, receiver) of each message in flight between live ranks."""
        dead = self.watch.simulation.status[:, Column.STATE] == State.DEAD
        return [(sender, receiver) for (_, receiver), (sender, _) in self.sent.items()
                if not dead[sender] and not dead[receiver]]  # fmt: skip

    def lose(self, mass: np.ndarray) -> None:
        """Expect so much less from now on."""
        if self.expected is not None:
            self.expected = self.expected - mass

    def require_balance(self) -> None:
        if self.expected is not None and self.watch.live:
            total = self.total()
            require(bool((total == self.expected).all()),
                    f"the masses sum to {total.tolist()}; expected {self.expected.tolist()}")  # fmt: skip


def wrap(owner: object, name: str, function: Callable[..., Any]) -> None:
    """Replace a method of one object."""
    setattr(owner, name, function)
