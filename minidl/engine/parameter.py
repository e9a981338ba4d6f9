"""Parameter: a tensor that is trained, may live in an arena, and knows how PyTorch lays it out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from minidl.engine.device import acting
from minidl.engine.tensor import Tensor
from minidl.errors import MinidlError, ShapeError

if TYPE_CHECKING:
    from minidl.engine.arena import Arena


class Parameter(Tensor):
    """A trained tensor.

    torch_axes: axis i of the array in a checkpoint is axis torch_axes[i] of ours. A convolution's weight is
        (kh, kw, in, out) here and (out, in, kh, kw) there: torch_axes = (3, 2, 0, 1). None: the same on both sides.

    Once in an arena, `data` is read-only and cannot be replaced: the array is a view into the arena's vector, and who
    replaced it would train a copy that nobody updates. Write with `copy_`, which raises the arena's version.
    """

    __slots__ = ("arena", "torch_axes")

    def __init__(self, data: Any, torch_axes: tuple[int, ...] | None = None, requires_grad: bool = True) -> None:
        self.arena: Arena | None = None
        super().__init__(data, requires_grad=requires_grad)
        self.torch_axes = torch_axes

    def move_into(self, arena: Arena | None, data: np.ndarray, grad: np.ndarray) -> None:
        """Use these arrays, which hold the values already, from now on (called by the arena)."""
        self._data, self._grad, self.arena = data, grad, arena

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        """A copy that lies in no arena: the copy of a model's arena takes it in (see arena.py)."""
        copied = type(self)(self._data.copy())
        copied.device, copied.requires_grad, copied.torch_axes = self.device, self.requires_grad, self.torch_axes
        copied.grad = None if self.grad is None else self.grad.copy()
        return copied

    @property
    def data(self) -> np.ndarray:
        """The array; read-only once in an arena."""
        if self.arena is None:
            return self._data
        view = self._data.view()
        view.flags.writeable = False
        return view

    @data.setter
    def data(self, array: np.ndarray) -> None:
        if self.arena is not None:
            raise MinidlError(
                f"parameter {self.shape}: its array is part of the model's arena and cannot be replaced; "
                "write into it with parameter.copy_(values)"
            )
        self.replace_data(array)

    @property
    def grad(self) -> np.ndarray | None:
        """d(loss)/d(this), of the same shape and type, or None; in an arena, a view into arena.grad."""
        if self.arena is not None:
            self.arena.cleared.discard(self)
        return self._grad

    @grad.setter
    def grad(self, array: np.ndarray | None) -> None:
        Tensor.grad.__set__(self, array)  # type: ignore[attr-defined]

    def accumulate(self, dx: np.ndarray) -> None:
        """grad += dx; where it is known to be zero, grad = dx."""
        if self.arena is None or self._grad is None or self not in self.arena.cleared:
            super().accumulate(dx)
        else:
            self.arena.cleared.discard(self)
            acting(self.device).copy(dx, self._grad)

    def replace_grad(self, array: np.ndarray | None) -> None:
        """What `parameter.grad = array` does: in an arena the gradient stays a view into arena.grad."""
        if self.arena is None:
            super().replace_grad(array)
        elif self._grad is not None:
            self._grad[...] = 0 if array is None else array
            if array is None:
                self.arena.cleared.add(self)
            else:
                self.arena.cleared.discard(self)

    def copy_(self, values: np.ndarray | Tensor) -> None:
        """Write other values of the same shape into the array.

        Not between a forward pass and its `backward`, which may need the old values, and does not notice. The same
        goes for an optimizer's step, and for any array that a tensor shares.
        """
        array = values.numpy() if isinstance(values, Tensor) else np.asarray(values)
        if array.shape != self.shape:
            raise ShapeError(f"copy_: values of shape {array.shape} for a parameter of shape {self.shape}")
        self._data[...] = array
        if self.arena is not None:
            self.arena.touch()

    def to_torch(self) -> np.ndarray:
        """A copy of the values in PyTorch's layout."""
        return np.array(self._data if self.torch_axes is None else self._data.transpose(self.torch_axes), order="C")

    @property
    def torch_shape(self) -> tuple[int, ...]:
        return self.shape if self.torch_axes is None else tuple(self.shape[axis] for axis in self.torch_axes)

    def from_torch(self, values: np.ndarray) -> None:
        """Take values in PyTorch's layout."""
        self.copy_(values if self.torch_axes is None else values.transpose(np.argsort(self.torch_axes)))


class Buffer(Parameter):
    """A tensor that belongs to the model but is not trained, such as batch norm's running mean."""

    __slots__ = ()

    def __init__(self, data: Any) -> None:
        super().__init__(data, requires_grad=False)
