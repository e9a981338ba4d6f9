"""A message in the network of a simulation."""

from __future__ import annotations

import numpy as np

from minidl.comm.transport.messages import Channel, Header


class InFlight:
    """A message in the simulated network.

    receivers: the ranks that have not released it yet. used: the number of the sender's slots that it occupies, 0 or 1.
    vector, header: set when the sender commits the message.
    """

    __slots__ = ("channel", "header", "receivers", "sender", "used", "vector")

    vector: np.ndarray
    header: Header

    def __init__(self, channel: Channel, sender: int, receivers: set[int], used: int) -> None:
        self.channel, self.sender, self.receivers, self.used = channel, sender, receivers, used
