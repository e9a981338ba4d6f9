"""A rank of elastic averaging dies. If it has the center, the others begin a new one, and say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quadratic import Run
from quick import quick
from sessions import Sessions
from test_mpi import nothing_left  # noqa: F401 (a fixture)
from test_mpi_deaths import COUNTING, RUN, ours, surviving
from test_shutdown import killed

from minidl.comm.fabric.base import Channel
from minidl.comm.methods.elastic import Served
from minidl.comm.transport.mailbox import Plan
from minidl.comm.transport.messages import BufferSpec

LINE = "minidl: the center has died with replica {}: replica {} begins a new center, from the average of the replicas"
RUNS: list[dict[str, Any]] = [
    {"method": method, "center": center} for method in ("async-easgd", "eamsgd") for center in ("beside", "rank")
]
WORKERS = 3


def home_of(options: dict[str, Any]) -> int:
    return WORKERS if options["center"] == "rank" else 0


@pytest.mark.parametrize("options", quick(RUNS, RUNS[0]))
def test_the_others_begin_a_new_center(
    tmp_path: Path, options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """Also if the next home dies, and if it happens when all have stopped training."""
    ranks, home = WORKERS + (options["center"] == "rank"), home_of(options)
    moments = sorted(Sessions(tmp_path / "whole", ranks, {}, epochs=2, **options).moments)
    assert not capfd.readouterr().err
    for number, part in enumerate((0.2, 0.4, 0.6, 0.75, 0.9)):
        when = moments[int(part * len(moments))] + 1e-9
        victims = (home,) if number != 1 else (home, 1 if home == 0 else 0)
        run = Sessions(tmp_path / f"run-{number}", ranks, dict.fromkeys(victims, when), epochs=2, **options)
        run.check()
        live = [rank for rank in range(WORKERS) if rank not in victims]
        assert run.summary and run.summary["replicas_alive"] == len(live)
        saved = run.last().vectors
        centers = {saved[f"{rank}/method.center"].tobytes() for rank in live}
        assert len(centers) == 1 and np.isfinite(saved[f"{live[0]}/method.center"]).all()
        said = capfd.readouterr().err.splitlines()
        assert LINE.format(home, live[0]) in said or part == 0.9


@pytest.mark.parametrize("method", ["async-easgd", "eamsgd"])
def test_the_new_center_is_the_average_of_the_replicas(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rho = 0 it changes only by the first visit of each replica: x_1, then the mean with x_2, then with x_3."""
    options = dict(rho=0.0, lr=0.1, momentum=0.0, period=1)
    half, begun = Run(method, 4, **options).seconds / 2, list[np.ndarray]()

    class Dying(Run):
        def work(self, rank: int) -> None:
            if rank == 0:
                self.simulation.at(half, self.simulation.die, 0)
            super().work(rank)

    answer = Served.answer

    def noted(self: Served, visit: Any) -> np.ndarray:
        before, marked = self.center.copy(), visit.header.marker
        reply = answer(self, visit)
        if marked:
            begun.append(before)
            expected = before + (visit.vector - before) / self.succession.averaged
            np.testing.assert_allclose(self.center, expected, rtol=0, atol=1e-12)
        return reply

    monkeypatch.setattr(Served, "answer", noted)
    found = Dying(method, 4, **options)
    assert len(begun) == 2, "those of the other live replicas"
    ends = [found.methods[rank].center for rank in (1, 2, 3)]
    assert all(np.array_equal(ends[0], other) for other in ends[1:])


