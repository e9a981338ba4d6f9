"""Code that reads settings by unusual names: changes of them are noticed, or the step is not recorded."""

from __future__ import annotations

import builtins
import functools
import sys
import types
from collections.abc import Callable
from dataclasses import asdict as as_dictionary
from dataclasses import dataclass
from operator import attrgetter as getter
from typing import Any

import numpy as np
import pytest

from minidl import nn, ops
from minidl.engine.tensor import Tensor
from minidl.program.replay import Gradient
from tests.reading_cases import FACTOR, Case, Cases, Net, Thing, assert_noticed, reading
from tests.twins import Twins, batch, plain

CASES = Cases()


read_attribute = getattr
SETTINGS = types.ModuleType("user_settings")  # a module of the user
SOURCE = """
P, Q = 1.0, 1.0
_store = {"LAZY": 1.0}
def __getattr__(name):
    try:
        return _store[name]
    except KeyError:
        raise AttributeError(name) from None
"""


# -- names that the engine uses, too -----------------------------------------------------------------------


class Mode(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (3.0 if self.training else 1.0)


@CASES.add
def training_of_a_module_outside_the_model() -> Case:
    mode = Mode()

    class Around(Net):
        def forward(self, x: Tensor) -> Tensor:
            return mode(super().forward(x))

    return lambda: Around(lambda m: 1.0), mode.eval


@CASES.add
def training_of_a_module_in_an_object() -> Case:
    thing = Thing(mode=Mode())
    return reading(lambda m: m.thing.mode.training + 1.0, lambda: thing.mode.eval(), thing=thing)


@CASES.add
def class_attribute_called_training() -> Case:
    class Config:
        training = True

    return reading(lambda m: 3.0 if Config.training else 1.0, lambda: setattr(Config, "training", False))


@CASES.add
def class_attribute_called_statistics() -> Case:
    class Config:
        statistics = 1.0

    return reading(lambda m: Config.statistics, lambda: setattr(Config, "statistics", 2.0))


@CASES.add
def submodule_attribute_called_statistics() -> Case:
    class Norm(nn.Module):
        def __init__(self) -> None:
            self.statistics = (0.5, 2.0)  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            return (x - self.statistics[0]) * self.statistics[1]  # type: ignore[index]

    models: list[nn.Sequential] = []

    def build() -> nn.Module:
        models.append(nn.Sequential(nn.Linear(4, 3), Norm()))
        return models[-1]

    return build, lambda: [setattr(model[1], "statistics", (0.1, 3.0)) for model in models]


# -- computed names ----------------------------------------------------------------------------------------


@CASES.add
def getattr_of_a_module() -> Case:
    name = "P"
    return reading(lambda m: getattr(SETTINGS, name), lambda: setattr(SETTINGS, "P", 2.0))


@CASES.add
def getattr_of_an_attribute_that_a_module_gets_later() -> Case:
    return reading(lambda m: getattr(SETTINGS, "LATER", 1.0), lambda: setattr(SETTINGS, "LATER", 2.0))


@CASES.add
def vars_of_a_module() -> Case:
    return reading(lambda m: vars(SETTINGS)["Q"], lambda: setattr(SETTINGS, "Q", 2.0))


@CASES.add
def getattr_of_a_module_of_python() -> Case:
    return reading(lambda m: SETTINGS.LAZY, lambda: SETTINGS._store.update(LAZY=2.0))


@CASES.add
def method_chosen_by_name() -> Case:
    class Chosen(Net):
        def run_one(self) -> float:
            return settings["p"]

    settings = {"p": 1.0}
    return lambda: Chosen(lambda m: getattr(m, "run_" + m.kind)(), kind="one"), lambda: settings.update(p=2.0)


@CASES.add
def method_chosen_by_an_unknown_name() -> Case:
    class Chosen(Net):
        def one(self) -> float:
            return settings["p"]

    settings = {"p": 1.0}
    return lambda: Chosen(lambda m: getattr(m, m.kind)(), kind="one"), lambda: settings.update(p=2.0)


@CASES.add
def method_chosen_by_name_and_replaced() -> Case:
    class Chosen(Net):
        def run_one(self) -> float:
            return 1.0

    change = functools.partial(setattr, Chosen, "run_one", lambda self: 5.0)
    return lambda: Chosen(lambda m: getattr(m, f"run_{m.kind}")(), kind="one"), change


@CASES.add
def getattr_by_another_name() -> Case:
    thing, name = Thing(p=1.0), "p"
    return reading(lambda m: read_attribute(m.thing, name), lambda: setattr(thing, "p", 2.0), thing=thing)


@CASES.add
def attrgetter_by_another_name() -> Case:
    thing = Thing(p=1.0)
    return reading(lambda m: getter("p")(m.thing), lambda: setattr(thing, "p", 2.0), thing=thing)


@CASES.add
def asdict_by_another_name() -> Case:
    @dataclass
    class Options:
        hidden_p: float = 1.0

    options = Options()
    change = functools.partial(setattr, options, "hidden_p", 2.0)
    return reading(lambda m: as_dictionary(m.options)["hidden" + "_p"], change, options=options)


@CASES.add
def attributes_read_by_a_mapped_getattr() -> Case:
    thing = Thing(p=1.0)
    return reading(lambda m: next(map(getattr, [m.thing], ["p"])), lambda: setattr(thing, "p", 2.0), thing=thing)


@pytest.fixture(autouse=True)
def settings() -> None:
    vars(SETTINGS).pop("LATER", None)
    exec(SOURCE, vars(SETTINGS))
    FACTOR["p"] = 1.0


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_noticed(name: str) -> None:
    assert_noticed(CASES[name]())


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "globals": (lambda m: globals()["FACTOR"]["p"], "globals"),
    "eval": (lambda m: eval("FACTOR")["p"], "eval"),
    "exec": (lambda m: exec("FACTOR") or 1.0, "exec"),
    "by another name": (lambda m: everything()["FACTOR"]["p"], "everything"),
    "sys.modules": (lambda m: sys.modules[__name__].FACTOR["p"], "sys.modules"),
    "globals of a function": (lambda m: reading.__globals__["FACTOR"]["p"], "__globals__"),
}
everything = builtins.globals


