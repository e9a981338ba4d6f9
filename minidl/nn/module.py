"""Module: parameters, sub-modules, and a forward pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import MemberDescriptorType
from typing import Any, TypeVar

import numpy as np

from minidl.checked import shown
from minidl.engine.arena import Arena
from minidl.engine.changes import count_change
from minidl.engine.device import undo_after_recording
from minidl.engine.gpus import open_gpu
from minidl.engine.parameter import Buffer, Parameter
from minidl.engine.tensor import Tensor, float_type
from minidl.errors import CheckpointError, ConfigError, MinidlError, ShapeError, nearest
from minidl.nn.modes import evaluating, watchers, watching
from minidl.nn.summary import Row, checked_shape, table

Self = TypeVar("Self", bound="Module")

RESERVED = ("arena", "statistics", "training", "built_for", "built_as")  # attributes of every module
CONTAINERS = (list, tuple, dict, set, frozenset, deque)


def _contains_modules(value: Any) -> bool:
    """Return whether a value is a module or a parameter, or a container with one at any depth."""
    waiting, seen = [value], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Module | Parameter):
            return True
        if isinstance(value, CONTAINERS) and id(value) not in seen:
            seen.add(id(value))  # a container may contain itself
            waiting += value
            waiting += value.values() if isinstance(value, dict) else ()
    return False


class Module:
    """The base class of layers and models.

    Assign parameters, buffers and modules to attributes in `__init__`, and write `forward`. A parameter's name is the
    path of attributes to it, such as `layer1.0.conv1.weight`. Parameters are listed in the order of assignment.

    `copy.deepcopy` and pickle return a model with its own parameters, in its own arena. `copy.copy` returns a
    model that shares parameters, sub-modules and arenas with the original.
    """

    __slots__ = ("__dict__", "__weakref__", "kept_prediction")

    kept_prediction: Any  # run/evaluation.py stores it here; a slot, because it must not be in vars(module)

    training = True
    arena: Arena | None = None  # the parameters, after `flatten`
    built_for: tuple[int, int, int] | None = None  # (H, W, C), if models.build made the model; None: unknown
    built_as: tuple[str, int] | None = None  # (name, classes), if models.build made the model
    statistics: Arena | None = None  # the buffers, after `flatten`: a separate vector, which replicas do not average

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, value in vars(cls).items():
            if _contains_modules(value):
                raise ConfigError(f"{cls.__name__}.{name}: modules of a class are not found: assign them in __init__")

    def __getstate__(self) -> Any:
        """Return the attributes for copy and pickle."""
        state: Any = super().__getstate__()
        if not isinstance(state, tuple):
            return state
        attributes, slots = state
        slots.pop("kept_prediction", None)
        return (attributes, slots) if slots else attributes

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no forward()")

    def __call__(self, *inputs: Any) -> Tensor:
        try:
            output = self.forward(*(Tensor(x) if isinstance(x, np.ndarray) else x for x in inputs))
        except ShapeError as error:
            error.name_layer(self, repr(self).partition("\n")[0].removesuffix("("), self.named_modules())
            raise
        for watcher in watchers():
            watcher(self, output)
        return output

    # -- sub-modules and parameters ----------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if name in RESERVED and isinstance(value, Module | Parameter):
            raise ConfigError(f"{type(self).__name__}.{name}: this name is reserved in every module; choose another")
        if isinstance(value, Module | Parameter) and isinstance(getattr(type(self), name, None), MemberDescriptorType):
            raise ConfigError(f"{type(self).__name__}.{name}: modules in __slots__ are not found: remove it from them")
        self._refuse_hidden(name, value)
        changed = name not in vars(self) or vars(self)[name] is not value
        if changed and name == "training":
            undo_after_recording(self, name)
        super().__setattr__(name, value)
        if changed:
            count_change(attribute=name != "training", mode=name == "training")

    def __delattr__(self, name: str) -> None:
        if name == "training":
            undo_after_recording(self, name)
        super().__delattr__(name)
        count_change(attribute=name != "training", mode=name == "training")

    def _refuse_hidden(self, name: str, value: Any) -> None:
        """Raise ConfigError for modules or parameters in a plain container: they would be neither trained nor saved."""
        if isinstance(value, CONTAINERS) and _contains_modules(value):
            raise ConfigError(f"{type(self).__name__}.{name}: modules in a plain {type(value).__name__} are not found: "
                              "use nn.ModuleList (parameters: an attribute for each)")  # fmt: skip

    def named_children(self) -> Iterator[tuple[str, Module]]:
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value
            else:
                self._refuse_hidden(name, value)  # a module may have been added to a container after its assignment

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield (path, module) for this module (its path is `prefix`) and every module below it."""
        yield prefix, self
        for name, child in self.named_children():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def _named_tensors(self, kind: type[Parameter]) -> Iterator[tuple[str, Parameter]]:
        for path, module in self.named_modules():
            for name, value in vars(module).items():
                if type(value) is kind:
                    yield f"{path}.{name}" if path else name, value

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield (name, parameter), each parameter once, under its first name."""
        return _once(self._named_tensors(Parameter))

    def named_buffers(self) -> Iterator[tuple[str, Parameter]]:
        """Yield (name, buffer), each buffer once, under its first name."""
        return _once(self._named_tensors(Buffer))

    def parameters(self) -> Iterator[Parameter]:
        for _, parameter in self.named_parameters():
            yield parameter

    def train(self: Self, mode: bool = True) -> Self:
        """Switch this module and all modules below it to training mode, or to evaluation mode if `mode` is False."""
        for _, module in self.named_modules():
            module.training = mode
        return self

    def eval(self: Self) -> Self:
        """Switch this module and all modules below it to evaluation mode."""
        return self.train(False)

    def zero_grad(self) -> None:
        for parameter in self.parameters():
            parameter.zero_grad()

    def flatten(self, buffer: np.ndarray | None = None) -> Arena:
        """Move all parameters into one arena, and all buffers into another. Return the parameters' arena.

        A second call returns the same arena. If a layer was replaced, or a part of the model is in another arena, a
        new arena with the same values replaces the old one. An optimizer of the old arena fails at its next step.

        buffer: memory for the parameters (see `Arena`), for example shared memory. Raises MinidlError if `buffer`
        is given but the model already has an arena with all its parameters.
        """
        parameters, buffers = dict(self.named_parameters()), dict(self.named_buffers())
        gpu = None if self.arena is None else self.arena.gpu
        if self.arena is None or not self.arena.holds(parameters):
            if self.arena is not None:
                self.arena.dissolve()
            self.arena = Arena(parameters, buffer)
            self.arena.move(gpu)
        elif buffer is not None:
            raise MinidlError("flatten: the model is in an arena already; give the buffer in the first call")
        if not buffers:
            self.statistics = None
        elif self.statistics is None or not self.statistics.holds(buffers):
            self.statistics = Arena(buffers)
            self.statistics.move(gpu)
        return self.arena

    def to(self: Self, device: str, precision: str = "float32") -> Self:
        """Train and predict on a device from now on: a GPU, "cuda:0", or "cpu".

        Recorded steps (`fit`, `predict`, `evaluate`, optimizers) then run there. Code that reads parameters, and models
        that cannot be recorded, still compute on the CPU: the values are copied when they are needed.

        precision: what matrix products on a GPU multiply: float32, or tf32 or bf16 on its tensor cores. Raises
        ConfigError if the device cannot be used, or not with this precision.
        """
        gpu = open_gpu(device, precision)
        arenas = self.flatten(), self.statistics
        if precision != "float32" and self.flatten().dtype != np.float32:
            raise ConfigError(f"precision {precision}: the weights are {self.flatten().dtype}; expected float32")
        for arena in arenas:
            if arena is not None:
                arena.move(gpu)
        return self

    def astype(self: Self, dtype: np.typing.DTypeLike) -> Self:
        """Convert all parameters and buffers, and their gradients, to float32 or float64.

        Raises, before any change, ShapeError if a parameter or buffer is in an arena, ConfigError for any other type.
        """
        wanted = float_type(dtype)
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        for name, tensor in tensors.items():
            if tensor.arena is not None:
                raise ShapeError(f"astype: {name} is in an arena already; convert before flatten()")
        for tensor in tensors.values():
            tensor._data = tensor._data.astype(wanted)
            tensor.grad = tensor._grad  # converts it to the type of the data
        return self

    # -- saving and loading ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies of all parameters and buffers, with PyTorch's names and layouts."""
        return {
            name: tensor.to_torch() for kind in (Parameter, Buffer) for name, tensor in self._named_tensors(kind)
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray], strict: bool = True) -> None:
        """Load values from `state_dict()`, or from the state_dict of a PyTorch model with the same structure.

        strict: the names must be exactly the model's; if False, missing and unknown names are ignored. PyTorch's
        `num_batches_tracked` is always ignored. Raises CheckpointError, before any change, if the values do not fit.
        """
        own = {name: tensor for kind in (Parameter, Buffer) for name, tensor in self._named_tensors(kind)}
        if not isinstance(state, Mapping):
            raise CheckpointError(f"load_state_dict: {shown(state)}; expected a dict of arrays, as of state_dict()")
        given = {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}
        missing, unknown = [n for n in own if n not in given], [n for n in given if n not in own]
        if strict and missing:
            hint = nearest(missing[0], unknown)
            raise CheckpointError(f"load_state_dict: no values for {_some(missing)}: another model?{hint}")
        if strict and unknown:
            raise CheckpointError(f"load_state_dict: {_some(unknown)} unknown to this model: another model?")
        fitting = {name: np.asarray(value) for name, value in given.items() if name in own}
        for name, value in fitting.items():
            if value.shape != own[name].torch_shape or value.dtype.kind != "f":
                raise CheckpointError(f"load_state_dict: {name} is {value.dtype} {value.shape}; expected floats "
                                      f"{own[name].torch_shape} (PyTorch's layout): another model?")  # fmt: skip
        for name, value in fitting.items():
            own[name].from_torch(value)

    # -- cost and description ----------------------------------------------------------------------------

    def flops(self, output_shape: tuple[int, ...]) -> int:
        """Return the number of floating-point operations of this layer for an output of this shape; 0 if negligible."""
        return 0

    def extra_repr(self) -> str:
        return ""

    def __repr__(self) -> str:
        children = [f"  ({name}): " + repr(child).replace("\n", "\n  ") for name, child in self.named_children()]
        inside = "\n" + "\n".join(children) + "\n" if children else self.extra_repr()
        return f"{type(self).__name__}({inside})"

    def summary(self, input_shape: tuple[int, ...]) -> str:
        """Return a table of the layers, with output shape, parameters, and FLOPs of one forward pass for one input.

        input_shape: the shape without the batch axis. To show the table: `print(model.summary((28, 28, 1)))`.
        """
        input_shape = checked_shape(input_shape)
        return table(self.summary_rows(input_shape), sum(p.size for p in self.parameters()), input_shape)

    def summary_rows(self, input_shape: tuple[int, ...]) -> list[Row]:
        """Return the rows of `summary`: name, layer, shape of the output, number of parameters, FLOPs."""
        names: dict[Module, list[str]] = {}  # a module that is used several times has several names
        for name, module in self.named_modules():
            names.setdefault(module, []).append(name)
        uncounted = {parameter: name for name, parameter in self.named_parameters()}
        rows: list[Row] = []

        def add_row(module: Module, output: Tensor) -> None:
            if not any(True for _ in module.named_children()):
                count = sum(p.size for p in module.parameters() if uncounted.pop(p, None))
                where, shape = ", ".join(names.get(module, ["?"])), str(output.shape[1:])
                rows.append((where, repr(module), shape, count, module.flops(output.shape)))

        dtype = next((p.dtype for p in self.parameters()), np.dtype(np.float32))
        with evaluating(self), watching(add_row):
            self(Tensor(np.zeros((1, *input_shape), dtype)))
        for parameter, name in uncounted.items():  # parameters of modules that have children or were not called
            rows.append((name, "Parameter", "", parameter.size, 0))
        return rows


class ModuleList(Module):
    """A list of modules, named "0", "1", ..., to be called by the `forward` of another module."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        if isinstance(modules, Module) or not isinstance(modules, Iterable):
            raise ConfigError(f"ModuleList: {shown(modules)}; expected a list of modules")
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> None:
        if not isinstance(module, Module):
            raise ConfigError(f"{type(self).__name__}: {shown(module)} among its modules; expected nn.Module")
        number = len(self)
        while str(number) in vars(self):  # an earlier one was deleted
            number += 1
        setattr(self, str(number), module)

    def __iter__(self) -> Iterator[Module]:
        return (module for _, module in self.named_children())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, i: int) -> Module:
        return list(self)[i]


class Sequential(ModuleList):
    """Modules applied one after the other, named "0", "1", ..."""

    def __init__(self, *modules: Module) -> None:
        super().__init__(modules)

    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


def _once(named: Iterator[tuple[str, Parameter]]) -> Iterator[tuple[str, Parameter]]:
    """Yield each tensor once, under the first of its names."""
    seen: set[Parameter] = set()
    for name, tensor in named:
        if tensor not in seen:
            seen.add(tensor)
            yield name, tensor


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
