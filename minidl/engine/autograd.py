"""The tape: the graph of the functions that computed a result, and backpropagation through it.

Each differentiable operation is a `Function` with `forward` and `backward` side by side. Applying it computes the
output. If an input requires a gradient (and `no_grad` is not in effect), the Function is stored on the output as its
`creator`. Creators and their inputs form the graph. The function `backward` visits each creator once, newest first.

A Function only consumes tensors that already exist, so the order of creation is a topological order. Backpropagation
needs the reverse. There is no recursion, so a long chain of ops cannot overflow the stack.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from minidl.engine.changes import count_change
from minidl.engine.device import Device, acting
from minidl.errors import MinidlError, ShapeError

_clock = itertools.count()


class _Mode(threading.local):
    enabled = True  # a default in the class: reading it is five times faster than `getattr` of what is not there
    before: tuple[bool, ...] = ()  # the values that the `with` blocks of this thread restore, outermost first


_mode = _Mode()


class GraphError(MinidlError, RuntimeError):
    """`backward` needs a graph that was not recorded or has been freed, or `astype` was called on a computed tensor."""


class Node(Protocol):
    """The members of Tensor that the tape uses. It is a protocol because tensor.py imports this module."""

    _data: np.ndarray
    device: Device
    requires_grad: bool
    creator: Function | None  # the Function that computed this tensor; None for a leaf

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def grad(self) -> np.ndarray | None: ...

    @classmethod
    def wrap(cls, array: np.ndarray, on: Device) -> Any: ...

    def numpy(self) -> np.ndarray: ...

    def accumulate(self, dx: np.ndarray) -> None: ...

    def zero_grad(self) -> None: ...


TensorT = TypeVar("TensorT", bound=Node)


def grad_enabled() -> bool:
    """Return whether the operations of this thread are recorded on the tape."""
    return _mode.enabled


class no_grad(ContextDecorator):  # PyTorch's name
    """Disables the tape in this thread: `with no_grad(): ...`, or `@no_grad()` above a function."""

    def __enter__(self) -> no_grad:
        # The stack is stored per thread, not in self: one object may be entered twice, or by several threads.
        _mode.before = *_mode.before, _mode.enabled
        _mode.enabled = False
        count_change()
        return self

    def __exit__(self, *exception: object) -> None:
        _mode.before, _mode.enabled = _mode.before[:-1], _mode.before[-1]
        count_change()


class Function:
    """One differentiable operation on arrays.

    A subclass defines

        forward(self, *arrays, **options) -> y    stores what backward needs as attributes of self
        backward(self, dy) -> dx                  dy = dL/dy, dx = dL/dx; for several inputs, a tuple of one dx for each

    and is used through `apply`. dx is None for "no gradient". In both methods `self.device` is the table of kernels,
    and `self.needs[i]` is True if input i requires a gradient. Returned arrays may share memory with dy: the tape never
    writes into them. The tape copies a returned array that is not contiguous: kernels require contiguous arrays.
    """

    device: Device
    inputs: tuple[Node, ...]
    needs: tuple[bool, ...]
    order: int  # position in the order of creation
    freed = False

    def forward(self, *arrays: Any, **options: Any) -> np.ndarray:
        raise NotImplementedError

    def backward(self, dy: np.ndarray) -> Any:
        raise NotImplementedError

    @classmethod
    def apply(cls, *inputs: TensorT, **options: Any) -> TensorT:
        """Run `forward` on the tensors' arrays. Record the Function if an input requires a gradient (not in no_grad).

        Raises TypeError if an input is not a Tensor, ShapeError if the inputs' data types or devices differ.
        """
        first = inputs[0]
        for tensor in inputs:
            if not hasattr(tensor, "creator"):
                raise TypeError(
                    f"{cls.__name__.lower()}: {type(tensor).__name__} is not a Tensor; convert it with Tensor(array)"
                )
            if tensor.dtype != first.dtype or tensor.device is not first.device:
                how = "x.astype('float32')" if tensor.dtype != first.dtype else "Tensor(x.numpy())"
                raise ShapeError(
                    f"{cls.__name__.lower()}: {first.dtype} on {first.device.name} and {tensor.dtype} on "
                    f"{tensor.device.name} do not mix: convert one with {how}"
                )
        function = cls()
        device = function.device = acting(first.device)
        function.needs = tuple(tensor.requires_grad for tensor in inputs)
        arrays = [tensor._data for tensor in inputs]
        y = function.forward(*(arrays if device is first.device else map(device.hidden, arrays)), **options)
        output: TensorT = type(first).wrap(np.asanyarray(y, first.dtype, order="C"), first.device)
        if device is not first.device:
            device.made(output)
        if any(function.needs) and grad_enabled():
            function.inputs, function.order = inputs, next(_clock)
            output.requires_grad, output.creator = True, function
        return output

    def release(self) -> None:
        """Free the memory of the inputs and the saved arrays."""
        self.__dict__.clear()
        self.freed = True


def backward(output: Node, gradient: ArrayLike | None = None, retain_graph: bool = False) -> None:
    """Add dL/d(leaf) to `.grad` of every leaf with requires_grad that `output` depends on.

    gradient: dL/d(output), by default 1 if output has one element. retain_graph: do not free the graph afterwards.
    Raises GraphError if output requires no gradient or its graph was freed, ShapeError if a gradient does not fit.
    """
    if not output.requires_grad:
        raise GraphError("backward: the tensor has no graph; use inputs with requires_grad=True, outside no_grad()")
    if gradient is None:
        if output._data.size != 1:
            raise ShapeError(f"backward: {output.shape} is not a single number; reduce it first, or pass a gradient")
        device = acting(output.device)
        dy = device.empty(output.shape, output.dtype)
        device.elementwise.fill(1.0, dy.reshape(-1))
    else:
        dy = np.asanyarray(gradient, output.dtype, order="C")
        if dy.shape != output.shape:
            raise ShapeError(f"backward: gradient {dy.shape} for an output of shape {output.shape}")

    pending: dict[Function, np.ndarray] = {}  # dL/d(output of the function), summed so far
    _deliver(output, dy, pending)
    for function in _newest_first(output.creator):
        if function not in pending:  # all functions that use its output returned None
            continue
        gradients = function.backward(pending.pop(function))
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        for tensor, dx in zip(function.inputs, gradients, strict=True):
            if tensor.requires_grad and dx is not None:
                dx = np.asanyarray(dx, tensor.dtype, order="C")
                if dx.shape != tensor.shape:
                    raise ShapeError(
                        f"{type(function).__name__}.backward: a gradient of shape {dx.shape} for an input of shape "
                        f"{tensor.shape}; they must be equal"
                    )
                _deliver(tensor, dx, pending)
        if not retain_graph:
            function.release()


def _newest_first(last: Function | None) -> list[Function]:
    """Return `last` and every function that it depends on, newest first. Raises GraphError if one was freed."""
    found = {last} if last else set()
    stack = list(found)
    while stack:
        function = stack.pop()
        if function.freed:
            raise GraphError(
                "backward: this graph was freed by an earlier backward(); "
                "run the forward pass again, or call backward(retain_graph=True) the first time"
            )
        for tensor in function.inputs:
            if tensor.creator is not None and tensor.creator not in found:
                found.add(tensor.creator)
                stack.append(tensor.creator)
    return sorted(found, key=lambda function: function.order, reverse=True)


def _deliver(tensor: Node, dx: np.ndarray, pending: dict[Function, np.ndarray]) -> None:
    """Add dx to a leaf's `.grad`, or to the pending gradient of the function that created the tensor."""
    if tensor.creator is None:
        tensor.accumulate(dx)
    elif tensor.creator in pending:
        device = acting(tensor.device)
        total = device.empty(dx.shape, dx.dtype)  # not in place: both arrays may be shared with other gradients
        device.elementwise.add(pending[tensor.creator].ravel(), dx.ravel(), total.ravel())
        pending[tensor.creator] = total
    else:
        pending[tensor.creator] = dx


