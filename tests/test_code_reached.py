"""Code that a recorded step reaches in unusual ways: changes of what it reads are noticed."""

from __future__ import annotations

import ctypes
import functools
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from minidl import nn, ops
from minidl.engine.tensor import Tensor
from minidl.program.replay import Gradient
from tests.reading_cases import FACTOR, Case, Cases, Net, assert_noticed, reading
from tests.twins import Twins, batch, plain

CASES = Cases()


# -- functions and classes ---------------------------------------------------------------------------------


@CASES.add
def global_of_a_wrapper_of_a_function_of_a_library() -> Case:
    variables: dict[str, Any] = {"functools": functools, "ops": ops, "P": 1.0, "__name__": "user"}
    exec("@functools.wraps(ops.relu)\ndef read(m):\n    return P", variables)
    return reading(variables["read"], lambda: variables.update(P=2.0))


@CASES.add
def global_of_code_without_a_module() -> Case:
    variables: dict[str, Any] = {"P": 1.0}
    exec("def read(m):\n    return P", variables)
    return reading(variables["read"], lambda: variables.update(P=2.0))


@CASES.add
def class_attribute_none_hides_that_of_a_base() -> Case:
    class Base(Net):
        p: Any = 1.0

    class Child(Base):
        pass

    return lambda: Child(lambda m: 3.0 if m.p is None else m.p), lambda: setattr(Child, "p", None)


@CASES.add
def class_attribute_added_later() -> Case:
    class Child(Net):
        pass

    def read(model: Any) -> Any:
        try:
            return model.scale
        except AttributeError:
            return 1.0

    return lambda: Child(read), lambda: setattr(Child, "scale", 2.0)


@CASES.add
def class_attribute_added_later_and_read_by_getattr() -> Case:
    class Child(Net):
        pass

    return lambda: Child(lambda m: getattr(m, "scale", 1.0)), lambda: setattr(Child, "scale", 2.0)


@CASES.add
def forward_of_a_subclass_of_sequential() -> Case:
    class Mine(nn.Sequential):
        pass

    def forward(self: Any, x: Tensor) -> Tensor:
        return self[0](x) * 2.0

    return lambda: Mine(nn.Linear(4, 3)), lambda: setattr(Mine, "forward", forward)


@CASES.add
def bases_of_a_class() -> Case:
    class One:
        p = 1.0

    class Two:
        p = 2.0

    class Child(One):
        pass

    return reading(lambda m: m.child.p, lambda: setattr(Child, "__bases__", (Two,)), child=Child())


@CASES.add
def call_of_a_subclass() -> Case:
    class Mine(Net):
        pass

    change = functools.partial(setattr, Mine, "__call__", lambda self, x: nn.Module.__call__(self, x) * 2)
    return lambda: Mine(lambda m: 1.0), change


@CASES.add
def global_that_hides_a_builtin() -> Case:
    variables: dict[str, Any] = {"__name__": "user"}
    exec("def read(m):\n    return float(max(1, 2))", variables)
    return reading(variables["read"], lambda: variables.update(max=min))


@CASES.add
def function_attribute_added_later() -> Case:
    def read(model: Any) -> Any:
        return getattr(read, "scale", 1.0)

    return reading(read, lambda: setattr(read, "scale", 2.0))


@CASES.add
def attribute_of_a_metaclass() -> Case:
    class Meta(type):
        scale = 1.0

    class Config(metaclass=Meta):
        pass

    return reading(lambda m: Config.scale, lambda: setattr(Meta, "scale", 2.0))


@CASES.add
def attribute_computed_by_a_metaclass() -> Case:
    store = {"scale": 1.0}

    class Meta(type):
        def __getattr__(cls, name: str) -> Any:
            return store[name]

    class Config(metaclass=Meta):
        pass

    return reading(lambda m: Config.scale, lambda: store.update(scale=2.0))


@CASES.add
def text_of_an_object() -> Case:
    class Kind:
        def __init__(self) -> None:
            self.label = "a"

        def __str__(self) -> str:
            return self.label

    kind = Kind()
    return reading(lambda m: {"a": 1.0, "b": 2.0}[str(m.kind)], lambda: setattr(kind, "label", "b"), kind=kind)


@CASES.add
def formatted_object() -> Case:
    class Kind:
        def __init__(self) -> None:
            self.label = "a"

        def __repr__(self) -> str:
            return self.label

    kind = Kind()
    return reading(lambda m: {"a": 1.0, "b": 2.0}[f"{m.kind}"], lambda: setattr(kind, "label", "b"), kind=kind)


@CASES.add
def least_of_ordered_objects() -> Case:
    @dataclass(order=True)
    class Stage:
        priority: int
        gain: float

    stages = [Stage(1, 2.0), Stage(2, 5.0)]
    return reading(lambda m: min(m.stages).gain, lambda: setattr(stages[0], "priority", 3), stages=stages)


