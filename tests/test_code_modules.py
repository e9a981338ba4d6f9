"""Changes are noticed even if an imported module, a package or a library contains the code that reads the values."""

from __future__ import annotations

import site
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from minidl import nn
from tests.reading_cases import Case, Cases, Net, Thing, assert_noticed, module, reading
from tests.twins import Twins, batch, plain

CASES = Cases()


def user_package(source: str) -> Case:
    config = module("user_package.config", "P = 1.0")
    package = module("user_package", source, __path__=[], __package__="user_package", config=config)
    return reading(package.read, lambda: setattr(config, "P", 2.0))


@CASES.add
def relative_import_in_a_function() -> Case:
    return user_package("def read(m):\n    from .config import P\n    return P")


@CASES.add
def relative_import_of_a_module() -> Case:
    return user_package("def read(m):\n    from . import config\n    return config.P")


@CASES.add
def file_named_like_a_module_of_python() -> Case:
    found = module("nturl2path", "P = 1.0\ndef read(m):\n    return P", "/home/user/nturl2path.py")
    return reading(found.read, lambda: setattr(found, "P", 2.0))


INSTALLED = """
from minidl import nn
def helper(model, x):
    return x * model.scale
class Net(nn.Module):
    def __init__(self):
        self.fc, self.scale = nn.Linear(4, 3), 1.0
    def forward(self, x):
        return helper(self, self.fc(x))
class Around(nn.Module):
    def __init__(self, block):
        self.fc, self.block = nn.Linear(4, 3), block
    def forward(self, x):
        return self.fc(x) * self.block.run()
class Block:
    def __init__(self):
        self.gain = 1.0
    def run(self):
        return self.gain
class Slots:
    __slots__ = ("gain",)
    def run(self):
        return self.gain
def gain_of(thing):
    return _gain(thing)
def _gain(thing):
    return thing.gain_in_helper
"""


def installed() -> Any:
    return module("installed_package", INSTALLED, f"{site.getsitepackages()[0]}/installed_package.py")


@CASES.add
def attribute_read_by_a_helper_of_an_installed_package() -> Case:
    models: list[Any] = []
    made = installed()

    def build() -> nn.Module:
        models.append(made.Net())
        return models[-1]  # type: ignore[no-any-return]

    return build, lambda: [setattr(model, "scale", 2.0) for model in models]


@CASES.add
def attribute_read_by_a_method_of_an_installed_package() -> Case:
    made = installed()
    block = made.Block()
    return lambda: made.Around(block), lambda: setattr(block, "gain", 2.0)


@CASES.add
def slot_read_by_a_method_of_an_installed_package() -> Case:
    block = installed().Slots()
    block.gain = 1.0
    return reading(lambda m: m.block.run(), lambda: setattr(block, "gain", 2.0), block=block)


@CASES.add
def attribute_of_the_user_read_by_an_installed_function() -> Case:
    thing, function = Thing(gain_in_helper=1.0), installed().gain_of
    return reading(lambda m: function(m.thing), lambda: setattr(thing, "gain_in_helper", 2.0), thing=thing)


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    before = dict(sys.modules)
    yield
    for name, made in [*sys.modules.items()]:
        if name not in before and made.__spec__ is None:  # keep modules imported from files, such as parts of Numba
            del sys.modules[name]


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_noticed(name: str) -> None:
    assert_noticed(CASES[name]())


def test_a_module_that_a_step_imports_is_read_from_the_next_step_on(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "imported_by_a_step.py").write_text("P = 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    variables: dict[str, Any] = {"__name__": "user"}
    exec("def read(m):\n    from imported_by_a_step import P\n    return P", variables)
    twins = Twins(lambda: (Net(variables["read"]), plain))
    with pytest.warns(UserWarning, match="import of imported_by_a_step changes"):
        twins.step(*batch())
    imported = sys.modules["imported_by_a_step"]
    twins.step(*batch())
    assert twins.replayed.programs and not twins.replayed.not_recorded
    imported.P = 2.0  # type: ignore[attr-defined]
    twins.step(*batch())
    assert sys.modules["imported_by_a_step"] is imported and not twins.replayed.not_recorded
