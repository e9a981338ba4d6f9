"""minidl compared with PyTorch: weights loaded in both directions, and training from the same weights and batches.

In each run, both engines start with the same weights and take 50 steps of momentum SGD on the same batches, in
float64 and in float32. In float64 every loss, every final parameter and every final statistic must agree to 1e-9.

In float32 each engine is compared with PyTorch's float64 run. The distance between the runs is |w - w64| / |w64| over
all parameters w. minidl's distance may be at most three times PyTorch's. Of the losses in float32, only the first two
are compared.

The test compares the medians of several runs, because ReLU and max pooling have kinks. At some step of a run, a value
is so close to a kink that float32 and float64 round it to different sides. This changes the gradient by much more than
a rounding error. Chance decides in which engine this happens earlier, so a single run shows little.

Winograd's method rounds more than a direct convolution (kernels/conv/WINOGRAD.md), so its runs reach a kink earlier: of
nine runs of LeNet on digits three within 50 steps, PyTorch's one; of ResNet-20 on 8 x 8 images six within 10 steps,
PyTorch's two. Up to there, the distances are 1.0 to 1.8 times PyTorch's. So the first two steps are compared with
Winograd's method, whole runs with direct convolutions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest

import minidl
from minidl import checkpoint, data, models, nn, no_grad, ops, optim
from minidl.engine import jit

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from bench.pytorch_twins import TWINS  # noqa: E402

Shape = tuple[int, int, int]
Arrays = dict[str, np.ndarray]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Limit both engines to one thread: waiting threads spin, and on busy cores runs take ten times as long."""
    before = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(1)
    jit.set_threads(1)
    yield
    torch.set_num_threads(before[0])
    jit.set_threads(before[1])


