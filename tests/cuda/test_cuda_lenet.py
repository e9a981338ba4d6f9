"""LeNet on digits with `--device cuda:0` has the losses of the CPU, step by step, through the trainer's real code."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from fake_driver import installed
from fake_driver.by_definition import by_definition
from fake_driver.driver import FakeDriver, Settings

from minidl.engine.cuda_device import Gpu
from minidl.errors import ConfigError
from minidl.kernels.conv import cuda_winograd
from minidl.program import cuda_table
from minidl.program.cuda_workspace import Batches
from minidl.run.config import resolve
from minidl.training.session import prepare
from minidl.training.trainer import Trainer

TOLERANCE = 1e-4


def losses(device: str, steps: int, ahead: bool = True) -> list[float]:
    """Train with batches of 8; return the loss of each step. ahead: compile all kernels before the first step."""
    config = resolve(
        {"data": "digits", "model": "lenet", "batch_size": 8, "steps": steps, "device": device, "workers": 1}
    )
    data, model = prepare(config)
    trainer = Trainer(model, data, config)
    if ahead:
        trainer.prepare()
    return [entry["loss"] for entry in trainer.run() if entry["event"] == "step"]


def check(fake: FakeDriver, steps: int, ahead: bool = True) -> None:
    found = losses("cuda:0", steps, ahead)
    assert not fake.error
    launches, expected = fake.launches, losses("cpu", steps)
    assert launches >= 20 * steps and fake.launches == launches
    assert len(found) == steps
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "settings", [Settings(), Settings(eager=True), Settings(captures=False)], ids=["late", "eager", "no graphs"]
)
def test_twenty_steps_of_the_host_code(settings: Settings) -> None:
    """The kernels are the CPU's."""
    with installed(settings) as fake, by_definition(fake, "cpu"):
        check(fake, 20)
        assert (fake.counts["cuGraphLaunch"] > 0) == settings.captures


@pytest.mark.parametrize("steps", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_steps_of_the_compiled_kernels(steps: int) -> None:
    with installed(Settings()) as fake:
        check(fake, steps, ahead=False)


def prepared(model: str, memory: int) -> tuple[FakeDriver, int]:
    """Prepare a run on a GPU with this memory, without compiled kernels. Return the driver, and the bytes in use."""
    with (
        installed(Settings(memory=memory)) as fake,
        patch.object(Gpu, "function", lambda *_: 1),
        patch.object(cuda_table, "compile_all", lambda *_: None),
    ):
        config = resolve({"data": "digits", "model": model, "batch_size": 8, "device": "cuda:0", "workers": 1})
        data, network = prepare(config)
        trainer = Trainer(network, data, config)
        trainer.prepare()
        return fake, memory - trainer.engine.arena.gpu.free()


@pytest.mark.parametrize("model", ["lenet", "vgg", "resnet20"])
def test_too_little_memory_is_noticed_before_the_first_step(model: str) -> None:
    """All memory of a run is taken before it begins: one byte less than that is refused, in one line."""
    fake, used = prepared(model, 1 << 40)
    assert fake.launches == 0 and used > 2**20
    assert prepared(model, used)[1] == used
    with pytest.raises(ConfigError, match=r"^cuda:0 is out of memory: .* use a smaller --batch-size or model$"):
        prepared(model, used - 1)


def test_the_planes_of_winograds_form_are_part_of_the_memory() -> None:
    _, used = prepared("vgg", 1 << 40)
    with patch.object(cuda_winograd, "pays", lambda *_: False):
        assert prepared("vgg", 1 << 40)[1] < used - 2**20


def test_a_run_takes_no_memory_after_its_preparation() -> None:
    with installed(Settings()) as fake, by_definition(fake, "cpu"):
        config = resolve({"data": "digits", "model": "lenet", "batch_size": 8, "device": "cuda:0", "workers": 1,
                          "steps": 5, "validation": 0.1})  # fmt: skip
        data, network = prepare(config)
        trainer = Trainer(network, data, config)
        trainer.prepare()
        before = trainer.engine.arena.gpu.free()
        list(trainer.run())
        assert before - trainer.engine.arena.gpu.free() < 4096  # the optimizer's numbers


@pytest.mark.parametrize("method", ["local", "gossip"])
def test_batches_are_copied_ahead(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a step of divided or claimed work runs, the trainer copies the next batch. Each is copied once."""

    def calls(name: str) -> list[Any]:
        found: list[Any] = []
        original = getattr(Batches, name)
        monkeypatch.setattr(Batches, name, lambda self, batch: found.append(batch) or original(self, batch))
        return found

    copied, ahead = calls("_copy"), calls("send_ahead")
    with installed(Settings()) as fake, by_definition(fake, "cpu"):
        config = resolve({"data": "digits", "model": "mlp", "batch_size": 200, "epochs": 2, "device": "cuda:0",
                          "workers": 1, "method": method})  # fmt: skip
        data, network = prepare(config)
        steps = sum(entry["event"] == "step" for entry in Trainer(network, data, config).run())
        assert not fake.error
    assert len(copied) == steps
    assert len(ahead) == steps - 2 if method == "local" else ahead  # all but the first batch of each epoch
