"""An operation of your own, with its gradient: a soft threshold, max(|x| - t, 0) with the sign of x.

    python examples/own_op.py

`gradcheck` compares the gradient with differences of the function, in float64. The operation computes with NumPy, so
minidl cannot record it: steps run on the tape, which is slower. CONTRIBUTING.md shows how an operation gets kernels.
"""

import numpy as np

import minidl
from minidl import Function, Tensor, nn


class SoftThreshold(Function):
    """y = sign(x) max(|x| - t, 0); dL/dx = dL/dy where y is not 0."""

    def forward(self, x: np.ndarray, t: float) -> np.ndarray:
        y = np.sign(x) * np.maximum(np.abs(x) - t, 0)
        self.passes = y != 0
        return y

    def backward(self, dy: np.ndarray) -> np.ndarray:
        return dy * self.passes


class Shrink(nn.Module):
    """The layer that applies it."""

    def __init__(self, t: float = 0.1) -> None:
        super().__init__()
        self.t = t

    def forward(self, x: Tensor) -> Tensor:
        return SoftThreshold.apply(x, t=self.t)


def main() -> None:
    x = Tensor(np.random.default_rng(0).normal(size=(5, 7)), requires_grad=True)
    minidl.gradcheck(lambda x: SoftThreshold.apply(x, t=0.3), x)
    minidl.seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), Shrink(), nn.Linear(64, 10))
    history = minidl.fit(model, "digits", epochs=8, lr=0.05)
    assert history.test
    print(f"test accuracy {history.test.accuracy:.1%}")


if __name__ == "__main__":
    main()
