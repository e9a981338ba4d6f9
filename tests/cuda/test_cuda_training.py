"""Training on a fake GPU gives the losses of the CPU: steps, optimizers, evaluation, and who owns the weights when."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_driver import environment
from fake_driver import installed as on_emulator
from fake_driver.by_definition import by_definition
from fake_driver.driver import FakeDriver, Settings

from minidl import nn, ops, optim
from minidl.engine.cuda_array import array_at
from minidl.engine.cuda_device import open_gpu
from minidl.errors import ConfigError, MinidlError
from minidl.nn import random_state, set_random_state
from minidl.program.cuda_table import ProgramOnGpu
from minidl.program.cuda_workspace import Batches
from minidl.program.replay import Gradient, Prediction

STEPS = 4
FAR_ON = 2**32 - 300  # in dropout's sequence: its keys change within the steps


@contextmanager
def installed(settings: Settings) -> Iterator[FakeDriver]:
    """A fake GPU whose kernels are not compiled, for tests of the host code."""
    with on_emulator(settings) as fake, by_definition(fake):
        yield fake


def mlp() -> nn.Module:
    nn.seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 10))


def with_state() -> nn.Module:
    """A model with running statistics and random numbers."""
    nn.seed(0)
    return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(20, 12), nn.Dropout(0.3),
                         nn.Linear(12, 10))  # fmt: skip


def with_state_far_on() -> nn.Module:
    model = with_state()
    set_random_state({"seed": -3, "offset": FAR_ON})
    return model


class ReadsValues(nn.Module):
    """A model that cannot be recorded."""

    def __init__(self) -> None:
        self.layer = nn.Linear(20, 10)

    def forward(self, x: Any) -> Any:
        y = self.layer(x.reshape(len(x), -1))
        return y * 2.0 if y.numpy().max() > 0 else y


def batches(steps: int = STEPS, size: int = 6) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((size, 5, 4, 1)).astype(np.float32), rng.integers(0, 10, size)) for _ in range(steps)]


def loss(logits: Any, labels: np.ndarray) -> Any:
    return ops.cross_entropy(logits, labels)


def trained(
    device: str, make: Any = optim.SGD, build: Any = mlp, **options: Any
) -> tuple[list[tuple[float, int]], nn.Module, Any]:  # fmt: skip
    """Return the losses of some steps, whose learning rate changes, the model and the optimizer."""
    model = build().to(device)
    optimizer, gradient = make(model, **{"lr": 0.1} | options), Gradient(model, loss)
    results = []
    for number, batch in enumerate(batches()):
        optimizer.lr = 0.1 / (number + 1)
        results.append(gradient(*batch))
        assert not gradient.not_recorded
        optimizer.step()
    return results, model, optimizer


def assert_same(gpu: tuple[Any, nn.Module, Any], cpu: tuple[Any, nn.Module, Any]) -> None:
    np.testing.assert_allclose(np.array(gpu[0]), np.array(cpu[0]), atol=1e-5)
    for (name, value), other in zip(gpu[1].state_dict().items(), cpu[1].state_dict().values(), strict=True):
        np.testing.assert_allclose(value, other, atol=1e-5, err_msg=name)
    for name, vector in gpu[2].state_dict()[0].items():
        np.testing.assert_allclose(vector, cpu[2].state[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "settings",
    [Settings(), Settings(eager=True), Settings(captures=False), Settings(breaks_captures=True)],
    ids=["late", "eager", "no graphs", "broken captures"],
)
def test_steps_agree_with_the_cpu(settings: Settings) -> None:
    options = {"momentum": 0.9, "weight_decay": 1e-3}
    with installed(settings) as fake:
        assert_same(trained("cuda:0", **options), trained("cpu", **options))
        assert not fake.error
        assert (fake.counts["cuGraphLaunch"] > 0) == (settings.captures and not settings.breaks_captures)
        assert fake.counts["cuStreamBeginCapture_v2"] == (2 if fake.counts["cuGraphLaunch"] else 1)


@pytest.mark.parametrize(
    ("make", "options"),
    [(optim.AdamW, {"weight_decay": 0.1}), (optim.LARS, {"trust": 0.1}), (optim.SGD, {"clip": 0.05, "momentum": 0.5})],
    ids=["adamw", "lars", "clip"],
)
def test_optimizers_agree_with_the_cpu(make: Any, options: dict[str, Any]) -> None:
    with installed(Settings()) as fake:
        assert_same(trained("cuda:0", make, **options), trained("cpu", make, **options))
        assert not fake.error


@pytest.mark.parametrize("settings", [Settings(), Settings(eager=True), Settings(captures=False)],
                         ids=["late", "eager", "no graphs"])  # fmt: skip
def test_statistics_and_random_numbers_are_those_of_the_cpu(settings: Settings) -> None:
    """A captured step draws other numbers in each run, of a seed that is negative or that changes."""
    with installed(settings) as fake:
        results = []
        for device in ("cuda:0", "cpu"):
            results.append(trained(device, build=with_state_far_on))
            assert random_state() == {"seed": -3, "offset": FAR_ON + STEPS * 6 * (20 + 12)}
        assert_same(*results)
        assert not fake.error
        assert (fake.counts["cuGraphLaunch"] > 0) == settings.captures


def test_a_model_that_cannot_be_recorded_is_computed_on_the_cpu() -> None:
    results = []
    with installed(Settings()):
        for device in ("cuda:0", "cpu"):
            nn.seed(0)
            model = ReadsValues().to(device)
            optimizer, gradient = optim.SGD(model, lr=0.1), Gradient(model, loss)
            with pytest.warns(UserWarning, match="without a recorded program"):
                gradient(*batches(1)[0])
            optimizer.step()
            results.append([gradient(*batch) for batch in batches()])
    np.testing.assert_allclose(results[0], results[1], atol=1e-5)


def test_no_weights_are_copied_between_steps() -> None:
    with installed(Settings()) as fake:
        model = mlp().to("cuda:0")
        optimizer, gradient = optim.SGD(model, lr=0.1), Gradient(model, loss)
        before: dict[str, int] = {}
        for number, batch in enumerate(batches(6)):
            if number == 3:  # the first step is walked, and the two places of batches have a graph each
                before = dict(fake.counts)
            gradient(*batch)
            optimizer.step()
        copied = {name: (fake.counts[name] - before[name]) / 3 for name in before}
        assert copied["cuMemcpyDtoHAsync_v2"] == 2, "the loss, and the number of correct answers"
        assert copied["cuMemcpyHtoDAsync_v2"] == 1, "a batch"
        assert copied["cuMemAlloc_v2"] == copied["cuMemHostAlloc"] == 0
        assert copied["cuGraphLaunch"] == copied["cuLaunchKernel"] == 1, "the step, and the update"


def test_whoever_reads_or_writes_weights_sees_the_newest() -> None:
    with installed(Settings()):
        model, reference = mlp().to("cuda:0"), mlp()
        for step in range(3):
            for one in (model, reference):
                optimizer, gradient = optim.SGD(one, lr=0.1), Gradient(one, loss)
                for batch in batches(2):
                    gradient(*batch)
                    optimizer.step()
                parameter = next(one.parameters())
                if step == 0:
                    parameter.copy_(parameter.numpy() * 0.5)
                elif step == 1:
                    one.flatten().theta[:] *= 0.9
                    one.flatten().touch()
            x = batches(1)[0][0]
            np.testing.assert_allclose(model(x).numpy(), reference(x).numpy(), atol=1e-5)
            np.testing.assert_allclose(Prediction(model)(x), reference(x).numpy(), atol=1e-5)
            np.testing.assert_allclose(copy.deepcopy(model)(x).numpy(), reference(x).numpy(), atol=1e-5)
        for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
            np.testing.assert_allclose(parameter.grad, other.grad, atol=1e-5)


def test_back_to_the_cpu() -> None:
    with installed(Settings()) as fake:
        _, model, optimizer = trained("cuda:0", momentum=0.9)
        model.to("cpu")
        before = fake.launches
        gradient = Gradient(model, loss)
        for batch in batches():
            gradient(*batch)
            optimizer.step()
        assert fake.launches == before
        assert model.flatten().gpu is None


def test_another_size_of_batch_gets_its_own_program() -> None:
    with installed(Settings()) as fake:
        model, reference = mlp().to("cuda:0"), mlp()
        mine, its = Gradient(model, loss), Gradient(reference, loss)
        for size in (6, 3, 6, 1, 3):
            batch = batches(1, size)[0]
            np.testing.assert_allclose(mine(*batch), its(*batch), atol=1e-5)
        assert not fake.error
        assert all(type(program) is ProgramOnGpu for program in mine.programs.values())


def test_a_batch_can_be_sent_ahead() -> None:
    for eager in (False, True):
        with installed(Settings(eager=eager)) as fake:
            model, reference = mlp().to("cuda:0"), mlp()
            mine, its, rounds = Gradient(model, loss), Gradient(reference, loss), batches(5)
            for number, batch in enumerate(rounds):
                mine.announce(lambda: rounds[number + 1] if number + 1 < len(rounds) else None)  # noqa: B023
                copies = fake.counts["cuMemcpyHtoDAsync_v2"]
                np.testing.assert_allclose(mine(*batch), its(*batch), atol=1e-5)
                if 0 < number < len(rounds) - 1:
                    assert fake.counts["cuMemcpyHtoDAsync_v2"] == copies + 1, "only the next batch is copied"
            assert not fake.error


def compiled(device: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return a prediction after a step of the optimizer, and the weights: two compiled kernels on a GPU."""
    nn.seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 12)).to(device)
    optimizer, predict = optim.SGD(model, lr=0.1, momentum=0.9), Prediction(model)
    model.flatten().grad[:] = np.linspace(-1, 1, model.flatten().size)
    optimizer.step()
    found = predict(batches(1)[0][0])
    assert not predict.not_recorded
    return found, model.state_dict()


