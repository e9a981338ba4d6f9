"""A recorded step is bit-identical to the tape, for any model. A model that cannot be recorded causes a warning."""

from __future__ import annotations

import copy
import tracemalloc
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl import models, nn, ops, optim
from minidl.engine import random
from minidl.engine.device import address
from minidl.engine.jit import set_threads, threads
from minidl.engine.tensor import Tensor
from minidl.errors import ShapeError
from minidl.ops.conv import with_winograd
from minidl.program.plan import plan
from minidl.program.record import Call, Memory, Place, Recorder, Unrecordable
from minidl.program.replay import Gradient, Prediction
from minidl.program.table import Program


def cross_entropy(logits: Tensor, y: np.ndarray) -> Tensor:
    return ops.cross_entropy(logits, y, 0.1)


def batch(shape: tuple[int, ...], count: int, classes: int = 10, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, *shape)).astype(np.float32), rng.integers(classes, size=count)


def spoil(gradient: Gradient) -> None:
    """Fill all gradients with NaN. This reveals a kernel that adds to a gradient before another kernel has written it.

    The gaps between the gradients in the arena stay zero.
    """
    for _, view in gradient.arena.views(gradient.arena.grad):
        view[...] = np.nan


class Everything(nn.Module):
    """A model with many different ops, a layer that is used twice, and a layer that is not used."""

    def __init__(self) -> None:
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=4, bias=False)
        self.dilated = nn.Conv2d(12, 7, (3, 1), dilation=2, padding=(2, 0))
        self.drop = nn.Dropout(0.3)
        self.tied = nn.Linear(7, 7)
        self.layer_norm = nn.LayerNorm(7)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(14, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = ops.relu(self.norm(self.first(x)))
        x = ops.max_pool2d(ops.pad(x, ((0, 0), (1, 1), (0, 1), (0, 0))), 2)
        x = self.dilated(ops.avg_pool2d(self.grouped(x), 2, stride=1))
        x = self.drop(ops.global_avg_pool2d(x) + x.max((1, 2), keepdims=True) * 0.5).reshape(-1, 7)
        y = ops.gelu(self.tied(x)) + ops.tanh(self.tied(ops.silu(x)))
        y = ops.sigmoid(self.layer_norm(y)) * ops.leaky_relu(x) - ops.softmax(x) / 3.0
        return self.last(ops.concat([y, (x * x + 1.0).sqrt().log()], axis=1)[:, :])


def model_of(name: str) -> tuple[nn.Module, tuple[int, ...], int]:
    """Return (model, shape of an image, classes)."""
    nn.seed(1)
    if name == "everything":
        return Everything(), (11, 9, 3), 5
    shape = (12, 12, 1) if name in ("mlp", "lenet") else (16, 16, 3)
    model = models.build(name, shape, 10)
    nn.fit_whitening(model, batch(shape, 9, 10)[0])
    return model, shape, 10


@pytest.mark.parametrize("name", ["mlp", "lenet", "vgg", "resnet20", "resnet20-gn", "whitened-cnn", "everything"])
def test_replay_and_tape_are_bit_identical(name: str) -> None:
    """Compare loss, gradients, weights, statistics and dropout's counter in three steps, one with a shorter batch."""
    runs = []
    for replay in (True, False):
        model, shape, classes = model_of(name)
        optimizer = optim.SGD(model, lr=0.01, momentum=0.9)
        gradient = Gradient(model, cross_entropy)
        random.seed(5)
        trace: list[Any] = []
        for step, count in enumerate((6, 5, 6)):
            x, y = batch(shape, count, classes, seed=step)
            spoil(gradient)
            trace += gradient(x, y) if replay else gradient.by_tape(x, y)
            optimizer.step()
            trace += [model.flatten().grad.tobytes(), model.flatten().theta.tobytes(), random.random_state()]
            trace += [model.statistics.theta.tobytes() if model.statistics is not None else b""]
        assert not gradient.not_recorded
        assert len(gradient.programs) == (2 if replay else 0)
        runs.append(trace)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", ["lenet", "resnet20", "resnet20-gn", "everything"])
def test_a_prediction_equals_the_output_of_the_model(name: str) -> None:
    model, shape, classes = model_of(name)
    x, y = batch(shape, 7, classes)
    Gradient(model, cross_entropy)(x, y)  # changes the running statistics
    model.eval()
    expected = model(x).numpy()
    model.train()
    prediction = Prediction(model)
    for rows in (slice(0, 7), slice(0, 3), slice(0, 7)):
        assert prediction(x[rows]).tobytes() == np.ascontiguousarray(expected[rows]).tobytes()
    assert not prediction.not_recorded
    assert all(module.training for _, module in model.named_modules())


def test_prediction_does_not_create_an_arena() -> None:
    model, shape, _ = model_of("lenet")
    x, _ = batch(shape, 3)
    before = Prediction(model)(x).copy()
    assert model.arena is None
    weight = next(model.parameters())
    weight.data[...] *= 2  # in place
    prediction = Prediction(model)
    assert not np.array_equal(prediction(x), before)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    before = threads()
    if before < 2:
        pytest.skip("needs two threads")
    found = []
    try:
        for count in (1, 2):
            set_threads(count)
            model, shape, _ = model_of("resnet20")
            x, y = batch(shape, 33)
            Gradient(model, cross_entropy)(x, y)
            found.append(model.flatten().grad.tobytes())
    finally:
        set_threads(before)
    assert found[0] == found[1]


def test_calls_are_fused() -> None:
    model, shape, _ = model_of("resnet20")
    x, y = batch(shape, 4)
    gradient, prediction = Gradient(model, cross_entropy), Prediction(model)
    with with_winograd(True):
        gradient(x, y), prediction(x)
    (program,), (predicting,) = gradient.programs.values(), prediction.programs.values()
    assert "elementwise.copy" not in program.calls  # kernels write gradients directly into the arena
    # Of the nine relus after a shortcut, five are merged with a convolution and batch norm (test_conv_norm.py).
    assert program.calls.count("activation.relu_backward") == 4
    # ReLUs and additions (of shortcuts) are fused into other kernels.
    assert not {"elementwise.add", "activation.relu"} & {*program.calls, *predicting.calls}
    assert "norm.affine" not in predicting.calls
    assert predicting.calls.count("conv.forward") == 19


class Twice(nn.Module):
    """A model that adds the output of a convolution, and of batch norm, to itself."""

    def __init__(self) -> None:
        self.conv1, self.conv2, self.norm = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(x)
        y = self.norm(self.conv2(y + y))
        return ops.flatten(y + y)


def test_an_array_added_to_itself() -> None:
    nn.seed(1)
    model, (x, y) = Twice(), batch((6, 6, 3), 5)
    gradient = Gradient(model, cross_entropy)
    found = gradient(x, y), model.flatten().grad.tobytes()
    assert found == (gradient.by_tape(x, y), model.flatten().grad.tobytes())
    model.eval()
    assert Prediction(model)(x).tobytes() == model(x).numpy().tobytes()


def test_relu_backward_is_computed_on_the_pooled_array() -> None:
    model, shape, _ = model_of("vgg")
    gradient = Gradient(model, cross_entropy)
    gradient(*batch(shape, 4))
    (program,) = gradient.programs.values()
    backward = [call for call in program.calls if call in ("activation.relu_backward", "pool.max_pool_backward")]
    assert backward[:2] == ["activation.relu_backward", "pool.max_pool_backward"]
    assert backward.count("activation.relu_backward") == 6


def test_a_parameter_has_a_gradient_only_while_it_is_not_frozen() -> None:
    model, shape, _ = model_of("mlp")
    x, y = batch(shape, 4)
    gradient = Gradient(model, cross_entropy)
    weight, *_ = model.parameters()
    for requires_grad in (True, False, True):
        weight.requires_grad = requires_grad
        spoil(gradient)
        gradient(x, y)
        assert np.isfinite(gradient.arena.grad[: weight.size]).all()
        assert bool(weight.grad.any()) is requires_grad


def test_one_program_serves_replicas_with_separate_vectors() -> None:
    model, shape, _ = model_of("mlp")
    gradient = Gradient(model, cross_entropy)
    x, y = batch(shape, 4)
    gradient(x, y)
    (program,) = gradient.programs.values()
    expected = gradient.arena.grad.copy()
    theta, grad = gradient.arena.new_vector(), gradient.arena.new_vector()
    theta[:] = gradient.arena.theta
    gradient.arena.theta[:] = np.nan
    spoil(gradient)
    memory = gradient.workspace.memory
    vectors = {"workspace": memory, "theta": theta, "grad": grad, "x": x, "y": y}
    program.run({name: address(array) for name, array in vectors.items()})
    np.testing.assert_array_equal(grad, expected)
    assert np.isnan(gradient.arena.grad[:10]).all()


def test_a_program_can_be_cut_where_part_of_the_gradient_is_final() -> None:
    model, shape, _ = model_of("mlp")
    gradient = Gradient(model, cross_entropy)
    x, y = batch(shape, 4)
    gradient(x, y)
    (program,) = gradient.programs.values()
    # The slot of the last weight, whose gradient is the first to be final.
    expected, slot = gradient.arena.grad.copy(), gradient.arena.slots[-2]
    cut = program.final("grad", slot.start * 4, slot.stop * 4)
    assert 0 < cut < len(program.calls)
    spoil(gradient)
    vectors = {"workspace": gradient.workspace.memory, **gradient.vectors, "x": x, "y": y}
    bases = {name: address(array) for name, array in vectors.items()}
    program.run(bases, 0, cut)
    last = slice(slot.start, slot.stop)
    np.testing.assert_array_equal(gradient.arena.grad[last], expected[last])
    assert np.isnan(gradient.arena.grad[: slot.start]).any()
    program.run(bases, cut)
    np.testing.assert_array_equal(gradient.arena.grad, expected)


def test_arrays_that_moved_and_layers_that_changed_are_detected() -> None:
    nn.seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    outer = nn.Sequential(inner, nn.Linear(8, 3))
    x, y = batch((4,), 6, 3)
    prediction = Prediction(inner)
    prediction(x)
    outer.flatten()  # inner's arrays move into outer's arena
    Gradient(outer, cross_entropy)(x, y)
    optim.SGD(outer, lr=1.0).step()
    inner.eval()
    assert prediction(x).tobytes() == inner(x).numpy().tobytes()
    setattr(inner, "0", nn.Linear(4, 8))
    assert prediction(x).tobytes() == inner(x).numpy().tobytes()


def test_a_copy_has_separate_programs() -> None:
    model, shape, _ = model_of("mlp")
    gradient = Gradient(model, cross_entropy)
    x, y = batch(shape, 4)
    found = gradient(x, y)
    twin = copy.deepcopy(gradient)
    spoil(gradient)
    assert twin(x, y) == found
    assert twin.arena is not gradient.arena and np.isnan(gradient.arena.grad[:10]).all()
    assert np.isfinite(twin.arena.grad).all()


def test_inputs_of_other_types() -> None:
    model, shape, _ = model_of("mlp")
    gradient, prediction = Gradient(model, cross_entropy), Prediction(model)
    x, y = batch(shape, 4)
    pixels = (x > 0).astype(np.uint8)
    assert gradient(pixels, y) == gradient(pixels.astype(np.float32), y)
    assert gradient(x[:, ::-1], y) == gradient(np.ascontiguousarray(x[:, ::-1]), y)
    with pytest.raises(ShapeError, match="integers"):
        gradient(x, y + 0.5)
    frozen = x.copy()
    frozen.flags.writeable = False
    assert prediction(frozen).tobytes() == prediction(x).tobytes()


class Peeks(nn.Module):
    """A model whose forward pass reads values or draws random numbers, as `how` selects."""

    def __init__(self, how: str) -> None:
        self.fc, self.how = nn.Linear(4, 3), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if self.how == "item":
            return y * (1.0 if y.sum().item() > 0 else 2.0)
        if self.how == "numpy":
            return y + Tensor(np.abs(y.numpy()))
        if self.how == "array":
            return y + Tensor(np.asarray(y) * 2)
        if self.how == "noise":
            return y * Tensor(np.random.default_rng(0).standard_normal(y.shape).astype(np.float32))
        return ops.relu(y) if np.random.random() < 0.5 else y  # "chance"


@pytest.mark.parametrize("how", ["item", "numpy", "array", "noise"])
def test_what_cannot_be_recorded_runs_on_the_tape_with_one_warning(how: str) -> None:
    model = Peeks(how)
    gradient = Gradient(model, cross_entropy)
    x, y = batch((4,), 8, 3)
    with pytest.warns(UserWarning, match="without a recorded program"):
        found = gradient(x, y)
    grad = gradient.arena.grad.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gradient(x, y) == found == gradient.by_tape(x, y)
    np.testing.assert_array_equal(gradient.arena.grad, grad)


def test_a_model_that_branches_at_random_causes_a_warning() -> None:
    gradient = Gradient(Peeks("chance"), cross_entropy)
    with pytest.warns(UserWarning, match="random"):
        gradient(*batch((4,), 4, 3))


def test_an_unknown_label_is_refused_as_by_the_tape() -> None:
    model, shape, _ = model_of("mlp")
    gradient = Gradient(model, cross_entropy)
    x, y = batch(shape, 4)
    gradient(x, y)
    with pytest.raises(ShapeError, match="labels from"):
        gradient(x, np.array([0, 1, 2, 10]))


def test_a_wrong_shape_is_refused_as_by_the_tape() -> None:
    model, _, _ = model_of("lenet")
    with pytest.raises(ShapeError, match="Conv2d"):
        Gradient(model, cross_entropy)(*batch((12, 12, 3), 4))


def test_a_model_flattened_again_is_recorded_again() -> None:
    model, shape, _ = model_of("mlp")
    gradient = Gradient(model, cross_entropy)
    x, y = batch(shape, 4)
    gradient(x, y)
    name, _ = list(model.named_children())[-1]
    setattr(model, name, nn.Linear(512, 10))
    model.flatten()
    assert gradient(x, y) == gradient.by_tape(x, y)


def test_a_replay_allocates_almost_no_memory() -> None:
    model, shape, _ = model_of("lenet")
    gradient = Gradient(model, cross_entropy)
    x, y = batch(shape, 8)
    gradient(x, y), gradient(x, y)
    peaks = []
    for _ in range(3):
        tracemalloc.start()
        gradient(x, y)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # A replay may allocate small objects and, for each thread, tables of offsets. One activation has 147,456 bytes.
    # The least of three: another thread of this process, such as that of pytest-xdist, may allocate during one of them.
    assert min(peaks) < 20_000 + 30_000 * threads()


def test_unknown_memory_is_refused() -> None:
    recorder = Recorder(Tensor(np.zeros(1)).device)
    with pytest.raises(Unrecordable, match="not a result"):
        recorder.activation.relu(np.zeros(4, np.float32), recorder.empty((4,), np.float32))


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 500)), max_size=12))
def test_buffers_that_are_live_at_the_same_time_do_not_overlap(spans: list[tuple[int, int, int]]) -> None:
    buffers = [Memory(np.empty(size, np.uint8)) for _, _, size in spans]
    calls = []
    for i in range(13):
        alive = [b for b, (a, z, _) in zip(buffers, spans) if min(a, z) <= i <= max(a, z)]
        calls.append(Call("op.kernel", None, {str(k): Place(b, 0, b.array) for k, b in enumerate(alive)}))
    offsets, size = plan(calls, set())
    for k, (b, (a, z, _)) in enumerate(zip(buffers, spans)):
        assert offsets[b] % 64 == 0 and offsets[b] + b.array.size <= size
        for other, (c, d, _) in list(zip(buffers, spans))[:k]:
            together = min(a, z) <= max(c, d) and min(c, d) <= max(a, z)
            apart = offsets[b] + b.array.size <= offsets[other] or offsets[other] + other.array.size <= offsets[b]
            assert apart or not together


def test_every_call_of_a_table_has_an_entry_and_a_block() -> None:
    model, shape, _ = model_of("mlp")
    gradient = Gradient(model, cross_entropy)
    gradient(*batch(shape, 4))
    (program,) = gradient.programs.values()
    assert isinstance(program, Program)
    assert (program.table != 0).all()
