"""Settings in unusual places: a recorded step notices that they change."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import enum
import functools
import itertools
import operator
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from minidl import nn, optim
from minidl.engine.tensor import Tensor
from tests.twins import Loss, Twins, batch, plain

VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("VARIABLE", default=1.0)
LOCAL = threading.local()
OTHER = types.ModuleType("other")  # a module of the user
SOURCE = """
FACTOR = 1.0
def factor():
    return FACTOR
"""


class AttributeDict(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


class Delegate:
    def __init__(self) -> None:
        self._content = {"p": 1.0}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_content"][name]


class Parent:
    p = 1.0
    count = 0

    @classmethod
    def of_class(cls) -> float:
        return cls.p


class Child(Parent):
    pass


class Kind(enum.Enum):
    ONE, TWO = 1, 2


@dataclass(frozen=True)
class Frozen:
    p: float = 1.0


class Descriptor:
    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return owner.__dict__.get("_value", 1.0)

    def __set__(self, owner: Any, value: float) -> None:
        owner.__dict__["_value"] = value


class Net(nn.Module):
    """A model whose output is multiplied by read(model)."""

    __slots__ = ("in_slot",)
    described: Any = Descriptor()

    def __init__(self, setting: Any, read: Callable[[Net], Any]) -> None:
        self.fc, self.setting, self.read, self.in_slot = nn.Linear(4, 3), setting, read, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * float(self.read(self))


def matched(net: Net) -> float:
    match net.setting:
        case Frozen(1.0):
            return 1.0
        case Frozen(p=2.0):
            return 5.0
    return 3.0


def imported(net: Net) -> float:
    from other import FACTOR  # type: ignore[import-not-found]

    return FACTOR  # type: ignore[no-any-return]


def counting() -> Callable[[], float]:
    def function() -> float:
        return function.count  # type: ignore[attr-defined,no-any-return]

    function.count = 1.0  # type: ignore[attr-defined]
    return function


Case = tuple[Callable[[], Any], Callable[[Net], Any], Callable[[Net], Any]]  # the setting, how to read and to change it
CASES: dict[str, Case] = {
    "namespace": (lambda: types.SimpleNamespace(p=1.0), lambda n: n.setting.p, lambda n: setattr(n.setting, "p", 2.0)),
    "attribute dict": (lambda: AttributeDict(a=AttributeDict(p=1.0)), lambda n: n.setting.a.p,
                       lambda n: n.setting.a.update(p=2.0)),
    "computed attribute": (Delegate, lambda n: n.setting.p, lambda n: n.setting._content.update(p=2.0)),
    "class attribute": (Parent, lambda n: n.setting.p, lambda n: setattr(Parent, "p", Parent.p + 1)),
    "attribute added to a subclass": (Child, lambda n: n.setting.p, lambda n: setattr(Child, "p", Parent.p + 2)),
    "attribute added to an instance": (Child, lambda n: n.setting.p, lambda n: setattr(n.setting, "p", 7.0)),
    "class method": (Parent, lambda n: n.setting.of_class(), lambda n: setattr(Parent, "p", Parent.p + 1)),
    "enumeration": (lambda: Kind.ONE, lambda n: n.setting.value, lambda n: setattr(n, "setting", Kind.TWO)),
    "frozen": (Frozen, lambda n: n.setting.p, lambda n: object.__setattr__(n.setting, "p", 2.0)),
    "match": (Frozen, matched, lambda n: object.__setattr__(n.setting, "p", 2.0)),
    "context variable": (lambda: None, lambda n: VARIABLE.get(), lambda n: VARIABLE.set(VARIABLE.get() + 1)),
    "thread-local": (lambda: None, lambda n: LOCAL.p, lambda n: setattr(LOCAL, "p", 3.0)),
    "attrgetter": (lambda: (operator.attrgetter("p"), Child()), lambda n: n.setting[0](n.setting[1]),
                   lambda n: setattr(n.setting[1], "p", 9.0)),
    "getattr": (lambda: 1.0, lambda n: getattr(n, "sett" + "ing"), lambda n: setattr(n, "setting", 2.0)),
    "vars": (Child, lambda n: vars(n.setting).get("p", 1.0), lambda n: setattr(n.setting, "p", 2.0)),
    "named tuple": (lambda: collections.namedtuple("N", "p")([1.0]), lambda n: n.setting.p[0],
                    lambda n: n.setting.p.__setitem__(0, 2.0)),
    "defaultdict": (lambda: collections.defaultdict(float, p=1.0), lambda n: n.setting["p"],
                    lambda n: n.setting.update(p=2.0)),
    "UserDict": (lambda: collections.UserDict(p=1.0), lambda n: n.setting["p"], lambda n: n.setting.update(p=2.0)),
    "array without axes": (lambda: np.array(1.0), lambda n: n.setting, lambda n: n.setting.__iadd__(1)),
    "strided array": (lambda: np.ones((4, 4))[::2, 1], lambda n: n.setting[1], lambda n: n.setting.__setitem__(1, 2)),
    "array.array": (lambda: array.array("d", [1.0]), lambda n: n.setting[0], lambda n: n.setting.__setitem__(0, 2.0)),
    "bytearray": (lambda: bytearray(b"a"), lambda n: n.setting[0], lambda n: n.setting.__setitem__(0, 2)),
    "ctypes": (lambda: ctypes.c_double(1.0), lambda n: n.setting.value, lambda n: setattr(n.setting, "value", 2.0)),
    "weak reference": (lambda: (p := Child(), weakref.ref(p)), lambda n: n.setting[1]().p,
                       lambda n: setattr(n.setting[0], "p", 2.0)),
    "attribute of a function": (counting, lambda n: n.setting(), lambda n: setattr(n.setting, "count", 2.0)),
    "slot of the module": (lambda: None, lambda n: n.in_slot, lambda n: setattr(n, "in_slot", 2.0)),
    "descriptor": (lambda: None, lambda n: n.described, lambda n: setattr(n, "described", 2.0)),
    "module": (lambda: None, lambda n: OTHER.FACTOR, lambda n: setattr(OTHER, "FACTOR", 5.0)),
    "function of a module": (lambda: None, lambda n: OTHER.factor(), lambda n: setattr(OTHER, "FACTOR", 6.0)),
    "import in the function": (lambda: None, imported, lambda n: setattr(OTHER, "FACTOR", 7.0)),
    "optimizer": (lambda: optim.SGD(nn.Linear(2, 2), lr=0.5), lambda n: n.setting.lr,
                  lambda n: setattr(n.setting, "lr", 0.25)),
    "partial": (lambda: functools.partial(lambda p: p["p"], {"p": 1.0}), lambda n: n.setting(),
                lambda n: n.setting.args[0].update(p=3.0)),
    "text": (lambda: "a", lambda n: len(n.setting), lambda n: setattr(n, "setting", "abc")),
}  # fmt: skip


@pytest.fixture(autouse=True)
def other() -> Iterator[None]:
    exec(SOURCE, vars(OTHER))
    sys.modules["other"], LOCAL.p = OTHER, 1.0
    yield
    del sys.modules["other"]


@pytest.mark.parametrize("name", CASES)
def test_a_setting_that_changes_is_noticed(name: str) -> None:
    make, read, change = CASES[name]
    twins = Twins(lambda: (Net(make(), read), plain))
    twins.step(*batch())
    assert twins.replayed.programs, twins.replayed.not_recorded
    twins.change(lambda g: change(g.model))
    twins.step(*batch())
    assert not twins.replayed.not_recorded


REFUSED: dict[str, tuple[Callable[[], Any], Callable[[Net], Any], str]] = {
    "cycle": (lambda: itertools.cycle([1.0, 1.0, 1.0, 2.0]), lambda n: next(n.setting), "iterator"),
    "generator": (lambda: (float(i // 3) for i in range(99)), lambda n: next(n.setting), "iterator"),
    "clock": (lambda: None, lambda n: time.time() > 0, "differ from call to call"),
    "environment": (lambda: None, lambda n: os.environ.get("X", 1.0), "differ from call to call"),
    "weights": (lambda: None, lambda n: np.abs(n.arena.theta).max(), "values are read"),
    "RandomState": (lambda: np.random.RandomState(0), lambda n: n.setting.rand() > 2, "draws random numbers"),
    "objects": (lambda: np.array([1.0, None]), lambda n: n.setting[0], "array of objects"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compared_is_refused(name: str) -> None:
    make, read, reason = REFUSED[name]
    twins = Twins(lambda: (Net(make(), read), plain))
    with pytest.warns(UserWarning, match=reason):
        for _ in range(5):
            twins.step(*batch())


def test_weights_and_layers_that_are_replaced_are_noticed() -> None:
    def build() -> tuple[nn.Module, Loss]:
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4)), plain

    def swap(model: Any) -> None:
        first, second = model[1], model[2]
        setattr(model, "1", second)
        setattr(model, "2", first)

    twins = Twins(build)
    changes: list[Callable[[Any], None]] = [
        swap,
        lambda m: setattr(m[3], "weight", m[0].weight),
        lambda m: setattr(m[4], "running_mean", type(m[4].running_mean)(np.ones(4, np.float32))),
        lambda m: setattr(m[0], "bias", type(m[0].bias)(np.ones(4, np.float32))),
    ]
    for change in changes:
        twins.step(*batch())
        twins.step(*batch())
        twins.change(lambda g, change=change: change(g.model))
        twins.step(*batch())
    assert not twins.replayed.not_recorded
