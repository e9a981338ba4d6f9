"""Elementwise arithmetic. Shapes broadcast as in NumPy.

If one operand is a number, `add`, `subtract` and `multiply` call `affine`. `divide` and `maximum` convert the
number to an array. `divide` does not use `affine` because x * (1 / n) rounds differently from x / n.
"""

from __future__ import annotations

import numpy as np

from minidl.engine.autograd import Function
from minidl.engine.device import acting
from minidl.engine.tensor import Scalar, Tensor
from minidl.errors import ShapeError
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


def _tensors(name: str, a: Operand, b: Operand) -> tuple[Tensor, Tensor]:
    """Return both operands as tensors, broadcast to the same shape. Raises ShapeError if that is impossible."""
    x, y = as_tensors(a, b)
    try:
        shape = np.broadcast_shapes(x.shape, y.shape)
    except ValueError:
        raise ShapeError(f"{name}: shapes {x.shape} and {y.shape} do not broadcast") from None
    return broadcast_to(x, shape), broadcast_to(y, shape)


def add(a: Operand, b: Operand) -> Tensor:
    """Return a + b."""
    if _is_number(a):
        a, b = b, a
    if _is_number(b):
        return affine(a, shift=float(b))  # type: ignore[arg-type]
    return Add.apply(*_tensors("add", a, b))


def subtract(a: Operand, b: Operand) -> Tensor:
    """Return a - b."""
    if _is_number(b):
        return affine(a, shift=-float(b))  # type: ignore[arg-type]
    if _is_number(a):
        return affine(b, scale=-1.0, shift=float(a))  # type: ignore[arg-type]
    return Subtract.apply(*_tensors("subtract", a, b))


def multiply(a: Operand, b: Operand) -> Tensor:
    """Return a times b, element by element."""
    if _is_number(a):
        a, b = b, a
    if _is_number(b):
        return affine(a, scale=float(b))  # type: ignore[arg-type]
    return Multiply.apply(*_tensors("multiply", a, b))


def divide(a: Operand, b: Operand) -> Tensor:
    """Return a / b."""
    return Divide.apply(*_tensors("divide", a, b))


def maximum(a: Operand, b: Operand) -> Tensor:
    """Return the larger of a and b, element by element. Where they are equal, each gets half the gradient."""
    return Maximum.apply(*_tensors("maximum", a, b))


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
