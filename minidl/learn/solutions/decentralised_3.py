"""Decentralised 3: push-sum never loses mass: a solution."""

from collections.abc import Callable


def step(
    x: float, w: float, inbox: list[tuple[float, float]], send: Callable[[float, float], bool]
) -> tuple[float, float]:
    """Return the new (x, w). inbox: the messages (x, w) that have arrived. send(x, w) tries to send a message."""
    for its_x, its_w in inbox:
        x, w = x + its_x, w + its_w
    if send(x / 2, w / 2):
        return x / 2, w / 2
    return x, w
