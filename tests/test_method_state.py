"""The state of a method: its vectors and numbers are saved when a run of several replicas stops, and restored."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sessions import Sessions

from minidl.comm.methods.base import Batch, Fabric, Method, Replica
from minidl.errors import CheckpointError
from minidl.run import checkpoint as files
from minidl.run.config import Config
from minidl.training import session, trainer

Vectors = dict[str, np.ndarray]
Stopped = tuple[Path, files.Checkpoint]  # the folder that contains a stopped run, and its checkpoint
SMALL: dict[str, Any] = dict(data="synthetic:120x2x2x1:2", batch_size=8, lr=0.01, epochs=4)


class Centered(Method):
    """Independent replicas, each with a vector of the model's length that follows its weights, and further state."""

    synchronous = False
    before: dict[int, tuple[dict[str, np.ndarray], dict[str, int | float]]]  # the state of each rank at its first step

    def __init__(self, replica: Replica, fabric: Fabric, config: Config) -> None:
        super().__init__(replica, fabric, config)
        self.center, self.table = replica.theta.copy(), np.zeros((2, 3))
        self.pulls, self.length = 0, 0.0

    def local(self, batch: Batch) -> float:
        self.before.setdefault(self.fabric.rank, ({n: v.copy() for n, v in self.vectors().items()}, self.numbers()))
        return super().local(batch)

    def exchange(self) -> None:
        self.replica.elastic(self.replica.theta, self.center, 0.25)
        self.pulls += 1
        self.length += 0.1
        self.table += self.fabric.rank / 3

    def vectors(self) -> dict[str, np.ndarray]:
        return {"center": self.center, "table": self.table}

    def numbers(self) -> dict[str, int | float]:
        return {"pulls": self.pulls, "length": self.length}

    def restore(self, vectors: Mapping[str, np.ndarray], numbers: Mapping[str, int | float]) -> None:
        super().restore(vectors, numbers)
        self.pulls, self.length = int(numbers["pulls"]), numbers["length"]


class SynchronousCentered(Centered):
    synchronous = True


@pytest.fixture(params=[Centered, SynchronousCentered])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Centered]:
    """Let --method local select one of the methods above."""
    for module in (session, trainer):
        monkeypatch.setattr(module, "method", lambda name: request.param)
    monkeypatch.setattr(Centered, "before", {}, raising=False)
    return request.param  # type: ignore[no-any-return]


def stopped(folder: Path, method: str = "local", **options: Any) -> files.Checkpoint:
    """Stop a run of three replicas at about the half of its time; return its checkpoint."""
    time = Sessions(folder / "whole", 3, {}, **SMALL, method=method, **options).simulation.time
    run = Sessions(folder / "run", 3, {}, stop=time / 2, **SMALL, method=method, **options)
    assert run.summary is None and not run.errors
    return run.last()


