"""Every compiled kernel against its reference: same names, same numbers, same bits on any number of threads.

A folder under kernels/ is found by itself. Its cases are a function here, one entry of CASES: it yields the name
of a kernel and the arguments of one call, by parameter name.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
import pytest

import minidl.jit  # noqa: F401  (sets Numba up before the kernels are compiled)

Arguments = dict[str, Any]
Cases = Iterator[tuple[str, Arguments]]

FOLDERS = sorted(file.parent.name for file in Path(__file__).parents[1].glob("kernels/*/cpu.py"))
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}  # relative to the largest element
SCRATCH = {"columns", "partial", "transposed"}  # arguments whose content afterwards is nobody's business


def module(folder: str, file: str) -> ModuleType:
    return importlib.import_module(f"minidl.kernels.{folder}.{file}")


KERNELS = [(folder, name) for folder in FOLDERS for name in module(folder, "cpu").__all__]


class Arrays:
    """Makes the arguments: `normal` draws what is read, `empty` holds sevens that must be overwritten."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.random = np.random.default_rng(0)

    def constant(self, value: float) -> np.floating:
        """A number of the arrays' type, which sums with it keep."""
        return np.dtype(self.dtype).type(value)

    def normal(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape).astype(self.dtype)

    def positive(self, *shape: int) -> np.ndarray:
        return abs(self.normal(*shape)) + self.constant(0.5)

    def integers(self, below: int, *shape: int) -> np.ndarray:
        return self.random.integers(below, size=shape)

    def empty(self, *shape: int) -> np.ndarray:
        return np.full(shape, 7, self.dtype)


def activation(a: Arrays) -> Cases:
    for n in (1, 7, 33, 40_000):  # the last takes several chunks
        for name in ("relu", "gelu", "silu", "tanh", "sigmoid"):
            yield name, dict(x=5 * a.normal(n), y=a.empty(n))
        for name in ("relu_backward", "tanh_backward", "sigmoid_backward"):
            yield name, dict(dy=a.normal(n), y=a.normal(n), dx=a.empty(n))
        for name in ("gelu_backward", "silu_backward"):
            yield name, dict(dy=a.normal(n), x=5 * a.normal(n), dx=a.empty(n))
        yield "leaky_relu", dict(x=a.normal(n), slope=0.01, y=a.empty(n))
        yield "leaky_relu_backward", dict(dy=a.normal(n), x=a.normal(n), slope=0.01, dx=a.empty(n))
    edges = np.array([0, -0.0, 1e4, -1e4], a.dtype)  # exp(1e4) is infinite
    yield "sigmoid", dict(x=edges, y=a.empty(4))
    yield "silu_backward", dict(dy=a.normal(4), x=edges, dx=a.empty(4))
    yield "relu_backward", dict(dy=a.normal(4), y=edges, dx=a.empty(4))


def softmax(a: Arrays) -> Cases:
    for rows, classes in ((1, 1), (7, 10), (33, 101)):
        shape = rows, classes
        labels = a.integers(classes, rows)
        for name in ("softmax", "log_softmax"):
            yield name, dict(x=9 * a.normal(*shape), y=a.empty(*shape))
            yield name + "_backward", dict(dy=a.normal(*shape), y=-a.positive(*shape), dx=a.empty(*shape))
        for smoothing in (0.0, 0.1):
            yield "cross_entropy", dict(
                logits=9 * a.normal(*shape) + 1, labels=labels, smoothing=smoothing,
                probabilities=a.empty(*shape), loss=a.empty(1),
            )  # fmt: skip
            yield "cross_entropy_backward", dict(
                dloss=a.normal(1), probabilities=a.positive(*shape), labels=labels, smoothing=smoothing,
                dlogits=a.empty(*shape),
            )  # fmt: skip
    yield "softmax", dict(x=np.array([[1000, -1000, -np.inf]], a.dtype), y=a.empty(1, 3))


