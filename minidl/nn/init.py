"""Initial weights (in, out) or (kh, kw, in, out). fan_in is the number of inputs that contribute to one output.

The functions write into a parameter. Random values come from the generator that `minidl.seed` restarts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from minidl.engine.parameter import Parameter
from minidl.engine.random import generator
from minidl.errors import MinidlError, ShapeError

WHITENED_AT_ONCE = 200  # images whose patches are in memory at the same time
_left: ContextVar[float] = ContextVar("left", default=math.inf)  # how many values layers may still allocate


class TooLarge(MinidlError):
    """A model has more values than `limit` allows."""


@contextmanager
def limit(values: int) -> Iterator[None]:
    """Limit the number of values in the weights of all layers that are created in the `with` block."""
    token = _left.set(values)
    try:
        yield
    finally:
        _left.reset(token)


def empty(*shape: int) -> np.ndarray:
    """Return an array for a parameter, float32, without values yet. Raises TooLarge beyond `limit`."""
    left = _left.get() - math.prod(shape)
    if left < 0:
        raise TooLarge(f"a parameter of shape {shape} exceeds the limit for this model")
    _left.set(left)
    return np.empty(shape, np.float32)


def fans(parameter: Parameter) -> tuple[int, int]:
    """Return (fan_in, fan_out). Raises ShapeError for a parameter with fewer than two axes."""
    if parameter.ndim < 2:
        raise ShapeError(f"init: a parameter of shape {parameter.shape} has no fan_in and fan_out; initialise biases "
                         "with constant, normal or uniform")  # fmt: skip
    *kernel, inputs, outputs = parameter.shape
    area = math.prod(kernel)
    return inputs * area, outputs * area


def constant(parameter: Parameter, value: float) -> None:
    parameter.copy_(np.full(parameter.shape, value))


def normal(parameter: Parameter, std: float = 1.0) -> None:
    parameter.copy_(generator().normal(0.0, std, parameter.shape))


def uniform(parameter: Parameter, bound: float) -> None:
    """Draw from the uniform distribution between -bound and bound."""
    parameter.copy_(generator().uniform(-bound, bound, parameter.shape))


def kaiming_normal(parameter: Parameter, gain: float = math.sqrt(2), fan_out: bool = False) -> None:
    """Draw from a normal distribution with std = gain / sqrt(fan_in), or gain / sqrt(fan_out) if fan_out is set.

    Through ReLU layers, fan_in preserves the variance of activations, and fan_out that of gradients (He et al. 2015).
    """
    inputs, outputs = fans(parameter)
    normal(parameter, gain / math.sqrt(outputs if fan_out else inputs))


def kaiming_uniform(parameter: Parameter, gain: float = math.sqrt(2)) -> None:
    """Draw from a uniform distribution with the variance of `kaiming_normal`."""
    uniform(parameter, gain * math.sqrt(3 / fans(parameter)[0]))


def xavier_uniform(parameter: Parameter, gain: float = 1.0) -> None:
    """Draw from `uniform` with bound = gain * sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio 2010)."""
    uniform(parameter, gain * math.sqrt(6 / sum(fans(parameter))))


def xavier_normal(parameter: Parameter, gain: float = 1.0) -> None:
    """Draw from a normal distribution with the variance of `xavier_uniform`."""
    normal(parameter, gain * math.sqrt(2 / sum(fans(parameter))))


def identity(parameter: Parameter) -> None:
    """Let the first filters (kh, kw, in, out) copy the channels of the input: filter i is 1 at the centre of channel i.

    If there are more outputs than inputs, the others keep their values. PyTorch's `dirac_` sets them to 0.
    Raises ShapeError for another number of axes.
    """
    if parameter.ndim != 4:
        raise ShapeError(f"init.identity: a parameter of shape {parameter.shape}; expected filters (kh, kw, in, out)")
    height, width, inputs, outputs = parameter.shape
    filters, channels = parameter.data.copy(), np.arange(min(inputs, outputs))
    filters[..., channels] = 0
    filters[height // 2, width // 2, channels, channels] = 1
    parameter.copy_(filters)


def whitening(images: np.ndarray, size: int, eps: float) -> np.ndarray:
    """Return filters (size, size, C, F) that whiten patches of images (N, H, W, C), F = size * size * C; float64.

    Filter i is the eigenvector v_i of the covariance of patches, over sqrt(lambda_i + eps), largest lambda_i first. So
    the outputs for these images are not correlated, and have about the variance 1 (Page 2018; Jordan 2024, 3.2). The
    largest element of v_i is positive. Raises ShapeError if the images are smaller than a patch.
    """
    images = np.asarray(images)
    if images.ndim != 4 or images.dtype.kind not in "fiu" or min(images.shape[1:3]) < size or not len(images):
        raise ShapeError(f"init.whitening: images {images.shape} and patches of {size}x{size}; expected images (N, H, "
                         "W, C) that are no smaller")  # fmt: skip
    features, patches = size * size * images.shape[3], 0
    total, square = np.zeros(features), np.zeros((features, features))
    for start in range(0, len(images), WHITENED_AT_ONCE):
        part = images[start : start + WHITENED_AT_ONCE].astype(np.float64)
        windows = np.lib.stride_tricks.sliding_window_view(part, (size, size), (1, 2))  # (n, Ho, Wo, C, kh, kw)
        rows = windows.transpose(0, 1, 2, 4, 5, 3).reshape(-1, features)  # in the order of a filter's weights
        total += rows.sum(axis=0)
        square += np.einsum("ni,nj->ij", rows, rows)  # not a BLAS, whose sums depend on its number of threads
        patches += len(rows)
    mean = total / patches
    values, vectors = np.linalg.eigh(square / patches - np.outer(mean, mean))
    vectors = vectors[:, ::-1]
    vectors = vectors * np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(features)])
    filters = vectors / np.sqrt(np.maximum(values[::-1], 0) + eps)
    return np.ascontiguousarray(filters.reshape(size, size, images.shape[3], features))


def torch_default(weight: Parameter, bias: Parameter | None) -> None:
    """Initialise as PyTorch's Linear and Conv2d do: weight and bias uniform, with bound = 1 / sqrt(fan_in)."""
    bound = 1 / math.sqrt(max(1, fans(weight)[0]))
    uniform(weight, bound)
    if bias is not None:
        uniform(bias, bound)
