"""--compress of centers that one rank serves: the equations in float64, convergence, deaths, resume, real processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_mpi as jobs
from launching import PATIENCE, Launched
from quadratic import SIZE, START, STEPS, Run, gradient
from quick import quick
from sessions import Sessions
from test_compression import CODECS, ETA, RHO, Q, train
from test_elastic_deaths import LINE, home_of
from test_elastic_deaths import WORKERS as P
from test_mpi import nothing_left  # noqa: F401 (a fixture)
from test_mpi_deaths import RUN, ours, run, surviving

from minidl.comm.methods import method
from minidl.comm.methods.compression import DifferenceCodes
from minidl.comm.methods.reconstruction import Reconstructions
from minidl.errors import ConfigError
from minidl.run.config import resolve

AGREEING = str(Path(__file__).parent / "replicas" / "agreeing.py")
RUNS: list[dict[str, Any]] = [
    {"method": "async-easgd", "center": "beside", "compress": "topk:0.1", "period": 2},
    {"method": "async-easgd", "center": "rank", "compress": "int8"},
    {"method": "eamsgd", "center": "beside", "compress": "sign"},
    {"method": "eamsgd", "center": "rank", "compress": "randk:0.1", "period": 1},
]
ROUND_ROBIN: list[dict[str, Any]] = [
    {"method": "easgd", "center": "beside", "compress": "topk:0.1"},
    {"method": "easgd", "center": "rank", "compress": "randk:0.1", "period": 2},
]


class Center:
    """c, h_i and k_i. visit(i, x_i) returns d_i. The replica beside the center needs no codes."""

    def __init__(self, q: Q, beside: bool) -> None:
        self.q, self.beside, self.c, self.changes = q, beside, START, list[np.ndarray]()
        self.h, self.k = np.tile(START, (P, 1)), np.tile(START, (P, 1))

    def visit(self, i: int, x: np.ndarray) -> np.ndarray:
        if self.beside and i == 0:
            self.h[0], self.k[0] = x, self.c
        else:
            self.h[i] += self.q(x - self.h[i])
            self.k[i] += self.q(self.c - self.k[i])
        self.c = self.c + ETA * RHO * (self.h[i] - self.c)
        self.changes.append(self.c)
        return ETA * RHO * (x - self.k[i])


def transcribed(name: str, visits: list[int], center: Center, mu: float, tau: int) -> np.ndarray:
    """Return the weights after each step (STEPS, P, n)."""
    x, v, made, xs = np.tile(START, (P, 1)), np.zeros((P, SIZE)), [0] * P, np.zeros((STEPS, P, SIZE))
    for i in visits:
        d = center.visit(i, x[i])
        for t in range(made[i], min(made[i] + tau, STEPS)):
            pull = d if t == made[i] else 0.0
            if name == "eamsgd":
                x[i] = x[i] - pull
                v[i] = mu * v[i] - ETA * gradient(x[i] + mu * v[i], t, i)
                x[i] = xs[t, i] = x[i] + v[i]
            else:
                v[i] = mu * v[i] - ETA * gradient(x[i], t, i)
                x[i] = xs[t, i] = x[i] + v[i] - pull
        made[i] += tau
    return xs


@pytest.mark.parametrize("tau", [1, 3])
@pytest.mark.parametrize("where", ["rank", "beside"])
@pytest.mark.parametrize("code", CODECS)
@pytest.mark.parametrize("name", ["easgd", "async-easgd", "eamsgd"])
def test_the_equations(name: str, code: str, where: str, tau: int) -> None:
    ranks = P + (where == "rank")
    found = Run(name, ranks, rho=RHO, lr=ETA, momentum=0.9, period=tau, center=where, compress=code)
    center = Center(CODECS[code], where == "beside")
    np.testing.assert_allclose(found.x, transcribed(name, found.visits, center, 0.9, tau), rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.c, center.changes, rtol=0, atol=1e-12)
    assert len({one.center.tobytes() for one in found.methods.values()}) == 1, "all end with the center"


def test_a_parameter_server_replies_with_codes() -> None:
    """One worker. Its first reply is the whole center."""
    q = CODECS["int8"]
    found = Run("ps", 2, lr=ETA, momentum=0.0, compress="int8")
    c, x, error = START, START, np.zeros(SIZE)
    for t in range(STEPS):
        error = error + gradient(x, t, 0)
        sent = q(error)
        error, c = error - sent, c - ETA * sent
        x = x + q(c - x) if t else c
        np.testing.assert_allclose(found.x[t, 0], x, rtol=0, atol=1e-12)


def to_one(x: np.ndarray, step: int, replica: int) -> np.ndarray:
    """The minimum is at 1. With minima that differ, a center that is visited one by one would go round in a cycle."""
    return np.linspace(1.0, 4.0, SIZE) * (x - 1)


def forgetful(self: DifferenceCodes, vector: np.ndarray, known: np.ndarray, code: np.ndarray, key: int) -> np.ndarray:
    """A sender that forgets what its codes lose."""
    honest(self, vector, known, code, key)
    known[:] = vector
    return code


honest = DifferenceCodes.encode_difference


def distance(name: str, code: str, steps: int) -> float:
    """Return how far the centers are from the optimum after training with P replicas."""
    _, methods = train(name, P, steps, compress=code, period=1)
    return float(max(abs(one.center - 1).max() for one in methods.values()))


@pytest.mark.parametrize(("code", "steps"), [
    ("int8", 200), ("topk:0.1", 300), pytest.param("sign", 600, marks=pytest.mark.slow),
    pytest.param("randk:0.1", 1000, marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.parametrize("name", ["easgd", "async-easgd", "eamsgd"])
def test_the_center_converges_to_the_optimum(
    name: str, code: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """With topk:0.1, one of seven elements is sent."""
    monkeypatch.setattr("quadratic.gradient", to_one)
    assert distance(name, code, steps) < 1e-6


def test_it_does_not_if_senders_forget_what_codes_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quadratic.gradient", to_one)
    monkeypatch.setattr(DifferenceCodes, "encode_difference", forgetful)
    assert distance("async-easgd", "topk:0.1", 300) > 1e-3


@pytest.fixture
def agreeing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Check in each visit that both sides have the same h_i, and then the same k_i. Returns the visitors."""
    visitors, h, k = list[int](), dict[int, bytes](), dict[int, bytes]()
    request, read = Reconstructions.request, Reconstructions.read
    encode_center, receive = Reconstructions.encode_center, Reconstructions.receive

    def requested(self: Reconstructions) -> np.ndarray:
        code = request(self)
        h[self.fabric.rank] = self.pair[0].tobytes()
        return code

    def has_read(self: Reconstructions, visit: Any) -> np.ndarray:
        known = read(self, visit)
        visitors.append(visit.sender)
        assert known.tobytes() == h[visit.sender]
        return known

    def encoded(self: Reconstructions, center: np.ndarray, replica: int, key: int) -> np.ndarray:
        code = encode_center(self, center, replica, key)
        k[replica] = self.of[replica][1].tobytes()
        return code

    def received(self: Reconstructions, center: np.ndarray) -> None:
        receive(self, center)
        assert center.tobytes() == k[self.fabric.rank]

    for name, checked in zip(("request", "read", "encode_center", "receive"), (requested, has_read, encoded, received)):
        monkeypatch.setattr(Reconstructions, name, checked)
    return visitors