def gradcheck(
    function: Callable[..., Node], *inputs: Node, eps: float = 1e-6, tolerance: float = 1e-6, seed: int = 0
) -> bool:
    """Compare `backward` with a difference quotient, along one random direction, in float64.

    Let J be the Jacobian of y = f(x). Let u (of x's shape) and v (of y's shape) be random. Compute v.(J u) twice: as
    u.(J^T v) by a backward pass, and as v.(f(x + eps * u) - f(x - eps * u)) / (2 * eps) by two forward passes. If
    `backward` has a wrong element anywhere in J, the two numbers differ with probability one. The usual check needs
    two forward passes for each element of x. The idea is from check_vjp of the library autograd.

    inputs: float64 tensors; those with requires_grad are checked. tolerance: relative, or absolute for values below 1.
    Returns True. Raises AssertionError if the two numbers differ, ShapeError if an input is not float64.
    """
    for tensor in inputs:
        if tensor.dtype != np.float64:
            raise ShapeError(f"gradcheck: an input is {tensor.dtype}; differences need float64")
    rng = np.random.default_rng(seed)
    checked = [tensor for tensor in inputs if tensor.requires_grad]
    directions = [rng.standard_normal(tensor.shape) for tensor in checked]

    def along(t: float) -> np.ndarray:
        moved = iter(directions)
        with no_grad():
            return function(
                *(x.wrap(np.asarray(x.numpy() + t * next(moved)), x.device) if x.requires_grad else x for x in inputs)
            ).numpy()

    for tensor in checked:
        tensor.zero_grad()
    y = function(*inputs)
    v = rng.standard_normal(y.shape)
    numeric = float(np.sum(v * (along(eps) - along(-eps)))) / (2 * eps)
    backward(y, v)
    analytic = sum(float(np.sum(u * x.grad)) for u, x in zip(directions, checked, strict=True) if x.grad is not None)
    if not abs(analytic - numeric) <= tolerance * max(1.0, abs(analytic), abs(numeric)):
        raise AssertionError(f"gradcheck: backward gives {analytic:.9g}, differences give {numeric:.9g}")
    return True