@pytest.mark.parametrize("center", ["beside", "rank"])
def test_rho_follows_the_number_of_live_replicas(tmp_path: Path, center: str) -> None:
    """Only the default does."""
    for rho, factor in ((None, 0.9 / (WORKERS - 1)), (0.5, 0.5 * 0.05)):
        found: dict[int, float] = {}
        ranks = WORKERS + (center == "rank")
        with pytest.MonkeyPatch.context() as patch:
            on_membership = Served.on_membership

            def noted(self: Served, view: Any, found: dict[int, float] = found, old: Any = on_membership) -> None:
                old(self, view)
                found[self.fabric.rank] = self.rho * self.config.lr

            patch.setattr(Served, "on_membership", noted)
            options = {} if rho is None else {"rho": rho}
            run = Sessions(tmp_path / f"run-{rho}", ranks, {2: 0.01}, method="async-easgd", center=center, lr=0.05,
                           epochs=2, **options)  # fmt: skip
        assert run.summary and set(found) == {0, 1}
        assert all(value == pytest.approx(factor) for value in found.values())


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_round_robin_goes_on_if_it_may(tmp_path: Path, victim: int, capfd: pytest.CaptureFixture[str]) -> None:
    """With --on-death continue. If the replica with the center dies, the others begin a new one."""
    options: dict[str, Any] = dict(method="easgd", epochs=2, on_death="continue")
    moments = sorted(Sessions(tmp_path / "whole", WORKERS, {}, **options).moments)
    for number, part in enumerate((0.3, 0.5, 0.7)):
        when = moments[int(part * len(moments))] + 1e-9
        run = Sessions(tmp_path / f"run-{number}", WORKERS, {victim: when}, **options)
        run.check()
        assert run.summary and run.summary["replicas_alive"] == WORKERS - 1 and run.summary["epochs"] == 2
        said = capfd.readouterr().err
        assert f"replica {victim} died; the other 2 go on" in said
        assert (LINE.format(0, 1) in said) == (victim == 0)


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(WORKERS + 1))
@pytest.mark.parametrize("options", [*RUNS, {"method": "easgd", "on_death": "continue", "center": "beside"}])
def test_one_dies_at_every_moment(tmp_path: Path, options: dict[str, Any], victim: int) -> None:
    ranks = WORKERS + (options["center"] == "rank")
    if victim >= ranks:
        pytest.skip("there is no such rank")
    for number, moment in enumerate(sorted(Sessions(tmp_path / "whole", ranks, {}, epochs=2, **options).moments)):
        run = Sessions(tmp_path / f"run-{number}", ranks, {victim: moment + 1e-9}, epochs=2, **options)
        run.check()
        saved = run.last().vectors if run.summary else {}
        assert len({vector.tobytes() for name, vector in saved.items() if name.endswith("method.center")}) <= 1


# Real processes.


@pytest.mark.parametrize("options", quick([RUNS[0], RUNS[3]], RUNS[3]))
def test_the_center_is_killed(tmp_path: Path, options: dict[str, Any]) -> None:
    """By SIGKILL, when it is to change for the first time."""
    ranks, home = 3, 2 if options["center"] == "rank" else 0
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    where = "comm.methods.elastic:Served.update_center"
    code, [result], errors = killed(tmp_path / "run", ranks, [home], where, *words)
    live = [rank for rank in range(3) if rank != home]
    assert code == 0 and result["replicas_alive"] == 2 and result["epochs"] == 4, errors
    assert sorted(errors.splitlines()) == sorted([
        f"minidl: replica {home} was killed by SIGKILL", LINE.format(home, live[0])
    ])  # fmt: skip


@pytest.mark.parametrize(("options", "ranks", "victim"), [(RUNS[0], 3, 0), (RUNS[3], 4, 3)])
def test_the_center_is_killed_under_mpi(tmp_path: Path, options: dict[str, Any], ranks: int, victim: int) -> None:
    """With Open MPI and ULFM. The rank of the center is killed after some steps."""
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    done = surviving(ranks, COUNTING, str(tmp_path / "log"), f"{victim}:15:9", *RUN, "--epochs", "3", *words,
                     "--out", str(tmp_path / "run"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    [result] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    first = 1 if victim == 0 else 0
    assert result["replicas_alive"] == ranks - 1 and LINE.format(victim, first) in ours(done.stderr)


def test_the_replies_of_heirs_need_no_memory_at_first() -> None:
    plain, heirs = (Plan(4, BufferSpec(1 << 20, call=True, serving=(0,), heirs=heirs)) for heirs in (False, True))
    assert plain.used == heirs.used and heirs.total > plain.total + 11 * (1 << 20)
    pools = [heirs.pools[rank][Channel.ANSWER] for rank in range(4)]
    assert [(pool.slots, pool.late) for pool in pools] == [(4, False), (4, True), (4, True), (4, True)]
    assert all(pool.start >= heirs.used for pool in pools[1:])
