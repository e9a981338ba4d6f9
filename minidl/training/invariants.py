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

from minidl.comm import memory
from minidl.comm.claims import Ledger
from minidl.comm.fabric.base import Channel, Column, Header, State
from minidl.comm.methods.gossip import Gossip
from minidl.comm.transport.in_flight import InFlight, Sender
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

    def divide_among_more(self, replicas: int) -> None:
        """Note that a newcomer is a member: an epoch is divided among this number of replicas."""
        self.left_out += replicas - 1


class Watch:
    """Looks at one part of a scenario. run: before it begins. again: whether it continues a checkpoint.

    died: the members that have died. joined: the number of newcomers that have become members. trained: whether a
    replica has begun a step.
    """

    def __init__(self, run: SimulatedRun, accounts: Accounts, index: dict[bytes, int], again: bool) -> None:
        self.run, self.accounts, self.index, self.again = run, accounts, index, again
        self.simulation = simulation = run.simulation
        self.died: set[int] = set()
        self.joined, self.trained = 0, False
        self.begun: Counter[int] = Counter()  # by piece, how often a replica has begun it
        self.masses = Masses(self) if run.config.mix == "mass" else None
        self._rows: dict[int, Rows] = {}  # by rank, the samples of its present batch
        self._shared: set[int] = set()  # ranks that have sent a message in their present step
        self._entered: set[int] = set()  # ranks that have begun `Session.train`
        for session in run.sessions.values():
            self._watch(session)
        wrap(run, "created", self._watch)
        die, write_state, send = simulation.die, simulation.write_state, simulation.send
        wrap(simulation, "die", lambda rank: self._died(die, rank))
        wrap(simulation, "write_state", lambda rank, state: self._changed(write_state, rank, state))
        wrap(simulation, "send", lambda message: self._sent(send, message))

    @property
    def live(self) -> list[Session]:
        """The sessions of the live replicas. The first one is that of the leader."""
        came = self.simulation.status[:, Column.INCARNATION]
        live = [rank for rank in self.run.sessions if rank not in self.simulation.servers and self._is_member(rank)]
        return [self.run.sessions[rank] for rank in sorted(live, key=lambda rank: (came[rank], rank))]

    def _is_member(self, rank: int) -> bool:
        return memory.is_member(self.simulation.status[rank, Column.STATE])

    def finished(self, summary: dict[str, Any]) -> None:
        """Check the end of a run that has a result."""
        live = [session.fabric.rank for session in self.live]
        for session in self.live:
            rank = session.fabric.rank
            require(rank in self.run.results, f"replica {rank} has not ended")
            require(session.trainer.finished, f"the run has a result, but replica {rank} has not finished its work")
        most = len(self.run.replicas) + self.joined
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
            self._entered.add(rank)
            self._begin_masses()
            return train()

        def stepped(x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
            self.trained = True
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

    def _begin_masses(self) -> None:
        """Note the masses when all have those that were saved."""
        everyone = [rank for rank in range(self.simulation.began) if self._is_member(rank)]
        if self.masses and self.masses.expected is None and self._entered.issuperset(everyone):
            self.masses.begin()

    def _died(self, die: Callable[[int], None], rank: int) -> None:
        before = self.simulation.deaths
        mass = self.masses.of(rank) if self.masses and self._is_member(rank) else None
        die(rank)
        if self.simulation.deaths > before:
            self.died.add(rank)
            self.accounts.regroup(len(self.run.sessions))
            session = self.run.sessions[rank]
            if session.trainer.regroups and rank in self._shared and rank in self._rows:
                self.accounts.settle(session, self._rows.pop(rank))  # the others know of the batch, or train it again
            if self.masses and mass is not None:
                self.masses.lose(mass - self.masses.withdrawn(rank))
            self._begin_masses()
        self.simulation.at(self.simulation.time, self._look_who_waits)

    def _changed(self, write_state: Callable[[int, float], None], rank: int, state: float) -> None:
        """Notice a newcomer that becomes a member."""
        joins = not self._is_member(rank) and memory.is_member(state)
        write_state(rank, state)
        if joins:
            self.joined += 1
            self.accounts.divide_among_more(len(self.live))

    def _sent(self, send: Callable[[InFlight], None], message: InFlight) -> None:
        self._shared.add(message.sender.rank)
        send(message)

    def _look_who_waits(self) -> None:
        """Require that no live rank waits for a dead one. All ranks have had their turn since the death."""
        for transport in self.simulation.transports:
            for task in () if transport.gone else transport.parked:
                dead = [peer for peer in task.peers if self.simulation.status[peer, Column.STATE] == State.DEAD]
                require(not dead, f"rank {transport.rank} waits for the dead {dead}: {task.what}")


class Masses:
    """The masses of push-sum (comm/methods/weighing.py): of the live replicas and of the messages in flight.

    expected: their sum. A death takes the mass of a replica, and of the messages from it and to it that are lost.
    sent: the messages in flight, (the identity of the header, receiver) -> (both transports, header). offers: by rank,
    the mass that it has offered to a newcomer. granted: by rank, (newcomer, mass) that the newcomer has taken, and the
    rank has not given yet.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch, simulation = watch, watch.simulation
        self.sent: dict[tuple[int, int], tuple[Sender, Sender, Header]] = {}
        self.offers: dict[int, np.ndarray] = {}
        self.granted: dict[int, tuple[int, np.ndarray]] = {}
        self.blocks: dict[int, int] = {}  # start of a block -> its number
        self.expected: np.ndarray | None = None
        send, release = simulation.send, simulation.release

        def sending(message: InFlight) -> None:
            if message.channel is Channel.MAIL and message.vector.size:  # the last message (`Fabric.drain`) is empty
                for receiver in message.receivers:
                    ends = message.sender, simulation.transport(receiver)
                    self.sent[id(message.header), receiver] = (*ends, message.header)
            send(message)

        def releasing(message: InFlight, peer: int) -> None:
            lost = self.sent.pop((id(message.header), peer), None) if message.channel is Channel.MAIL else None
            if lost is not None:
                sender, receiver, header = lost
                require(sender.gone or receiver.gone,
                        f"a message from {sender.rank} to {peer} was dropped with its mass")  # fmt: skip
                mass = np.zeros(len(self.blocks))
                mass[self.blocks[header.start]] = header.weight
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
        self._watch_offers(rank, method)

    def _watch_offers(self, rank: int, method: Gossip) -> None:
        offer, accepted, restore, joins = method.offer, method.accepted, method.restore, method.fabric.newcomer

        def offered() -> Any:
            found = offer()
            if found is not None:
                self.offers[rank] = found[0]["mass"].copy()
            return found

        def given(vectors: Any) -> None:
            accepted(vectors)
            require(self.granted.pop(rank, None) is not None, f"replica {rank} gives mass that no newcomer has taken")

        def restored(vectors: Any, numbers: Any) -> None:
            restore(vectors, numbers)
            if joins:
                giver = method.fabric.leader
                self.granted[giver] = rank, self.offers.pop(giver)

        wrap(method, "offer", offered)
        wrap(method, "accepted", given)
        wrap(method, "restore", restored)

    def begin(self) -> None:
        self.expected = self.total()
        before = self.watch.accounts.mass
        if before is not None and self.watch.again and self.watch.accounts.clean and not self.watch.died:
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
        for _, _, header in self.sent.values():
            total[self.blocks[header.start]] += header.weight
        return np.asarray(total - sum(mass for _, mass in self.granted.values()))

    def withdrawn(self, rank: int) -> np.ndarray:
        """Return the mass that is not lost if this rank dies: it exists twice, until the giver has given it."""
        givers = [giver for giver, (taker, _) in self.granted.items() if rank in (giver, taker)]
        return np.sum([self.granted.pop(giver)[1] for giver in givers], axis=0)

    def in_flight(self) -> list[tuple[int, int]]:
        """Return (sender, receiver) of each message in flight between live ranks."""
        return [(sender.rank, receiver.rank) for sender, receiver, _ in self.sent.values()
                if not sender.gone and not receiver.gone]  # fmt: skip

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
