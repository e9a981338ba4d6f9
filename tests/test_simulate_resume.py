"""A simulated run that was stopped is saved like a real one. `python -m minidl.simulate --resume` continues it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sessions import OPTIONS, Sessions

import minidl
from minidl import simulate, train
from minidl.comm.cluster import parse
from minidl.errors import MinidlError
from minidl.run import checkpoint as files
from minidl.run.config import resolve
from minidl.run.folder import RunFolder
from minidl.run.progress import Progress
from minidl.run.signals import Signals, Stopped
from minidl.training.simulated import HEAD, Parts, SimulatedRun
from minidl.training.work import Divided

NODE = """
devices.core = {flops = 1e6, jitter = 0.3}
nodes = [{name = "node", devices = ["core", "core", "core", "core"]}]
inside = {alpha = 1e-3, rate = 1e8}
"""


class Interrupted:
    """A simulated run of three replicas in a folder, which a signal stops after a part of its time.

    `run` is finished or stopped. deaths: {rank: virtual seconds}.
    """

    def __init__(self, folder: Path, stop: float = 0.0, deaths: str = "", **options: Any) -> None:
        full = options.pop("full", False)
        config = resolve({**OPTIONS, "epochs": 3, "out": str(folder), **options})
        text, signals = f"{NODE}deaths = [{deaths}]", Signals()
        self.run = run = SimulatedRun(config, parse(text), 3 + (config.method == "ps"), signals, full=full)
        if stop:
            run.simulation.at(stop, setattr, signals, "received", signal.SIGINT)
        head = HEAD.format(cluster="mine.toml", ranks=3)
        try:
            self.result = run.begin(lambda: RunFolder.create(run.config, head, text))
        except Stopped as stopped:
            self.stopped = stopped


def go_on(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert simulate.main(["--resume", str(folder), "--quiet", "--json", *options]) == 0
    return dict(json.loads(capsys.readouterr().out))


def weights(folder: Path) -> dict[str, np.ndarray]:
    return dict(minidl.load(folder / "model.safetensors")[0].state_dict())


def assert_equal(one: Path, other: Path) -> None:
    found, expected = weights(one), weights(other)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


def entries(folder: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in (folder / "metrics.jsonl").open())


@pytest.mark.parametrize("method", ["dpsgd", "allreduce", "local-sgd"])
def test_a_resumed_run_ends_with_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    options: dict[str, Any] = {"method": method, "optimizer": "adam", "validation": 0.25}
    whole = Interrupted(tmp_path / "whole", **options)
    folder = tmp_path / "run"
    half = whole.run.simulation.time / 2
    stopped = Interrupted(folder, stop=half, **options).stopped
    assert stopped.code == 130
    assert stopped.message == f"saved; to continue: python -m minidl.simulate --resume {folder}"
    assert not (folder / "summary.json").exists() and len(Sessions.last_of(folder).state["members"]) == 3
    result = go_on(folder, capsys)
    assert_equal(folder, tmp_path / "whole")
    for name in ("test_loss", "steps", "samples", "messages", "bytes_sent", "consensus_distance", "best_step"):
        assert result.get(name) == whole.result.get(name), name
    assert result["seconds"] == pytest.approx(whole.result["seconds"], rel=0.3)
    times = [entry["time"] for entry in entries(folder)]
    assert times == sorted(times) and [e["epoch"] for e in entries(folder) if e["event"] == "epoch"] == [1, 2, 3]


@pytest.mark.parametrize("method", ["gossip", "ps", "local"])
def test_a_resumed_asynchronous_run_trains_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    whole = Interrupted(tmp_path / "whole", method=method)
    Interrupted(tmp_path / "run", stop=whole.run.simulation.time / 2, method=method)
    before = Sessions.last_of(tmp_path / "run").state["progress"]
    assert 0 < before["step"] < whole.result["steps"]
    result = go_on(tmp_path / "run", capsys)
    assert (result["samples"], result["steps"]) == (whole.result["samples"], whole.result["steps"])
    assert result["batches_repeated"] == 0 and result["replicas_alive"] == 3
    images = [member["images"] for member in Sessions.last_of(tmp_path / "run").state["members"].values()]
    assert sum(images) == 3 * 48, "each batch is trained once"


def test_processes_continue_a_stopped_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint has the format of a real run: processes on one node end with the bits of the simulation."""
    whole = Interrupted(tmp_path / "whole", method="dpsgd")
    Interrupted(tmp_path / "run", stop=whole.run.simulation.time / 2, method="dpsgd")
    (tmp_path / "run" / "cluster.toml").unlink()
    command = [sys.executable, "-m", "minidl.train", "--resume", str(tmp_path / "run"), "--threads", "1", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert_equal(tmp_path / "run", tmp_path / "whole")


def test_a_finished_run_becomes_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    first = Interrupted(folder, method="dpsgd").result
    assert simulate.main(["--resume", str(folder), "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out) == first
    assert f"To train longer: python -m minidl.simulate --resume {folder} --epochs N" in output.err
    result = go_on(folder, capsys, "--epochs", "5")
    assert result["epochs"] == 5 and result["seconds"] > first["seconds"]
    assert result["cluster"] == str(folder / "cluster.toml")
    text = (folder / "config.toml").read_text()
    assert text.startswith("# The options of a simulated run") and "epochs = 5" in text


def test_deaths_before_the_stop_do_not_happen_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    time = Interrupted(tmp_path / "whole", method="gossip").run.simulation.time
    deaths = f"{{rank = 2, time = {time / 4}}}, {{rank = 1, time = {0.9 * time}}}"
    run = Interrupted(tmp_path / "run", stop=time / 2, deaths=deaths, method="gossip").run
    assert sorted(run.results) == [0, 1] and len(Sessions.last_of(tmp_path / "run").state["members"]) == 2
    assert go_on(tmp_path / "run", capsys)["replicas_alive"] == 2, "only rank 1 dies now"


def test_a_death_in_a_synchronous_run_saves_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    time = Interrupted(tmp_path / "whole", method="allreduce").run.simulation.time
    with pytest.raises(minidl.MinidlError) as error:
        Interrupted(tmp_path / "run", deaths=f"{{rank = 2, time = {time / 2}}}", method="allreduce")
    words = "the others are saved; to continue from their average: python -m minidl.simulate --resume"
    assert f"{words} {tmp_path}" in str(error.value)
    assert go_on(tmp_path / "run", capsys)["epochs"] == 3


def test_a_full_simulation_can_be_killed_at_any_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoints of epochs and the local snapshots are those of a real job, so a killed run can continue."""

    class Killed(BaseException):
        pass

    def kill() -> None:
        raise Killed

    time = Interrupted(tmp_path / "whole", method="gossip", full=True).run.simulation.time
    at = SimulatedRun._prepare
    monkeypatch.setattr(SimulatedRun, "_prepare", lambda run: (run.simulation.at(0.8 * time, kill), at(run)))
    with pytest.raises(Killed):
        Interrupted(tmp_path / "run", method="gossip", full=True)
    monkeypatch.undo()
    assert len(list((tmp_path / "run" / "checkpoints" / "parts").iterdir())) >= 2
    result = go_on(tmp_path / "run", capsys)
    assert result["replicas_alive"] == 3 and result["epochs"] == 3


def test_the_leader_dies_while_it_collects_the_states(tmp_path: Path) -> None:
    """In full, the collection takes virtual time. The next leader repeats it."""
    options: dict[str, Any] = {"method": "gossip", "full": True}
    whole = Interrupted(tmp_path / "whole", **options).run
    ended = max(transport.stats.ended for transport in whole.simulation.transports)
    assert ended < whole.simulation.time
    run = Interrupted(tmp_path / "run", deaths=f"{{rank = 0, time = {ended + 1e-3}}}", **options)
    assert run.result["replicas_alive"] == 2 and sorted(run.run.results) == [1, 2]
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == run.result
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_runs_share_their_parts(tmp_path: Path) -> None:
    config = resolve({**OPTIONS, "epochs": 2, "method": "dpsgd"})
    parts = Parts(config)

    def run(folder: str) -> dict[str, Any]:
        run = SimulatedRun(config, parse(NODE), 3, Signals(), parts)
        result = run.begin(lambda: RunFolder.create(replace(run.config, out=str(tmp_path / folder))))
        assert parts.engine is run.sessions[2].trainer.engine
        return {name: value for name, value in result.items() if name not in ("out", "real_seconds")}

    assert run("one") == run("two")


@pytest.mark.parametrize(("program", "options", "words"), [
    (train, [], "is a simulated run, which cannot be resumed as a real run: python -m minidl.simulate --resume"),
    (simulate, ["--ranks", "2"], "--ranks cannot be given with --resume: the run keeps its options"),
    (simulate, ["--epochs", "1"], "the run has 2 epochs, and can only become longer: 1 epochs are fewer"),
])  # fmt: skip
def test_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], program: Any, options: list[str], words: str
) -> None:
    Interrupted(tmp_path / "run", stop=1e-3, epochs=2)
    assert program.main(["--resume", str(tmp_path / "run"), *options]) == 2
    assert words in capsys.readouterr().err


def test_a_real_run_is_not_continued_as_a_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Sessions(tmp_path / "run", 2, {}, method="local", epochs=1)
    assert simulate.main(["--resume", str(tmp_path / "run")]) == 2
    assert "is a real run, which cannot be resumed as a simulation: python -m minidl.train" in capsys.readouterr().err


def test_ctrl_c_saves_a_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--data", "synthetic:96x4x4x1:4", "--model", "mlp", "--ranks", "3", "--steps", "100000"]
    command = [sys.executable, "-m", "minidl.simulate", *options, "--out", str(tmp_path / "run")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 300
        while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=300)[1]
    assert process.returncode == 130
    assert errors.endswith(f"minidl: saved; to continue: python -m minidl.simulate --resume {tmp_path / 'run'}\n")
    assert files.last(tmp_path / "run" / "checkpoints")


def test_what_only_a_dead_replica_has_trained_is_trained_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies three steps after the last average, which the others continue from."""
    trained = Counter[int]()
    settle = Divided.settle

    def counted(work: Divided, at: Progress, images: int, *counts: Any) -> bool:
        trained[at.epoch] += images
        return settle(work, at, images, *counts)

    monkeypatch.setattr(Divided, "settle", counted)
    options: dict[str, Any] = {"method": "local-sgd", "period": 4, "batch_size": 1}
    whole = Interrupted(tmp_path / "whole", **options)
    images = whole.result["samples"] // 3
    assert [trained[epoch] for epoch in range(3)] == [images] * 3
    for fraction in (0.1, 0.2, 0.3):
        trained.clear()
        folder, time = tmp_path / str(fraction), fraction * whole.run.simulation.time
        with pytest.raises(MinidlError, match="the others are saved"):
            Interrupted(folder, deaths=f"{{rank = 1, time = {time}}}", **options)
        state = Sessions.last_of(folder).state
        [epoch] = {member["progress"]["epoch"] for member in state["members"].values()}
        assert all(member["known"] <= member["progress"]["batch"] for member in state["members"].values())
        go_on(folder, capsys)
        assert trained[epoch] >= images
