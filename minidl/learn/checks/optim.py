"""Checks of the exercises for kernels/optim/README.md. Each raises Wrong if the answer, a module, is no solution.

The functions of an answer change vectors in place; so do those of the reference, on copies.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from minidl.kernels.optim import reference
from minidl.learn.grading import call, compare, numbers

NONE = np.zeros(1)


def check_1(answer: ModuleType) -> None:
    random = np.random.default_rng(1)
    for n in (1, 5, 17):
        theta, velocity = numbers(random, n), np.zeros(n)
        right, right_velocity = theta.copy(), velocity.copy()
        whole = np.zeros(1, int), np.array([n]), np.array([0.1]), NONE  # one segment
        for number in (1, 2, 3):
            grad = numbers(random, n)
            given = call("step", theta=right, grad=grad, velocity=right_velocity, lr=0.1, momentum=0.9)
            reference.sgd(right, grad, right_velocity, *whole, 0.9, False, False, 1.0)
            answer.step(theta, grad, velocity, 0.1, 0.9)
            compare(f"{given}, step {number}", "velocity", velocity, right_velocity)
            compare(f"{given}, step {number}", "theta", theta, right)


def check_2(answer: ModuleType) -> None:
    random = np.random.default_rng(2)
    starts, stops, lr, decay = (np.array(each) for each in ([0, 3, 9], [3, 8, 10], [0.1, 0.2, 0.1], [0.5, 0.0, 0.1]))
    theta, velocity = numbers(random, 11), np.zeros(11)
    right, right_velocity = theta.copy(), velocity.copy()
    for number in (1, 2, 3):
        grad = numbers(random, 11)
        reference.sgd(right, grad, right_velocity, starts, stops, lr, decay, 0.9, False, True, 1.0)
        answer.step(theta, grad, velocity, starts, stops, lr, decay, 0.9)
        given = call("step", theta=theta, starts=starts, stops=stops, weight_decay=decay)
        compare(f"{given}, step {number}", "velocity", velocity, right_velocity)
        compare(f"{given}, step {number}", "theta", theta, right)


def check_3(answer: ModuleType) -> None:
    random = np.random.default_rng(3)
    theta, first, second = random.standard_normal(7), np.zeros(7), np.zeros(7)
    rights = theta.copy(), first.copy(), second.copy()
    whole = np.zeros(1, int), np.array([7]), np.array([0.01]), NONE
    for number in (1, 2, 3):
        grad = random.standard_normal(7) * 10.0 ** np.arange(-3, 4)
        reference.adam(rights[0], grad, *rights[1:], *whole, 0.9, 0.999, 1e-8, number, False, 1.0)
        answer.update(theta, grad, first, second, 0.01, 0.9, 0.999, number)
        given = call("update", theta=theta, lr=0.01, beta1=0.9, beta2=0.999, step=number)
        for name, got, expected in zip(("theta", "first", "second"), (theta, first, second), rights):
            compare(given, name, got, expected)
