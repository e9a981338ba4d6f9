"""LeNet on digits with `--device cuda:0` has the losses of the CPU, step by step, through the trainer's real code."""

from __future__ import annotations

import numpy as np
import pytest
from fake_driver import installed
from fake_driver.by_definition import by_definition
from fake_driver.driver import FakeDriver, Settings

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
