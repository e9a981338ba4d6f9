"""Copies of models, optimizers, gradients and tensors: by deepcopy, by pickle, by copy."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minidl import nn, ops, optim
from minidl.engine import random
from minidl.engine.arena import Arena
from minidl.engine.parameter import Parameter
from minidl.engine.tensor import Tensor
from minidl.errors import ConfigError, MinidlError
from minidl.program.replay import Gradient, Prediction
from minidl.program.workspace import Workspace
from minidl.run.evaluation import predict


def out_of_band(thing: Any) -> Any:
    """Return a copy, made by pickle, whose arrays come from read-only buffers."""
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(thing, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(text, buffers=[bytes(buffer.raw()) for buffer in buffers])


WAYS: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "out of band": out_of_band} | {
    f"pickle {protocol}": lambda thing, protocol=protocol: pickle.loads(pickle.dumps(thing, protocol))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
}
X = np.random.default_rng(0).standard_normal((6, 5, 5, 2)).astype(np.float32)
Y = np.arange(6) % 3


class Tied(nn.Module):
    """A model with tied weights, a module with two names, a frozen parameter, batch norm and dropout."""

    def __init__(self) -> None:
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.square, self.again = nn.Linear(4, 4), nn.Linear(4, 4)
        self.again.weight = self.square.weight
        self.same = self.square
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(4, 3)
        self.last.bias.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        x = ops.relu(self.norm(self.conv(x))).mean((1, 2))
        return self.last(self.drop(self.same(self.again(self.square(x)))))


def network(seed: int = 0) -> Tied:
    nn.seed(seed)
    return Tied()


def steps(model: nn.Module, optimizer: optim.Optimizer, count: int, gradient: Gradient | None = None) -> list[Any]:
    """Make steps; return all that they compute, as bytes and numbers."""
    random.set_random_state({"seed": 7, "offset": 0})
    found: list[Any] = []
    for step in range(count):
        x = X + np.float32(step)
        if gradient is not None:
            found.append(gradient(x, Y))
        else:
            optimizer.zero_grad()
            loss = ops.cross_entropy(model(x), Y)
            loss.backward()
            found.append(loss.item())
        optimizer.step()
        found += [value.tobytes() for value in model.state_dict().values()]
        found += [vector.tobytes() for vector in optimizer.state.values()] + [optimizer.steps]
    return found


def values(model: nn.Module) -> bytes:
    return b"".join(value.tobytes() for value in model.state_dict().values())


@pytest.mark.parametrize(
    ("kind", "way"), [("adam", way) for way in WAYS] + [(kind, "deepcopy") for kind in optim.OPTIMIZERS]
)
def test_a_model_and_its_optimizer_continue_in_the_middle_of_training(kind: str, way: str) -> None:
    model = network()
    optimizer = optim.build(kind, model, 0.05)
    steps(model, optimizer, 2)
    optimizer.zero_grad()
    ops.cross_entropy(model(X), Y).backward()  # the copy also has gradients
    twin, its_optimizer = WAYS[way]((model, optimizer))
    before = values(model)
    assert its_optimizer.arena is twin.arena is not model.arena and its_optimizer.steps == optimizer.steps
    assert twin.arena.grad.tobytes() == model.arena.grad.tobytes()
    after = steps(twin, its_optimizer, 3)
    assert values(model) == before != values(twin)
    assert after == steps(model, optimizer, 3)
    for parameter in twin.parameters():
        assert np.shares_memory(parameter.data, twin.arena.theta)
    assert not np.shares_memory(twin.arena.theta, model.arena.theta)


def prepared(flat: bool) -> Tied:
    """Return a model with gradients. One module is in training mode, the others in evaluation mode."""
    model = network().eval()
    model.norm.train()
    if flat:
        model.flatten()
    ops.cross_entropy(model(X), Y).backward()
    return model


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_copied_model_has_the_same_structure_and_is_trained(way: str, flat: bool) -> None:
    model, equal = prepared(flat), prepared(flat)
    twin = WAYS[way](model)
    assert (twin.arena is None) is not flat and values(twin) == values(model)
    assert twin.same is twin.square and twin.again.weight is twin.square.weight is not model.square.weight
    assert not twin.last.bias.requires_grad and twin.conv.weight.torch_axes == (3, 2, 0, 1)
    assert [m.training for _, m in twin.named_modules()] == [m.training for _, m in model.named_modules()]
    for own, other in zip(twin.parameters(), model.parameters(), strict=True):
        assert (own._grad is None) is (other._grad is None)
        assert own._grad is None or (own._grad.tobytes() == other._grad.tobytes() and own.arena is twin.arena)
    before = values(model)
    assert steps(twin, optim.SGD(twin, 0.1), 2) == steps(equal, optim.SGD(equal, 0.1), 2)
    assert values(model) == before != values(twin)


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_and_a_prediction_continue(way: str) -> None:
    model = network()
    optimizer = optim.SGD(model, 0.05, momentum=0.9)
    workspace = Workspace()
    gradient = Gradient(model, ops.cross_entropy, workspace=workspace, progress=lambda ready, total: None)
    prediction = Prediction(model, workspace=workspace)
    steps(model, optimizer, 2, gradient)
    prediction(X)
    twin, its_optimizer, its_gradient, its_prediction = WAYS[way]((model, optimizer, gradient, prediction))
    assert its_gradient.model is twin is its_prediction.model and its_gradient.arena is its_optimizer.arena
    assert its_gradient.workspace is its_prediction.workspace is not workspace
    before = values(model)
    after = steps(twin, its_optimizer, 2, its_gradient)
    assert values(model) == before and after == steps(model, optimizer, 2, gradient)
    assert its_prediction(X).tobytes() == prediction(X).tobytes()
    assert its_gradient.programs and not its_gradient.not_recorded


def test_a_copy_of_an_optimizer_has_its_own_parameters() -> None:
    model = network()
    optimizer = optim.Adam(model.parameters())
    for way in WAYS.values():
        twin = way(optimizer)
        before = values(model)
        twin.arena.grad[:] = 1
        theta = twin.arena.theta.copy()
        twin.step()
        assert (twin.arena.theta != theta).any() and values(model) == before
        assert all(parameter.arena is twin.arena for parameter in twin.options)
        assert twin.theta.ctypes.data % 64 == twin.state["first_moment"].ctypes.data % 64 == 0


def test_an_arena_that_was_dissolved_stays_dissolved() -> None:
    model = network()
    part = optim.SGD(model.last.parameters(), 0.1)
    whole = optim.SGD(model, 0.1)
    for way in WAYS.values():
        for first in (True, False):
            twins = way((part, model, whole) if first else (whole, model, part))
            its_part, its_whole = (twins[0], twins[2]) if first else (twins[2], twins[0])
            assert its_whole.arena is twins[1].arena and its_part.arena.dissolved and not its_whole.arena.dissolved
            its_whole.step()
            with pytest.raises(ConfigError, match="moved to another arena"):
                its_part.step()


def test_copies_of_tensors_have_no_graph() -> None:
    x = Tensor(np.arange(3.0), requires_grad=True)
    (x * x).sum().backward()
    y = x * 2
    for way in [*WAYS.values(), copy.copy]:
        leaf, computed = way(x), way(y)
        assert leaf.requires_grad and leaf.grad.tolist() == x.grad.tolist() and leaf.data.flags.writeable
        assert computed.creator is None and not computed.requires_grad and (computed == y).all()
        (leaf * 3).sum().backward()
        assert type(leaf) is Tensor and leaf.device is x.device and y.creator is not None


class Scaled(Parameter):
    """A parameter with two additional attributes, one in `__dict__` and one in a slot."""

    __slots__ = ("__dict__", "scale")


def test_attributes_of_subclasses_are_copied() -> None:
    weight = Scaled(np.ones((2, 3)), torch_axes=(1, 0))
    weight.scale, weight.note = 3.0, ["a"]
    holder = nn.Sequential()
    holder.weight, holder.last_output, holder.table = weight, Tensor([1.0], requires_grad=True) * 2, np.arange(3)
    for way in WAYS.values():
        twin = way(holder)
        assert (twin.weight.scale, twin.weight.note, twin.weight.torch_axes) == (3.0, ["a"], (1, 0))
        assert type(twin.weight) is Scaled and twin.weight.note is not weight.note
        assert twin.last_output.item() == 2 and twin.table.tolist() == [0, 1, 2]


class Restored(nn.Sequential):
    """A model that defines how it is pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "note": "copied"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def test_predict_changes_nothing_that_is_copied() -> None:
    model = Restored(nn.Flatten(), nn.Linear(50, 3))
    expected = predict(model, X)
    assert b"Prediction" not in pickle.dumps(model)
    for way in [*WAYS.values(), copy.copy]:
        twin = way(model)
        assert twin.note == "copied" and predict(twin, X).tobytes() == expected.tobytes()
        if way is not copy.copy:
            twin[1].weight.copy_(twin[1].weight.numpy() * 2)
            assert predict(twin, X).tobytes() != expected.tobytes() == predict(model, X).tobytes()


