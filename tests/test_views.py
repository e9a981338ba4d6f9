"""Test-time augmentation: the outputs are the weighted mean over the views of an image, wherever images are tested."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import minidl
from minidl import models, nn, no_grad, ops
from minidl.data.views import views
from minidl.errors import ConfigError
from minidl.train import main


def images(n: int = 6, shape: tuple[int, int, int] = (8, 7, 2)) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((n, *shape)).astype(np.float32)


def model() -> nn.Module:
    minidl.seed(1)
    return models.build("lenet", (8, 7, 2), 4)


def expected(net: nn.Module, x: np.ndarray, name: str) -> np.ndarray:
    """The mean of the outputs in float64, from the definition."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
    moved = [x, padded[:, :-2, :-2], padded[:, 2:, 2:]]
    weights = {"none": [1, 0, 0], "mirror": [1, 0, 0], "mirror-shift": [0.5, 0.25, 0.25]}[name]
    total = 0.0
    with no_grad():
        for weight, one in zip(weights, moved, strict=True):
            both = [one] if name == "none" else [one, one[:, :, ::-1]]
            total = total + weight * np.mean([net(v.copy()).numpy().astype(np.float64) for v in both], axis=0)
    return np.asarray(total)


@pytest.mark.parametrize("name", ["none", "mirror", "mirror-shift"])
def test_outputs_are_averaged(name: str) -> None:
    net, x = model(), images()
    before, logits = x.copy(), expected(net, x, name)
    np.testing.assert_allclose(minidl.Prediction(net, name)(x), logits, atol=1e-6)
    probabilities = ops.softmax(minidl.Tensor(logits)).numpy()
    np.testing.assert_allclose(minidl.predict(net, x, batch_size=4, views=name), probabilities, atol=1e-6)
    y = np.array([0, 1, 2, 3, 0, 1])
    score = minidl.evaluate(net, x, y, batch_size=4, views=name)
    assert score.accuracy == pytest.approx((logits.argmax(axis=1) == y).mean())
    assert score.loss == pytest.approx(-np.log(probabilities[range(6), y]).mean(), rel=1e-5)
    assert score == pytest.approx(minidl.evaluate(net, x, y, prediction=minidl.Prediction(net, name)))
    np.testing.assert_array_equal(x, before)
    assert sum(weight for weight, _ in views(name, x)) == 1


def test_mirrored_images_have_the_same_prediction() -> None:
    net, x = model(), images()
    for name in ("mirror", "mirror-shift"):
        prediction = minidl.Prediction(net, name)
        close = np.abs(prediction(x) - prediction(x[:, :, ::-1].copy())).max()
        # The shifted views of a mirrored image are moved to the other sides.
        assert close < 1e-6 if name == "mirror" else close > 0


def test_errors() -> None:
    with pytest.raises(ConfigError, match=r"unknown views 'miror'.*Did you mean 'mirror'"):
        minidl.Prediction(model(), "miror")
    with pytest.raises(ConfigError, match="unknown views"):
        minidl.predict(model(), images(), views="flip")
    with pytest.raises(ConfigError, match=r"views mirror: an array of shape \(5, 3\); expected images"):
        minidl.predict(nn.Linear(3, 2), np.ones((5, 3), np.float32), views="mirror")


def test_a_run_tests_with_its_views(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also --evaluate, which may choose others."""
    run = ["--model", "mlp", "--data", "synthetic:80x6x6x1:3", "--steps", "3", "--workers", "1", "--quiet", "--json"]
    assert main([*run, "--views", "mirror", "--out", str(tmp_path / "run")]) == 0
    result = json.loads(capsys.readouterr().out)
    net, _ = minidl.load(tmp_path / "run")
    data = minidl.data.load("synthetic:80x6x6x1:3")
    losses = {name: minidl.evaluate(net, data.x_test, data.y_test, views=name).loss for name in ("none", "mirror")}
    assert losses["none"] != losses["mirror"] == result["test_loss"]
    for more, name in (([], "mirror"), (["--views", "none"], "none")):
        assert main(["--evaluate", str(tmp_path / "run"), "--quiet", "--json", *more]) == 0
        assert json.loads(capsys.readouterr().out)["test_loss"] == losses[name]
