"""Requests and replies: what a rank does that asks, and what a rank does that answers.

    caller    request ------>  server: handle(request) returns the reply
              out     <------  reply

A server that does not train calls `Fabric.serve`. A rank that trains registers a service (`Fabric.register`): it then
answers whenever it waits for something else, and at the beginning of each step. So two ranks that call each other never
wait forever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from minidl.comm.transport.base import Transport
from minidl.comm.transport.messages import Channel, Header, Message

Handler = Callable[[Message], tuple[Sequence[np.ndarray], Header]]


class Call:
    """A request that has been sent. `wait` waits for the reply, copies it to `out`, and returns its header."""

    def __init__(self, transport: Transport, server: int, out: np.ndarray) -> None:
        self.transport, self.server, self.out = transport, server, out
        self._header: Header | None = None

    def wait(self) -> Header:
        if self._header is None:
            peer = self.server
            with self.transport.wait(lambda: self.transport.take(Channel.ANSWER, peer), (peer,), "a reply") as message:
                self.out[...] = message.vector
                self._header = message.header
        return self._header


class Service:
    """A handler of requests. It must not change the parts of its reply before it is called again."""

    def __init__(self, transport: Transport, handle: Handler) -> None:
        self.transport, self.handle = transport, handle
        self._reply: tuple[int, Sequence[np.ndarray], Header] | None = None  # not sent yet: its receiver is not ready
        self._handling = False

    def poll(self) -> bool:
        """Answer the requests that have arrived, without waiting. Returns whether there was any."""
        found = False
        if self._handling:  # the handler itself waits for something
            return False
        for _ in range(self.transport.size):
            message = self.transport.take(Channel.CALL) if self.replied() else None
            if message is None:
                break
            found = self._handling = True
            try:
                with message:
                    self._reply = (message.sender, *self.handle(message))
            finally:
                self._handling = False
        self.replied()
        return found

    def replied(self) -> bool:
        """Try to send the last reply. Returns whether it was sent, or its receiver is dead."""
        if self._reply is not None:
            peer, parts, header = self._reply
            if self.transport.post(Channel.ANSWER, (peer,), parts, header) or not self.transport.alive(peer):
                self._reply = None
        return self._reply is None