@pytest.mark.parametrize("name", REFUSED)
def test_code_that_can_read_anything_is_refused(name: str) -> None:
    read, reason = REFUSED[name]
    twins = Twins(lambda: (Net(read), plain))
    with pytest.warns(UserWarning, match=f"{reason}, by which it can read anything") as caught:
        for step in range(3):
            FACTOR["p"] = 1.0 + step
            twins.step(*batch())
    assert len(caught) == 1


def test_the_mode_of_a_loss_is_noticed() -> None:
    class Smoothing(nn.Module):
        def __call__(self, logits: Tensor, y: Any) -> Tensor:
            return ops.cross_entropy(logits, y, 0.3 if self.training else 0.0)

    twins = Twins(lambda: (nn.Linear(4, 3), Smoothing()))
    twins.step(*batch())
    twins.change(lambda g: g.loss.eval())
    twins.step(*batch())
    assert not twins.replayed.not_recorded


def test_a_name_that_begins_with_a_constant_does_not_count_all_attributes() -> None:
    class Numbered(Net):
        def later(self) -> Any:
            return np.random.default_rng()  # never called; as code of the step, it would prevent recording

    model = Numbered(lambda m: sum(getattr(m, f"layer{i}") for i in range(2)), layer0=1.0, layer1=1.0)
    gradient = Gradient(model, plain)
    gradient(*batch())
    programs = list(gradient.programs.values())
    model.note = 1  # type: ignore[assignment]
    gradient(*batch())
    assert list(gradient.programs.values()) == programs and not gradient.not_recorded
    model.layer1 = 2.0  # type: ignore[assignment]
    assert gradient(*batch()) == gradient.by_tape(*batch())
    assert list(gradient.programs.values()) != programs
