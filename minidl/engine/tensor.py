"""Tensor: an array with an optional gradient and a reference to the function that computed it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from minidl.engine.autograd import Function, GraphError, backward
from minidl.engine.device import Device, acting, forbid_recording
from minidl.errors import ConfigError, ShapeError

Scalar = int | float | np.floating | np.integer
FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


def _comparison(how: Callable[[Any, Any], Any]) -> Callable[[Tensor, object], Any]:
    """Return the method of Tensor for a comparison operator."""
    return lambda self, other: self._compare(how, other)


class Tensor:
    """A float32 or float64 array on a device, and a node of the tape's graph.

    data           arrays and tensors of float32 or float64 keep their type; C-contiguous ones are shared, not copied.
                   Anything else (lists, numbers, integer arrays) is converted to a new float32 array.
    requires_grad  whether `backward` adds d(loss)/d(this) to `.grad`, an array of the same shape

    Comparisons (==, !=, <, <=, >, >=) with numbers, arrays and tensors return NumPy arrays of booleans, with no graph.
    As a key of a dict or a member of a set, a tensor is compared by identity, not by its values.

    Copies (copy, deepcopy, pickle) have no graph: the copy of a computed tensor is a leaf, as `detach` returns it.

    Raises ShapeError if data contains anything but real numbers and booleans.
    """

    __slots__ = ("__weakref__", "_data", "_grad", "creator", "device", "requires_grad")
    __array_ufunc__ = None  # ndarray + Tensor calls Tensor.__radd__; np.sqrt(tensor) fails instead of losing the graph

    _data: np.ndarray
    _grad: np.ndarray | None
    creator: Function | None

    def __init__(self, data: Any, requires_grad: bool = False, device: str | Device = "cpu") -> None:
        if copied := isinstance(data, Tensor):
            data = data._data
        array = data if copied else np.asarray(data)
        if array.dtype.kind not in "fiub":
            raise ShapeError(f"Tensor: an array of {array.dtype}; expected floats, integers or booleans")
        if array.dtype not in FLOATS or not isinstance(data, np.ndarray):
            array = array.astype(np.float32)
        self._data = np.asanyarray(array, order="C")  # np.ascontiguousarray would turn the shape () into (1,)
        self.requires_grad = requires_grad
        self.device = device if isinstance(device, Device) else Device(device)
        self.grad = None
        self.creator = None
        if copied:
            acting(self.device).made(self)

    @classmethod
    def wrap(cls, array: np.ndarray, on: Device) -> Tensor:
        """Return a tensor that shares a contiguous array of floats. Ops use this constructor: it checks nothing."""
        tensor = Tensor.__new__(Tensor)
        tensor._data, tensor.device = array, on
        tensor.requires_grad, tensor._grad, tensor.creator = False, None, None
        return tensor

    # -- the array ---------------------------------------------------------------------------------------

    @property
    def data(self) -> np.ndarray:
        """The array, not a copy. It may be modified, or replaced by an array of the same shape and type."""
        forbid_recording()
        return self._data

    @data.setter
    def data(self, array: np.ndarray) -> None:
        self.replace_data(array)

    def replace_data(self, array: np.ndarray) -> None:
        """Implement `tensor.data = array`. Raises ShapeError if the shape or the type differs."""
        forbid_recording()
        if array.shape != self.shape or array.dtype != self.dtype:
            raise ShapeError(f"data: {array.dtype} {array.shape}; expected the tensor's {self.dtype} {self.shape}")
        self._data = np.asarray(array, order="C")

    @property
    def grad(self) -> np.ndarray | None:
        """d(loss)/d(this), of the same shape and type, or None."""
        forbid_recording()
        return self._grad

    @grad.setter
    def grad(self, array: np.ndarray | None) -> None:
        if array is not None and np.shape(array) != self.shape:
            raise ShapeError(f"grad: an array of shape {np.shape(array)} for a tensor of shape {self.shape}")
        self.replace_grad(array)

    def replace_grad(self, array: np.ndarray | None) -> None:
        """Implement `tensor.grad = array`."""
        self._grad = None if array is None else np.asarray(array, self.dtype, order="C")

    @property
    def shape(self) -> tuple[int, ...]:
        return self._data.shape

    @property
    def dtype(self) -> np.dtype:
        return self._data.dtype

    @property
    def ndim(self) -> int:
        return self._data.ndim

    @property
    def size(self) -> int:
        return self._data.size

    def numpy(self) -> np.ndarray:
        """Return the values as a NumPy array (not a copy: do not write to it)."""
        forbid_recording()
        return self._data

    def item(self) -> float:
        """Return the value of a tensor with one element. Raises ShapeError for any other tensor."""
        if self.size != 1:
            raise ShapeError(f"item: a tensor of shape {self.shape} is not a single number")
        return float(self.numpy().reshape(())[()])

    def __float__(self) -> float:
        return self.item()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype, copy=copy)

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ShapeError(f"a tensor of shape {self.shape} is neither true nor false; compare it, and reduce the "
                             "result with .any() or .all()")  # fmt: skip
        return bool(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without axes has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        extra = ", requires_grad=True" if self.requires_grad else ""
        return f"Tensor({np.array2string(self._data, precision=4, threshold=20)}{extra})"

    # -- comparisons -------------------------------------------------------------------------------------

    __hash__ = object.__hash__

    def _compare(self, how: Callable[[Any, Any], Any], other: Any) -> Any:
        """Return how(values, other's values): an array of booleans, or one boolean for two values without axes.

        Raises ShapeError if `other` is not an array of real numbers whose shape broadcasts.
        """
        if isinstance(other, int | float):
            return how(self.numpy(), other)  # NumPy converts the number to the array's type
        if not isinstance(other, Tensor | np.ndarray | np.generic | list | tuple):  # None, a string, ...
            return NotImplemented
        try:
            values = other.numpy() if isinstance(other, Tensor) else np.asarray(other)
            if values.dtype.kind in "fiub":
                return how(self.numpy(), values)
            what = str(values.dtype)
        except ValueError:
            what = f"an array of shape {np.shape(other)}" if hasattr(other, "shape") else f"this {type(other).__name__}"
        raise ShapeError(f"a tensor of shape {self.shape} cannot be compared with {what}")

    __eq__ = _comparison(operator.eq)
    __ne__ = _comparison(operator.ne)
    __lt__ = _comparison(operator.lt)
    __le__ = _comparison(operator.le)
    __gt__ = _comparison(operator.gt)
    __ge__ = _comparison(operator.ge)

    # -- copies ------------------------------------------------------------------------------------------

    def __getstate__(self) -> Any:
        """Return the attributes for copy and pickle: (a subclass's dict or None, the values in slots by name)."""
        forbid_recording()
        state: Any = super().__getstate__()
        others, slots = state
        if self.creator is not None:
            slots |= {"creator": None, "_grad": None, "requires_grad": False}
        return others, slots

    def __setstate__(self, state: Any) -> None:
        others, slots = state
        for name, value in {**(others or {}), **slots}.items():
            # An array in a memory map or in a buffer of pickle protocol 5 may be read-only.
            setattr(self, name, value.copy() if isinstance(value, np.ndarray) and not value.flags.behaved else value)

    # -- the tape ----------------------------------------------------------------------------------------

    def backward(self, gradient: ArrayLike | None = None, retain_graph: bool = False) -> None:
        """Add d(this)/d(leaf) to `.grad` of every leaf that this was computed from (see autograd.backward)."""
        backward(self, gradient, retain_graph)

    def detach(self) -> Tensor:
        """Return a leaf with the same values, in the same memory."""
        leaf = Tensor.wrap(self._data, self.device)
        acting(self.device).made(leaf)
        return leaf

    def zero_grad(self) -> None:
        self.grad = None

    def accumulate(self, dx: np.ndarray) -> None:
        """Add dx to grad."""
        device = acting(self.device)
        if self._grad is None:
            self._grad = device.empty(dx.shape, dx.dtype)
            device.copy(dx, self._grad)  # a copy: dx may be shared with another tensor
        else:
            device.elementwise.accumulate(dx.reshape(-1), self._grad.reshape(-1))

    def astype(self, dtype: DTypeLike) -> Tensor:
        """Return a new leaf with the values converted to float32 or float64.

        Raises GraphError if this is not a leaf, since gradients do not pass conversions; ConfigError for another type.
        """
        if self.creator is not None:
            raise GraphError("astype: a conversion does not propagate gradients; call detach() first")
        return Tensor(self._data.astype(float_type(dtype)), self.requires_grad, self.device)

    # -- arithmetic: every operator is an op -------------------------------------------------------------

    def __add__(self, other: Tensor | np.ndarray | Scalar) -> Tensor:
        return ops.add(self, other)

    def __sub__(self, other: Tensor | np.ndarray | Scalar) -> Tensor:
        return ops.subtract(self, other)

    def __mul__(self, other: Tensor | np.ndarray | Scalar) -> Tensor:
        return ops.multiply(self, other)

    def __truediv__(self, other: Tensor | np.ndarray | Scalar) -> Tensor:
        return ops.divide(self, other)

    def __radd__(self, other: np.ndarray | Scalar) -> Tensor:
        return ops.add(other, self)

    def __rsub__(self, other: np.ndarray | Scalar) -> Tensor:
        return ops.subtract(other, self)

    def __rmul__(self, other: np.ndarray | Scalar) -> Tensor:
        return ops.multiply(other, self)

    def __rtruediv__(self, other: np.ndarray | Scalar) -> Tensor:
        return ops.divide(other, self)

    def __neg__(self) -> Tensor:
        return ops.affine(self, scale=-1.0)

    def __pow__(self, exponent: Scalar) -> Tensor:
        return ops.power(self, exponent)

    def __matmul__(self, other: Tensor | np.ndarray) -> Tensor:
        return ops.matmul(self, other)

    def __rmatmul__(self, other: np.ndarray) -> Tensor:
        return ops.matmul(other, self)

    def __getitem__(self, key: Any) -> Tensor:
        return ops.index(self, key)

    def exp(self) -> Tensor:
        return ops.exp(self)

    def log(self) -> Tensor:
        return ops.log(self)

    def sqrt(self) -> Tensor:
        return ops.sqrt(self)

    def abs(self) -> Tensor:
        return ops.absolute(self)

    def relu(self) -> Tensor:
        return ops.relu(self)

    def sum(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
        return ops.sum(self, axis, keepdims)

    def mean(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
        return ops.mean(self, axis, keepdims)

    def max(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
        return ops.max(self, axis, keepdims)

    def reshape(self, *shape: int) -> Tensor:
        return ops.reshape(self, shape)

    def transpose(self, *axes: int) -> Tensor:
        return ops.transpose(self, axes)

    @property
    def T(self) -> Tensor:  # NumPy's name
        return ops.transpose(self)


def float_type(dtype: DTypeLike) -> np.dtype:
    """Return dtype as a NumPy type. Raises ConfigError if it is neither float32 nor float64."""
    name: object = dtype
    if dtype is not None:  # np.dtype(None) is float64
        with suppress(TypeError):
            name = found = np.dtype(dtype)
            if found in FLOATS:
                return found
    raise ConfigError(f"astype: {name}; expected float32 or float64")


from minidl import ops  # noqa: E402  (the one import cycle: ops use Tensor, and Tensor's operators use ops)
