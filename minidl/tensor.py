"""Tensor: an array that may want a gradient, and knows the function that made it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidl.autograd import Function, GraphError, backward
from minidl.device import Device
from minidl.device import device as find_device
from minidl.errors import ShapeError

Scalar = int | float | np.floating | np.integer
FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


class Tensor:
    """A float32 or float64 array on a device, with its place on the tape.

    data           anything NumPy makes an array of; what is not float64 becomes float32, C-contiguous
    requires_grad  whether `backward` should leave d(loss)/d(this) in `.grad`, an array of the same shape
    """

    __slots__ = ("__weakref__", "_data", "creator", "device", "grad", "requires_grad")
    __array_priority__ = 1000.0  # ndarray + Tensor must ask Tensor first

    _data: np.ndarray
    grad: np.ndarray | None
    creator: Function | None

    def __init__(self, data: Any, requires_grad: bool = False, device: str | Device = "cpu") -> None:
        array = np.asarray(data._data if isinstance(data, Tensor) else data)
        if array.dtype not in FLOATS:
            if array.dtype.kind not in "fiub":
                raise ShapeError(f"Tensor: an array of {array.dtype} is not numeric; expected floats or integers")
            array = array.astype(np.float32)
        self._data = np.asarray(array, order="C")  # (ascontiguousarray would turn () into (1,))
        self.requires_grad = requires_grad
        self.device = find_device(device)
        self.grad = None
        self.creator = None

    @classmethod
    def wrap(cls, array: np.ndarray, on: Device) -> Tensor:
        """A tensor around an array that is float and contiguous already: what ops use."""
        tensor = Tensor.__new__(Tensor)
        tensor._data, tensor.device = array, on
        tensor.requires_grad, tensor.grad, tensor.creator = False, None, None
        return tensor

    # -- the array ---------------------------------------------------------------------------------------

    @property
    def data(self) -> np.ndarray:
        """The array itself; it may be written to, or replaced by one of the same shape and type."""
        return self._data

    @data.setter
    def data(self, array: np.ndarray) -> None:
        self.replace_data(array)

    def replace_data(self, array: np.ndarray) -> None:
        """What `tensor.data = array` does."""
        if array.shape != self.shape or array.dtype != self.dtype:
            raise ShapeError(f"data: {array.dtype} {array.shape} for a tensor of {self.dtype} {self.shape}")
        self._data = np.asarray(array, order="C")

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
        """The values as a NumPy array (not a copy: do not write to it)."""
        return self._data

    def item(self) -> float:
        """The value of a tensor with one element."""
        if self.size != 1:
            raise ShapeError(f"item: a tensor of shape {self.shape} is not a single number")
        return float(self._data.reshape(())[()])

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without axes")
        return self.shape[0]

    def __repr__(self) -> str:
        extra = ", requires_grad=True" if self.requires_grad else ""
        return f"Tensor({np.array2string(self._data, precision=4, threshold=20)}{extra})"

    # -- the tape ----------------------------------------------------------------------------------------

    def backward(self, gradient: np.ndarray | None = None, retain_graph: bool = False) -> None:
        """Add the gradient of this tensor to `.grad` of every leaf that it was computed from."""
        backward(self, gradient, retain_graph)

    def detach(self) -> Tensor:
        """The same values (the same memory) with no past."""
        return Tensor.wrap(self._data, self.device)

    def zero_grad(self) -> None:
        self.grad = None

    def accumulate(self, dx: np.ndarray) -> None:
        """grad += dx."""
        if self.grad is None:
            self.grad = dx.copy()  # dx may be shared with another tensor
        else:
            self.device.elementwise.accumulate(dx.ravel(), self.grad.ravel())

    def astype(self, dtype: np.typing.DTypeLike) -> Tensor:
        """A leaf with the same values in float32 or float64; no gradient flows through."""
        if self.creator is not None:
            raise GraphError("astype: gradients do not flow through a change of type; detach() first")
        return Tensor(self._data.astype(dtype), self.requires_grad, self.device)

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




from minidl import ops  # noqa: E402  (ops are made of Tensors, and Tensor's operators of ops)