@pytest.fixture(scope="module")
def of_centered(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """Return the folder of a run that was stopped with the method Centered, and its checkpoint."""
    folder = tmp_path_factory.mktemp("centered")
    with pytest.MonkeyPatch.context() as patch:
        for module in (session, trainer):
            patch.setattr(module, "method", lambda name: Centered)
        patch.setattr(Centered, "before", {}, raising=False)
        return folder, stopped(folder)


def resumed(folder: Path, checkpoint: files.Checkpoint) -> Sessions:
    """Replace the checkpoint of a stopped run and resume it."""
    files.save(folder / "run" / "checkpoints", checkpoint.state["progress"]["step"], checkpoint)
    return Sessions(folder / "run", 3, {})


def test_a_stopped_run_continues_from_the_saved_state(tmp_path: Path, kind: type[Centered]) -> None:
    saved = stopped(tmp_path)
    Centered.before.clear()
    again = Sessions(tmp_path / "run", 3, {})
    assert again.summary and len(Centered.before) == 3
    for rank, (vectors, numbers) in Centered.before.items():
        theta = saved.vectors[f"{rank}/theta"]
        center, table = saved.vectors[f"{rank}/method.center"], saved.vectors[f"{rank}/method.table"]
        assert (center.dtype, center.shape) == (theta.dtype, theta.shape) and not np.array_equal(center, theta)
        assert (table.dtype, table.shape) == (np.float64, (2, 3))
        np.testing.assert_array_equal(vectors["center"], center)
        np.testing.assert_array_equal(vectors["table"], table)
        assert numbers == saved.state["members"][str(rank)]["method"] and numbers["pulls"] > 0
    if kind.synchronous:
        whole = Sessions.last_of(tmp_path / "whole").vectors
        for name, vector in again.last().vectors.items():
            if not name.endswith("communication"):
                np.testing.assert_array_equal(vector, whole[name], err_msg=name)


def test_other_replicas_begin_with_a_new_state(tmp_path: Path, kind: type[Centered]) -> None:
    stopped(tmp_path)
    Centered.before.clear()
    again = Sessions(tmp_path / "run", 2, {})
    assert again.summary and [numbers["pulls"] for _, numbers in Centered.before.values()] == [0, 0]


def test_a_single_replica_needs_no_state_of_a_method(tmp_path: Path) -> None:
    """A run of gossip that continues with one replica has no masses."""
    assert "1/method.mass" in stopped(tmp_path, "gossip", mix="mass").vectors
    assert Sessions(tmp_path / "run", 1, {}).summary


def test_after_a_kill_the_method_starts_again(tmp_path: Path, kind: type[Centered]) -> None:
    if kind.synchronous:
        return  # it has no snapshots of single replicas
    time = Sessions(tmp_path / "whole", 3, {}, **SMALL, method="local").simulation.time
    Sessions(tmp_path / "run", 3, dict.fromkeys(range(3), 0.7 * time), **SMALL, method="local")
    Centered.before.clear()
    assert Sessions(tmp_path / "run", 3, {}).summary
    assert [numbers["pulls"] for _, numbers in Centered.before.values()] == [0, 0, 0]


@pytest.mark.parametrize(("change", "words"), [
    (lambda v: v.update({"1/method.center": v["1/method.center"][:7]}), r"1/method.center is float32 \(7,\); expected"),
    (lambda v: v.update({"1/method.center": v["1/method.center"].astype("d")}), "1/method.center is float64 .* expect"),
    (lambda v: v.update({"2/method.table": v["2/method.table"].T}), r"2/method.table is float64 \(3, 2\); expected f"),
    (lambda v: v.update({"0/method.table": np.zeros((2, 3), np.int64)}), "0/method.table is int64"),
    (lambda v: v["0/method.center"].put(3, np.nan), "0/method.center holds values that are not finite"),
    (lambda v: v["0/method.table"].put(3, np.inf), "0/method.table holds values that are not finite"),
    (lambda v: v.pop("0/method.center"), r"other vectors than this run \(method.center\)"),
    (lambda v: v.update({"0/method.more": np.zeros(3)}), r"other vectors than this run \(method.more\)"),
    (lambda v: v.update({"0/method.\n": np.zeros(3)}), r"other vectors than this run \('method.\\n'\)"),
])  # fmt: skip
@pytest.mark.parametrize("kind", [Centered], indirect=True)
def test_vectors_that_do_not_fit_are_refused(
    of_centered: Stopped, kind: type[Centered], change: Callable[[Vectors], Any], words: str
) -> None:
    folder, saved = of_centered
    vectors = {name: vector.copy() for name, vector in saved.vectors.items()}
    change(vectors)
    [error] = {str(e) for e in resumed(folder, replace(saved, vectors=vectors)).errors}
    with pytest.raises(CheckpointError, match=words):
        raise CheckpointError(error)
    assert "\n" not in error


@pytest.mark.parametrize(("numbers", "words"), [
    ({"pulls": 3}, "its numbers are pulls; expected pulls, length"),
    ({"pulls": 3, "length": 1.0, "more": 1}, "its numbers are pulls, length, more; expected pulls, length"),
    ({"pulls": 3.5, "length": 1.0}, "pulls is 3.5; expected a whole number"),
    ({}, "its numbers are none; expected pulls, length"),
])  # fmt: skip
@pytest.mark.parametrize("kind", [Centered], indirect=True)
def test_numbers_that_do_not_fit_are_refused(
    of_centered: Stopped, kind: type[Centered], numbers: dict[str, Any], words: str
) -> None:
    folder, saved = of_centered
    state = copy.deepcopy(saved.state)
    state["members"]["1"]["method"] = numbers
    [error] = resumed(folder, replace(saved, state=state)).errors
    assert f"the state of the method local is not as expected: {words}" in error


def test_a_mass_of_0_is_refused(tmp_path: Path) -> None:
    """A mass of 0 would be a divisor."""
    saved = stopped(tmp_path, "gossip", mix="mass")
    vectors = {**saved.vectors, "1/method.mass": np.zeros(1)}
    [error] = resumed(tmp_path, replace(saved, vectors=vectors)).errors
    assert "the state of the method gossip is not as expected: a mass is 0; expected masses above 0" in error
