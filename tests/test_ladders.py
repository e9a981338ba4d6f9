"""Each step ("rung") of the lessons in kernels/<op>/ladder.py agrees with the definition, computed in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from quick import quick

import minidl.engine.jit  # noqa: F401  (configures Numba before the kernels are compiled)
from minidl.kernels.activation import ladder as activation
from minidl.kernels.activation import reference as activation_reference
from minidl.kernels.codec import ladder as codec
from minidl.kernels.codec import reference as codec_reference
from minidl.kernels.conv import ladder as conv
from minidl.kernels.conv import reference as conv_reference
from minidl.kernels.drift import cpu as drift_cpu
from minidl.kernels.drift import ladder as drift
from minidl.kernels.drift import reference as drift_reference
from minidl.kernels.dropout import ladder as dropout
from minidl.kernels.dropout import reference as dropout_reference
from minidl.kernels.elementwise import ladder as elementwise
from minidl.kernels.elementwise import reference as elementwise_reference
from minidl.kernels.group_norm import ladder as group_norm
from minidl.kernels.group_norm import reference as group_norm_reference
from minidl.kernels.matmul import ladder as matmul
from minidl.kernels.mix import ladder as mix
from minidl.kernels.mix import reference as mix_reference
from minidl.kernels.movement import ladder as movement
from minidl.kernels.movement import reference as movement_reference
from minidl.kernels.norm import ladder as norm
from minidl.kernels.optim import ladder as optim
from minidl.kernels.optim import reference as optim_reference
from minidl.kernels.pool import ladder as pool
from minidl.kernels.pool import reference as pool_reference
from minidl.kernels.reduce import ladder as reduce
from minidl.kernels.reduce import reference as reduce_reference
from minidl.kernels.softmax import ladder as softmax
from minidl.kernels.softmax import reference as softmax_reference

Rung = Callable[..., None]
Arguments = tuple[Any, ...]
SIZE = 40_003  # elements: several chunks, and enough for several threads


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def matrix_product(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    out[:] = a @ b


def convolution(x: np.ndarray, weight: np.ndarray, y: np.ndarray) -> None:
    none, one = np.empty(0), (1, 1)
    conv_reference.forward(x, weight, none, none, none, none, False, 1, one, one, one, False, none, none, y)


def sgd(theta: np.ndarray, grad: np.ndarray, velocity: np.ndarray) -> None:
    segment, numbers = np.array([[0], [theta.size]]), np.array([[optim.LR], [0.0]])
    optim_reference.sgd(theta, grad, velocity, *segment, *numbers, optim.MOMENTUM, False, False, 1.0)


def max_pool(x: np.ndarray, y: np.ndarray, place: np.ndarray) -> None:
    pool_reference.max_pool(x, pool.TWO, pool.TWO, pool.NONE, y, place)


def max_pool_backward(dy: np.ndarray, place: np.ndarray, dx: np.ndarray) -> None:
    pool_reference.max_pool_backward(dy, place, pool.TWO, pool.TWO, pool.NONE, dx)


def batch_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, y: np.ndarray) -> None:
    y[:] = np.maximum((x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * weight + bias, 0)


def group_norm_with_relu(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, groups: int, y: np.ndarray) -> None:
    mean, rstd = np.empty((2, len(x), groups))
    group_norm_reference.group_norm(x, weight, bias, 1e-5, x[:0], True, mean, rstd, y)


def transposed(shape: tuple[int, ...], axes: tuple[int, ...]) -> Arguments:
    """Return the arguments of movement.copy for a transpose."""
    x = random(*shape)
    view, target = x.transpose(axes), np.zeros(x.size, np.float32)
    strides = np.array(view.strides) // 4, np.array(np.empty(view.shape, "b").strides)
    return x.reshape(-1), 0, strides[0], np.array(view.shape), 0, strides[1], target


Y, PLACE = np.zeros((2, 3, 4, 17), np.float32), (np.arange(2 * 3 * 4 * 17) % 4).astype(np.uint8).reshape(2, 3, 4, 17)
ROWS = np.zeros((9, 21), np.float32)

# For each lesson: its rungs, the definition of the result, and the arguments of both.
LESSONS: dict[str, tuple[dict[str, Rung], Rung, Arguments]] = {
    "activation": (activation.RUNGS, activation_reference.tanh, (random(SIZE), np.zeros(SIZE, np.float32))),
    "codec": (
        codec.RUNGS, codec_reference.topk_encode,
        (random(SIZE), 41, np.zeros(402, np.uint16), np.zeros(402, np.float32)),
    ),
    "conv": (conv.RUNGS, convolution, (random(2, 5, 7, 3), random(3, 3, 3, 19), random(2, 5, 7, 19))),
    "drift": (
        drift.RUNGS, drift_reference.drift,
        (random(SIZE) / 100, random(2, SIZE)[1] / 100, np.array([0, 5]), np.array([SIZE, 700]),
         np.zeros(drift_cpu.drift_partial(2)), np.zeros((2, 3))),
    ),
    "elementwise": (
        elementwise.RUNGS, elementwise_reference.affine, (random(SIZE), 0.3, 1.0, np.zeros(SIZE, np.float32))
    ),
    "group norm": (
        group_norm.RUNGS, group_norm_with_relu,
        (random(3, 50, 6), random(6), random(2, 6)[1], 2, np.zeros((3, 50, 6), np.float32)),
    ),
    "matmul": (matmul.RUNGS, matrix_product, (random(67, 70), random(70, 133), np.zeros((67, 133), np.float32))),
    "mix": (mix.RUNGS, mix_reference.mix, (random(SIZE), random(2, SIZE)[1], 0.3)),
    "movement": (movement.RUNGS, movement_reference.copy, transposed((3, 41, 43, 9), (0, 3, 1, 2))),
    "movement, 2 axes": (movement.RUNGS, movement_reference.copy, transposed((5, 7), (1, 0))),
    "norm": (norm.RUNGS, batch_norm, (random(300, 7), random(7), random(2, 7)[1], np.zeros((300, 7), np.float32))),
    "optim": (optim.RUNGS, sgd, tuple(random(3, SIZE))),
    "pool": (pool.RUNGS, max_pool, (random(2, 7, 9, 17), Y, PLACE)),
    "pool, backward": (pool.BACKWARD, max_pool_backward, (random(2, 3, 4, 17), PLACE, random(2, 7, 9, 17))),
    "reduce": (
        reduce.RUNGS, reduce_reference.sum,
        (random(1, 9001, 5), np.zeros((4, 1, 5)), np.zeros((1, 5), np.float32)),
    ),
    "reduce, a vector": (
        reduce.RUNGS, reduce_reference.sum,
        (random(1, 4099, 1), np.zeros((4, 1, 1)), np.zeros((1, 1), np.float32)),
    ),
    "softmax": (softmax.RUNGS, softmax_reference.softmax, (random(9, 21), ROWS)),
    "softmax, ten classes": (softmax.RUNGS, softmax_reference.softmax, (random(501, 10), random(501, 10))),
}  # fmt: skip
PARTIAL = {("drift", 4), ("reduce", 1), ("reduce, a vector", 1)}  # (lesson, index of scratch memory)


def in_float64(argument: Any) -> Any:
    return argument.astype(np.float64) if getattr(argument, "dtype", None) == np.float32 else argument


ALL = [(lesson, rung) for lesson in LESSONS for rung in LESSONS[lesson][0]]
LAST = [(lesson, [*LESSONS[lesson][0]][-1]) for lesson in LESSONS]  # the fastest one, with the most code


@pytest.mark.parametrize(("lesson", "rung"), quick(ALL, *LAST))
def test_each_rung_agrees_with_the_definition(lesson: str, rung: str) -> None:
    rungs, definition, arguments = LESSONS[lesson]
    found = copy.deepcopy(arguments)
    expected = [in_float64(a) for a in copy.deepcopy(arguments)]
    rungs[rung](*found)
    definition(*expected)
    for i, (each, right) in enumerate(zip(found, expected, strict=True)):
        if isinstance(each, np.ndarray) and (lesson, i) not in PARTIAL:
            np.testing.assert_allclose(each, right, rtol=0, atol=2e-4, err_msg=f"argument {i}")


@pytest.mark.parametrize("rung", dropout.RUNGS)
def test_each_rung_drops_its_share(rung: str) -> None:
    """Only the last two rungs use the random numbers of the reference, so only they drop the same elements."""
    x = random(SIZE)
    y, expected = np.empty_like(x), np.empty_like(x)
    dropout.RUNGS[rung](x, 0.3, 5, 7, y)
    dropout_reference.dropout(x, 0.3, 5, 7, expected)
    if "32 bits" in rung:
        np.testing.assert_array_equal(y == 0, expected == 0)
    np.testing.assert_allclose(y[y != 0], x[y != 0] / 0.7, rtol=1e-6)
    assert abs(np.mean(y == 0) - 0.3) < 0.01
