"""Elastic 3: round robin, with gradients computed before the turn.

In a round robin the center meets one replica at a time: replica 0, then 1, and so on. In its turn, replica i and the
center pull each other, and the next replica sees the center after this visit. So the center never jumps by more than a
times its distance from one replica, however many there are. The gradients do not need c, so all replicas may compute
them before the turns, from the weights x_i before the step. Fill the hole: return the replicas and the center after one
round. Do not change the arrays that you are given.

Read: "Round robin against tree" and "What overlap may use" in docs/elastic.md.
Hint: in each turn d_i, with the current center, moves x_i and the center. eta * g_i moves only x_i.
"""

from numpy import ndarray


def turns(x: ndarray, c: float, g: ndarray, eta: float, a: float) -> tuple[ndarray, float]:
    """Return (x, c) after a turn of each replica; x (P,), g (P,): the gradients before the round; a = eta * rho."""
    raise NotImplementedError  # HOLE
