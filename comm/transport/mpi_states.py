"""Published states of ranks on other nodes. A rank requests the newest state of a peer, which sends it once.

    reader    ASK, the version that it has seen ------>  writer    waits until its state is newer
              newest() returns the state  <------ NEWS             sends it from its mailbox, without a copy

The progress engine's thread calls `asked`, `arrived`, `answer`, `forget` and `died`. The replica's thread calls
`newest`.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from minidl.comm.stats import Stats
from minidl.comm.transport.mailbox import SLOTS, Mailbox
from minidl.comm.transport.messages import MAX_CHANNELS, Message
from minidl.comm.transport.progress_engine import ProgressEngine

ASK, NEWS = 2 * MAX_CHANNELS, 2 * MAX_CHANNELS + 1  # tags
VERSIONS = 1 << 32  # published states of a join: the versions of another join differ


class RemoteStates:
    """The published states that one rank has requested, and the requests of others for its own."""

    def __init__(self, engine: ProgressEngine, stats: Stats) -> None:
        self.engine, self.stats = engine, stats
        self.answering = 0  # number of replies that are being sent
        self._joins = 0  # number of joins that this rank has left
        self._news: dict[int, Message] = {}
        self._requested: set[int] = set()  # peers whose state this rank has requested
        self._seen = [0] * engine.size  # for each peer, the version of its state that this rank received last
        self._askers: dict[int, int] = {}  # peer that requested this rank's state -> version that the peer has seen

    def newest(self, peer: int) -> Message | None:
        """Return a peer's published state if it has arrived. Else request it."""
        message = self._news.pop(peer, None)
        # Ask only now that nothing is here. A reply requested earlier would wait, and be old when it is wanted.
        if message is None and peer not in self._requested:
            self._requested.add(peer)
            self.engine.send(peer, ASK, np.array([self._seen[peer]]).view(np.uint8))
        return message

    def asked(self, source: int, request: np.ndarray) -> None:
        """Note a request for this rank's state."""
        if (seen := int(request.view(np.int64)[0])) >= self._joins * VERSIONS:
            self._askers[source] = seen

    def arrived(self, source: int, message: Message, version: int) -> None:
        """Keep a published state until `newest` takes it. Drop a state of an earlier join."""
        if version <= self._seen[source]:
            message.release()
            return
        if old := self._news.pop(source, None):
            old.release()
        self._seen[source], self._news[source] = version, message
        self._requested.discard(source)

    def answer(self, mailbox: Mailbox) -> None:
        """Send the published state of this rank to the peers that requested it and have not seen this version."""
        if not self._askers or self.answering:
            return
        newest = int(mailbox.newest[self.engine.rank, 0]) // SLOTS
        peers = [peer for peer, seen in self._askers.items() if seen < newest]
        shown = mailbox.show() if peers else None
        if shown is None:
            return
        message, data = shown
        self.answering = len(peers)
        for peer in peers:
            del self._askers[peer]
            self.stats.sent(peer, message.vector.nbytes)
            self.engine.send(peer, NEWS, data, partial(self._sent, message))

    def _sent(self, message: Message) -> None:
        self.answering -= 1
        if not self.answering:
            message.release()

    def forget(self, joins: int) -> None:
        """Let go of what remains of a join. joins: the number of joins that this rank has left."""
        for unread in self._news.values():
            unread.release()
        self._news, self._askers, self._requested = {}, {}, set()
        self._joins, self._seen = joins, [joins * VERSIONS] * self.engine.size

    def died(self, peer: int) -> None:
        """Expect nothing from a dead peer, and owe it nothing. A state of it that has arrived can still be read."""
        self._requested.discard(peer)
        self._askers.pop(peer, None)
