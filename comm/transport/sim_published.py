"""The published states of the ranks of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from greenlet import GreenletExit

from minidl.comm.transport.event_loop import EventLoop, Rank
from minidl.comm.transport.messages import DTYPES, BufferSpec, Header, Message, Slot, check_size


class PublishedStates(Rank):
    """The part of SimTransport (sim.py) that publishes states, and reads those of other ranks."""

    def __init__(self, simulation: EventLoop, rank: int, trace: bool = False) -> None:
        super().__init__(simulation, rank, trace)
        self.newest: tuple[int, np.ndarray, Header] | None = None  # (number, vector, header) of the published state
        self.number = self.dropped = 0  # of the last published state; of the last one of an earlier join
        self.publishing = False  # whether a slot for a published state is reserved
        self.seen: dict[int, int] = {}  # peer -> the number of its newest published state that this rank has seen
        self.asked: set[int] = set()
        self.answers: dict[int, tuple[int, np.ndarray, Header]] = {}
        self.lookers: set[int] = set()  # ranks that looked for a new state and found none; `publish` wakes them

    @property
    def _owners(self) -> Sequence[PublishedStates]:
        return self.simulation.transports  # type: ignore[return-value]

    def unpublish(self) -> None:
        """Drop this rank's published state, and the states that have arrived here. Their numbers continue."""
        self.newest, self.publishing, self.dropped = None, False, self.number
        self.answers.clear()

    def reserve_state(self, nbytes: int) -> Slot | None:
        self._check_here()
        buffers = self.buffers or BufferSpec()
        check_size(nbytes, buffers.publish, buffers.nbytes, "published state")
        if self.publishing:
            self.stats.reads_missed(self.rank)
            return None
        self.publishing = True
        data = self.simulation.memory(nbytes)
        return Slot(data, partial(self._publish, data), partial(setattr, self, "publishing", False))

    def _publish(self, data: np.ndarray, nbytes: int, code: int, header: Header) -> None:
        self._check_here()
        self.number += 1
        vector = data[:nbytes].view(DTYPES[code])
        vector.flags.writeable = False  # all readers share it
        self.newest = self.number, vector, header
        self.publishing = False
        for rank in sorted(self.lookers):
            self.simulation.transports[rank].wake()
        self.lookers.clear()

    def latest(self, peer: int) -> Message | None:
        self._check_here()
        simulation, owner = self.simulation, self._owners[peer]
        if self.nodes[peer] != self.nodes[self.rank]:
            found = self.answers.pop(peer, None)
            if found is None and peer not in self.asked and self.alive(peer):
                self.asked.add(peer)
                simulation.at(simulation.time + simulation.link(self.rank, peer).alpha, self._answer, peer)
        else:
            found = owner.newest
            if found is None or found[0] <= self.seen.get(peer, 0):
                owner.lookers.add(self.rank)
                found = None
        if found is None:
            return None
        number, vector, header = found
        self.seen[peer] = number
        self.stats.received(peer, vector.nbytes)
        if owner.nodes[peer] == self.nodes[self.rank]:
            link = simulation.link(self.rank, peer)
            self._sleep(link.alpha + vector.nbytes * link.beta)
        return Message(peer, vector, header, lambda: None)

    def _answer(self, peer: int) -> None:
        """Handle the arrival of this rank's request at a peer: if the peer's state is new, send it back."""
        simulation, owner = self.simulation, self._owners[peer]
        if (awake := simulation.freezes.wakes_at(peer)) > simulation.time:
            simulation.at(awake, self._answer, peer)
            return
        if owner.newest is None or owner.newest[0] <= self.seen.get(peer, 0) or not self.alive(peer):
            number = owner.newest[0] if owner.newest else 0
            simulation.at(simulation.time + simulation.link(peer, self.rank).alpha, self._nothing_new, peer, number)
            return
        owner.stats.sent(self.rank, owner.newest[1].nbytes)
        simulation.transfer(peer, self.rank, owner.newest[1].nbytes, self._answered, peer, owner.newest)

    def _answered(self, peer: int, found: tuple[int, np.ndarray, Header]) -> None:
        """Handle the arrival of a peer's state at this rank."""
        self.asked.discard(peer)
        if self.alive(peer) and found[0] > self._owners[peer].dropped:
            self.answers[peer] = found
        if self.alive(peer):
            self.wake()

    def _nothing_new(self, peer: int, number: int) -> None:
        """Handle a reply without a state. The peer may have published a state while the reply was in flight."""
        self.asked.discard(peer)
        owner = self._owners[peer]
        if owner.newest is not None and owner.newest[0] > number:
            self.wake()
        else:
            owner.lookers.add(self.rank)

    def _check_here(self) -> None:
        if self.gone:
            raise GreenletExit  # ends this greenlet: the rank is dead, or the simulation is over
