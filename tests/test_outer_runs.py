"""Runs with outer steps: they stop and resume, lose replicas and go on, count their bytes, and refuse bad options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quadratic import SIZE, STEPS, Run
from quick import quick
from sessions import Sessions, one_folder_at_a_time
from toy_replicas import alone, batch_of, config_of, engine_of, run

from minidl.comm.fabric.base import Fabric
from minidl.comm.methods.diloco import DiLoCo
from minidl.comm.replica import Replica
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.run import checkpoint as files
from minidl.train import main

METHODS: dict[str, dict[str, Any]] = {
    "diloco": {"period": 3},
    "streaming": {"method": "diloco", "period": 4, "fragments": 2, "merge_after": 3, "merge_weight": 0.25},
    "noloco": {"period": 2},
    "gasloc": {"period": 2},
    "sparta": {"mask": 0.1},
    "epidemic": {"period": 2},
}
LONG = {"epochs": 6}
SLOW = pytest.mark.slow  # the processes of the replicas find these mistakes


def options_of(name: str) -> dict[str, Any]:
    return {"method": name, **METHODS[name]}


def vectors(one: Sessions) -> dict[str, bytes]:
    return {name: vector.tobytes() for name, vector in one.last().vectors.items() if "communication" not in name}


@pytest.mark.parametrize("name", quick(METHODS, "streaming", "noloco", "gasloc"))
def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path, name: str) -> None:
    whole = Sessions(tmp_path / "whole", 3, {}, **LONG, **options_of(name))
    for part in (0.4, 0.55) if name == "streaming" else (0.5,):
        stop = whole.simulation.time * part
        first = Sessions(tmp_path / f"run-{part}", 3, {}, stop=stop, **LONG, **options_of(name))
        assert whole.summary and first.summary is None and not first.errors
        assert vectors(Sessions(first.folder, 3, {})) == vectors(whole)


@pytest.mark.parametrize("name", quick(METHODS, "diloco", "noloco"))
def test_a_stopped_run_goes_on_with_another_number_of_replicas(tmp_path: Path, name: str) -> None:
    whole = Sessions(tmp_path / "whole", 3, {}, **LONG, **options_of(name))
    first = Sessions(tmp_path / "run", 3, {}, stop=whole.simulation.time / 2, **LONG, **options_of(name))
    steps = first.last().state["progress"]["step"]
    again = Sessions(first.folder, 2, {})
    assert again.summary and again.summary["steps"] > steps and again.summary["epochs"] == 6


def test_other_replicas_take_the_outer_optimizer_of_diloco() -> None:
    """phi and m are the same on all replicas, so those of any one fit the others. The steps in flight begin again."""
    config = config_of("diloco", period=4, merge_after=2, fragments=2)
    replica = Replica(engine_of("sgd", 0.0, 0.0, 0.1), Fabric(LoopbackTransport()), own=True)
    acting = DiLoCo(replica, replica.fabric, config)
    saved = {name: np.full_like(replica.theta, number) for number, name in enumerate(acting.vectors())}
    replica.steps = 9
    acting.restart(saved)
    assert (acting.phi == 0).all() and (acting.velocity == 1).all() and acting.merged == acting.begun(9) == 4
    acting.restart()
    assert np.array_equal(acting.phi, replica.theta) and not acting.velocity.any()


def test_a_single_replica_has_outer_steps_and_resumes(tmp_path: Path) -> None:
    for name in ("streaming", "gasloc"):
        whole = Sessions(tmp_path / f"{name}-whole", 1, {}, **LONG, **options_of(name))
        plain = Sessions(tmp_path / f"{name}-plain", 1, {}, **LONG, method="local")
        stop = whole.simulation.time * 0.45
        first = Sessions(tmp_path / f"{name}-run", 1, {}, stop=stop, **LONG, **options_of(name))
        assert first.summary is None and not first.errors
        again = Sessions(first.folder, 1, {})
        assert {n: w.tobytes() for n, w in again.last().weights.items()} == {
            n: w.tobytes() for n, w in whole.last().weights.items()}  # fmt: skip
        assert any(not np.array_equal(w, plain.last().weights[n]) for n, w in whole.last().weights.items())


@pytest.mark.parametrize("name", ["sparta", "epidemic"])
def test_a_single_replica_is_plain_sgd(name: str) -> None:
    trained = run(name, 1, 6, momentum=0.9, **METHODS[name])
    assert np.array_equal(trained.theta()[0], alone(6, momentum=0.9).theta)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "sparta"])
def test_before_the_first_exchange_a_replica_is_plain_sgd(name: str) -> None:
    options = {**options_of(name), "period": 5}
    trained = run(options.pop("method"), 3, 1, momentum=0.9, **options)
    expected = [alone(1, lambda step, rank=rank: batch_of(rank, step), momentum=0.9).theta for rank in range(3)]
    assert np.array_equal(trained.theta(), expected)


# Deaths.


def after_deaths(folder: Path, deaths: dict[int, float], name: str) -> Sessions:
    found = Sessions(folder, 4, deaths, on_death="continue", **LONG, **options_of(name))
    found.check()
    return found


def check_agreement(found: Sessions) -> None:
    """All members have the same phi and m, bit for bit."""
    last = found.last().vectors
    for vector in ("phi", "velocity"):
        assert len({value.tobytes() for name, value in last.items() if name.endswith(f"method.{vector}")}) == 1


@pytest.mark.parametrize("name", quick(METHODS, "streaming", "gasloc"))
def test_the_others_go_on_after_a_death(tmp_path: Path, name: str) -> None:
    folders = one_folder_at_a_time(tmp_path)
    moments = sorted(Sessions(next(folders), 4, {}, **LONG, **options_of(name)).moments)
    for number in range(3):
        moment = moments[int(len(moments) * (0.3 + 0.23 * number))]
        found = after_deaths(next(folders), {number % 4: moment + 1e-9}, name)
        assert found.summary and found.summary["replicas_alive"] == 3, found.errors
        if "diloco" in (name, METHODS[name].get("method")):
            check_agreement(found)


@pytest.mark.parametrize("name", ["diloco", pytest.param("streaming", marks=pytest.mark.slow)])
def test_a_death_interrupts_an_outer_step_anywhere(tmp_path: Path, name: str) -> None:
    """Some members have completed the outer step, the others take its result; or none has, and they repeat it."""
    folders = one_folder_at_a_time(tmp_path)
    moments = sorted(Sessions(next(folders), 4, {}, **LONG, **options_of(name)).moments)
    middle = len(moments) // 2
    for number, moment in enumerate(moments[middle - 40 : middle + 40 : 1 if name == "streaming" else 20]):
        found = after_deaths(next(folders), {number % 3 + 1: moment + 1e-9}, name)
        assert found.summary, found.errors
        check_agreement(found)


@pytest.mark.parametrize("name", quick(METHODS, "diloco", "noloco"))
def test_without_on_death_a_death_ends_the_run(tmp_path: Path, name: str) -> None:
    whole = Sessions(tmp_path / "whole", 3, {}, **LONG, **options_of(name))
    found = Sessions(tmp_path / "run", 3, {1: whole.simulation.time / 2}, **LONG, **options_of(name))
    found.check()
    assert found.summary is None and "saved" in found.errors[0]
    assert Sessions(found.folder, 2, {}).summary


# Statistics.


def sent(name: str, ranks: int, **options: Any) -> list[int]:
    return [sum(one.fabric.stats.sent_bytes) for one in Run(name, ranks, **options).methods.values()]


def test_the_bytes_that_are_sent() -> None:
    """Models of SIZE float64, STEPS steps."""
    model = 8 * SIZE
    assert sent("diloco", 2, period=2) == [STEPS // 2 * model] * 2, "two replicas: the sum moves up, and down"
    assert sent("diloco", 2, period=4, fragments=2) == [STEPS // 4 * model] * 2
    assert sent("diloco", 2, period=4, merge_after=3) == [(STEPS // 4 - 1) * model] * 2, "the last one is in flight"
    assert sent("noloco", 4, period=2) == [STEPS // 2 * model] * 4, "one model, also among four"
    assert sent("gasloc", 4, period=2) == [2 * STEPS // 2 * model] * 4, "a model for each of two neighbours"
    assert sent("sparta", 2, mask=0.3) == [STEPS * 2 * 8] * 2, "two of seven weights, and no places"
    assert sent("epidemic", 4, period=4, receivers=3) == [3 * STEPS // 4 * model] * 4


# Bad input.


@pytest.mark.parametrize(("line", "words"), [
    ("--method diloco --outer-lr 0", "outer-lr: expected a number above 0, got 0"),
    ("--method diloco --outer-momentum 1", "outer-momentum: expected a number of 0 or more and below 1, got 1"),
    pytest.param("--method diloco --fragments 51",
                 "fragments 51: expected at most 50, because each fragment has an outer step ev", marks=SLOW),
    ("--method diloco --period 4 --merge-after 4", "merge-after 4: expected at most 3, because each fragment has an"),
    ("--method diloco --merge-weight 1", "merge-weight: expected a number of 0 or more and below 1, got 1"),
    pytest.param("--method diloco --model mlp --fragments 9",
                 "the model has 3 layers with parameters; expected at most one frag", marks=SLOW),
    ("--method diloco --reduce fast --on-death continue", "on-death has an effect only with reduce tree or ring"),
    ("--method noloco --fragments 2", "fragments is an option of the method diloco, not of noloco"),
    ("--method noloco --period 0", "period: expected a whole number of 1 or more, got 0"),
    ("--method gasloc --topology matching", "unknown topology 'matching'"),
    ("--method gasloc --alpha 1.5", "alpha: expected a number above 0 and of at most 1, got 1.5"),
    pytest.param("--method gasloc --workers 3 --alpha 0.6",
                 "alpha 0.6: a replica has 2 neighbours in topology ring; expected at", marks=SLOW),
    ("--method sparta --mask 0", "mask: expected a number above 0 and of at most 1, got 0"),
    ("--method sparta --mask 1.01", "mask: expected a number above 0 and of at most 1, got 1.01"),
    pytest.param("--method epidemic --receivers 2",
                 "receivers 2: each replica has 1 others; expected at most 1", marks=SLOW),
    ("--method epidemic --receivers -1", "receivers: expected a whole number of 0 or more, got -1"),
])  # fmt: skip
def test_bad_options(
    tmp_path: Path, line: str, words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    workers = [] if "--workers" in line else ["--workers", "2"]
    assert main([*line.split(), *workers, "--threads", "1", "--quiet"]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("minidl: error: ") and words in lines[0], lines
    assert not [*tmp_path.rglob("metrics.jsonl")]


def edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    saved = Sessions.last_of(folder)
    change(saved.state["members"])
    files.save(folder / "checkpoints", saved.state["progress"]["step"], replace(saved))


def test_a_checkpoint_with_an_impossible_number_is_refused(tmp_path: Path) -> None:
    whole = Sessions(tmp_path / "whole", 3, {}, **LONG, **options_of("streaming"))
    first = Sessions(tmp_path / "run", 3, {}, stop=whole.simulation.time / 2, **LONG, **options_of("streaming"))
    edited(first.folder, lambda members: [member["method"].update(version=99) for member in members.values()])
    [error] = {*Sessions(first.folder, 3, {}).errors}
    assert "the state of the method diloco is not as expected: version is 99; expected at most" in error
