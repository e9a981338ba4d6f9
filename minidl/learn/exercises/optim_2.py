"""Optim 2: decoupled weight decay, for each segment of the vector.

Classic weight decay adds weight_decay * theta to the gradient, so it also enters the velocity, and acts on many later
steps. Decoupled weight decay (Loshchilov, Hutter 2019) multiplies theta by 1 - lr * weight_decay, and leaves the
velocity unchanged.
All parameters of a model are in one vector. Segment s is the range [starts[s], stops[s]). It has the learning rate
lr[s] and the weight decay weight_decay[s]: biases, for example, have no decay. Fill the hole. Elements outside all
segments do not change.

Read: "Further details" in kernels/optim/README.md, and `sgd` in kernels/optim/reference.py.
Hint: first the decay of theta, then the step of exercise 1.
"""

from collections.abc import Sequence

from numpy import ndarray


def step(
    theta: ndarray, grad: ndarray, velocity: ndarray, starts: Sequence[int], stops: Sequence[int],
    lr: Sequence[float], weight_decay: Sequence[float], momentum: float,
) -> None:  # fmt: skip
    """Update theta (n,) and velocity (n,) in place."""
    for s in range(len(starts)):
        for i in range(starts[s], stops[s]):
            raise NotImplementedError  # HOLE: update element i, which is in segment s
