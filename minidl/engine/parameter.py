"""Parameter: a trained tensor, stored in an arena or in a separate array, with conversion to PyTorch's layout."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import ref

import numpy as np

from minidl.engine.changes import count_change
from minidl.engine.device import acting, forbid_recording
from minidl.engine.tensor import Tensor
from minidl.errors import MinidlError, ShapeError


class Owner(Protocol):
    """The members of Arena that a parameter uses. It is a protocol because arena.py imports this module."""

    cleared: set[Parameter]  # parameters whose gradient is known to be zero

    def touch(self) -> None: ...

    def fetch(self) -> None: ...

    def dissolve(self) -> None: ...


class Parameter(Tensor):
    """A trained tensor.

    torch_axes: axis i of PyTorch's array is axis torch_axes[i] of this array; None: both layouts are equal. Example: a
        convolution's weight is (kh, kw, in, out) here and (out, in, kh, kw) in PyTorch, so torch_axes is (3, 2, 0, 1).

    In an arena, `data` is read-only and cannot be replaced: it is a view into the arena's vector, which
    the optimizer updates. Write with `copy_`, which increases the arena's version.

    A copy (copy, deepcopy, pickle) is outside any arena. When a model is copied, its arena is copied as well, and the
    copied parameters move into the new arena (see `Arena.__reduce__`).
    """

    __slots__ = ("_arena", "torch_axes")

    _arena: ref[Owner] | None

    def __init__(self, data: Any, torch_axes: tuple[int, ...] | None = None, requires_grad: bool = True) -> None:
        self._arena = None
        super().__init__(data, requires_grad=requires_grad)
        self.torch_axes = torch_axes

    def move_into(self, arena: Owner | None, data: np.ndarray, grad: np.ndarray) -> None:
        """Use these arrays, which already hold the values, from now on. Called by the arena."""
        self._data, self._grad, self._arena = data, grad, None if arena is None else ref(arena)

    @property
    def arena(self) -> Owner | None:
        """The arena that stores this parameter, or None.

        The reference is weak: models and optimizers keep an arena alive. A strong reference would form a cycle,
        so that only the garbage collector would free the memory of a discarded model.
        """
        return None if self._arena is None else self._arena()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("_data", "requires_grad"):  # a recorded step depends on these
            count_change()

    def __getattr__(self, name: str) -> Any:
        """Return an array that is absent, because a GPU has the newer values: copy them to the host first."""
        arena: Any = self.arena if name in ("_data", "_grad") else None
        if arena is None or arena.gpu is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        arena._there.host("theta" if name == "_data" else "grad")
        return object.__getattribute__(self, name)

    def __getstate__(self) -> Any:
        if (arena := self.arena) is not None:
            arena.fetch()
        others, slots = super().__getstate__()
        return others, slots | {"_arena": None}

    @property
    def data(self) -> np.ndarray:
        """The array; read-only in an arena. Assigning to it in an arena raises MinidlError."""
        forbid_recording()
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
        """d(loss)/d(this), of the same shape and type, or None; in an arena, a view into arena.grad.

        Reading it removes the parameter from arena.cleared, since the caller may then modify the array.
        """
        forbid_recording()
        if (arena := self.arena) is not None:
            arena.cleared.discard(self)
        return self._grad

    @grad.setter
    def grad(self, array: np.ndarray | None) -> None:
        Tensor.grad.__set__(self, array)  # type: ignore[attr-defined]

    def accumulate(self, dx: np.ndarray) -> None:
        """Add dx to grad. If grad is known to be zero, copy dx instead."""
        arena = self.arena
        if arena is None or self._grad is None or self not in arena.cleared:
            super().accumulate(dx)
        else:
            arena.cleared.discard(self)
            acting(self.device).copy(dx, self._grad)

    def replace_grad(self, array: np.ndarray | None) -> None:
        """Implement `parameter.grad = array`: in an arena, copy the values, since grad is a view into arena.grad."""
        if array is not None:
            forbid_recording()
        if (arena := self.arena) is None:
            super().replace_grad(array)
        elif self._grad is not None:
            self._grad[...] = 0 if array is None else array
            if array is None:
                arena.cleared.add(self)
            else:
                arena.cleared.discard(self)

    def copy_(self, values: np.ndarray | Tensor) -> None:
        """Write other values of the same shape into the array. Raises ShapeError if the shape differs.

        Do not call it between a forward pass and its `backward`: backward may need the old values, and does not detect
        the change. The same is true of an optimizer's step, and of any other write to a tensor's array.
        """
        forbid_recording()
        array = values.numpy() if isinstance(values, Tensor) else np.asarray(values)
        if array.shape != self.shape:
            raise ShapeError(f"copy_: values of shape {array.shape} for a parameter of shape {self.shape}")
        self._data[...] = array
        if (arena := self.arena) is not None:
            arena.touch()

    def to_torch(self) -> np.ndarray:
        """Return a copy of the values in PyTorch's layout."""
        forbid_recording()
        return np.array(self._data if self.torch_axes is None else self._data.transpose(self.torch_axes), order="C")

    @property
    def torch_shape(self) -> tuple[int, ...]:
        return self.shape if self.torch_axes is None else tuple(self.shape[axis] for axis in self.torch_axes)

    def from_torch(self, values: np.ndarray) -> None:
        """Write values given in PyTorch's layout."""
        self.copy_(values if self.torch_axes is None else values.transpose(np.argsort(self.torch_axes)))


class Buffer(Parameter):
    """A tensor that a model saves but does not train, such as the running mean of batch norm."""

    __slots__ = ()

    def __init__(self, data: Any) -> None:
        super().__init__(data, requires_grad=False)