@pytest.mark.parametrize("options", quick(RUNS, RUNS[0]))
def test_a_center_dies(
    tmp_path: Path, options: dict[str, Any], capfd: pytest.CaptureFixture[str], agreeing: list[int]
) -> None:  # fmt: skip
    """Or the center and a replica, or a replica, at several moments."""
    ranks, home = P + (options["center"] == "rank"), home_of(options)
    moments = sorted(Sessions(tmp_path / "whole", ranks, {}, epochs=2, **options).moments)
    for number, part in enumerate((0.5, 0.45, 0.6, 0.8)):
        when = moments[int(part * len(moments))] + 1e-9
        victims = ((home, 1 if home == 0 else 0), (home,), (2,), (home,))[number]
        run = Sessions(tmp_path / f"run-{number}", ranks, dict.fromkeys(victims, when), epochs=2, **options)
        run.check()
        live = [rank for rank in range(P) if rank not in victims]
        saved = run.last().vectors
        assert run.summary and run.summary["replicas_alive"] == len(live)
        assert len({saved[f"{rank}/method.center"].tobytes() for rank in live}) == 1
        assert {*agreeing} >= {*live} - {0, 1}
        said = LINE.format(home, live[0]) in capfd.readouterr().err.splitlines()
        assert said == (home in victims) or part == 0.8


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_round_robin_goes_on(tmp_path: Path, victim: int, agreeing: list[int]) -> None:
    options: dict[str, Any] = {**ROUND_ROBIN[0], "epochs": 2, "on_death": "continue"}
    moments = sorted(Sessions(tmp_path / "whole", P, {}, **options).moments)
    for number, part in enumerate((0.3, 0.5, 0.7)):
        when = moments[int(part * len(moments))] + 1e-9
        run = Sessions(tmp_path / f"run-{number}", P, {victim: when}, **options)
        run.check()
        assert run.summary and run.summary["replicas_alive"] == P - 1