def test_compiled_kernels_agree_with_the_cpu() -> None:
    with on_emulator(Settings()) as fake:
        (found, weights), (expected, others) = compiled("cuda:0"), compiled("cpu")
        assert not fake.error
        assert fake.launches == 2
    np.testing.assert_allclose(found, expected, atol=1e-6)
    for name, value in weights.items():
        np.testing.assert_allclose(value, others[name], atol=1e-6)


def test_cubins_come_from_the_cache(tmp_path: Path) -> None:
    """A second process makes no PTX; a damaged file is compiled again. The CPU's kernels have their usual cache."""
    script = "; ".join([
        "import pathlib, sys", "from minidl.engine import cuda, cuda_cache", "made = []", "to_ptx = cuda.to_ptx",
        "cuda.to_ptx = lambda *a: made.append(a) or to_ptx(*a)",
        "cuda_cache._folder = lambda: pathlib.Path(sys.argv[1])",
        "import test_cuda_training as t", "t.compiled('cuda:0')", "print(len(made))",
    ])  # fmt: skip
    variables = os.environ | environment(Settings())

    def made() -> int:
        found = subprocess.run([sys.executable, "-c", script, tmp_path], env=variables, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr
        return int(found.stdout)

    assert made() == 2
    files = list(tmp_path.iterdir())
    assert len(files) == 2
    assert made() == 0
    files[0].write_bytes(files[0].read_bytes()[:-1])
    assert made() == 1


def test_too_little_memory_is_noticed_before_the_first_step() -> None:
    with installed(Settings(memory=20_000)) as fake:
        model = mlp().to("cuda:0")
        optimizer, gradient = optim.SGD(model, lr=0.1), Gradient(model, loss)
        with pytest.raises(ConfigError, match=r"cuda:0 is out of memory: .* use a smaller --batch-size"):
            gradient.prepare(*batches(1, 400)[0])
        assert optimizer.steps == fake.launches == 0


def test_a_lost_device_is_reported() -> None:
    with installed(Settings(lose_after=20)), pytest.raises(MinidlError, match=r"cuda:0 .* has failed"):
        trained("cuda:0")


def test_a_driver_that_cannot_load_a_cubin() -> None:
    with on_emulator(Settings(loads=False)), pytest.raises(ConfigError, match="update the NVIDIA driver"):
        compiled("cuda:0")


def test_a_place_for_batches_is_not_overwritten_while_it_is_used() -> None:
    """Three batches, of which the third takes the place of the first; nothing waits for the kernels before."""
    with installed(Settings()):
        gpu = open_gpu("cuda:0")
        memory, found = Batches(gpu), []
        for x in np.eye(3, dtype=np.float32):
            out = gpu.allocate(x.nbytes)
            there = memory.send({"x": x})["x"]
            with gpu.running():
                gpu.kernels("elementwise").copy(array_at(there, (3,), x.dtype), array_at(out.address, (3,), x.dtype))
            found.append(out)
        gpu.driver.cuStreamSynchronize(gpu.copies)  # all copies, before the kernels that need not precede them
        for x, out in zip(np.eye(3, dtype=np.float32), found, strict=True):
            result = np.empty_like(x)
            gpu.fetch(out.address, result)
            np.testing.assert_array_equal(result, x)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_products_on_tensor_cores(precision: str) -> None:
    """They round what they multiply: close to float32, and with other bits. A model can return to float32."""
    with on_emulator(Settings()) as fake:
        nn.seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(20, 12))
        expected, x = Prediction(model)(batches(1)[0][0]), batches(1)[0][0]
        predict = Prediction(model.to("cuda:0", precision))
        found = predict(x)
        assert not fake.error and "tensor_product" in fake.log[-1]
        assert 0 < np.abs(found - expected).max() < {"tf32": 2e-3, "bf16": 2e-2}[precision]
        model.to("cuda:0")
        np.testing.assert_allclose(predict(x), expected, atol=1e-6)
        assert "tensor_product" not in fake.log[-1]


def test_precisions_that_do_not_fit() -> None:
    with installed(Settings()):
        for model, device, precision, message in (
            (mlp(), "cpu", "bf16", "precision bf16 needs the tensor cores of a GPU"),
            (mlp(), "cuda:0", "fp8", "unknown precision"),
            (mlp().astype("float64"), "cuda:0", "tf32", "the weights are float64; expected float32"),
        ):
            with pytest.raises(ConfigError, match=message):
                model.to(device, precision)
