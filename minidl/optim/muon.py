"""Muon: an update whose singular values are all about 1 (Jordan, Jin, Boza, You, Cesista, Newhouse, Bernstein 2024).

    v <- momentum * v + g
    u <- g + momentum * v                                          Nesterov's direction
    theta <- (1 - lr * decay) * theta - lr * s * orthogonal(u)     s = sqrt(max(1, outputs / inputs))

For u = U S V^T, the orthogonal matrix next to u is U V^T. A few Newton-Schulz steps come close to it:

    x <- u / |u|                                                   Frobenius norm: no singular value exceeds 1
    x <- a x + (b A + c A^2) x,  A = x x^T                         repeated; each singular value s becomes
                                                                   a s + b s^3 + c s^5
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from minidl.checked import shown, whole
from minidl.engine.device import Device
from minidl.errors import ConfigError, ShapeError
from minidl.ops.matmul import product, product_with_transposed, transposed_product
from minidl.optim.optimizer import Optimizer, Parameters

A, B, C = 3.4445, -4.7750, 2.0315  # Jordan's: steep at 0, and after 5 steps between about 0.7 and 1.2
EPS = 1e-7
UNCHANGED = -0.0  # the summand that changes no number: 0.0 would turn -0.0 into 0.0


class Matrix(NamedTuple):
    """A parameter that is orthogonalised: theta[start:stop] is a matrix (inputs, outputs). segment: its number."""

    segment: int
    start: int
    stop: int
    inputs: int
    outputs: int


class Muon(Optimizer):
    """Nesterov's momentum, then an orthogonal update of each matrix. The other parameters are updated as by SGD.

    A filter (kh, kw, in, out) is the matrix (kh * kw * in, out). A group with "orthogonal": False, and all parameters
    with at most one axis, are updated as by SGD with Nesterov's momentum `sgd_momentum` and coupled weight decay; give
    their groups an "lr". The weight decay of matrices is decoupled. The last layer should not be orthogonalised.

    ns_steps: the number of Newton-Schulz steps. normalise: before each update, scale each matrix to the Frobenius norm
    sqrt(outputs), in place of weight decay; for layers whose scale has no effect, because batch norm follows.
    """

    fuses_neighbours = False  # each matrix is a segment
    group_keys = ("lr", "weight_decay", "orthogonal")

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        normalise: bool = False,
        sgd_momentum: float = 0.9,
        clip: float | None = None,
    ) -> None:
        self.momentum = self._number("momentum", momentum, below=1)
        self.sgd_momentum = self._number("sgd_momentum", sgd_momentum, below=1)
        self.ns_steps, self.normalise = whole("Muon", "ns_steps", ns_steps, 1), normalise
        super().__init__(parameters, lr, weight_decay, clip)

    def find_segments(self) -> None:
        super().find_segments()
        for group in self.groups:
            if not isinstance(group.get("orthogonal", True), bool):
                raise ConfigError(f"Muon: orthogonal = {shown(group['orthogonal'])}; expected True or False")
        plain = {p for group in self.groups if not group.get("orthogonal", True) for p in group["params"]}
        self.matrices = [
            Matrix(i, int(start), int(stop), parameter.size // parameter.shape[-1], parameter.shape[-1])
            for i, (start, stop, parameter) in enumerate(zip(self.starts, self.stops, self.trained, strict=True))
            if parameter.ndim > 1 and parameter.size and parameter not in plain
        ]
        chosen = {matrix.segment for matrix in self.matrices}
        self.orthogonal = np.array(sorted(chosen), np.int64)  # segments
        self.others = np.array([i for i in range(len(self.trained)) if i not in chosen], np.int64)
        self.direction = self.arena.new_vector()
        self.direction_squares, self.weight_squares = np.zeros((2, len(chosen)))

    def update(self, lr: np.ndarray, scale: float) -> None:
        self._require_cpu()  # its products are not on the GPU yet
        device, theta, direction = self.device, self.theta, self.direction
        vectors = theta, self.grad, self.kept("velocity")
        # The same kernel updates the velocity of the matrices, at the rate 0.
        none = np.zeros(len(self.orthogonal))
        for segments, rate, decay, momentum in (
            (self.others, lr[self.others], self.decays[self.others], self.sgd_momentum),
            (self.orthogonal, none, none, self.momentum),
        ):
            ranges = self.starts[segments], self.stops[segments]
            device.optim.sgd(*vectors, *ranges, rate, decay, momentum, True, False, scale)
        device.elementwise.affine(self.kept("velocity"), self.momentum, UNCHANGED, direction)
        device.mix.axpy(float(scale), self.grad, direction)
        device.optim.norms(direction, *ranges, self.partial, self.direction_squares)
        if self.normalise:
            device.optim.norms(theta, *ranges, self.partial, self.weight_squares)
        norms, weight_norms = np.sqrt(self.direction_squares).tolist(), np.sqrt(self.weight_squares).tolist()
        for (segment, start, stop, inputs, outputs), norm, weight_norm in zip(self.matrices, norms, weight_norms):
            part, weights = direction[start:stop], theta[start:stop]
            device.elementwise.affine(part, 1 / (norm + EPS), UNCHANGED, part)
            found = newton_schulz(device, part.reshape(inputs, outputs), self.ns_steps)
            keep = 1 - float(lr[segment] * self.decays[segment])
            if self.normalise and weight_norm:
                keep *= math.sqrt(outputs) / weight_norm
            device.elementwise.affine(weights, keep, UNCHANGED, weights)
            device.mix.axpy(-float(lr[segment]) * math.sqrt(max(1, outputs / inputs)), found.reshape(-1), weights)


def orthogonalise(matrix: np.ndarray, steps: int = 5) -> np.ndarray:
    """Return about the orthogonal matrix next to a matrix (m, n), float32 or float64: singular values near 1.

    Raises ShapeError for anything else.
    """
    if not isinstance(matrix, np.ndarray) or matrix.ndim != 2 or matrix.dtype.name not in ("float32", "float64"):
        raise ShapeError(f"orthogonalise: {shown(matrix)}; expected a matrix (m, n) of float32 or float64")
    norm = float(np.sqrt(np.square(matrix, dtype=np.float64).sum()))
    return newton_schulz(Device("cpu"), np.ascontiguousarray(matrix * matrix.dtype.type(1 / (norm + EPS))), steps)


def newton_schulz(device: Any, x: np.ndarray, steps: int) -> np.ndarray:
    """Return x (m, n), whose norm is at most 1, after some Newton-Schulz steps. The array x is overwritten.

    The polynomial is computed on the shorter side: A = x x^T and (b A + c A^2) x, or A = x^T x and x (b A + c A^2).
    Both are the same matrix. The product of two matrices of the shorter side costs little.
    """
    memory = Device(device.name)
    tall, side = x.shape[0] > x.shape[1], min(x.shape)
    y, none = memory.empty(x.shape, x.dtype), memory.empty((0,), x.dtype)
    gram, polynomial = (memory.empty((side, side), x.dtype) for _ in range(2))
    for _ in range(steps):
        (transposed_product if tall else product_with_transposed)(device, x, x, gram)
        product(device, gram, gram, none, polynomial)
        device.elementwise.affine(polynomial.reshape(-1), C, UNCHANGED, polynomial.reshape(-1))
        device.mix.axpy(B, gram.reshape(-1), polynomial.reshape(-1))
        product(device, *((x, polynomial) if tall else (polynomial, x)), none, y)
        device.mix.axpy(A, x.reshape(-1), y.reshape(-1))
        x, y = y, x
    return x
