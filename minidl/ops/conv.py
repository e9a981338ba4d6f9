"""Two-dimensional convolution: images (N, H, W, C), weights (kh, kw, C / groups, O)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral

import numpy as np

from minidl.checked import shown
from minidl.engine.autograd import Function
from minidl.engine.changes import count_change
from minidl.engine.tensor import Tensor
from minidl.errors import ShapeError
from minidl.kernels.conv.reference import Pair, output_length
from minidl.ops.arrays import reduce_sum

_winograd = True


class _Thread(threading.local):
    winograd: bool | None = None  # replaces _winograd in this thread, unless it is None


_thread = _Thread()


def uses_winograd() -> bool:
    """Return whether this thread may use Winograd convolution."""
    return _winograd if _thread.winograd is None else _thread.winograd


def winograd(enabled: bool) -> None:
    """Allow or forbid Winograd's method. It is often faster, but less accurate (kernels/conv/WINOGRAD.md)."""
    global _winograd
    _winograd = enabled
    count_change()


@contextmanager
def with_winograd(enabled: bool) -> Iterator[None]:
    """Within the `with` block, allow or forbid Winograd convolution in this thread."""
    before = _thread.winograd
    _thread.winograd = enabled
    count_change()
    try:
        yield
    finally:
        _thread.winograd = before
        count_change()


class Conv2d(Function):
    def forward(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        *bias: np.ndarray,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: int,
    ) -> np.ndarray:
        conv = self.device.conv
        self.x, self.weight = x, weight
        self.options = groups, stride, padding, dilation, uses_winograd()
        out = (
            output_length(x.shape[1 + axis], weight.shape[axis], stride[axis], padding[axis], dilation[axis])
            for axis in (0, 1)
        )
        y = self.device.empty((x.shape[0], *out, weight.shape[3]), x.dtype)
        none = self.none = self.device.empty((0,), x.dtype)
        b = bias[0] if bias else none
        conv.forward(x, weight, b, none, none, none, False, *self.options, none,
                     self.scratch(conv.forward_scratch), y)  # fmt: skip
        return y

    def backward(self, dy: np.ndarray) -> tuple[np.ndarray | None, ...]:
        conv, x, weight = self.device.conv, self.x, self.weight
        dx = self.device.empty(x.shape, dy.dtype) if self.needs[0] else None
        dw = self.device.empty(weight.shape, dy.dtype) if self.needs[1] else None
        if dw is not None:
            conv.backward_weight(x, dy, *self.options, self.scratch(conv.backward_weight_scratch), dw)
        if dx is not None:
            conv.backward_input(dy, weight, self.none, *self.options, self.scratch(conv.backward_input_scratch), dx)
        return dx, dw, *(reduce_sum(self.device, dy, (0, 1, 2)) if need else None for need in self.needs[2:])

    def scratch(self, size: Callable[..., int]) -> np.ndarray:
        return self.device.empty((size(self.x.shape, self.weight.shape, *self.options),), self.x.dtype)


def pair(value: int | Pair) -> Pair:
    """Convert a number to a pair: 3 -> (3, 3). A sequence of two numbers becomes a tuple.

    Raises ShapeError for any other value, such as a fraction.
    """
    both = value if isinstance(value, tuple | list) else (value, value)
    if len(both) != 2 or not all(isinstance(one, Integral) and one is not True and one is not False for one in both):
        raise ShapeError(f"a kernel, stride, padding or dilation of {shown(value)}; expected a whole number, or two "
                         "for (height, width)")  # fmt: skip
    return int(both[0]), int(both[1])


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
) -> Tensor:
    """Cross-correlate images x (N, H, W, C) with weight (kh, kw, C / groups, O), and add bias (O,).

    Returns (N, Ho, Wo, O) with Ho = (H + 2 * padding - dilation * (kh - 1) - 1) // stride + 1, and Wo likewise.
    Raises ShapeError if shapes do not fit or options are out of range.
    """
    stride, padding, dilation = pair(stride), pair(padding), pair(dilation)
    if x.ndim != 4 or weight.ndim != 4 or groups < 1 or x.shape[3] != weight.shape[2] * groups:
        raise ShapeError(f"conv2d: images {x.shape} for a weight {weight.shape} in {groups} group(s); expected "
                         "images (N, H, W, C) and a weight (kh, kw, C / groups, O)")  # fmt: skip
    if weight.shape[3] % groups:
        raise ShapeError(f"conv2d: {weight.shape[3]} output channels do not divide into {groups} groups")
    if bias is not None and bias.shape != weight.shape[3:]:
        raise ShapeError(f"conv2d: bias {bias.shape} for a weight {weight.shape}; expected {weight.shape[3:]}")
    if min(stride) < 1 or min(dilation) < 1 or min(padding) < 0:
        raise ShapeError(f"conv2d: stride {stride}, padding {padding}, dilation {dilation}; expected stride and "
                         "dilation of at least 1, padding of at least 0")  # fmt: skip
    for axis in (0, 1):
        if output_length(x.shape[1 + axis], weight.shape[axis], stride[axis], padding[axis], dilation[axis]) < 1:
            raise ShapeError(f"conv2d: a kernel of {weight.shape[:2]} with dilation {dilation} does not fit into "
                             f"images {x.shape} with padding {padding}")  # fmt: skip
    return Conv2d.apply(
        x, weight, *([] if bias is None else [bias]), stride=stride, padding=padding, dilation=dilation, groups=groups
    )
