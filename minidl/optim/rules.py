"""Update rules that treat each element alike, or each parameter with one rate: SGD, Adam, AdamW, LARS."""

from __future__ import annotations

from numbers import Real

import numpy as np

from minidl.checked import shown
from minidl.errors import ConfigError
from minidl.optim.optimizer import Optimizer, Parameters


class SGD(Optimizer):
    """v <- momentum * v + g;  theta <- theta - lr * v.   nesterov: theta <- theta - lr * (g + momentum * v)

    Weight decay is coupled (g + decay * theta replaces g, as in PyTorch's SGD), or decoupled: theta is multiplied by
    1 - lr * decay, independently of the gradient (Loshchilov and Hutter 2019).
    """

    def __init__(
        self,
        parameters: Parameters,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        decoupled: bool = False,
        clip: float | None = None,
    ) -> None:
        self.momentum, self.nesterov, self.decoupled = self._number("momentum", momentum, below=1), nesterov, decoupled
        if nesterov and not momentum:
            raise ConfigError(f"{type(self).__name__}: nesterov has no effect without momentum: give both or neither")
        super().__init__(parameters, lr, weight_decay, clip)

    def update(self, lr: np.ndarray, scale: float) -> None:
        vectors = self.theta, self.grad, self.kept("velocity")
        options = self.momentum, self.nesterov, self.decoupled, scale
        self.device.optim.sgd(*vectors, self.starts, self.stops, lr, self.decays, *options)


class Adam(Optimizer):
    """m <- b1 * m + (1 - b1) * g;  v <- b2 * v + (1 - b2) * g^2;  theta <- theta - lr * m' / (sqrt(v') + eps)

    with m' = m / (1 - b1^t) and v' = v / (1 - b2^t) (Kingma and Ba 2015). Weight decay is coupled (see SGD).
    """

    decoupled = False
    state_names = ("first_moment", "second_moment")

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip: float | None = None,
    ) -> None:
        numbers = isinstance(betas, tuple | list) and all(isinstance(beta, Real) and 0 <= beta < 1 for beta in betas)
        if not numbers or len(betas) != 2:
            raise ConfigError(f"{type(self).__name__}: betas = {shown(betas)}; expected two numbers in [0, 1)")
        self.betas = float(betas[0]), float(betas[1])
        self.eps = self._number("eps", eps)
        super().__init__(parameters, lr, weight_decay, clip)

    def update(self, lr: np.ndarray, scale: float) -> None:
        vectors = self.theta, self.grad, self.kept("first_moment"), self.kept("second_moment")
        options = *self.betas, self.eps, self.steps, self.decoupled, scale
        self.device.optim.adam(*vectors, self.starts, self.stops, lr, self.decays, *options)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    decoupled = True


class LARS(SGD):
    """v <- momentum * v + lr * r * (g + decay * w);  w <- w - v   for each parameter w (You, Gitman, Ginsburg 2017)

    with r = trust * |w| / (|g| + decay * |w|), or 1 if w has at most one axis (such as a bias) or if |w| or |g| is 0.
    """

    fuses_neighbours = False  # each parameter needs separate norms

    def __init__(
        self,
        parameters: Parameters,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        clip: float | None = None,
    ) -> None:
        self.trust = self._number("trust", trust)
        super().__init__(parameters, lr, momentum, weight_decay, clip=clip)

    def find_segments(self) -> None:
        super().find_segments()
        self.adapt = np.array([parameter.ndim > 1 for parameter in self.trained], bool)  # one per segment

    def update(self, lr: np.ndarray, scale: float) -> None:
        self.norms(self.theta, self.theta_squares)
        if not self.clip:  # with clipping, `scale` has computed these norms
            self.norms(self.grad, self.grad_squares)
        vectors = self.theta, self.grad, self.kept("velocity")
        options = self.momentum, self.trust, self.theta_squares, self.grad_squares, scale
        self.device.optim.lars(*vectors, self.starts, self.stops, lr, self.decays, self.adapt, *options)