@pytest.mark.parametrize("options", [RUNS[0], RUNS[2], {"method": "ps", "compress": "topk:0.1"}])
def test_a_newcomer_is_told_everything(tmp_path: Path, options: dict[str, Any], agreeing: list[int]) -> None:
    """In a new place, or in that of a replica that has died."""
    for deaths, rank in (({}, P), ({1: 0.01}, 1)):
        run = Sessions(tmp_path / f"run-{rank}", P + (rank == P), deaths, joins={rank: 0.03}, max_workers=P + 1,
                       epochs=3, **options)  # fmt: skip
        run.check()
        assert run.summary and len({*run.last().state["members"]}) >= 2


@pytest.mark.parametrize("options", ROUND_ROBIN)
def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path, options: dict[str, Any]) -> None:
    """h_i and k_i are saved."""
    ranks = P + (options["center"] == "rank")
    whole = Sessions(tmp_path / "whole", ranks, {}, epochs=2, **options)
    run = Sessions(tmp_path / "run", ranks, {}, epochs=2, stop=whole.simulation.time / 2, **options)
    assert whole.summary and run.summary is None and not run.errors
    again = Sessions(run.folder, ranks, {})
    first, second = ({name: vector.tobytes() for name, vector in each.last().vectors.items()
                      if "communication" not in name} for each in (whole, again))  # fmt: skip
    assert first == second and "1/method.heard" in first


@pytest.mark.parametrize("options", quick(
    [RUNS[0], RUNS[3], ROUND_ROBIN[0], {"method": "ps", "compress": "int8"}], RUNS[3], ROUND_ROBIN[0],
))  # fmt: skip
@pytest.mark.parametrize("workers", quick([2, P], 2))
def test_a_stopped_run_goes_on(tmp_path: Path, options: dict[str, Any], workers: int) -> None:
    """Also with another number of replicas."""
    servers = options["method"] == "ps" or options.get("center") == "rank"
    run = Sessions(tmp_path / "run", P + servers, {}, epochs=2, stop=0.02, **options)
    assert run.summary is None and not run.errors
    again = Sessions(run.folder, workers + servers, {})
    assert again.summary and again.summary["epochs"] == 2