def norm(a: Arrays) -> Cases:
    for rows, channels in ((1, 7), (7, 1), (33, 65), (1001, 3)):
        shape = rows, channels
        x = a.normal(*shape) + a.constant(10)
        weight, bias, running_mean = a.normal(channels), a.normal(channels), a.normal(channels)
        eps, running_var = 1e-5, a.positive(channels)
        yield "batch_norm", dict(
            x=x, weight=weight, bias=bias, eps=eps, momentum=0.1, running_mean=running_mean,
            running_var=running_var, mean=a.empty(channels), rstd=a.empty(channels), y=a.empty(*shape),
        )  # fmt: skip
        yield "batch_norm_eval", dict(
            x=x, weight=weight, bias=bias, eps=eps, running_mean=running_mean, running_var=running_var,
            y=a.empty(*shape),
        )  # fmt: skip
        yield "layer_norm", dict(
            x=x, weight=weight, bias=bias, eps=eps, mean=a.empty(rows), rstd=a.empty(rows), y=a.empty(*shape)
        )
        gradients = dict(dx=a.empty(*shape), dweight=a.empty(channels), dbias=a.empty(channels))
        for name, count in (("batch_norm_backward", channels), ("layer_norm_backward", rows)):
            yield name, dict(
                dy=a.normal(*shape), x=x, weight=weight, mean=a.normal(count) + a.constant(10),
                rstd=a.positive(count), **gradients,
            )  # fmt: skip
        yield "batch_norm_eval_backward", dict(
            dy=a.normal(*shape), x=x, weight=weight, eps=eps, running_mean=running_mean,
            running_var=running_var, **gradients,
        )  # fmt: skip


