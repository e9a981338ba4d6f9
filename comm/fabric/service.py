"""Requests and replies: what a rank does that asks, and what a rank does that answers.

    caller    request ------>  server: handle(request) returns the reply
              out     <------  reply

A server that does not train calls `Fabric.serve`. A rank that trains registers a service (`Fabric.register`): it then
answers whenever it waits for something else, and at the beginning of each step. So two ranks that call each other never
wait forever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from minidl.comm.transport.base import Transport
from minidl.comm.transport.messages import Channel, Header, Message

Handler = Callable[[Message], tuple[Sequence[np.ndarray], Header]]


class Call:
    """A request that has been sent. `wait` waits for the reply, copies it to `out`, and returns its header.

    calls: the calls of this server whose replies have not been received, this one last. A server answers them in order.
    """

    def __init__(self, transport: Transport, server: int, out: np.ndarray, calls: deque[Call]) -> None:
        self.transport, self.server, self.out, self.calls = transport, server, out, calls
        self._header: Header | None = None
        calls.append(self)

    def wait(self) -> Header:
        while self._header is None:  # the replies to earlier calls come first
            self.transport.wait(partial(receive, self.transport, self.calls), (self.server,), "a reply")
        return self._header

    def done(self, message: Message) -> None:
        self.out[...] = message.vector
        self._header = message.header


def receive(transport: Transport, calls: deque[Call]) -> bool | None:
    """Complete the oldest call if its reply has arrived. Returns True if it was completed, else None."""
    message = transport.take(Channel.ANSWER, calls[0].server) if calls else None
    if message is None:
        return None
    with message:
        calls.popleft().done(message)
    return True


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
