"""Calls are moved, merged, removed or computed in place only if no result changes."""

from __future__ import annotations

import copy
import gc
import importlib
import math
import random
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import Arrays

from minidl import nn, ops
from minidl.engine.device import Device, address, aligned
from minidl.engine.tensor import Tensor
from minidl.program.dependence import FIRST_WRITTEN, accesses
from minidl.program.record import Call, Memory, Place, Recorder
from minidl.program.replay import Gradient, Prediction
from minidl.program.table import WORKSPACE, Program

OPS = (
    "activation", "conv", "conv_norm", "dropout", "elementwise", "group_norm", "matmul", "movement", "norm", "pool",
    "reduce", "softmax",
)  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_kernels_only_read_the_arguments_before_the_first_written_one(op: str) -> None:
    kernels = importlib.import_module(f"minidl.kernels.{op}.cpu")
    assert {name for name in FIRST_WRITTEN if name.startswith(f"{op}.")} == {f"{op}.{name}" for name in kernels.__all__}
    for name, given_arguments in importlib.import_module(f"kernel_cases.{op}").cases(Arrays("float32")):
        kernel = getattr(kernels, name)
        names = kernel.py_func.__code__.co_varnames[: kernel.py_func.__code__.co_argcount]
        arguments = copy.deepcopy(given_arguments)
        kernel(*(arguments[p] for p in names))
        first = FIRST_WRITTEN[f"{op}.{name}"]
        assert first in names
        for p in names[: names.index(first)]:
            if isinstance(arguments[p], np.ndarray):
                assert arguments[p].tobytes() == given_arguments[p].tobytes(), (name, p)


def test_an_unknown_kernel_counts_as_writing_all_its_arrays() -> None:
    places = {name: Place(Memory(np.zeros(2)), 0, np.zeros(2)) for name in ("x", "y")}
    assert accesses(Call("op.unknown", None, {**places, "n": 3})) == [(place, True) for place in places.values()]
    assert accesses(Call("activation.relu", None, places)) == [(places["x"], False), (places["y"], True)]


# -- random sequences of calls -------------------------------------------------------------------------------------

IMAGE, ROWS, SMALL = (2, 2, 2, 3), (8, 3), (2, 1, 1, 3)
Regions = dict[str, np.ndarray]


