"""Pooling of images (N, H, W, C)."""

from __future__ import annotations

import numpy as np

from minidl.engine.autograd import Function
from minidl.engine.tensor import Tensor
from minidl.errors import ShapeError
from minidl.kernels.conv.reference import Pair, output_length
from minidl.ops.conv import pair


def _output_shape(x: np.ndarray, kernel: Pair, stride: Pair, padding: Pair) -> tuple[int, ...]:
    height, width = (output_length(x.shape[1 + a], kernel[a], stride[a], padding[a]) for a in (0, 1))
    return (x.shape[0], height, width, x.shape[3])


class MaxPool2d(Function):
    def forward(self, x: np.ndarray, kernel: Pair, stride: Pair, padding: Pair) -> np.ndarray:
        self.shape, self.geometry = x.shape, (kernel, stride, padding)
        y = self.device.empty(_output_shape(x, *self.geometry), x.dtype)
        self.place = self.device.empty(y.shape, np.uint8 if kernel[0] * kernel[1] <= 256 else np.int32)
        self.device.pool.max_pool(x, *self.geometry, y, self.place)
        return y

    def backward(self, dy: np.ndarray) -> np.ndarray:
        dx = self.device.empty(self.shape, dy.dtype)
        self.device.pool.max_pool_backward(dy, self.place, *self.geometry, dx)
        return dx


class AvgPool2d(Function):
    def forward(self, x: np.ndarray, kernel: Pair, stride: Pair, padding: Pair) -> np.ndarray:
        self.shape, self.geometry = x.shape, (kernel, stride, padding)
        y = self.device.empty(_output_shape(x, *self.geometry), x.dtype)
        self.device.pool.average_pool(x, *self.geometry, y)
        return y

    def backward(self, dy: np.ndarray) -> np.ndarray:
        dx = self.device.empty(self.shape, dy.dtype)
        self.device.pool.average_pool_backward(dy, *self.geometry, dx)
        return dx


def _geometry(
    name: str, x: Tensor, kernel: int | Pair, stride: int | Pair | None, padding: int | Pair
) -> dict[str, Pair]:
    """Return the options of `forward`. Raises ShapeError if x or an option is not valid."""
    kernel = pair(kernel)
    geometry = {"kernel": kernel, "stride": kernel if stride is None else pair(stride), "padding": pair(padding)}
    if x.ndim != 4:
        raise ShapeError(f"{name}: a tensor of shape {x.shape}; expected images (N, H, W, C)")
    if min(kernel) < 1 or min(geometry["stride"]) < 1 or any(not 0 <= 2 * p <= k for p, k in
                                                            zip(geometry["padding"], kernel, strict=True)):  # fmt: skip
        raise ShapeError(f"{name}: {geometry}; expected kernel and stride >= 1, padding at most half the kernel")
    if min(*x.shape[1:3], *_output_shape(x._data, **geometry)[1:3]) < 1:
        raise ShapeError(f"{name}: a window of {kernel} does not fit into images {x.shape}")
    return geometry


def max_pool2d(x: Tensor, kernel: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0) -> Tensor:
    """Return the largest value in each window: images (N, H, W, C) -> (N, Ho, Wo, C); stride defaults to `kernel`.

    Raises ShapeError if x does not have four axes, the window does not fit, or an option is out of range.
    """
    return MaxPool2d.apply(x, **_geometry("max_pool2d", x, kernel, stride, padding))


def avg_pool2d(x: Tensor, kernel: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0) -> Tensor:
    """Return the mean of each window, where padding counts as zeros, as in PyTorch. Arguments as in `max_pool2d`."""
    return AvgPool2d.apply(x, **_geometry("avg_pool2d", x, kernel, stride, padding))


def global_avg_pool2d(x: Tensor) -> Tensor:
    """Return the mean over all pixels: (N, H, W, C) -> (N, 1, 1, C). Raises ShapeError unless x has four axes."""
    if x.ndim != 4:
        raise ShapeError(f"global_avg_pool2d: a tensor of shape {x.shape}; expected images (N, H, W, C)")
    return x.mean((1, 2), keepdims=True)
