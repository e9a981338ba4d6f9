"""Optim 3: Adam's bias correction.

Adam keeps running means of the gradient (`first`) and of its square (`second`). Both begin at 0, so in the first steps
they are too small: after one step, `first` is only (1 - beta1) times the gradient. Adam divides them by what is missing
(Kingma, Ba 2015, algorithm 1). Then the first step of each parameter has almost the length lr, whatever its gradient
is. Fill the hole: correct both means, and update theta. `step` counts from 1.

Read: `adam` in kernels/optim/reference.py only if you are stuck.
Hint: if all gradients were 1, what would `first` be after t steps? Divide by this. Do not store the corrected means.
"""

from numpy import ndarray

EPS = 1e-8


def update(
    theta: ndarray, grad: ndarray, first: ndarray, second: ndarray, lr: float, beta1: float, beta2: float, step: int
) -> None:
    """Update theta, first and second (n,) in place: theta -= lr * mean / (sqrt(square) + EPS), corrected."""
    first[:] = beta1 * first + (1 - beta1) * grad
    second[:] = beta2 * second + (1 - beta2) * grad**2
    raise NotImplementedError  # HOLE: compute the corrected mean and square, and update theta in place
