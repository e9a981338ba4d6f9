"""minidl: a deep-learning engine from scratch in NumPy and Numba.

    import minidl
    data = minidl.data.load("digits")
    model = minidl.models.build("lenet", input_shape=data.input_shape)
    minidl.fit(model, data)

`import minidl` alone imports neither NumPy nor Numba: a name is imported when it is first used (PEP 562).
"""

from importlib import import_module, util
from importlib.machinery import ModuleSpec
from pathlib import Path
from sys import modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the table below, for type checkers and editors
    from minidl import checkpoint as checkpoint
    from minidl import data as data
    from minidl import errors as errors
    from minidl import models as models
    from minidl import nn as nn
    from minidl import ops as ops
    from minidl import optim as optim
    from minidl import schedules as schedules
    from minidl.autograd import Function as Function
    from minidl.autograd import gradcheck as gradcheck
    from minidl.autograd import no_grad as no_grad
    from minidl.device import Device as Device
    from minidl.errors import MinidlError as MinidlError
    from minidl.program import Gradient as Gradient
    from minidl.program import Prediction as Prediction
    from minidl.random import seed as seed
    from minidl.tensor import Tensor as Tensor
    from minidl.training import evaluate as evaluate
    from minidl.training import fit as fit
    from minidl.training import load_model as load_model
    from minidl.training import predict as predict

__version__ = "0.1.0"

# name -> the module that defines it; None: the name is itself a module of minidl
_EXPORTS: dict[str, str | None] = {
    "Device": "device",
    "Function": "autograd",
    "Gradient": "program",
    "MinidlError": "errors",
    "Prediction": "program",
    "Tensor": "tensor",
    "checkpoint": None,
    "data": None,
    "errors": None,
    "evaluate": "training",
    "fit": "training",
    "gradcheck": "autograd",
    "load_model": "training",
    "models": None,
    "nn": None,
    "no_grad": "autograd",
    "ops": None,
    "optim": None,
    "predict": "training",
    "schedules": None,
    "seed": "random",
}
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'minidl' has no attribute {name!r}")
    home = _EXPORTS[name]
    value = getattr(import_module(f"minidl.{home}"), name) if home else import_module(f"minidl.{name}")
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _follow_text_link(name: str) -> None:
    """Make `minidl.<name>` importable where its link came out of git as a text file (`core.symlinks=false`)."""
    link = Path(__file__).parent / name
    if not link.is_file() or link.read_text().strip() != f"../{name}":
        return
    spec = ModuleSpec(f"minidl.{name}", None, is_package=True)
    spec.submodule_search_locations = [str(link.parent.parent / name)]
    modules[spec.name] = globals()[name] = util.module_from_spec(spec)  # a namespace package


for _name in ("kernels", "comm"):
    _follow_text_link(_name)