def test_a_shallow_copy_of_a_model_shares_its_parameters() -> None:
    model = network()
    arena = model.flatten()
    twin = copy.copy(model)
    assert twin.flatten() is arena and twin.conv is model.conv
    before = values(model)
    steps(twin, optim.SGD(twin, 0.1), 1)
    assert values(twin) == values(model) != before
    twin.last = nn.Linear(4, 3)
    assert model.last is not twin.last
    with pytest.raises(MinidlError, match=r"copy\.copy of an arena .* use copy\.deepcopy"):
        copy.copy(arena)
    assert arena.holds(dict(model.named_parameters()))


def test_a_copied_arena_keeps_its_version_and_which_gradients_are_zero() -> None:
    arena = network().flatten()
    arena.touch()
    arena.zero_grad()
    twin: Arena = copy.deepcopy(arena)
    assert twin.version == arena.version and twin.layout_hash == arena.layout_hash
    assert twin.cleared == set(twin.parameters.values()) and arena.cleared == set(arena.parameters.values())


PROCESS = """
import pickle, sys
import numpy as np
model, optimizer, gradient, x, y = pickle.load(open(sys.argv[1], "rb"))
print(gradient(x, y))
optimizer.step()
print(gradient(x, y), optimizer.steps, float(model.arena.theta.sum()))
"""


def test_a_pickle_continues_in_another_process(tmp_path: Path) -> None:
    nn.seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(50, 3))
    optimizer = optim.Adam(model)
    gradient = Gradient(model, ops.cross_entropy)
    gradient(X, Y)
    optimizer.step()
    (tmp_path / "all").write_bytes(pickle.dumps((model, optimizer, gradient, X, Y)))
    found = subprocess.run(
        [sys.executable, "-c", PROCESS, str(tmp_path / "all")], capture_output=True, text=True, check=True
    )
    first = gradient(X, Y)
    optimizer.step()
    expected = [f"{first}", f"{gradient(X, Y)} {optimizer.steps} {float(model.arena.theta.sum())}"]
    assert found.stdout.splitlines() == expected
