"""Optimizers: each update is one fused pass over the arena's flat vectors. Clipping and LARS first compute norms.

A parameter group is a set of parameters with one learning rate and one weight decay. The kernels do not know
parameters: they update segments [start, stop) of the vectors, with a rate and a decay for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from minidl import models
from minidl.checked import one_of, real, shown
from minidl.engine.device import Device
from minidl.engine.parameter import Parameter
from minidl.errors import CheckpointError, ConfigError
from minidl.nn.groups import Parameters, arena_of, groups_of
from minidl.nn.groups import parameter_groups as parameter_groups
from minidl.nn.module import Module
from minidl.program.precompile import KernelCollector


class Optimizer:
    """The base class of all optimizers: groups, segments, clipping.

    parameters: a model, parameters, or groups. A group is a mapping with "params" and optionally "lr" and
        "weight_decay", which override the arguments. Parameters without an arena (see arena.py) are moved into a new
        one. Parameters with requires_grad = False are not updated.
    lr: the learning rate. The attribute may be changed before each step, for example by a schedule.
    weight_decay: the decay of all parameters whose group does not set one.
    clip: the maximum norm; a gradient with a larger norm is scaled down (Pascanu et al. 2013). None: no clipping.

    Raises ConfigError if a value is out of range, or if parameters repeat or are in different arenas.
    """

    fuses_neighbours = True  # whether adjacent parameters with equal rate and decay form one segment
    state_names: tuple[str, ...] = ("velocity",)  # the vectors that the rule keeps between steps

    def __init__(self, parameters: Parameters, lr: float, weight_decay: float = 0.0, clip: float | None = None) -> None:
        self.lr, weight_decay = self._number("lr", lr), self._number("weight_decay", weight_decay)
        self.clip, self.steps = None if clip is None else self._number("clip", clip), 0
        groups = groups_of(parameters)
        for group in groups:
            group |= {name: self._number(name, value) for name, value in group.items() if name != "params"}
            if group.get("lr") and not lr:
                raise ConfigError(f"{type(self).__name__}: lr = {lr}; a group with its own rate needs lr > 0")
        self.arena = arena_of(parameters, groups)
        self.state: Mapping[str, np.ndarray] = {name: self.arena.new_vector() for name in self.state_names}
        self.bound: dict[str, np.ndarray] = {}  # vectors that replace theta and grad of the arena
        self.device: Any = Device("cpu")
        self.gpu: Any = None  # on which the arena's vectors are
        self.options = {  # parameter -> (rate relative to lr, weight decay)
            parameter: (group["lr"] / lr if "lr" in group and lr else 1.0, group.get("weight_decay", weight_decay))
            for group in groups
            for parameter in group["params"]
        }
        self._move()

    def _move(self) -> None:
        """Compute where the arena's other users compute: on the CPU, or on a GPU, which then has the state, too."""
        state, self.gpu, self.device = dict(self.state), self.arena.gpu, Device("cpu")
        self.state = state
        if self.gpu is not None:
            from minidl.engine.cuda_optim import OptimOnGpu
            from minidl.engine.cuda_vectors import MirroredVectors

            self.device, self.state = OptimOnGpu(self.gpu), MirroredVectors(self.gpu, state)
        self.find_segments()

    def bind(self, theta: np.ndarray, grad: np.ndarray, **state: np.ndarray) -> None:
        """Make `step` update these vectors, which have the arena's layout, for one replica (comm/replica.py)."""
        self._require_cpu()
        self.bound, self.state = {"theta": theta, "grad": grad}, state

    @contextmanager
    def on(self, theta: np.ndarray | None) -> Iterator[None]:
        """Let `step` update this vector inside a `with` block. None: there is no other vector than before."""
        before = self.bound
        if theta is not None:
            self._require_cpu()
        self.bound = before if theta is None else {**before, "theta": theta}
        try:
            yield
        finally:
            self.bound = before

    def _require_cpu(self) -> None:
        if self.gpu is not None:
            raise ConfigError(f"{type(self).__name__} on {self.gpu.name} updates only the model's own weights: this "
                              "method needs device cpu")  # fmt: skip

    @property
    def theta(self) -> np.ndarray:
        return self.bound.get("theta", self.arena.theta) if self.gpu is None else self.arena.array("theta")

    @property
    def grad(self) -> np.ndarray:
        return self.bound.get("grad", self.arena.grad) if self.gpu is None else self.arena.array("grad")

    def kept(self, name: str) -> np.ndarray:
        """Return a vector of the state, for kernels."""
        state: Any = self.state
        return state[name] if self.gpu is None else state.array(name)

    def trainable(self) -> list[Parameter]:
        """Return the optimizer's parameters that now have requires_grad, in the arena's order."""
        return [p for p in self.arena.parameters.values() if p in self.options and p.requires_grad]

    def find_segments(self) -> None:
        """Compute the segments of the vectors to update, with a rate (relative to lr) and a decay for each."""
        self.trained = self.trainable()
        segments: list[list[float]] = []  # start, stop, rate relative to lr, decay
        adjacent = False  # whether the last segment ends with the previous parameter
        trained = set(self.trained)
        for slot, parameter in zip(self.arena.slots, self.arena.parameters.values(), strict=True):
            if parameter not in trained:
                adjacent = False
                continue
            rate, decay = self.options[parameter]
            if self.fuses_neighbours and adjacent and segments[-1][2:] == [rate, decay]:
                segments[-1][1] = slot.stop  # the gap between the parameters holds zeros, which stay zeros
            else:
                segments.append([slot.start, slot.stop, rate, decay])
            adjacent = True
        table = np.array(segments, np.float64).reshape(-1, 4)
        self.starts, self.stops = np.ascontiguousarray(table[:, :2].T).astype(np.int64)
        self.rates, self.decays = np.ascontiguousarray(table[:, 2:].T)
        # Memory that every step reuses: the rates of this step, and squared norms.
        self.rates_now, self.grad_squares, self.theta_squares = np.zeros((3, len(segments)))
        self.partial = np.zeros(self.device.optim.norms_partial(len(segments)))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy (deepcopy, pickle) in new memory: aligned like the arena's, and writable."""
        vars(self).update(state)
        vectors, self.state = self.state, {name: self.arena.new_vector() for name in self.state}
        for name, vector in vectors.items():
            self.state[name][:] = vector
        self._move()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"state": dict(self.state), "device": Device("cpu"), "gpu": None}

    def _number(self, name: str, value: Any, below: float = math.inf) -> float:
        """Return an argument as a float. Raises ConfigError unless it is a finite number >= 0 and below `below`."""
        return real(type(self).__name__, name, value, below=below)

    def step(self) -> None:
        """Update theta once, from grad. Raises ConfigError if a parameter has left the arena."""
        if self.arena.dissolved:
            raise ConfigError(f"{type(self).__name__}: its parameters have moved to another arena (the model, or a "
                              "part of it, was flattened again); build the optimizer again")  # fmt: skip
        if self.arena.gpu is not self.gpu:
            self._move()
        if [*map(id, self.trainable())] != [*map(id, self.trained)]:
            self.find_segments()
        self.steps += 1
        np.multiply(self.rates, self.lr, out=self.rates_now)
        self.update(self.rates_now, self.scale())
        self.arena.touch()

    def kernels(self) -> list[Any]:
        """Return the kernels that `step` calls, to be compiled in advance; on a GPU, the calls (cuda_launches.py)."""
        if self.gpu is not None:
            with self.device.collecting() as calls:
                self.update(self.rates_now, self.scale())
            return list(calls)
        device, collector = self.device, KernelCollector(self.device)
        self.device = collector
        try:
            self.update(self.rates_now, self.scale())
        finally:
            self.device = device
        return collector.kernels

    def update(self, lr: np.ndarray, scale: float) -> None:
        """Apply the update rule. lr: the rate of each segment. scale: the factor to multiply the gradient by first."""
        raise NotImplementedError

    def scale(self) -> float:
        """Return the factor that clips the gradient: min(1, clip / |grad|), or 1 without clipping."""
        if not self.clip:
            return 1.0
        self.norms(self.grad, self.grad_squares)
        norm = math.sqrt(self.grad_squares.sum())
        return min(1.0, self.clip / norm) if norm else 1.0

    def norms(self, vector: np.ndarray, squares: np.ndarray) -> None:
        """Write the squared norm of each segment of the vector into `squares`."""
        self.device.optim.norms(vector, self.starts, self.stops, self.partial, squares)

    def zero_grad(self) -> None:
        self.arena.zero_grad()

    def state_dict(self) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Return (vectors, numbers): copies of all that the next step needs besides theta and grad."""
        return {name: vector.copy() for name, vector in self.state.items()}, {"steps": self.steps}

    def load_state_dict(self, vectors: Mapping[str, np.ndarray], numbers: Mapping[str, float]) -> None:
        """Restore what `state_dict` returned; a missing vector becomes zero.

        Raises CheckpointError, before anything is changed, if a vector is unknown or has another shape.
        """
        for name, vector in vectors.items():
            if name not in self.state:
                raise CheckpointError(f"optimizer state {name}: unknown to {type(self).__name__}: another optimizer's?")
            if vector.shape != self.arena.theta.shape:
                raise CheckpointError(f"optimizer state {name}: {vector.shape}; expected {self.arena.theta.shape}")
        for name, own in self.state.items():
            own[:] = vectors.get(name, 0)
        self.steps = int(numbers["steps"])


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


# What the command line offers (see run/declared.py). All take lr, weight_decay and clip.
ABOUT = {
    "sgd": "SGD with momentum; weight decay is added to the gradient",
    "nesterov": "SGD with Nesterov's momentum",
    "sgdw": "SGD with momentum and decoupled weight decay (Loshchilov and Hutter 2019)",
    "adam": "Adam (Kingma and Ba 2015); weight decay is added to the gradient",
    "adamw": "Adam with decoupled weight decay (Loshchilov and Hutter 2019)",
    "lars": "SGD with momentum and a rate for each layer, for large batches (You, Gitman, Ginsburg 2017)",
}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "sgd": {"momentum": {"default": 0.9, "min": 0, "below": 1, "help": "fraction of the previous update that is kept"}},
    "nesterov": {"momentum": {"like": "sgd"}},
    "sgdw": {"momentum": {"like": "sgd"}},
    "adam": {},
    "adamw": {},
    "lars": {"momentum": {"like": "sgd"}},
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": SGD,
    "nesterov": partial(SGD, nesterov=True),
    "sgdw": partial(SGD, decoupled=True),
    "adam": Adam,
    "adamw": AdamW,
    "lars": LARS,
}


def build(
    name: str, model: Module, lr: float, weight_decay: float = 0.0, clip: float | None = None, **options: Any
) -> Optimizer:
    """Return the optimizer of that name, without weight decay for norms and biases.

    options: the options that OPTIONS declares for this optimizer, with the same defaults as on the command line.
    Raises ConfigError for an unknown name or option.
    """
    one_of("optimizer", name, OPTIMIZERS)
    models.check(f"optimizer {name}", model)
    defaults = {key: OPTIONS[entry.get("like", name)][key]["default"] for key, entry in OPTIONS[name].items()}
    if unknown := options.keys() - defaults.keys():
        raise ConfigError(f"optimizer {name}: unknown option {', '.join(sorted(unknown))}; expected "
                          f"{', '.join(['lr', 'weight_decay', 'clip', *defaults])}; the classes of minidl.optim take "
                          "more")  # fmt: skip
    Module.flatten(model)
    return OPTIMIZERS[name](parameter_groups(model), lr, weight_decay=weight_decay, clip=clip, **defaults | options)
