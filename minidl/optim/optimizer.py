"""The base class of all optimizers: parameter groups, segments, clipping, lookahead.

A parameter group is a set of parameters with one learning rate and one weight decay. The kernels do not know
parameters: they update segments [start, stop) of the vectors, with a rate and a decay for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from minidl.checked import real, shown, whole
from minidl.engine.arena import Arena
from minidl.engine.device import Device
from minidl.engine.parameter import Parameter
from minidl.engine.tensor import Tensor
from minidl.errors import CheckpointError, ConfigError
from minidl.nn.module import Module
from minidl.program.precompile import Kernel, KernelCollector

Parameters = Module | Iterable[Parameter] | Sequence[Mapping[str, Any]]
SLOW = "slow"  # the name of lookahead's vector in the state


class Optimizer:
    """The base class of all optimizers.

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
    group_keys: tuple[str, ...] = ("lr", "weight_decay")  # what a group may contain besides "params"
    lookahead = 0  # steps between two returns to the slow weights; 0: never

    def __init__(self, parameters: Parameters, lr: float, weight_decay: float = 0.0, clip: float | None = None) -> None:
        self.lr, weight_decay = self._number("lr", lr), self._number("weight_decay", weight_decay)
        self.clip, self.steps = None if clip is None else self._number("clip", clip), 0
        groups = _groups(parameters, self.group_keys)
        for group in groups:
            group |= {name: self._number(name, group[name]) for name in ("lr", "weight_decay") if name in group}
            if group.get("lr") and not lr:
                raise ConfigError(f"{type(self).__name__}: lr = {lr}; a group with its own rate needs lr > 0")
        self.arena = _arena(parameters, groups)
        self.state = {name: self.arena.new_vector() for name in self.state_names}
        self.bound: dict[str, np.ndarray] = {}  # vectors that replace theta and grad of the arena
        self.device = Device("cpu")
        self.groups = groups
        self.options = {  # parameter -> (rate relative to lr, weight decay)
            parameter: (group["lr"] / lr if "lr" in group and lr else 1.0, group.get("weight_decay", weight_decay))
            for group in groups
            for parameter in group["params"]
        }
        self.find_segments()

    def bind(self, theta: np.ndarray, grad: np.ndarray, **state: np.ndarray) -> None:
        """Make `step` update these vectors, which have the arena's layout, for one replica (comm/replica.py)."""
        self.bound, self.state = {"theta": theta, "grad": grad}, state

    @contextmanager
    def on(self, theta: np.ndarray | None) -> Iterator[None]:
        """Let `step` update this vector inside a `with` block. None: there is no other vector than before."""
        before = self.bound
        self.bound = before if theta is None else {**before, "theta": theta}
        try:
            yield
        finally:
            self.bound = before

    def look_ahead(self, steps: int = 5, rate: float = 0.5) -> None:
        """After every `steps` steps, let the weights return to a slow average of themselves (Zhang et al. 2019).

            slow <- slow + rate * (theta - slow);  theta <- slow        slow = theta before the first step

        The slow weights are part of the state. Call this before the first step. Raises ConfigError if an argument is
        out of range.
        """
        self.lookahead, self.lookahead_rate = whole("lookahead", "steps", steps, 1), real("lookahead", "rate", rate)
        if not 0 < rate <= 1:
            raise ConfigError(f"lookahead: rate = {rate}; expected a number above 0, at most 1")
        self.state[SLOW] = self.arena.new_vector()

    @property
    def theta(self) -> np.ndarray:
        return self.bound.get("theta", self.arena.theta)

    @property
    def grad(self) -> np.ndarray:
        return self.bound.get("grad", self.arena.grad)

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
        self.find_segments()

    def _number(self, name: str, value: Any, below: float = math.inf) -> float:
        """Return an argument as a float. Raises ConfigError unless it is a finite number >= 0 and below `below`."""
        return real(type(self).__name__, name, value, below=below)

    def step(self) -> None:
        """Update theta once, from grad. Raises ConfigError if a parameter has left the arena."""
        if self.arena.dissolved:
            raise ConfigError(f"{type(self).__name__}: its parameters have moved to another arena (the model, or a "
                              "part of it, was flattened again); build the optimizer again")  # fmt: skip
        if [*map(id, self.trainable())] != [*map(id, self.trained)]:
            self.find_segments()
        if self.lookahead and not self.steps:
            self.state[SLOW][:] = self.theta
        self.steps += 1
        np.multiply(self.rates, self.lr, out=self.rates_now)
        self.update(self.rates_now, self.scale())
        if self.lookahead and self.steps % self.lookahead == 0:
            self._return_to_slow()
        self.arena.touch()

    def _return_to_slow(self) -> None:
        slow = self.state[SLOW]
        self.device.mix.mix(slow, self.theta, self.lookahead_rate)
        self.device.elementwise.copy(slow, self.theta)

    def kernels(self) -> list[Kernel]:
        """Return the kernels that `step` calls, to be compiled in advance."""
        device, collector = self.device, KernelCollector(self.device)
        self.device = collector  # type: ignore[assignment]
        try:
            self.update(self.rates_now, self.scale())
            if self.lookahead:
                self._return_to_slow()
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


def _groups(parameters: Parameters, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return the parameters as a list of groups. Raises ConfigError if they are not valid."""
    items = _listed(parameters.parameters() if isinstance(parameters, Module) else parameters)
    given: list[Mapping[str, Any]] = items if any(isinstance(item, Mapping) for item in items) else [{"params": items}]
    for group in given:
        if not isinstance(group, Mapping):
            raise ConfigError(f"optimizer: groups and a {type(group).__name__} in one list; expected one kind only")
        if "params" not in group or not set(group) <= {"params", *keys}:
            raise ConfigError(f"parameter group with {', '.join(group)}; expected params, optionally {', '.join(keys)}")
    groups = [{**group, "params": _listed(group["params"])} for group in given]  # an iterator could be read only once
    every = [p for group in groups for p in group["params"]]
    for p in every:
        if not isinstance(p, Parameter):
            raise ConfigError(f"optimizer: a {type(p).__name__} among the parameters; expected nn.Parameter")
    if not every or len(set(every)) < len(every):
        raise ConfigError("optimizer: no parameters, or one given twice or in two groups")
    return groups


def _listed(parameters: Any) -> list[Any]:
    if isinstance(parameters, Tensor | str) or not isinstance(parameters, Iterable):
        raise ConfigError(f"optimizer: {shown(parameters)} in place of parameters; expected a model, or a list of "
                          "nn.Parameter or of groups")  # fmt: skip
    return list(parameters)


def _arena(parameters: Parameters, groups: list[dict[str, Any]]) -> Arena:
    """Return the arena of the parameters: a new one if they are in none. Raises ConfigError if they are in several."""
    if isinstance(parameters, Module):
        return Module.flatten(parameters)
    every = [parameter for group in groups for parameter in group["params"]]
    arenas = {parameter.arena for parameter in every}
    if len(arenas) > 1:
        raise ConfigError("optimizer: its parameters are not in one arena; first flatten one model with all of them")
    arena = arenas.pop()
    return arena if isinstance(arena, Arena) else Arena({str(i): p for i, p in enumerate(every)})
