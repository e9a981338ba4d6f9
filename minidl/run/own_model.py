"""Import a user's file and build the model of `--model FILE.py:FUNCTION`. See model_file.py."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from copy import deepcopy
from importlib.abc import SourceLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from minidl import nn
from minidl.checked import shown
from minidl.errors import ConfigError, MinidlError, nearest
from minidl.models import Shape
from minidl.program.hidden import Unrecordable
from minidl.program.replay import Prediction
from minidl.run import model_file


class _Loader(SourceLoader):
    """Imports a file from bytes that are already read, so that the code that runs is the code that was hashed.

    It writes no __pycache__.
    """

    def __init__(self, path: Path, source: bytes) -> None:
        self.path, self.source = path, source

    def get_filename(self, fullname: str) -> str:
        return str(self.path)

    def get_data(self, path: str | bytes) -> bytes:
        if path != str(self.path):
            raise OSError(path)  # there is no cached bytecode
        return self.source


def build(model: str, expected: str, input_shape: Shape, classes: int) -> nn.Module:
    """Import the file of FILE.py:FUNCTION, call the function, and check the model.

    expected: the SHA-256 of the file. Raises ConfigError if the file has another hash or cannot be imported, if the
    function does not exist or fails, or if it returns no model for images of input_shape and this number of classes.
    """
    path, name = model_file.split(model)
    source, found = model_file.read(model)
    if found != expected:
        raise ConfigError(f"{path} has changed while the job began: start it again")
    module = _imported(path, source, found)
    function = _function(module, path, name)
    call = f"{path}: {name}({input_shape}, {classes})"
    built = _called(lambda: function(input_shape, classes), path, call)
    if not isinstance(built, nn.Module):
        raise ConfigError(f"{call} returned {shown(built)}; expected an nn.Module")
    _check(built, path, call, input_shape, classes)
    if built.built_for is None:
        built.built_for = input_shape
    return built


def _imported(path: Path, source: bytes, found: str) -> ModuleType:
    """Return the module. Files next to it can be imported by it, and hide no other module."""
    name = f"{path.stem}_{found[:8]}"  # unlike any other module's name
    loader = _Loader(path, source)
    spec = spec_from_loader(name, loader)
    assert spec
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses, for example, look their module up
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    _called(lambda: loader.exec_module(module), path, f"{path} cannot be imported")
    return module


def _function(module: ModuleType, path: Path, name: str) -> Callable[..., Any]:
    own = [each for each, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    if not hasattr(module, name):
        hint = nearest(name, own) or (f" It has {', '.join(own[:5])}" if own else "")
        raise ConfigError(f"{path} has no function {name!r}; expected {name}(input_shape, classes), which returns an "
                          f"nn.Module.{hint}")  # fmt: skip
    function = getattr(module, name)
    if not callable(function):
        raise ConfigError(f"{path}: {name} is {shown(function)}; expected a function of (input_shape, classes)")
    found: Callable[..., Any] = function
    return found


def _called(call: Callable[[], Any], path: Path, what: str) -> Any:
    """Call a user's code. Raises ConfigError with the last line of its traceback, and the line in the user's file."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        if isinstance(error, MemoryError | Unrecordable):
            raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        if isinstance(error, SyntaxError) and error.filename == str(path) and error.lineno:
            lines.append(error.lineno)
        where = f"line {lines[-1]}: " if lines else ""
        text = str(error) if isinstance(error, MinidlError) else traceback.format_exception_only(error)[-1]
        raise ConfigError(f"{what}: {where}{' '.join(text.split())}") from None


def _check(model: nn.Module, path: Path, call: str, input_shape: Shape, classes: int) -> None:
    """Raise ConfigError unless the model has weights and maps images of this shape to a value for each class."""
    types = {parameter.dtype.name for parameter in model.parameters()}
    if types != {"float32"} or any(not parameter.size for parameter in model.parameters()):
        kind = f"{', '.join(sorted(types))} parameters" if types - {"float32"} else "no parameters"
        raise ConfigError(f"{call} returned a model with {kind}; expected float32 parameters")
    images = np.zeros((2, *input_shape), np.float32)
    try:
        copied = deepcopy(model)  # its forward may keep tensors or count calls
    except Exception:  # it holds something that cannot be copied: the first step checks it
        return
    try:
        shape = _called(lambda: _output(copied, images), path, f"{call} returned a model that refuses its images")
    except Unrecordable:  # it will train on the tape; its first step checks it
        return
    if shape != (2, classes):
        raise ConfigError(f"{call} returned a model whose output for 2 images is {shape}; expected (2, {classes}), a "
                          "value for each class")  # fmt: skip


def _output(model: nn.Module, images: np.ndarray) -> object:
    """Return the shape of the model's output. The forward pass is only recorded: no kernel is compiled or called."""
    recorder, batch = Prediction(model).recorder({"x": images})
    with recorder.active(), nn.evaluating(model):
        output = model(recorder.tensor(batch["x"]))
    return output.shape if hasattr(output, "shape") else shown(output)


