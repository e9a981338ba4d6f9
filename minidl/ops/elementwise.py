"""Elementwise arithmetic. Shapes broadcast as in NumPy.

If one operand has one number for all elements along adjacent axes of the other, such as a number for each channel, the
kernels read it where it is. Otherwise `broadcast_to` first writes it as an array of the other's shape.

If one operand is a number, `add`, `subtract` and `multiply` call `affine`. `divide` and `maximum` convert the
number to an array. `divide` does not use `affine` because x * (1 / n) rounds differently from x / n.
"""

from __future__ import annotations

import math

import numpy as np

from minidl.engine.autograd import Function
from minidl.engine.device import acting
from minidl.engine.tensor import Scalar, Tensor
from minidl.errors import ShapeError
from minidl.ops.arrays import reduce_sum, runs
from minidl.ops.movement import broadcast_to

Operand = Tensor | np.ndarray | Scalar


class Elementwise(Function):
    """The base class. Outputs have the shape of the inputs, and kernels receive flat vectors."""

    def run(self, kernel: str, *arguments: np.ndarray | float) -> np.ndarray:
        """Return the kernel's result, an array with the shape and type of the first argument."""
        like = arguments[0]
        assert isinstance(like, np.ndarray)
        out = self.device.empty(like.shape, like.dtype)
        flat = (a.ravel() if isinstance(a, np.ndarray) else a for a in arguments)
        getattr(self.device.elementwise, kernel)(*flat, out.ravel())
        return out

    def scaled(self, x: np.ndarray, scale: float) -> np.ndarray:
        return self.run("affine", x, scale, 0.0)


class Add(Elementwise):
    def forward(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return self.run("add", a, b)

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray, ...]:
        return dy, dy


class Subtract(Elementwise):
    def forward(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return self.run("subtract", a, b)

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray | None, ...]:
        return dy, self.scaled(dy, -1.0) if self.needs[1] else None


class Multiply(Elementwise):
    def forward(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        self.a, self.b = a, b
        return self.run("multiply", a, b)

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray | None, ...]:
        return (
            self.run("multiply", dy, self.b) if self.needs[0] else None,
            self.run("multiply", dy, self.a) if self.needs[1] else None,
        )


class Divide(Elementwise):
    def forward(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        self.b, self.y = b, self.run("divide", a, b)
        return self.y

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray | None, ...]:
        da = self.run("divide", dy, self.b)
        return da, self.scaled(self.run("multiply", da, self.y), -1.0) if self.needs[1] else None


class Maximum(Elementwise):
    def forward(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        self.a, self.b = a, b
        return self.run("maximum", a, b)

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray, ...]:
        da, db = self.device.empty(dy.shape, dy.dtype), self.device.empty(dy.shape, dy.dtype)
        self.device.elementwise.maximum_backward(*(v.ravel() for v in (dy, self.a, self.b, da, db)))
        return da, db


class Broadcast(Elementwise):
    """The base class of operations on x and w, which has one element for all elements of x along adjacent axes."""

    kernel: str

    def forward(self, x: np.ndarray, w: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        self.w, self.axes = w, axes
        return self.combined(x)

    def combined(self, x: np.ndarray) -> np.ndarray:
        return self.run(self.kernel, x, self.w.ravel(), math.prod(x.shape[self.axes[-1] + 1 :]))

    def summed(self, dy: np.ndarray) -> np.ndarray:
        """Return the sums over the elements of x that belong to each element of w."""
        return reduce_sum(self.device, dy, self.axes).reshape(self.w.shape)


class AddBroadcast(Broadcast):
    kernel = "add_broadcast"

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray | None, ...]:
        return dy, self.summed(dy) if self.needs[1] else None


class SubtractBroadcast(Broadcast):
    kernel = "subtract_broadcast"

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray | None, ...]:
        return dy, self.scaled(self.summed(dy), -1.0) if self.needs[1] else None


class MultiplyBroadcast(Broadcast):
    kernel = "multiply_broadcast"

    def forward(self, x: np.ndarray, w: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        self.x = x
        return super().forward(x, w, axes)

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray | None, ...]:
        return (
            self.combined(dy) if self.needs[0] else None,
            self.summed(self.run("multiply", dy, self.x)) if self.needs[1] else None,
        )


class DivideBroadcast(Broadcast):
    kernel = "divide_broadcast"

    def forward(self, x: np.ndarray, w: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        self.y = super().forward(x, w, axes)
        return self.y

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray | None, ...]:
        dx = self.combined(dy)
        return dx, self.scaled(self.summed(self.run("multiply", dx, self.y)), -1.0) if self.needs[1] else None


class Affine(Elementwise):
    def forward(self, x: np.ndarray, scale: float, shift: float) -> np.ndarray:
        self.scale = scale
        return self.run("affine", x, scale, shift)

    def backward(self, dy: np.ndarray) -> np.ndarray:
        return self.scaled(dy, self.scale)


class Power(Elementwise):
    def forward(self, x: np.ndarray, exponent: float) -> np.ndarray:
        self.x, self.exponent = x, exponent
        return self.run("power", x, exponent)

    def backward(self, dy: np.ndarray) -> np.ndarray:
        return self.run("power_backward", dy, self.x, self.exponent)


class Exp(Elementwise):
    def forward(self, x: np.ndarray) -> np.ndarray:
        self.y = self.run("exp", x)
        return self.y

    def backward(self, dy: np.ndarray) -> np.ndarray:
        return self.run("multiply", dy, self.y)


