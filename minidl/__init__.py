"""minidl: a deep-learning engine written from scratch with NumPy and Numba.

    import minidl
    data = minidl.data.load("digits")
    model = minidl.models.build("lenet", input_shape=data.input_shape)
    minidl.fit(model, data)

`import minidl` alone imports neither NumPy nor Numba: each name below is imported when it is first used (PEP 562).
"""

from minidl import start as start  # first: until it is imported, Ctrl-C prints a traceback

# isort: split
from importlib import import_module, util
from importlib.machinery import ModuleSpec
from pathlib import Path
from sys import modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names as in _EXPORTS, for type checkers and editors
    from minidl import data as data
    from minidl import errors as errors
    from minidl import models as models
    from minidl import nn as nn
    from minidl import ops as ops
    from minidl import optim as optim
    from minidl import schedules as schedules
    from minidl.engine.autograd import Function as Function
    from minidl.engine.autograd import gradcheck as gradcheck
    from minidl.engine.autograd import no_grad as no_grad
    from minidl.engine.device import Device as Device
    from minidl.engine.random import seed as seed
    from minidl.engine.tensor import Tensor as Tensor
    from minidl.errors import MinidlError as MinidlError
    from minidl.program.replay import Gradient as Gradient
    from minidl.program.replay import Prediction as Prediction
    from minidl.run import checkpoint as checkpoint
    from minidl.run.evaluation import evaluate as evaluate
    from minidl.run.evaluation import predict as predict
    from minidl.run.trained import load as load
    from minidl.run.trained import save as save
    from minidl.training.collectives import allreduce as allreduce
    from minidl.training.collectives import broadcast as broadcast
    from minidl.training.collectives import neighbor_average as neighbor_average
    from minidl.training.collectives import rank as rank
    from minidl.training.collectives import size as size
    from minidl.training.fit import fit as fit
    from minidl.training.joined import join as join

__version__ = "0.1.0"

# name -> its source: a module, or module:attribute
_EXPORTS = {
    "Device": "engine.device:Device",
    "Function": "engine.autograd:Function",
    "Gradient": "program.replay:Gradient",
    "MinidlError": "errors:MinidlError",
    "Prediction": "program.replay:Prediction",
    "Tensor": "engine.tensor:Tensor",
    "allreduce": "training.collectives:allreduce",
    "broadcast": "training.collectives:broadcast",
    "checkpoint": "run.checkpoint",
    "data": "data",
    "errors": "errors",
    "evaluate": "run.evaluation:evaluate",
    "fit": "training.fit:fit",
    "gradcheck": "engine.autograd:gradcheck",
    "join": "training.joined:join",
    "load": "run.trained:load",
    "models": "models",
    "neighbor_average": "training.collectives:neighbor_average",
    "nn": "nn",
    "no_grad": "engine.autograd:no_grad",
    "ops": "ops",
    "optim": "optim",
    "predict": "run.evaluation:predict",
    "rank": "training.collectives:rank",
    "save": "run.trained:save",
    "schedules": "schedules",
    "seed": "engine.random:seed",
    "size": "training.collectives:size",
}
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'minidl' has no attribute {name!r}")
    module, _, attribute = _EXPORTS[name].partition(":")
    value: Any = import_module(f"minidl.{module}")
    if attribute:
        value = getattr(value, attribute)
    globals()[name] = value  # so that later uses do not call __getattr__
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _follow_text_link(name: str) -> None:
    """Make `minidl.<name>` importable if git checked out the symbolic link as a text file (`core.symlinks=false`)."""
    link = Path(__file__).parent / name
    if not link.is_file() or link.read_text().strip() != f"../{name}":
        return
    spec = ModuleSpec(f"minidl.{name}", None, is_package=True)
    spec.submodule_search_locations = [str(link.parent.parent / name)]
    modules[spec.name] = globals()[name] = util.module_from_spec(spec)  # a namespace package


for _name in ("kernels", "comm"):
    _follow_text_link(_name)
