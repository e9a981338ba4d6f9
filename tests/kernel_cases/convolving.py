"""Calls the three kernels of a convolution, with guards around their memory, and computes the same in float64."""

from __future__ import annotations

import numpy as np

from minidl.kernels.conv import cpu

Options = tuple[int, tuple[int, int], tuple[int, int], tuple[int, int], bool]


def between_nan(shape: tuple[int, ...], dtype: type, random: np.random.Generator) -> np.ndarray:
    """Return random numbers, with NaN before and after them in memory."""
    memory = np.full(int(np.prod(shape)) + 128, np.nan, dtype)
    inner = memory[64:-64].reshape(shape)
    inner[:] = random.standard_normal(shape)
    return inner


def check_and_strip(memory: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array in the middle of `memory`, around which nothing was written."""
    assert (memory[:64] == 7).all() and (memory[-64:] == 7).all()
    return memory[64:-64].reshape(shape)


def compute(
    x: np.ndarray, weight: np.ndarray, dy: np.ndarray, options: Options, end: tuple[np.ndarray, ...] = ()
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return y, dx and dweight of the kernels. end: bias, scale, shift and the shortcuts of y and of dx."""
    none = x.reshape(-1)[:0]
    bias, scale, shift, of_y, of_dx = end or (none,) * 5

    def run(like: np.ndarray, size: str, *arguments: object) -> np.ndarray:
        memory = np.full(like.size + 128, 7, like.dtype)
        numbers = getattr(cpu, f"{size}_scratch")(x.shape, weight.shape, *options)
        scratch = np.full(numbers + 4096, np.nan, like.dtype)
        getattr(cpu, size)(*arguments, scratch[:numbers], memory[64:-64].reshape(like.shape))
        assert np.isnan(scratch[numbers:]).all()
        return check_and_strip(memory, like.shape)

    y = run(dy, "forward", x, weight, bias, scale, shift, of_y, bool(end), *options, none)
    dx = run(x, "backward_input", dy, weight, of_dx, *options)
    return y, dx, run(weight, "backward_weight", x, dy, *options)


def expected(
    x: np.ndarray, weight: np.ndarray, dy: np.ndarray, options: Options
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the same in float64, one tap after the other."""
    groups, stride, padding, dilation, _ = options
    out = dy.shape[1:3]
    padded = np.pad(x.astype(np.float64), [(0, 0), *((p, p) for p in padding), (0, 0)])
    w = weight.astype(np.float64).reshape(*weight.shape[:3], groups, -1)
    gradient = dy.astype(np.float64).reshape(*dy.shape[:3], groups, -1)
    y, dx, dweight = np.zeros(gradient.shape), np.zeros(padded.shape), np.zeros(w.shape)
    for u in range(weight.shape[0]):
        for v in range(weight.shape[1]):
            rows = slice(u * dilation[0], u * dilation[0] + (out[0] - 1) * stride[0] + 1, stride[0])
            columns = slice(v * dilation[1], v * dilation[1] + (out[1] - 1) * stride[1] + 1, stride[1])
            patch = padded[:, rows, columns].reshape(*dy.shape[:3], groups, -1)
            y += np.einsum("nijgk,kgo->nijgo", patch, w[u, v], optimize=True)
            back = np.einsum("nijgo,kgo->nijgk", gradient, w[u, v], optimize=True)
            dx[:, rows, columns] += back.reshape(*dy.shape[:3], -1)
            dweight[u, v] = np.einsum("nijgk,nijgo->kgo", patch, gradient, optimize=True)
    inner = dx[:, padding[0] : padding[0] + x.shape[1], padding[1] : padding[1] + x.shape[2]]
    return y.reshape(dy.shape), inner, dweight.reshape(weight.shape)