@CASES.add
def object_as_a_key() -> Case:
    class Key:
        def __init__(self, p: int) -> None:
            self.p = p

        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Key) and self.p == other.p

    keys, settings = (Key(1), Key(2)), {Key(1): 1.0, Key(2): 2.0}
    return reading(lambda m: m.settings[m.keys[0]], lambda: setattr(keys[0], "p", 2), keys=keys, settings=settings)


class Maker:
    def __init__(self) -> None:
        self.gain = FACTOR["p"]

    @classmethod
    def make(cls) -> Maker:
        return cls()


@CASES.add
def constructor_reached_by_a_class_method() -> Case:
    return reading(lambda m: m.maker.make().gain, lambda: FACTOR.update(p=2.0), maker=Maker())


@CASES.add
def constructor_reached_by_the_type_of_an_object() -> Case:
    return reading(lambda m: type(m.maker)().gain, lambda: FACTOR.update(p=3.0), maker=Maker())


@CASES.add
def constructor_reached_by_the_class_of_an_object() -> Case:
    return reading(lambda m: m.maker.__class__().gain, lambda: FACTOR.update(p=4.0), maker=Maker())


# -- objects -----------------------------------------------------------------------------------------------


@CASES.add
def view_of_a_dictionary() -> Case:
    settings = {"a": 1.0}
    return reading(lambda m: sum(m.view), lambda: settings.update(a=2.0), view=settings.values())


@CASES.add
def structure_of_ctypes() -> Case:
    class Structure(ctypes.Structure):
        _fields_ = (("p", ctypes.c_float),)

    structure = Structure(1.0)
    return reading(lambda m: m.structure.p, lambda: setattr(structure, "p", 2.0), structure=structure)


@CASES.add
def attribute_of_a_subclass_of_an_array() -> Case:
    class Info(np.ndarray):
        gain: float

    info = np.zeros(2).view(Info)
    info.gain = 1.0
    return reading(lambda m: m.info.gain, lambda: setattr(info, "gain", 2.0), info=info)


@CASES.add
def attribute_of_a_subclass_of_a_tensor() -> Case:
    class Info(Tensor):
        __slots__ = ("__dict__",)
        gain: float

    info = Info(np.zeros(2, np.float32))
    info.gain = 1.0
    return reading(lambda m: m.info.gain, lambda: setattr(info, "gain", 2.0), info=info)


@CASES.add
def attribute_of_a_subclass_of_a_generator() -> Case:
    class Info(random.Random):
        gain = 1.0

        def scale(self) -> float:
            return self.gain

    info = Info(0)
    return reading(lambda m: m.info.scale(), lambda: setattr(info, "gain", 2.0), info=info)


@CASES.add
def shape_of_an_array() -> Case:
    array = np.zeros((2, 3))
    return reading(lambda m: m.array.shape[0], lambda: array.resize((3, 2), refcheck=False), array=array)


@CASES.add
def structured_scalar() -> Case:
    record = np.array([(1.0, 1)], dtype=[("p", "f4"), ("q", "i4")])[0]
    return reading(lambda m: m.record["p"], lambda: record.__setitem__("p", 2.0), record=record)


@pytest.fixture(autouse=True)
def settings() -> None:
    FACTOR["p"] = 1.0


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_noticed(name: str) -> None:
    assert_noticed(CASES[name]())


def test_attributes_that_a_recording_adds_are_removed() -> None:
    class Counting(Net):
        pass

    def read(model: Any) -> Any:
        read.count = getattr(read, "count", 0) + 1  # type: ignore[attr-defined]
        Counting.count = getattr(Counting, "count", 0) + 1  # type: ignore[attr-defined]
        return 1.0

    gradient = Gradient(Counting(read), plain)
    with pytest.warns(UserWarning, match="changes from step to step"):
        gradient.prepare(*batch())
    assert not hasattr(read, "count") and not hasattr(Counting, "count")


def test_a_setter_of_a_property_is_read() -> None:
    class Setter:
        value = 2.0

        @property
        def scale(self) -> float:
            return self.value

        @scale.setter
        def scale(self, value: float) -> None:
            self.value = value * FACTOR["p"]

    def read(model: Any) -> Any:
        model.setter.scale = 2.0
        return model.setter.scale

    def build() -> tuple[nn.Module, Any]:
        setter = Setter()
        setter.scale = 2.0
        return Net(read, setter=setter), plain

    twins = Twins(build)
    twins.step(*batch())
    assert twins.replayed.programs
    FACTOR["p"] = 3.0
    with pytest.warns(UserWarning, match=r"value changes from step to step"):
        twins.step(*batch())
