"""Module: parameters, sub-modules, and a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from minidl.arena import Arena
from minidl.autograd import no_grad
from minidl.errors import CheckpointError, MinidlError, ShapeError, nearest
from minidl.parameter import Buffer, Parameter
from minidl.tensor import Tensor

Watcher = Callable[["Module", Tensor], None]
Self = TypeVar("Self", bound="Module")

_watchers: list[Watcher] = []


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Within it, watcher(module, output) is called whenever a module has computed its output."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


class Module:
    """Base class of layers and models.

    Assign parameters, buffers and modules to attributes in `__init__` and write `forward`; their names are the
    attributes' names, joined by dots, in the order of assignment: `layer1.0.conv1.weight`.
    """

    training = True
    arena: Arena | None = None  # parameters, once flattened
    statistics: Arena | None = None  # buffers, once flattened: another vector, which replicas do not average

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no forward()")

    def __call__(self, *inputs: Any) -> Tensor:
        try:
            output = self.forward(*(Tensor(x) if isinstance(x, np.ndarray) else x for x in inputs))
        except ShapeError as error:
            error.name_layer(self, repr(self).partition("\n")[0].removesuffix("("), self.named_modules())
            raise
        for watcher in _watchers:
            watcher(self, output)
        return output

    # -- what it is made of ------------------------------------------------------------------------------

    def named_children(self) -> Iterator[tuple[str, Module]]:
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module ("") and every one below it, with its path."""
        yield prefix, self
        for name, child in self.named_children():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def _named_tensors(self, kind: type[Parameter]) -> Iterator[tuple[str, Parameter]]:
        for path, module in self.named_modules():
            for name, value in vars(module).items():
                if type(value) is kind:
                    yield f"{path}.{name}" if path else name, value

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """(name, parameter), each parameter once, under its first name."""
        seen: set[int] = set()
        for name, parameter in self._named_tensors(Parameter):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def named_buffers(self) -> Iterator[tuple[str, Parameter]]:
        return self._named_tensors(Buffer)

    def parameters(self) -> Iterator[Parameter]:
        for _, parameter in self.named_parameters():
            yield parameter

    def train(self: Self, mode: bool = True) -> Self:
        """Training behaviour (batch norm, dropout) for this module and all below it."""
        for _, module in self.named_modules():
            module.training = mode
        return self

    def eval(self: Self) -> Self:
        """The behaviour for prediction."""
        return self.train(False)

    def zero_grad(self) -> None:
        for parameter in self.parameters():
            parameter.zero_grad()

    def flatten(self, buffer: np.ndarray | None = None) -> Arena:
        """Move all parameters into one arena (and all buffers into another); the same one when called again.

        buffer: the memory for the parameters, if it should be some of yours (see `Arena`): shared memory, say.
        """
        if self.arena is not None and buffer is not None:
            raise MinidlError("flatten: the model lies in an arena already; give the buffer in the first call")
        if self.arena is None:
            self.arena = Arena(dict(self.named_parameters()), buffer)
            buffers = dict(self.named_buffers())
            self.statistics = Arena(buffers) if buffers else None
        return self.arena

    def astype(self: Self, dtype: np.typing.DTypeLike) -> Self:
        """All parameters and buffers in float32 or float64 (before `flatten`)."""
        for kind in (Parameter, Buffer):
            for name, tensor in self._named_tensors(kind):
                if tensor.arena is not None:
                    raise ShapeError(f"astype: {name} lies in an arena already; convert before flatten()")
                tensor._data = tensor._data.astype(dtype)
        return self

    # -- in and out --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of all parameters and buffers, under PyTorch's names and in PyTorch's layouts."""
        return {
            name: tensor.to_torch() for kind in (Parameter, Buffer) for name, tensor in self._named_tensors(kind)
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray], strict: bool = True) -> None:
        """Take values as `state_dict` returns them, or as a PyTorch model of the same structure would.

        strict: every name must be there and none besides (PyTorch's `num_batches_tracked`, which nothing uses, may
        be). Nothing is changed unless everything fits. Raises CheckpointError.
        """
        own = {name: tensor for kind in (Parameter, Buffer) for name, tensor in self._named_tensors(kind)}
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
                raise CheckpointError(
                    f"load_state_dict: {name} is {value.dtype} {value.shape}; expected floats "
                    f"{own[name].torch_shape} (PyTorch's layout): another model?"
                )
        for name, value in fitting.items():
            own[name].from_torch(value)

    # -- what it costs -----------------------------------------------------------------------------------

    def flops(self, output_shape: tuple[int, ...]) -> int:
        """Floating-point operations of this layer alone for an output of this shape; 0 where they do not count."""
        return 0

    def extra_repr(self) -> str:
        return ""

    def __repr__(self) -> str:
        children = [f"  ({name}): " + repr(child).replace("\n", "\n  ") for name, child in self.named_children()]
        inside = "\n" + "\n".join(children) + "\n" if children else self.extra_repr()
        return f"{type(self).__name__}({inside})"

    def summary(self, input_shape: tuple[int, ...]) -> str:
        """A table of the layers with output shape, parameters and FLOPs of one forward pass for one input.

        input_shape: without the batch, such as (28, 28, 1).
        """
        names = {id(module): name for name, module in self.named_modules()}
        rows: list[tuple[str, str, str, int, int]] = []

        def note(module: Module, output: Tensor) -> None:
            if not any(True for _ in module.named_children()):
                parameters = sum(p.size for p in module.parameters())
                shape = str(output.shape[1:])
                rows.append((names[id(module)], repr(module), shape, parameters, module.flops(output.shape)))

        before = {name: module.training for name, module in self.named_modules()}
        dtype = next((p.dtype for p in self.parameters()), np.dtype(np.float32))
        try:
            with no_grad(), watching(note):
                self.eval()(Tensor(np.zeros((1, *input_shape), dtype)))
        finally:
            for name, module in self.named_modules():
                module.training = before[name]
        total = sum(p.size for p in self.parameters())
        widths = [max(len(text) for text in column) for column in zip(*(row[:3] for row in rows), strict=True)]
        lines = [f"{'name':<{widths[0]}}  {'layer':<{widths[1]}}  {'output':<{widths[2]}}  parameters         FLOPs"]
        for name, layer, shape, count, flops in rows:
            lines.append(
                f"{name:<{widths[0]}}  {layer:<{widths[1]}}  {shape:<{widths[2]}}  {count:>10,}  {flops:>12,}"
            )
        lines.append(f"{total:,} parameters, {sum(row[4] for row in rows):,} FLOPs for one input of {input_shape}")
        return "\n".join(lines)


class Sequential(Module):
    """Modules one after the other, named "0", "1", ..."""

    def __init__(self, *modules: Module) -> None:
        for i, module in enumerate(modules):
            setattr(self, str(i), module)

    def forward(self, x: Tensor) -> Tensor:
        for _, module in self.named_children():
            x = module(x)
        return x

    def __len__(self) -> int:
        return sum(1 for _ in self.named_children())

    def __getitem__(self, i: int) -> Module:
        return [module for _, module in self.named_children()][i]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

