"""Optim 1: SGD with momentum in one pass.

About ten minutes.

    velocity = momentum * velocity + grad
    theta    = theta - lr * velocity

In NumPy this is four passes over memory. Here it is one: each element of the three vectors is read once, and theta and
velocity are written once. Fill the hole with a loop over the elements that changes theta and velocity in place. (Numba
compiles such a loop to fast machine code; plain Python is slow, but correct.)

Read: "Why the naive update is slow" in kernels/optim/README.md.
Hint: the new velocity moves theta, not the old one.
"""

from numpy import ndarray


def step(theta: ndarray, grad: ndarray, velocity: ndarray, lr: float, momentum: float) -> None:
    """Update theta (n,) and velocity (n,) in place."""
    raise NotImplementedError  # HOLE