def pool(a: Arrays) -> Cases:
    for image, kernel, stride, padding in (
        ((1, 1, 1, 1), (1, 1), (1, 1), (0, 0)),
        ((2, 8, 8, 33), (2, 2), (2, 2), (0, 0)),
        ((3, 7, 9, 5), (3, 2), (2, 1), (1, 1)),  # windows overlap and stick out
        ((5, 7, 7, 3), (2, 3), (3, 4), (0, 0)),  # pixels between windows and at the end are left out
        ((2, 5, 7, 17), (5, 7), (1, 1), (0, 0)),
    ):
        n, *pixels, channels = image
        out_pixels = [(p + 2 * d - k) // s + 1 for p, k, s, d in zip(pixels, kernel, stride, padding, strict=True)]
        out = n, *out_pixels, channels
        window = dict(kernel=kernel, stride=stride, padding=padding)
        argmax = a.integers(pixels[0] * pixels[1], *out).astype(np.int32)
        ties = a.integers(3, *image).astype(a.dtype)
        for x in (a.normal(*image), ties):
            yield "max_pool", dict(x=x, **window, y=a.empty(*out), argmax=np.full(out, -1, np.int32))
        yield "max_pool_backward", dict(dy=a.normal(*out), argmax=argmax, dx=a.empty(*image))
        yield "average_pool", dict(x=a.normal(*image), **window, y=a.empty(*out))
        yield "average_pool_backward", dict(dy=a.normal(*out), **window, dx=a.empty(*image))


def dropout(a: Arrays) -> Cases:
    for n, p, seed, offset in ((1, 0.5, 0, 0), (7, 0.0, 1, 5), (7, 1.0, 1, 5), (40_000, 0.3, -3, 2**40)):
        yield "dropout", dict(x=a.normal(n), p=p, seed=seed, offset=offset, y=a.empty(n))


def optim(a: Arrays) -> Cases:
    n = 5003
    segments = dict(starts=np.array([0, 33, 40]), stops=np.array([1, 40, 5001]))  # with gaps
    rates = dict(lr=np.array([0.1, 0.2, 0.05]), weight_decay=np.array([0.01, 0.0, 0.1]))
    for nesterov, decoupled, momentum in ((False, False, 0.9), (True, False, 0.9), (False, True, 0.0)):
        yield "sgd", dict(
            theta=a.normal(n), grad=a.normal(n), velocity=a.normal(n), **segments, **rates,
            momentum=momentum, nesterov=nesterov, decoupled=decoupled, scale=0.5,
        )  # fmt: skip
    for step, decoupled in ((1, False), (1000, True)):
        yield "adam", dict(
            theta=a.normal(n), grad=a.normal(n), first=a.normal(n), second=a.positive(n), **segments, **rates,
            beta1=0.9, beta2=0.999, eps=1e-8, step=step, decoupled=decoupled, scale=0.5,
        )  # fmt: skip
    yield "norms", dict(x=a.normal(n), **segments, squares=np.full(3, 7.0))
    for adapt in ([True, True, False], [False, True, True]):  # the middle one without weight decay
        yield "lars", dict(
            theta=a.normal(n), grad=a.normal(n), velocity=a.normal(n), **segments, **rates, adapt=np.array(adapt),
            momentum=0.9, trust=0.02, theta_squares=np.array([1.0, 2.0, 4000.0]),
            grad_squares=np.array([0.0, 3.0, 5000.0]), scale=0.5,
        )  # fmt: skip


def elementwise(a: Arrays) -> Cases:
    for n in (1, 7, 33, 70_001):
        for name in ("add", "subtract", "multiply", "divide", "maximum"):
            yield name, dict(a=a.normal(n), b=a.positive(n), out=a.empty(n))
        for name in ("exp", "log", "sqrt", "absolute"):
            yield name, dict(x=a.positive(n), out=a.empty(n))
        yield "maximum_backward", dict(
            dy=a.normal(n), a=a.integers(3, n).astype(a.dtype), b=a.integers(3, n).astype(a.dtype),
            da=a.empty(n), db=a.empty(n),
        )  # fmt: skip
        yield "affine", dict(x=a.normal(n), scale=0.3, shift=-2.0, out=a.empty(n))
        yield "accumulate", dict(x=a.normal(n), out=a.normal(n))
        yield "add_bias", dict(bias=a.normal(n % 64), out=a.normal(n // 64 + 1, n % 64))
        yield "absolute_backward", dict(dy=a.normal(n), x=a.integers(3, n).astype(a.dtype) - 1, dx=a.empty(n))
        for exponent in (0.0, 2.0, 2.5):
            yield "power", dict(x=a.positive(n), exponent=exponent, out=a.empty(n))
            yield "power_backward", dict(dy=a.normal(n), x=a.positive(n), exponent=exponent, dx=a.empty(n))


def movement(a: Arrays) -> Cases:
    transpose = dict(source_offset=0, target_offset=0, source_strides=np.array([1, 7]), target_strides=np.array([5, 1]))
    yield "copy", dict(source=a.normal(35), **transpose, shape=np.array([7, 5]), target=a.empty(35))
    broadcast = dict(source_offset=1, target_offset=2, source_strides=np.array([0]), target_strides=np.array([3]))
    yield "copy", dict(source=a.normal(2), **broadcast, shape=np.array([4]), target=a.empty(12))
    for source_strides, shape in (([15, 5, 1], [2, 3, 5]), ([-15, 5, -2], [2, 3, 3]), ([15, 5, 1], [2, 0, 5])):
        n, offset = int(np.prod(shape)), 15 * (source_strides[0] < 0) + 4 * (source_strides[2] < 0)
        yield "copy", dict(
            source=a.normal(30), source_offset=offset, source_strides=np.array(source_strides), shape=np.array(shape),
            target_offset=1, target_strides=np.array([1, 2 * shape[2], 2]), target=a.empty(2 * n + 3),
        )  # fmt: skip
    for n, rows, channels in ((1, 1, 1), (7, 33, 5), (33, 7, 17), (3, 0, 2)):
        picked = a.integers(n, rows)
        yield "take", dict(x=a.normal(n, channels), rows=picked, out=a.empty(rows, channels))
        yield "take_backward", dict(dy=a.normal(rows, channels), rows=picked, dx=a.empty(n, channels))


def reduce(a: Arrays) -> Cases:
    for outer, n, inner in ((1, 1, 1), (7, 33, 5), (3, 1001, 1), (1, 101, 65)):
        x = a.normal(outer, n, inner)
        for chunks in (1, 5):
            yield "sum", dict(x=x, partial=np.full((chunks, outer, inner), 7.0), out=a.empty(outer, inner))
        for values in (x, a.integers(3, *x.shape).astype(a.dtype)):
            yield "maximum", dict(x=values, out=a.empty(outer, inner), winner=np.full((outer, inner), -1))
        winner = a.integers(n, outer, inner)
        yield "maximum_backward", dict(dy=a.normal(outer, inner), winner=winner, dx=a.empty(*x.shape))


def matmul(a: Arrays) -> Cases:
    for m, n, k in ((1, 1, 1), (7, 33, 5), (67, 3, 129), (301, 5, 7), (0, 3, 5), (3, 5, 0)):  # from 64 rows: blocks
        yield "nn", dict(a=a.normal(m, k), b=a.normal(k, n), out=a.empty(m, n))
        yield "nt", dict(a=a.normal(m, k), b=a.normal(n, k), out=a.empty(m, n))
        yield "tn", dict(a=a.normal(k, m), b=a.normal(k, n), transposed=a.empty(m, k), out=a.empty(m, n))


def conv(a: Arrays) -> Cases:
    for image, kernel, outputs, groups, stride, padding, dilation, out in (
        ((1, 1, 1, 1), (1, 1), 1, 1, (1, 1), (0, 0), (1, 1), (1, 1)),
        ((7, 7, 9, 2), (3, 2), 5, 1, (2, 1), (1, 1), (1, 1), (4, 10)),
        ((2, 8, 7, 3), (3, 3), 2, 1, (1, 2), (0, 2), (2, 1), (4, 5)),
        ((2, 5, 6, 4), (3, 1), 6, 2, (1, 2), (1, 0), (1, 1), (5, 3)),
        ((2, 5, 5, 3), (3, 3), 3, 3, (1, 1), (2, 2), (2, 2), (5, 5)),  # depthwise
    ):
        x, y = a.normal(*image), a.normal(image[0], *out, outputs)
        weight = a.normal(*kernel, image[3] // groups, outputs)
        window: Arguments = dict(stride=stride, padding=padding, dilation=dilation)
        if groups == 1:
            patch = kernel[0] * kernel[1] * image[3]
            # two tasks, that take one image at a time, or two: of 7 images one is left over
            window["columns"] = a.empty(2, 1 + image[0] % 2, out[0] * out[1], patch)
            name, partial = "", dict(partial=a.empty(2, 2, patch, outputs))
        else:
            window["groups"] = groups
            name, partial = "grouped_", {}
        yield name + "forward", dict(x=x, weight=weight, **window, y=a.empty(*y.shape))
        yield name + "backward_input", dict(dy=y, weight=weight, **window, dx=a.empty(*x.shape))
        yield name + "backward_weight", dict(x=x, dy=y, **window, **partial, dweight=a.empty(*weight.shape))


CASES: dict[str, Callable[[Arrays], Cases]] = {
    "activation": activation,
    "conv": conv,
    "dropout": dropout,
    "elementwise": elementwise,
    "matmul": matmul,
    "movement": movement,
    "norm": norm,
    "optim": optim,
    "pool": pool,
    "reduce": reduce,
    "softmax": softmax,
}


def cases(folder: str, kernel: str, dtype: str) -> list[Arguments]:
    return [arguments for name, arguments in CASES[folder](Arrays(dtype)) if name == kernel]


def call(folder: str, file: str, kernel: str, arguments: Arguments) -> dict[str, np.ndarray]:
    """Calls the kernel on copies; returns every array as the call left it."""
    arguments = copy.deepcopy(arguments)
    getattr(module(folder, file), kernel)(*(arguments[p] for p in parameters(folder, kernel)))
    return {p: v for p, v in arguments.items() if isinstance(v, np.ndarray) and p not in SCRATCH}


def parameters(folder: str, kernel: str, file: str = "reference") -> list[str]:
    function = getattr(module(folder, file), kernel)
    return list(inspect.signature(getattr(function, "py_func", function)).parameters)


def in_float64(arguments: Arguments) -> Arguments:
    """The same numbers, so that the reference computes without float32's rounding."""
    return {
        p: v.astype(np.float64) if isinstance(v, np.ndarray) and v.dtype.kind == "f" else v
        for p, v in arguments.items()
    }


def check(folder: str, kernel: str, dtype: str, arguments: Arguments) -> dict[str, np.ndarray]:
    """The compiled kernel against the reference in float64; returns what the compiled one left."""
    expected = call(folder, "reference", kernel, in_float64(arguments))
    found = call(folder, "cpu", kernel, arguments)
    for p, array in found.items():
        largest = np.max(abs(expected[p]), where=np.isfinite(expected[p]), initial=0)
        tolerance = TOLERANCE[dtype] * largest if array.dtype.kind == "f" else 0
        np.testing.assert_allclose(array, expected[p], rtol=0, atol=tolerance, err_msg=f"{kernel}: {p}")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_both_files_have_the_same_kernels(folder: str) -> None:
    assert sorted(module(folder, "cpu").__all__) == sorted(module(folder, "reference").__all__)
    for kernel in module(folder, "cpu").__all__:
        assert parameters(folder, kernel, "cpu") == parameters(folder, kernel), kernel


def test_every_kernel_has_a_case() -> None:
    with_case = {(folder, name) for folder, generate in CASES.items() for name, _ in generate(Arrays("float32"))}
    assert [f"{folder}.{name}" for folder, name in sorted(set(KERNELS) - with_case)] == []


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("folder", "kernel"), [k for k in KERNELS if k[0] in CASES])
def test_kernel_agrees_with_its_reference(folder: str, kernel: str, dtype: str) -> None:
    for arguments in cases(folder, kernel, dtype):
        check(folder, kernel, dtype, arguments)


@pytest.mark.skipif(numba.get_num_threads() < 2, reason="needs two cores")
@pytest.mark.parametrize(("folder", "kernel"), [k for k in KERNELS if k[0] in CASES])
def test_bits_do_not_depend_on_the_number_of_threads(folder: str, kernel: str) -> None:
    before = numba.get_num_threads()
    try:
        for arguments in cases(folder, kernel, "float32"):
            numba.set_num_threads(1)
            alone = call(folder, "cpu", kernel, arguments)
            numba.set_num_threads(2)
            together = call(folder, "cpu", kernel, arguments)
            for p, array in alone.items():
                assert array.tobytes() == together[p].tobytes(), p
    finally:
        numba.set_num_threads(before)


PASS_NAN_ON = {
    "activation": ("relu", "leaky_relu", "gelu", "silu", "tanh", "sigmoid"),
    "elementwise": ("maximum", "sqrt", "exp"),
    "norm": ("batch_norm", "batch_norm_eval", "layer_norm"),
    "pool": ("max_pool", "average_pool"),
    "reduce": ("sum", "maximum"),
    "softmax": ("softmax", "log_softmax", "cross_entropy"),
}


@pytest.mark.parametrize(("folder", "kernel"), [(f, k) for f, kernels in PASS_NAN_ON.items() for k in kernels])
def test_nan_passes_through(folder: str, kernel: str) -> None:
    for arguments in cases(folder, kernel, "float32"):
        x = arguments[parameters(folder, kernel)[0]]
        x.flat[:: max(5, x.size // 9)] = np.nan
        found = check(folder, kernel, "float32", arguments)
        output = next(p for p in ("y", "out", "loss") if p in found)
        assert np.isnan(found[output]).any()