def custom(shape: Shape, classes: int) -> nn.Module:
    """Build a model with features that other models lack: dilation, groups, non-square kernels, strides and padding."""
    height, width, channels = shape
    return nn.Sequential(
        nn.Conv2d(channels, 6, (3, 5), stride=(1, 2), padding=(1, 2)),
        nn.BatchNorm2d(6),
        nn.SiLU(),
        nn.Conv2d(6, 9, 3, padding=2, dilation=2, groups=3, bias=False),
        nn.BatchNorm2d(9),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(9 * (height // 2) * ((width + 1) // 2 // 2), 17),
        nn.LayerNorm(17),
        nn.Tanh(),
        nn.Linear(17, classes),
    )


def custom_twin(shape: Shape, classes: int) -> Any:
    height, width, channels = shape
    return torch.nn.Sequential(
        torch.nn.Conv2d(channels, 6, (3, 5), stride=(1, 2), padding=(1, 2)),
        torch.nn.BatchNorm2d(6),
        torch.nn.SiLU(),
        torch.nn.Conv2d(6, 9, 3, padding=2, dilation=2, groups=3, bias=False),
        torch.nn.BatchNorm2d(9),
        torch.nn.GELU(),
        torch.nn.AvgPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(9 * (height // 2) * ((width + 1) // 2 // 2), 17),
        torch.nn.LayerNorm(17),
        torch.nn.Tanh(),
        torch.nn.Linear(17, classes),
    )


def build_ours(name: str, shape: Shape) -> nn.Module:
    model = custom(shape, 10) if name == "custom" else models.build(name, shape)
    nn.fit_whitening(model, images(shape, seed=5))
    return model


def build_theirs(name: str, shape: Shape) -> Any:
    return custom_twin(shape, 10) if name == "custom" else TWINS[name](shape, 10)


def to_torch(x: np.ndarray) -> Any:
    """Convert images (N, H, W, C) to PyTorch's layout (N, C, H, W)."""
    return torch.from_numpy(x).permute(0, 3, 1, 2)


# Weights in both directions

MODELS: list[tuple[str, Shape]] = [
    ("mlp", (7, 5, 3)),
    ("lenet", (9, 14, 2)),
    ("vgg", (17, 9, 3)),
    ("resnet20", (11, 8, 3)),
    ("resnet20-gn", (11, 8, 3)),
    ("whitened-cnn", (17, 16, 3)),
    ("custom", (8, 10, 3)),
]


def images(shape: Shape, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((4, *shape)).astype(np.float32)


def same_outputs(ours: nn.Module, theirs: Any, shape: Shape) -> None:
    """Assert that outputs agree to 1e-5 in evaluation mode (which uses the running statistics) and training mode."""
    x = images(shape, seed=9)
    for mode in (False, True):
        with no_grad(), torch.no_grad():
            y = ours.train(mode)(x).numpy()
            expected = theirs.train(mode)(to_torch(x)).numpy()
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5 * abs(expected).max())


@pytest.mark.parametrize(("name", "shape"), MODELS)
def test_pytorch_loads_our_checkpoint(name: str, shape: Shape, tmp_path: Path) -> None:
    minidl.seed(3)
    ours, theirs = build_ours(name, shape), build_theirs(name, shape)
    for seed in range(3):  # changes the running statistics
        ours(images(shape, seed))
    checkpoint.save(tmp_path, 7, checkpoint.Checkpoint(ours.state_dict(), {}, {}))
    theirs.load_state_dict(safetensors_torch.load_file(checkpoint.folder_of(tmp_path, 7) / checkpoint.MODEL))
    same_outputs(ours, theirs, shape)


@pytest.mark.parametrize(("name", "shape"), MODELS)
def test_minidl_loads_a_file_of_pytorch(name: str, shape: Shape, tmp_path: Path) -> None:
    torch.manual_seed(3)
    ours, theirs = build_ours(name, shape), build_theirs(name, shape)
    for seed in range(3):
        theirs(to_torch(images(shape, seed)))
    safetensors_torch.save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    nn.Module.flatten(ours)
    ours.load_state_dict(checkpoint.header(tmp_path / "model.safetensors").values())
    same_outputs(ours, theirs, shape)


@pytest.mark.parametrize(("name", "shape"), MODELS)
def test_names_shapes_and_order_are_those_of_pytorch(name: str, shape: Shape) -> None:
    ours, theirs = build_ours(name, shape), build_theirs(name, shape)
    expected = {key: tuple(value.shape) for key, value in theirs.named_parameters()}
    assert list(expected) == [key for key, _ in ours.named_parameters()]
    expected |= {key: tuple(value.shape) for key, value in theirs.named_buffers() if "num_batches" not in key}
    assert {key: value.shape for key, value in ours.state_dict().items()} == expected


def test_tied_weights_have_the_names_of_pytorch() -> None:
    def tie(namespace: Any) -> Any:
        model = namespace.Sequential(namespace.Linear(5, 5), namespace.Tanh(), namespace.Linear(5, 5))
        model[2].weight = model[0].weight
        return model

    ours, theirs = tie(nn), tie(torch.nn)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert len(nn.Module.flatten(ours).slots) == len(list(theirs.parameters()))


# Whole runs


class Case(NamedTuple):
    """A training run. The learning rate is so low that the training is stable; otherwise, distances have no meaning."""

    model: str
    data: str
    batch: int
    lr: float
    runs: int = 5
    steps: int = 50


class Run(NamedTuple):
    losses: np.ndarray  # (steps,), the loss before each step
    early: Arrays  # parameters after EARLY steps
    last: Arrays  # parameters and running statistics after the last step


EARLY = 2  # steps. By then few runs have reached a kink (see above), so most distances come from rounding alone

QUICK = [
    Case("mlp", "digits", batch=16, lr=0.05),
    Case("lenet", "digits", batch=4, lr=0.02),
    Case("vgg", "synthetic:200x8x8x3:10", batch=2, lr=0.002, runs=3),
    Case("resnet20", "synthetic:200x8x8x3:10", batch=16, lr=0.001, runs=9, steps=10),
    Case("resnet20-gn", "synthetic:200x8x8x3:10", batch=4, lr=0.001, runs=3),
    Case("custom", "synthetic:200x8x10x3:10", batch=8, lr=0.02),
]
FULL_SIZE = [
    Case("mlp", "synthetic:800x28x28x1:10", batch=16, lr=0.02),
    Case("lenet", "synthetic:800x28x28x1:10", batch=4, lr=0.01),
    Case("vgg", "synthetic:800x32x32x3:10", batch=8, lr=0.001, runs=3),
    Case("resnet20", "synthetic:800x32x32x3:10", batch=8, lr=0.001, runs=3),
]
LARGE = ("vgg", "resnet20", "resnet20-gn")  # the other models have nearly all of their layers
CASES = [pytest.param(case, id=case.model, marks=[pytest.mark.slow] * (case.model in LARGE)) for case in QUICK] + [
    pytest.param(case, id=f"{case.model}-full-size", marks=pytest.mark.slow) for case in FULL_SIZE
]


@functools.cache
def beginning(case: Case, seed: int) -> tuple[Arrays, list[tuple[np.ndarray, np.ndarray]]]:
    """Return the initial weights and the batches of a run."""
    dataset = data.load(case.data, seed=seed)
    loader = data.Loader(dataset.x_train, dataset.y_train, case.batch, seed=seed, drop_last=True)
    epochs = -(-case.steps // len(loader))
    batches = [batch for epoch in range(epochs) for batch in loader.epoch(epoch)][: case.steps]
    minidl.seed(seed)
    return build_ours(case.model, dataset.input_shape).state_dict(), batches


def train(batches: list, step: Callable[[np.ndarray, np.ndarray], float], state: Callable[[], Arrays]) -> Run:
    losses, early = [], {}
    for i, (x, y) in enumerate(batches, start=1):
        losses.append(step(x, y))
        if i == EARLY:
            early = state()
    return Run(np.array(losses), early, state())


@functools.cache
def ours(case: Case, seed: int, dtype: str, winograd: bool = True) -> Run:
    weights, batches = beginning(case, seed)
    model = build_ours(case.model, batches[0][0].shape[1:]).astype(dtype)
    model.load_state_dict(weights)
    optimizer = optim.SGD(model, case.lr, momentum=0.9)

    def step(x: np.ndarray, y: np.ndarray) -> float:
        loss = ops.cross_entropy(model(x.astype(dtype)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    with ops.conv.with_winograd(winograd):
        return train(batches, step, model.state_dict)


@functools.cache
def theirs(case: Case, seed: int, dtype: str) -> Run:
    weights, batches = beginning(case, seed)
    model = build_theirs(case.model, batches[0][0].shape[1:]).to(getattr(torch, dtype))
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    optimizer = torch.optim.SGD(model.parameters(), case.lr, momentum=0.9)

    def step(x: np.ndarray, y: np.ndarray) -> float:
        loss = torch.nn.functional.cross_entropy(model(to_torch(x.astype(dtype))), torch.from_numpy(y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def state() -> Arrays:
        return {name: value.numpy().copy() for name, value in model.state_dict().items() if name in weights}

    return train(batches, step, state)


@pytest.mark.parametrize("case", CASES)
def test_float64_runs_agree(case: Case) -> None:
    run, expected = ours(case, 0, "float64"), theirs(case, 0, "float64")
    half = case.steps // 2
    assert expected.losses[half:].mean() < expected.losses[:half].mean(), "the loss must decrease in the run"
    np.testing.assert_allclose(run.losses, expected.losses, rtol=1e-9)
    assert set(run.last) == set(expected.last)
    for name, value in expected.last.items():
        np.testing.assert_allclose(run.last[name], value, rtol=0, atol=1e-9 * abs(value).max(), err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_float32_losses_of_the_first_steps_agree(case: Case) -> None:
    """The losses before and after the first step agree to 1e-5."""
    for seed in range(case.runs):
        run, expected = ours(case, seed, "float32"), theirs(case, seed, "float32")
        np.testing.assert_allclose(run.losses[:2], expected.losses[:2], rtol=1e-5)


def distance(weights: Arrays, exact: Arrays) -> float:
    """Return |w - w64| / |w64| over all parameters."""
    names = [name for name in exact if "running" not in name]
    off = sum(np.square(weights[name] - exact[name]).sum() for name in names)
    return float(np.sqrt(off / sum(np.square(exact[name]).sum() for name in names)))


@pytest.mark.parametrize("case", CASES)
def test_float32_runs_stay_as_close_to_float64_as_those_of_pytorch(case: Case) -> None:
    for when, winograd in (("early", True), ("last", False)):
        exact = [getattr(theirs(case, seed, "float64"), when) for seed in range(case.runs)]
        distances = {
            "ours": [distance(getattr(ours(case, i, "float32", winograd), when), exact[i]) for i in range(case.runs)],
            "theirs": [distance(getattr(theirs(case, i, "float32"), when), exact[i]) for i in range(case.runs)],
        }
        print(when, {name: [f"{value:.1e}" for value in values] for name, values in distances.items()})
        assert np.median(distances["ours"]) <= 3 * np.median(distances["theirs"]), (when, distances)
        assert min(distances["ours"]) > 1e-9, "a float32 run must not compute in float64"