class Log(Elementwise):
    def forward(self, x: np.ndarray) -> np.ndarray:
        self.x = x
        return self.run("log", x)

    def backward(self, dy: np.ndarray) -> np.ndarray:
        return self.run("divide", dy, self.x)


class Sqrt(Elementwise):
    def forward(self, x: np.ndarray) -> np.ndarray:
        self.y = self.run("sqrt", x)
        return self.y

    def backward(self, dy: np.ndarray) -> np.ndarray:
        return self.scaled(self.run("divide", dy, self.y), 0.5)


class Absolute(Elementwise):
    def forward(self, x: np.ndarray) -> np.ndarray:
        self.x = x
        return self.run("absolute", x)

    def backward(self, dy: np.ndarray) -> np.ndarray:
        return self.run("absolute_backward", dy, self.x)


def _is_number(value: Operand) -> bool:
    return isinstance(value, int | float | np.floating | np.integer)


def as_tensors(a: Operand, b: Operand) -> tuple[Tensor, Tensor]:
    """Return both operands as tensors. An array or a number gets the data type and device of the other operand.

    Raises TypeError if neither is a tensor.
    """
    like = a if isinstance(a, Tensor) else b
    if not isinstance(like, Tensor):
        raise TypeError(
            f"{type(a).__name__} and {type(b).__name__}: one must be a Tensor; convert it with Tensor(array)"
        )

    def tensor(v: Operand) -> Tensor:
        if isinstance(v, Tensor):
            return v
        if not _is_number(v):
            return Tensor(np.asarray(v, like.dtype), device=like.device)
        device = acting(like.device)
        number = device.empty((), like.dtype)
        device.elementwise.fill(float(v), number.reshape(1))
        return Tensor.wrap(number, like.device)

    return tensor(a), tensor(b)


def _shared_axes(x: Tensor, w: Tensor) -> tuple[int, ...]:
    """Return the axes along which elements of x share an element of w; () if there are none, or not adjacent ones."""
    new = x.ndim - w.ndim
    axes = tuple(axis for axis, n in enumerate(x.shape) if n > 1 and (axis < new or w.shape[axis - new] == 1))
    return axes if len(runs(axes)) == 1 and x.size > 0 else ()


def _apply(
    operation: type[Elementwise], a: Operand, b: Operand, broadcast: type[Broadcast] | None = None, swaps: bool = False
) -> Tensor:
    """Return the result of an operation on two operands, which are broadcast to the same shape.

    broadcast: the same operation for a second operand that has fewer elements. swaps: whether the operands may change
    places. Raises ShapeError if the shapes do not broadcast.
    """
    x, y = as_tensors(a, b)
    try:
        shape = np.broadcast_shapes(x.shape, y.shape)
    except ValueError:
        raise ShapeError(f"{operation.__name__.lower()}: shapes {x.shape} and {y.shape} do not broadcast") from None
    for large, small in ((x, y), (y, x)) if swaps else ((x, y),):
        if broadcast and large.shape == shape and (axes := _shared_axes(large, small)):
            return broadcast.apply(large, small, axes=axes)
    return operation.apply(broadcast_to(x, shape), broadcast_to(y, shape))


def add(a: Operand, b: Operand) -> Tensor:
    """Return a + b."""
    if _is_number(a):
        a, b = b, a
    if _is_number(b):
        return affine(a, shift=float(b))  # type: ignore[arg-type]
    return _apply(Add, a, b, AddBroadcast, swaps=True)


def subtract(a: Operand, b: Operand) -> Tensor:
    """Return a - b."""
    if _is_number(b):
        return affine(a, shift=-float(b))  # type: ignore[arg-type]
    if _is_number(a):
        return affine(b, scale=-1.0, shift=float(a))  # type: ignore[arg-type]
    return _apply(Subtract, a, b, SubtractBroadcast)


def multiply(a: Operand, b: Operand) -> Tensor:
    """Return a times b, element by element."""
    if _is_number(a):
        a, b = b, a
    if _is_number(b):
        return affine(a, scale=float(b))  # type: ignore[arg-type]
    return _apply(Multiply, a, b, MultiplyBroadcast, swaps=True)


def divide(a: Operand, b: Operand) -> Tensor:
    """Return a / b."""
    return _apply(Divide, a, b, DivideBroadcast)


def maximum(a: Operand, b: Operand) -> Tensor:
    """Return the larger of a and b, element by element. Where they are equal, each gets half the gradient."""
    return _apply(Maximum, a, b)


def affine(x: Tensor, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """Return scale * x + shift, where scale and shift are numbers."""
    return Affine.apply(x, scale=float(scale), shift=float(shift))


def power(x: Tensor, exponent: Scalar) -> Tensor:
    """Return x^exponent. Raises ShapeError if the exponent is not a number."""
    if not _is_number(exponent):
        raise ShapeError(f"power: the exponent must be a number, not {type(exponent).__name__}")
    return Power.apply(x, exponent=float(exponent))


def exp(x: Tensor) -> Tensor:
    """Return e^x."""
    return Exp.apply(x)


def log(x: Tensor) -> Tensor:
    """Return ln x."""
    return Log.apply(x)


def sqrt(x: Tensor) -> Tensor:
    """Return the square root of x."""
    return Sqrt.apply(x)


def absolute(x: Tensor) -> Tensor:
    """Return |x|."""
    return Absolute.apply(x)