@pytest.mark.parametrize(("name", "lengths"), [
    # A visit, and its reply; what is sent whole in the beginning; the last center, for which a replica asks.
    ("async-easgd", {"request": 12, "reply": 12, "whole request": 2, "whole reply": 1}),
    ("ps", {"request": 12, "reply": 11, "whole reply": 1 + 2}),  # the last center, and its velocity
])  # fmt: skip
def test_bytes_are_counted_after_compression(name: str, lengths: dict[str, int]) -> None:
    """Seven float64, or seven int8 and a float32. Two ranks: the second one sends the requests, or the first to ps."""
    code, whole = SIZE + 4, 8 * SIZE
    methods = train(name, 2, 12, compress="int8")[1] if name != "ps" else served(12)
    sent = [sum(methods[rank].fabric.stats.sent_bytes) for rank in ((1, 0) if name != "ps" else (0, 1))]
    assert sent == [lengths["request"] * code + lengths.get("whole request", 0) * whole,
                    lengths["reply"] * code + lengths["whole reply"] * whole]  # fmt: skip


def served(steps: int) -> dict[int, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quadratic.STEPS", steps)
        return Run("ps", 2, lr=ETA, momentum=0.0, compress="int8").methods


@pytest.mark.parametrize("name", ["easgd", "async-easgd", "eamsgd"])
@pytest.mark.parametrize("code", ["topk:0.9", "int7"])
def test_codes_that_do_not_exist(name: str, code: str) -> None:
    with pytest.raises(ConfigError, match="compress"):
        method(name).buffers(100, resolve({"method": name, "compress": code, "workers": 2}))


# Real processes. test_fabrics_agree.py compares the bits of `easgd`.


def agreed(folder: Path, options: dict[str, Any], victim: str, start: Callable[..., tuple[int, str, str]]) -> set[str]:
    """Train three ranks, of which one may be killed. In each visit, both sides must know the same h_i and k_i.

    start(program, arguments) runs the job. Returns what the ranks have read, such as "1 home" or "1 replica".
    """
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    log = folder / "log"
    code, out, errors = start(AGREEING, [str(log), victim, *RUN, "--epochs", "3", *words, "--out", str(folder / "run")])
    assert code == 0, errors
    [result] = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    served = options["center"] == "rank"
    assert result["replicas_alive"] == (2 if served or victim else 3)
    assert (LINE.format(*((2, 0) if served else (0, 1))) in ours(errors)) == bool(victim)
    return set(log.with_suffix(".checks").read_text().splitlines())


def in_shared_memory(program: str, arguments: list[str]) -> tuple[int, str, str]:
    with Launched(3, *arguments, program=[program]) as launched:
        out, errors = launched.process.communicate(timeout=PATIENCE)
        return launched.process.returncode, out, errors


def under_mpi(program: str, arguments: list[str]) -> tuple[int, str, str]:
    if jobs.mpiexec() is None:
        pytest.skip("no mpiexec")
    done = run(3, [], program, *arguments)
    return done.returncode, done.stdout, done.stderr


def with_ulfm(program: str, arguments: list[str]) -> tuple[int, str, str]:
    done = surviving(3, program, *arguments)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("options", quick([RUNS[0], RUNS[3]], RUNS[0]))
@pytest.mark.parametrize("start", [in_shared_memory, with_ulfm])
def test_the_center_is_killed(tmp_path: Path, options: dict[str, Any], start: Any) -> None:
    """After some steps. The next home knows what the others know."""
    home, heir = (0, 1) if options["center"] == "beside" else (2, 0)
    found = agreed(tmp_path, options, f"{home}:15:9", start)
    assert found >= {f"{home} home", f"{heir} home", f"{heir} replica"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [*RUNS, *ROUND_ROBIN])
def test_both_sides_agree_under_mpi(tmp_path: Path, options: dict[str, Any]) -> None:
    home = 0 if options["center"] == "beside" else 2
    assert agreed(tmp_path, options, "", under_mpi) >= {f"{home} home", "1 replica"}