class Sequence:
    """A random sequence of kernel calls: parts of typical steps in random order, and other calls between them.

    The same seed makes the same calls on the CPU, which executes them, and on a recorder.
    """

    def __init__(self, device: Any, regions: Regions, seed: int) -> None:
        self.device, self.random = device, random.Random(seed)
        self.x, self.theta, self.grad, self.statistics = (
            [regions[name].reshape(-1, *shape)[i] for i in range(regions[name].size // math.prod(shape))]
            for name, shape in (("x", IMAGE), ("theta", (3,)), ("grad", IMAGE), ("statistics", (3,)))
        )
        self.images = list(self.x)
        self.smalls: list[np.ndarray] = []
        kinds = [self.norm, self.norm, self.residual, self.pool, self.gradient, self.disturb, self.map]
        parts = [self.random.choice(kinds)() for _ in range(self.random.randint(2, 7))]
        while parts:
            part = self.random.choice(parts)
            if next(part, "end") == "end":
                parts.remove(part)

    def empty(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.device.empty(shape, np.dtype(np.float32))

    def image(self) -> np.ndarray:
        """Return a random image: one of the inputs or of the results."""
        return self.random.choice(self.images)

    def elementwise(self, kernel: str, *inputs: np.ndarray) -> np.ndarray:
        out = self.empty(inputs[0].shape)
        op = self.device.activation if kernel.startswith("relu") else self.device.elementwise
        getattr(op, kernel)(*(a.reshape(-1) for a in inputs), out.reshape(-1))
        (self.images if out.shape == IMAGE else self.smalls).append(out)
        return out

    def batch_norm(self, x: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """Return batch norm's output, and the arrays that its gradient needs."""
        y, mean, rstd = self.empty(IMAGE), self.empty((3,)), self.empty((3,))
        weight, bias = self.theta[:2]
        running = self.random.choice([self.statistics[:2], self.statistics[2:]])
        partial = self.device.empty((1, 2, 3), np.dtype(np.float64))
        none = self.empty((0, 3))
        self.device.norm.batch_norm(
            x.reshape(ROWS), weight, bias, 1e-5, 0.1, none, False, *running, partial, mean, rstd, y.reshape(ROWS)
        )
        self.images.append(y)
        return y, (x.reshape(ROWS), weight, bias, mean, rstd)

    def norm(self) -> Iterator[None]:
        """Batch norm and relu, forward and backward."""
        y, saved = self.batch_norm(self.image())
        yield
        z = self.elementwise("relu", y)
        yield
        dy = self.elementwise("relu_backward", self.image(), z)
        yield
        dx, dweight, dbias = self.empty(IMAGE), self.empty((3,)), self.empty((3,))
        partial = self.device.empty((1, 2, 3), np.dtype(np.float64))
        self.device.norm.batch_norm_backward(
            dy.reshape(ROWS), *saved, False, partial, dx.reshape(ROWS), dweight, dbias
        )
        self.images.append(dx)

    def residual(self) -> Iterator[None]:
        """Batch norm, a sum and relu."""
        y, _ = self.batch_norm(self.image())
        yield
        total = self.elementwise("add", *self.random.sample([y, self.random.choice([y, self.image()])], 2))
        yield
        self.elementwise("relu", total)

    def pool(self) -> Iterator[None]:
        """Relu and max pool, forward and backward."""
        x = self.elementwise("relu", self.image())
        yield
        y, place = self.empty(SMALL), self.device.empty(SMALL, np.dtype(np.uint8))
        self.device.pool.max_pool(x, (2, 2), (2, 2), (0, 0), y, place)
        self.smalls.append(y)
        yield
        dx = self.empty(IMAGE)
        self.device.pool.max_pool_backward(self.random.choice(self.smalls), place, (2, 2), (2, 2), (0, 0), dx)
        self.images.append(dx)
        yield
        self.elementwise("relu_backward", dx, x)

    def gradient(self) -> Iterator[None]:
        """Copy a result into a gradient, and add an image."""
        target = self.random.choice(self.grad)
        source = self.elementwise("multiply", self.image(), self.image())
        yield
        self.device.elementwise.copy(source.reshape(-1), target.reshape(-1))
        yield
        self.device.elementwise.accumulate(self.image().reshape(-1), target.reshape(-1))

    def disturb(self) -> Iterator[None]:
        """Write into arrays that exist already."""
        for _ in range(self.random.randint(1, 4)):
            target = self.random.choice([*self.images[len(self.x) :], *self.smalls, *self.statistics, *self.grad])
            source = self.random.choice([a for a in (target, *self.images, *self.theta) if a.size == target.size])
            self.device.elementwise.affine(source.reshape(-1), 0.5, 0.25, target.reshape(-1))
            yield

    def map(self) -> Iterator[None]:
        """Compute new arrays from random arrays."""
        for kernel in ("add", "relu", "subtract", "relu_backward"):
            inputs = [self.random.choice([*self.images, *self.grad]) for _ in range(1 + (kernel != "relu"))]
            self.elementwise(kernel, *inputs)
            yield

    def results(self) -> dict[str, np.ndarray]:
        """Return some of the results. All others are temporaries: the program may reuse their memory or omit them."""
        found = [*self.images[len(self.x) :], *self.smalls]
        return {str(i): array for i, array in enumerate(found) if self.random.random() < 0.3 or i == len(found) - 1}


def regions(seed: int) -> Regions:
    rng = np.random.default_rng(seed)
    shapes = {"x": (2, *IMAGE), "theta": (3, 3), "grad": (2, *IMAGE), "statistics": (4, 3)}
    return {name: rng.standard_normal(shape).astype(np.float32).reshape(-1) for name, shape in shapes.items()}


@given(st.integers(0, 10**9))
def test_a_program_computes_the_same_bits_as_its_calls(seed: int) -> None:
    device = Device("cpu")
    expected = regions(seed)
    sequence = Sequence(device, expected, seed)
    expected |= sequence.results()

    recorder, found = Recorder(device), regions(seed)
    inputs = {name: recorder.region(name, array) for name, array in found.items()}
    with recorder.active():
        recorded = Sequence(recorder, inputs, seed)
    program = Program(recorder, recorded.results())
    workspace = aligned(program.workspace_size, np.uint8)
    workspace[:] = 255  # NaN
    program.run({name: address(array) for name, array in {**found, WORKSPACE: workspace}.items()})
    for name, (offset, like) in program.results.items():
        found[name] = workspace[offset : offset + like.nbytes].view(like.dtype)
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in expected.items()
    }


# -- models --------------------------------------------------------------------------------------------------------


class Siamese(nn.Module):
    """Two inputs go through the same layers. The order of the two batch norms matters for the running statistics."""

    def __init__(self) -> None:
        self.encode, self.norm, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        u, v = self.norm(self.encode(x)), self.norm(self.encode(x * 0.5))
        return self.last(ops.flatten(ops.global_avg_pool2d(ops.relu(v) - ops.relu(u))))


class Shared(nn.Module):
    """A random network with few layers, each of which may be used several times."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed).randrange
        self.steps = [(draw(7), draw(3), draw(9), draw(2)) for _ in range(3 + draw(7))]
        self.pools = bool(draw(2))
        self.conv = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1, bias=False)])
        self.norm = nn.BatchNorm2d(4)
        self.tied, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for kind, i, j, k in self.steps:
            a, b = found[-1 - i % len(found)], found[j % len(found)]
            if kind == 0:
                new = self.conv[k](a)
            elif kind <= 2:
                new = self.norm(a)
            elif kind == 3:
                new = ops.relu(a)
            elif kind == 4:
                new = a + b if k else a - b
            elif kind == 5:
                new = self.tied(a)
            else:
                new = ops.relu(self.norm(a) + b)
            found.append(new)
        y = found[-1] + found[-2]
        if self.pools:
            y = ops.max_pool2d(ops.relu(y), 2)
        y = ops.global_avg_pool2d(y).reshape(-1, 4)
        return self.last(self.tied(y) + y @ self.tied.weight)


def step(model: nn.Module, shape: tuple[int, ...], replay: bool) -> list[Any]:
    """Return loss, gradient and statistics after two steps."""
    gradient = Gradient(model, ops.cross_entropy)
    for seed in (0, 1):
        rng = np.random.default_rng(seed)
        x, y = rng.standard_normal((5, *shape)).astype(np.float32), rng.integers(3, size=5)
        result = gradient(x, y) if replay else gradient.by_tape(x, y)
    assert not gradient.not_recorded
    assert model.arena is not None
    statistics = model.statistics.theta.tobytes() if model.statistics is not None else b""
    return [result, model.arena.grad.tobytes(), statistics]


def test_a_batch_norm_that_is_used_twice() -> None:
    nn.seed(0)
    model = Siamese()
    twin = copy.deepcopy(model)
    assert step(model, (6, 6, 3), replay=True) == step(twin, (6, 6, 3), replay=False)


@given(st.integers(0, 10**9))
def test_shared_layers_tied_weights_and_sums_of_the_same_arrays(seed: int) -> None:
    nn.seed(seed)
    model = Shared(seed)
    twin = copy.deepcopy(model)
    assert step(model, (4, 4, 4), replay=True) == step(twin, (4, 4, 4), replay=False)


def test_a_recording_keeps_no_batch_alive() -> None:
    """No reference cycle keeps the batch: it is freed without Python's garbage collector."""
    gradient = Gradient(nn.Linear(4, 3), ops.cross_entropy)
    x, y = np.zeros((2, 4), np.float32), np.zeros(2, np.int64)
    alive = weakref.ref(x)
    gc.disable()
    try:
        gradient.prepare(x, y)
        del x
        assert alive() is None
    finally:
        gc.enable()


class Recurrent(nn.Module):
    def __init__(self, steps: int) -> None:
        self.steps, self.inputs, self.hidden = steps, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for _ in range(self.steps):
            h = ops.relu(self.inputs(x) + self.hidden(h))
        return h


def test_the_work_of_a_recording_grows_linearly_with_the_model() -> None:
    """For twice the layers, a new batch size must need at most 2.2 times as many calls of Python functions."""

    def work(steps: int) -> int:
        gradient, calls = Gradient(Recurrent(steps), ops.cross_entropy), 0
        x, y = np.zeros((2, 4), np.float32), np.zeros(2, np.int64)
        gradient.prepare(x, y)  # compiles

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            gradient.prepare(x[:1], y[:1])
        finally:
            sys.setprofile(None)
        return calls

    assert work(120) < 2.2 * work(60)


def test_calls_whose_results_are_not_read_are_removed() -> None:
    """A prediction needs no copies of the running statistics for a backward pass; a gradient through them does."""
    nn.seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GlobalAvgPool2d(), nn.Flatten(), nn.Linear(4, 2)
    model = nn.Sequential(*layers).eval()
    x, y = np.random.default_rng(0).standard_normal((2, 5, 5, 3), np.float32), np.array([0, 1])
    predict, gradient = Prediction(model), Gradient(model, ops.cross_entropy)
    np.testing.assert_array_equal(predict(x), model(x).numpy())
    gradient(x, y)
    (forward,), (both,) = predict.programs.values(), gradient.programs.values()
    assert forward.calls[:3] == ["norm.fold", "conv.forward", "reduce.sum"]
    assert both.calls[:5] == ["conv.forward", "norm.fold", "norm.affine", "movement.copy", "movement.copy"]
