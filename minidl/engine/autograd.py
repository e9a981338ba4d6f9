"""The tape: how a result remembers what it was computed from, and how gradients flow back along it.

Each differentiable operation is a `Function` with `forward` and `backward` side by side. Applying one computes the
output and, where a gradient will be wanted, leaves the Function on the output as its `creator`: creators and their
inputs are the graph. `backward` walks it once, newest first.

Why newest first is right: a Function can only consume tensors that exist already, so the order of creation is a
topological order, and its reverse is what backpropagation needs. No recursion: a chain of 10,000 ops is as good as one
of 10.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any

import numpy as np

from minidl.engine.device import acting
from minidl.errors import MinidlError, ShapeError

if TYPE_CHECKING:
    from minidl.engine.device import Device
    from minidl.engine.tensor import Tensor

_clock = itertools.count()
_mode = threading.local()


class GraphError(MinidlError, RuntimeError):
    """`backward` was called where there is no graph (any more)."""


def grad_enabled() -> bool:
    """Whether operations are recorded in this thread."""
    return getattr(_mode, "enabled", True)


class no_grad(ContextDecorator):  # PyTorch's name
    """Within it nothing is recorded: `with no_grad(): ...`, or `@no_grad()` above a function."""

    def __enter__(self) -> no_grad:
        # A stack of the thread's own: one object may be entered twice, and a decorated function by many threads.
        _mode.before = [*getattr(_mode, "before", []), grad_enabled()]
        _mode.enabled = False
        return self

    def __exit__(self, *exception: object) -> None:
        _mode.enabled = _mode.before.pop()


class Function:
    """One differentiable operation on arrays.

    A subclass defines

        forward(self, *arrays, **options) -> array          keeps what backward needs as attributes of self
        backward(self, dy) -> array, or one for each input  dL/dy comes in, dL/dx goes out; None for "no gradient"

    and is used through `apply`. Inside, `self.device` is the table of kernels and `self.needs[i]` says whether
    anybody wants the gradient of input i. Returned arrays may share memory with dy: the tape never writes into them.
    They may be views of any strides: the tape copies what is not contiguous, since kernels rely on it.
    """

    device: Device
    inputs: tuple[Tensor, ...]
    needs: tuple[bool, ...]
    order: int  # of creation
    freed = False

    def forward(self, *arrays: Any, **options: Any) -> np.ndarray:
        raise NotImplementedError

    def backward(self, dy: np.ndarray) -> Any:
        raise NotImplementedError

    @classmethod
    def apply(cls, *inputs: Tensor, **options: Any) -> Tensor:
        """Run `forward` on the tensors' arrays; record the Function when one of them requires a gradient."""
        first = inputs[0]
        for tensor in inputs:
            if not hasattr(tensor, "creator"):
                raise TypeError(f"{cls.__name__.lower()}: {type(tensor).__name__} is not a Tensor: Tensor(array) is")
            if tensor.dtype != first.dtype or tensor.device is not first.device:
                how = "what is float64 with .astype('float32')" if tensor.dtype != first.dtype else "Tensor(x.numpy())"
                raise ShapeError(
                    f"{cls.__name__.lower()}: {first.dtype} on {first.device.name} and {tensor.dtype} on "
                    f"{tensor.device.name} do not mix: convert {how}"
                )
        function = cls()
        function.device = acting(first.device)
        function.needs = tuple(tensor.requires_grad for tensor in inputs)
        y = function.forward(*(tensor._data for tensor in inputs), **options)
        output = type(first).wrap(np.asanyarray(y, first.dtype, order="C"), first.device)
        if any(function.needs) and grad_enabled():
            function.inputs, function.order = inputs, next(_clock)
            output.requires_grad, output.creator = True, function
        return output

    def release(self) -> None:
        """Forget inputs and saved arrays, so that their memory can be used again."""
        self.__dict__.clear()
        self.freed = True


def backward(output: Tensor, gradient: np.ndarray | Tensor | None = None, retain_graph: bool = False) -> None:
    """Add d(output)/d(leaf) to `.grad` of every leaf below `output`, then free the graph.

    gradient: dL/d(output), of output's shape; may be left out for a single number.
    """
    if not output.requires_grad:
        raise GraphError("backward: nothing here requires a gradient; create the inputs with requires_grad=True")
    if gradient is None:
        if output.size != 1:
            raise ShapeError(f"backward: {output.shape} is not a single number; reduce it first, or give a gradient")
        device = acting(output.device)
        dy = device.empty(output.shape, output.dtype)
        device.elementwise.fill(1.0, dy.reshape(-1))
    else:
        dy = np.asanyarray(gradient, output.dtype, order="C")
        if dy.shape != output.shape:
            raise ShapeError(f"backward: gradient {dy.shape} for an output of shape {output.shape}")

    waiting: dict[Function, np.ndarray] = {}  # dL/d(output of that function), as far as summed
    _deliver(output, dy, waiting)
    for function in _newest_first(output.creator):
        if function not in waiting:  # every path from here to the output was cut
            continue
        gradients = function.backward(waiting.pop(function))
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        for tensor, dx in zip(function.inputs, gradients, strict=True):
            if tensor.requires_grad and dx is not None:
                if np.shape(dx) != tensor.shape:
                    raise ShapeError(
                        f"{type(function).__name__}.backward: a gradient of shape {np.shape(dx)} for an input of shape "
                        f"{tensor.shape}; they must be equal"
                    )
                _deliver(tensor, np.asanyarray(dx, tensor.dtype, order="C"), waiting)
        if not retain_graph:
            function.release()


def _newest_first(last: Function | None) -> list[Function]:
    """Every function that `last` depends on, itself included, in reverse order of creation."""
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


def _deliver(tensor: Tensor, dx: np.ndarray, waiting: dict[Function, np.ndarray]) -> None:
    """Add dx to a leaf's .grad, or to what waits for the function that made the tensor."""
    if tensor.creator is None:
        tensor.accumulate(dx)
    elif tensor.creator in waiting:
        device = acting(tensor.device)
        total = device.empty(dx.shape, dx.dtype)  # not in place: dx may be somebody else's array too
        device.elementwise.add(waiting[tensor.creator].ravel(), dx.ravel(), total.ravel())
        waiting[tensor.creator] = total
    else:
        waiting[tensor.creator] = dx


def gradcheck(
    function: Callable[..., Tensor], *inputs: Tensor, eps: float = 1e-6, tolerance: float = 1e-6, seed: int = 0
) -> bool:
    """Compare `backward` with a difference quotient, along one random direction, in float64.

    For y = f(x), a random u (of x's shape) and v (of y's shape), the number v.J.u is computed twice: as
    u.(J^T v) by one backward pass, and as v.(f(x + eps u) - f(x - eps u)) / (2 eps) by two forward passes. One
    wrong element anywhere in J changes it with probability one, at the cost of three passes instead of one
    for each element (the idea: autograd's check_vjp).

    inputs: float64 tensors; those with requires_grad are checked. Returns True, or raises AssertionError.
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
        raise AssertionError(f"gradcheck: backward says {analytic:.9g}, differences say {numeric:.9g}")
    return True
