"""`python -m minidl.simulate`: its files, its output and its errors. One replica is bit-identical to plain training."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from sessions import Sessions

import minidl
from minidl import data, nn, train
from minidl.comm.cluster import load
from minidl.errors import CheckpointError
from minidl.models import mlp
from minidl.run.config import resolve
from minidl.run.evaluation import predict
from minidl.run.folder import read_run
from minidl.run.signals import Signals
from minidl.simulate import main
from minidl.training.fit import fit
from minidl.training.gradient_cost import flops_per_image, with_measured

QUICK = ["--data", "digits", "--model", "mlp", "--quiet", "--json"]


def simulate(tmp_path, capsys, *options: str, out: str = "run") -> dict:
    assert main([*QUICK, "--out", str(tmp_path / out), *options]) == 0
    return json.loads(capsys.readouterr().out)


def error(capsys, *options: str) -> str:
    assert main([*options]) == 2
    words = capsys.readouterr().err
    assert words.startswith("minidl: error: ") and words.count("\n") == 1
    return words


def test_a_run_and_its_folder(tmp_path, capsys):
    result = simulate(tmp_path, capsys, "--cluster", "two-racks", "--ranks", "4", "--steps", "44", "--method", "dpsgd")
    folder = tmp_path / "run"
    assert json.loads((folder / "summary.json").read_text()) == result
    assert result["time"] == "virtual" and result["workers"] == 4 and result["steps"] == 44
    assert result["test_accuracy"] == result["accuracy_average"] > 0.9
    assert result["accuracy_worst"] <= result["accuracy_best"] and result["consensus_distance"] < 0.05
    # The default topology is one-peer exponential: each replica sends its model once per step.
    assert result["messages"] == 4 * 44
    size = result["bytes_sent"] / result["messages"]
    assert size >= 4 * result["parameters"] and size < 4 * result["parameters"] + 4096
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if line["event"] == "epoch"]
    assert [line["epoch"] for line in epochs] == [1, 2, 3]
    assert 0 < epochs[0]["time"] < epochs[-1]["time"] <= result["seconds"] and "images_per_second" not in epochs[0]
    assert tomllib.loads((folder / "config.toml").read_text())["method"]["workers"] == 4
    model, _ = minidl.load(folder / "model.safetensors")
    digits = data.load("digits")
    assert (predict(model, digits.x_test).argmax(axis=1) == digits.y_test).mean() == result["test_accuracy"]

    racks = ("--cluster", "two-racks", "--ranks", "4")
    again = simulate(tmp_path, capsys, *racks, "--config", str(folder / "config.toml"), out="again")
    for name in set(result) - {"real_seconds", "out"}:
        assert result[name] == again[name], name
    other = simulate(tmp_path, capsys, *racks, "--steps", "44", "--seed", "1", out="other")
    assert other["seconds"] != result["seconds"] and other["test_loss"] != result["test_loss"]


def test_one_replica_is_bit_identical_to_plain_training(tmp_path, capsys):
    result = simulate(tmp_path, capsys, "--ranks", "1", "--epochs", "1")
    config = resolve({"data": "digits", "model": "mlp"})
    digits = data.load("digits")
    nn.seed(config.seed)
    model = mlp(digits.input_shape, digits.classes)
    history = fit(model, digits, epochs=1, progress=None)
    assert history.test.loss == result["test_loss"]
    trained, _ = minidl.load(tmp_path / "run" / "model.safetensors")
    for name, values in model.state_dict().items():
        np.testing.assert_array_equal(values, trained.state_dict()[name])
    assert result["bytes_sent"] == 0 and result["wait_fraction"] == 0


@pytest.mark.parametrize("method", ["allreduce", "local-sgd", "gossip", "ps"])
def test_every_method(tmp_path, capsys, method):
    options = ["--ranks", "5", "--steps", "24", "--method", method, *(["--period", "1"] * (method == "local-sgd"))]
    result = simulate(tmp_path, capsys, "--cluster", "two-racks", *options)
    assert result["workers"] == (4 if method == "ps" else 5) and result["steps"] == 24
    assert result["accuracy_average"] > 0.5 and result["messages"] > 50
    assert (result["wait_fraction"] == 0) == (method == "gossip")


def test_the_best_average_on_validation_images_is_the_result(tmp_path, capsys):
    options = ("--ranks", "3", "--method", "gossip", "--validation", "0.2", "--epochs", "6", "--optimizer", "adam",
               "--lr", "0.003", "--schedule", "constant")  # fmt: skip
    result = simulate(tmp_path, capsys, *options)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    looks = [line for line in lines if "validation_accuracy" in line]
    assert [line["epoch"] for line in looks] == [1, 2, 3, 4, 5, 6] and looks[-1]["event"] == "average"
    best = max(looks, key=lambda line: (line["validation_accuracy"], -line["validation_loss"]))
    assert result["best_step"] == best["step"] and result["validation_loss"] == best["validation_loss"]
    model, _ = minidl.load(tmp_path / "run" / "model.safetensors")
    digits = data.load("digits")
    assert (predict(model, digits.x_test).argmax(axis=1) == digits.y_test).mean() == result["test_accuracy"]
    assert train.main(["--evaluate", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["test_loss"] == result["test_loss"]


def test_a_timeline_in_virtual_time(tmp_path, capsys):
    result = simulate(tmp_path, capsys, "--cluster", "two-racks", "--ranks", "4", "--steps", "9", "--trace")
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert max(span["ts"] + span["dur"] for span in spans) == pytest.approx(1e6 * result["seconds"], abs=20)
    gradients = [span for span in spans if span["name"] == "gradient" and span["dur"]]
    assert len(gradients) == 4 * 9
    seconds = sum(span["dur"] for span in gradients) / 1e6
    assert seconds == pytest.approx(result["virtual_seconds_by_kind"]["gradient"], rel=0.01)
    assert len([event for event in events if event["ph"] == "s"]) == result["messages"] == 4 * 9


ONE_NODE = """
[devices.core]
flops = 40e9
memory = 10e9
[[nodes]]
name = "node"
devices = ["core", "core", "core"]
[inside]
alpha = 1e-6
rate = 1e11
"""


@pytest.mark.slow  # test_fabrics_agree.py has the same for losses
@pytest.mark.parametrize("method", ["dpsgd", "allreduce"])
def test_processes_train_a_bit_identical_model(tmp_path, capsys, method):
    options = ["--steps", "6", "--method", method]
    (tmp_path / "one-node.toml").write_text(ONE_NODE)  # like the processes: bits of a sum depend on the nodes
    simulated = simulate(tmp_path, capsys, "--cluster", str(tmp_path / "one-node.toml"), "--ranks", "3", *options)
    command = [sys.executable, "-m", "minidl.train", "--workers", "3", "--threads", "1", *QUICK, *options]
    done = subprocess.run([*command, "--out", tmp_path / "real"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["test_loss"] == simulated["test_loss"]
    models = [minidl.load(tmp_path / run / "model.safetensors")[0].state_dict() for run in ("run", "real")]
    for name in models[0]:
        np.testing.assert_array_equal(models[0][name], models[1][name])


DEATH = """
[devices.core]
flops = 1e9
[[nodes]]
name = "node"
count = 4
devices = ["core"]
[between]
alpha = 1e-3
rate = 1e9
"""


def test_deaths(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text(DEATH + "[[deaths]]\nrank = 2\ntime = 0.3\n")
    result = simulate(tmp_path, capsys, "--cluster", str(file), "--ranks", "4", "--steps", "30", "--method", "local")
    assert result["replicas_alive"] == 3 and result["steps"] == 30
    assert result["idle_seconds"] < 0.05, "the dead replica is not idle"
    words = error(capsys, *QUICK, "--cluster", str(file), "--ranks", "4", "--out", str(tmp_path / "died"))
    assert "replica 2 died while others waited for" in words
    assert "virtual s: with dpsgd all make each step" in words


def test_a_gradient_is_measured_once_and_used(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text(DEATH.replace("flops = 1e9", "speed = 0.5"))
    words = error(capsys, *QUICK, "--cluster", str(file), "--ranks", "2", "--out", str(tmp_path / "no"))
    assert "[measured] has no 'mlp digits'" in words
    assert main([*QUICK, "--cluster", str(file), "--measure"]) == 0
    seconds = json.loads(capsys.readouterr().out)["seconds_per_image"]
    assert load(file).measured == {"mlp digits": pytest.approx(seconds, rel=1e-3)}
    result = simulate(tmp_path, capsys, "--cluster", str(file), "--ranks", "2", "--steps", "3", "--method", "local")
    update = 20 * result["parameters"] / 10e9
    assert result["seconds"] == pytest.approx(3 * (32 * seconds / 0.5 + update), rel=0.01)
    assert "copy" in error(capsys, *QUICK, "--cluster", "uniform", "--measure")


def test_the_measured_part_of_a_file():
    text = "# mine\n[measured] # s\n\"a b\" = 1.0\n\"c d\" = 2.0\n[inside]\n"
    assert with_measured(text, "c d", 0.5) == '# mine\n[measured] # s\n"c d" = 5.0000e-01\n"a b" = 1.0\n[inside]\n'
    added = "[measured]  # seconds for an image's gradient, at speed 1"
    assert with_measured("x = 1", "a", 0.5) == f'x = 1\n\n{added}\n"a" = 5.0000e-01\n'


@pytest.mark.parametrize("options, words", [
    (["--cluster", "nowhere.toml"], "there is no cluster file 'nowhere.toml'"),
    (["--rank", "3"], "unknown option --rank. Did you mean '--ranks'?"),
    (["--ranks", "0"], "ranks: expected a whole number between 1 and 65536, got 0"),
    (["--cluster", "two-racks", "--ranks", "17"], "cluster file 'two-racks': 17 ranks on 16 devices"),
    (["--workers", "2"], "unknown option --workers"),
    (["--method", "gosip"], "unknown method 'gosip'. Did you mean 'gossip'?"),
    (["--ranks", "2000"], "1438 training images cannot be divided among 2000 replicas"),
])  # fmt: skip
def test_errors_are_one_line(tmp_path, capsys, options, words):
    assert words in error(capsys, *QUICK, *options, "--out", str(tmp_path / "no"))
    assert not (tmp_path / "no").exists()


def test_help_names_the_options(capsys):
    assert main(["--help"]) == 0
    words = capsys.readouterr().out
    assert "--cluster" in words and "--resume" in words and "--keep" not in words


def test_flops_of_an_image():
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 25, 10))
    assert flops_per_image(model, (5, 5, 1)) == 6 * (4 * 9 * 25 + 1000)


def test_a_signal_stops_all_after_their_step(tmp_path, capsys):
    from minidl.comm import cluster
    from minidl.run.folder import RunFolder
    from minidl.run.signals import Stopped
    from minidl.training.simulated import SimulatedRun

    config = resolve({"data": "digits", "model": "mlp", "epochs": 1000, "quiet": True, "out": str(tmp_path / "run")})
    with Signals() as signals:
        simulated = SimulatedRun(config, cluster.load("uniform"), 3, signals)
        simulated.simulation.at(0.01, setattr, signals, "received", 15)
        with pytest.raises(Stopped):
            simulated.begin(lambda: RunFolder.create(simulated.config))
    assert [type(result) for result in simulated.results.values()] == [Stopped] * 3
    [steps] = {session.trainer.progress.step for session in simulated.sessions.values()}
    assert steps > 0 and len(Sessions.last_of(tmp_path / "run").state["members"]) == 3


@pytest.mark.slow
def test_a_model_with_batch_norm(tmp_path, capsys):
    """Each replica has its own batch-norm statistics. For the average model, they are computed again."""
    result = simulate(tmp_path, capsys, "--ranks", "3", "--steps", "2", "--model", "resnet20", "--batch-size", "8")
    assert result["replicas_alive"] == 3


def test_a_simulation_that_is_killed_at_its_beginning_is_no_run_to_resume(tmp_path, capsys, monkeypatch):
    replace, killed = os.replace, []

    def replace_and_copy(*paths):
        replace(*paths)
        killed.append(tmp_path / f"killed-{len(killed)}")
        shutil.copytree(tmp_path / "run", killed[-1])

    monkeypatch.setattr(os, "replace", replace_and_copy)
    simulate(tmp_path, capsys, "--ranks", "2", "--steps", "2")
    for folder in killed:
        with pytest.raises(CheckpointError, match=r"is not the folder of a run|is a simulated run"):
            read_run(folder)
    assert len(killed) > 2 and (killed[0] / "cluster.toml").exists()


def test_training_does_not_resume_a_simulation(tmp_path, capsys):
    simulate(tmp_path, capsys, "--ranks", "2", "--steps", "2")
    assert train.main(["--resume", str(tmp_path / "run")]) == 2
    assert "is a simulated run, which cannot be resumed" in capsys.readouterr().err
