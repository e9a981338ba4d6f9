"""Cases of code that reads settings. A case is a model that calls a function, and a change of what it reads."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from minidl import nn
from minidl.engine.tensor import Tensor
from tests.twins import Twins, batch, plain

Case = tuple[Callable[[], Any], Callable[[], Any]]  # how to build the model, how to change what it reads
FACTOR = {"p": 1.0}


class Cases(dict[str, Callable[[], Case]]):
    """The cases of a file, by name."""

    def add(self, make: Callable[[], Case]) -> Callable[[], Case]:
        self[make.__name__.replace("_", " ")] = make
        return make


class Net(nn.Module):
    """A model whose output is multiplied by read(model)."""

    def __init__(self, read: Callable[[Any], Any], **settings: Any) -> None:
        self.fc, self.read = nn.Linear(4, 3), read
        for name, value in settings.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * float(self.read(self))


class Thing:
    """An object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def reading(read: Callable[[Any], Any], change: Callable[[], Any], **settings: Any) -> Case:
    return lambda: Net(read, **settings), change


def module(name: str, source: str, file: str | None = None, **variables: Any) -> types.ModuleType:
    """Return a new module, as if it had been imported."""
    made = types.ModuleType(name)
    vars(made).update(variables, **({} if file is None else {"__file__": file}))
    sys.modules[name] = made
    exec(source, vars(made))
    return made


def assert_noticed(case: Case) -> None:
    """Assert that the step is recorded, that a change affects the tape's result, and that the step has this result."""
    build, change = case
    twins = Twins(lambda: (build(), plain))
    twins.step(*batch())
    assert twins.replayed.programs, twins.replayed.not_recorded
    before = twins.tape.by_tape(*batch())
    change()
    twins.step(*batch())
    assert twins.tape.by_tape(*batch()) != before
    assert not twins.replayed.not_recorded
