"""Decentralised 3: push-sum never loses mass.

Each replica has a value x and a mass w, and its estimate of the average is x / w. It adds all messages that have
arrived. Then it keeps half of x and w, and sends the other half. But the receiver may still have the previous message:
then `send` returns False, and nothing was sent. The sums of all x and of all w, of replicas and of messages in flight,
must never change. Fill the hole for one step of one replica.

Read: "Push-sum" in docs/decentralised.md.
Hint: what does the replica keep if nothing was sent? Call `send` only once.
"""

from collections.abc import Callable


def step(
    x: float, w: float, inbox: list[tuple[float, float]], send: Callable[[float, float], bool]
) -> tuple[float, float]:
    """Return the new (x, w). inbox: the messages (x, w) that have arrived. send(x, w) tries to send a message."""
    raise NotImplementedError  # HOLE
