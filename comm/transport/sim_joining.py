"""How a rank of a simulation joins the others, at the beginning or while they train."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minidl.comm.transport.event_loop import EventLoop
from minidl.comm.transport.messages import BufferSpec, Channel, Column, State
from minidl.comm.transport.sim_published import PublishedStates
from minidl.errors import ConfigError


class Joining(PublishedStates):
    """The part of SimTransport (sim.py) that allocates the memory for messages."""

    def __init__(self, simulation: EventLoop, rank: int, trace: bool = False) -> None:
        super().__init__(simulation, rank, trace)
        self.joins = self.left = 0  # the number of calls of `join`; of those before which it has dropped all messages

    @property
    def _ranks(self) -> Sequence[Joining]:
        return self.simulation.transports  # type: ignore[return-value]

    def join(self, buffers: BufferSpec, layout: str) -> None:
        simulation = self.simulation
        if self.joins and simulation.current is not None:
            self._leave()
        if simulation.layouts.setdefault(self.joins, layout) != layout:
            raise ConfigError(f"replica {self.rank} has another model: its layout differs from that of the others")
        if self.joins and self.joins == simulation.joins:  # the first rank that joins again
            simulation.claims[:] = 0
            for transport in self._ranks:
                transport.unpublish()
        self.joins += 1
        simulation.joins = max(simulation.joins, self.joins)
        self._allocate(buffers)

    def _allocate(self, buffers: BufferSpec) -> None:
        simulation, self.buffers = self.simulation, buffers
        used = [number - free for (number, _), free in zip(self.slots, self.free, strict=True)]  # still in flight
        self.slots = [*buffers.slots(self.rank, self.size, self.rank in self.servers).values()]
        self.free = [number - some for (number, _), some in zip(self.slots, used, strict=True)]
        for name, elements in buffers.shared:
            nodes = len(simulation.place.groups)
            if nodes > 1:
                raise ConfigError(f"this method needs memory that all replicas share, and ranks on {nodes} nodes "
                                  "share no memory: run it on one node")  # fmt: skip
            simulation.vectors.setdefault(name, np.zeros(elements, np.float32))

    def _leave(self) -> None:
        """Before another `join`: wait until all live ranks have called it, and drop the messages that arrive."""
        ranks, joins = self._ranks, self.joins

        def delivered() -> bool | None:
            self.drop_messages()
            return self.delivered() or None

        def left() -> bool | None:
            if all(other.left >= joins for other in ranks if other.alive(other.rank)):
                return True  # from now on, messages are those of the next join: others may have sent some already
            self.drop_messages()
            return None

        self.wait(delivered, (), "others to receive the last messages")
        self.left = joins
        if left():
            self.simulation.wake_all()
        self.wait(left, self.servers, "all ranks to join")

    def enter(self, buffers: BufferSpec, layout: str) -> None:
        """See Transport. This rank's state is COMING then."""
        simulation = self.simulation
        if simulation.layouts[simulation.joins - 1] != layout:
            raise ConfigError("this replica's model differs from that of the job")
        self.include_newcomers()
        self.replicas = (*(rank for rank in self.replicas if rank != self.rank), self.rank)
        self.joins = self.left = simulation.joins
        self._allocate(buffers)
        self.claims.revoke(self.rank)
        self.set_status(Column.STATE, State.COMING)

    def include_newcomers(self) -> None:
        """See Transport. If the replicas have changed, a condition that this rank waits for may have, too."""
        before = self.replicas
        super().include_newcomers()
        if self.replicas != before:
            self.simulation.at(self.simulation.time, self.wake)

    def take_over(self, old: Joining) -> None:
        """Drop what a dead rank has left in this place. Messages that have arrived remain, except requests."""
        for transport in self.simulation.transports:
            for channel in Channel:
                message = transport.inbox[channel].get(self.rank)
                if message is None:
                    continue
                if channel is Channel.CALL:
                    del transport.inbox[channel][self.rank]
                    self.simulation.release(message, transport.rank)
                else:
                    message.sender, message.used = self, 0
                    self.on_way[channel] |= message.receivers
        self.number = self.dropped = old.number  # readers have seen these states
        self.lookers = old.lookers
