"""Checks of the exercises for kernels/conv/README.md. Each raises Wrong if the answer, a module, is no solution."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from minidl.kernels.conv import reference
from minidl.learn.grading import call, compare, numbers

LINES = ((1, 1, 1, 0), (5, 3, 1, 0), (5, 3, 1, 1), (7, 3, 2, 1), (8, 3, 2, 1), (9, 2, 3, 0), (6, 5, 2, 2))
NONE = np.zeros(0)


def check_1(answer: ModuleType) -> None:
    random = np.random.default_rng(1)
    for size, taps, stride, padding in LINES:
        x, weight = numbers(random, size), numbers(random, taps)
        outputs = reference.output_length(size, taps, stride, padding)
        y = np.empty((1, 1, outputs, 1))
        image, kernel = x.reshape(1, 1, -1, 1), weight.reshape(1, -1, 1, 1)
        options = (1, (1, stride), (0, padding), (1, 1), False, NONE, NONE)
        reference.forward(image, kernel, NONE, NONE, NONE, NONE, False, *options, y)
        given = call("forward", x=x, weight=weight, stride=stride, padding=padding)
        compare(given, "y", answer.forward(x, weight, stride, padding), y.reshape(-1))


def check_2(answer: ModuleType) -> None:
    for shape, kh, kw, stride, padding in (
        ((1, 1, 1), 1, 1, 1, 0), ((3, 5, 2), 2, 3, 1, 0), ((4, 3, 3), 3, 3, 1, 1), ((7, 5, 1), 3, 2, 2, 1),
        ((5, 5, 2), 5, 5, 3, 2),
    ):  # fmt: skip
        x = 1.0 + np.arange(np.prod(shape)).reshape(shape)
        padded = np.pad(x, ((padding, padding), (padding, padding), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (kh, kw), (0, 1))[::stride, ::stride]
        expected = windows.transpose(0, 1, 3, 4, 2).reshape(-1, kh * kw * shape[2])
        given = call("im2col", x=x, kh=kh, kw=kw, stride=stride, padding=padding)
        compare(given, "columns", answer.im2col(x, kh, kw, stride, padding), expected, tolerance=0)


def check_3(answer: ModuleType) -> None:
    random = np.random.default_rng(3)
    for size, taps, stride, padding in LINES:
        outputs = reference.output_length(size, taps, stride, padding)
        dy, weight, dx = numbers(random, outputs), numbers(random, taps), np.empty((1, 1, size, 1))
        options = (1, (1, stride), (0, padding), (1, 1), False, NONE)
        reference.backward_input(dy.reshape(1, 1, -1, 1), weight.reshape(1, -1, 1, 1), NONE, *options, dx)
        given = call("backward", dy=dy, weight=weight, size=size, stride=stride, padding=padding)
        compare(given, "dx", answer.backward(dy, weight, size, stride, padding), dx.reshape(-1))
