"""Threads and forks, with each of Numba's threading layers. Each test runs a script in another process."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAD = """
import multiprocessing, os, pickle, sys, threading
import numpy as np
import minidl
from minidl import nn, ops, optim
from minidl.engine.random import random_state
from minidl.program.replay import Gradient, Prediction

X = np.random.default_rng(0).standard_normal((8, 12, 12, 3)).astype(np.float32)
Y = np.arange(8) % 5

def network(seed=0, drop=0.0):
    nn.seed(seed)
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(16, 16, 5), nn.Flatten(), nn.Dropout(drop), nn.Linear(64, 5))

def trained(model, steps=4, count=8):
    # Train by the tape; return the weights.
    optimizer = optim.SGD(model, 0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        ops.cross_entropy(model(X[:count]), Y[:count]).backward()
        optimizer.step()
    return model.flatten().theta.tobytes()

def replayed(model, steps=4, count=8):
    optimizer = optim.SGD(model, 0.05, momentum=0.9)
    gradient = Gradient(model, ops.cross_entropy)
    for _ in range(steps):
        gradient(X[:count], Y[:count])
        optimizer.step()
    return model.flatten().theta.tobytes()

def fitted(model, seed, threads=0):
    minidl.fit(model, (np.repeat(X, 4, 0), np.repeat(Y, 4)), epochs=2, batch_size=8, seed=seed, threads=threads,
               progress=None)
    return model.flatten().theta.tobytes()

def together(*functions):
    # Run functions in threads that begin at the same time; return their results.
    results, barrier = [None] * len(functions), threading.Barrier(len(functions))
    def work(i):
        barrier.wait()
        try:
            results[i] = functions[i]()
        except BaseException as error:
            results[i] = repr(error)
    threads = [threading.Thread(target=work, args=[i]) for i in range(len(functions))]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return results
"""


@functools.cache
def missing(layer: str) -> bool:
    """Return whether Numba cannot load the layer on this machine."""
    code = "import numba\nfrom numba.np.ufunc import parallel\nparallel._launch_threads()"
    environment = os.environ | {"NUMBA_THREADING_LAYER": layer}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).returncode != 0


def run(script: str, layer: str, **variables: str) -> str:
    """Run a script; return what it prints. The test fails if the script fails or does not end."""
    if missing(layer):
        pytest.skip(f"Numba cannot load {layer}")
    environment = os.environ | {"NUMBA_THREADING_LAYER": layer, "NUMBA_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", HEAD + script], env=environment | variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def layers(*quick: str) -> pytest.MarkDecorator:
    """Run a test with each threading layer. The quick tests use only the layers in `quick`."""
    slow = [pytest.param(layer, marks=pytest.mark.slow) for layer in ("omp", "workqueue", "tbb") if layer not in quick]
    return pytest.mark.parametrize("layer", [*quick, *slow])


@layers("omp", "workqueue")
def test_threads_call_one_prediction(layer: str) -> None:
    script = """
    model = network()
    prediction, expected = Prediction(model), [Prediction(model)(X[:n]) for n in range(1, 9)]
    def work():
        return [n for n in [1, 8, 3, 8, 5] * 20 if prediction(X[:n]).tobytes() != expected[n - 1].tobytes()]
    print(together(*[work] * 4))
    first = prediction(X)
    before = first.copy()
    prediction(X + 1)
    print((first == before).all(), all(module.training for _, module in model.named_modules()))
    """
    assert run(_dedent(script), layer).split("\n")[:2] == [str([[]] * 4), "True True"]


@layers("workqueue")
def test_threads_call_predict_and_models(layer: str) -> None:
    script = """
    models = [network(seed) for seed in range(3)]
    expected = [minidl.predict(model, X).tobytes() for model in models]
    fresh = [network(seed) for seed in range(3)]
    def by_predict(i):  # the same models in all threads, in training mode
        found = [[minidl.predict(model, X).tobytes() for model in fresh] for _ in range(20)]
        return len(found) - found.count(expected)
    def by_hand(i):
        with nn.evaluating(models[i % 3]):
            found = [ops.softmax(models[i % 3](X)).numpy().tobytes() for _ in range(20)]
        return len(found) - found.count(expected[i % 3])
    print(together(*(lambda i=i: by_predict(i) for i in range(3)), *(lambda i=i: by_hand(i) for i in range(4))))
    print({module.training for model in models + fresh for _, module in model.named_modules()})
    """
    assert run(_dedent(script), layer).split("\n")[:2] == [str([0] * 7), "{True}"]


@layers("workqueue")
def test_threads_train_different_models(layer: str) -> None:
    script = """
    # Compiles the kernels.
    expected = [trained(network(1)), replayed(network(2)), trained(network(3), count=5), replayed(network(4), count=6)]
    models = [network(seed) for seed in (1, 2, 3, 4)]
    for _ in range(3):
        models = [network(seed) for seed in (1, 2, 3, 4)]
        found = together(lambda: trained(models[0]), lambda: replayed(models[1]),
                         lambda: trained(models[2], count=5), lambda: replayed(models[3], count=6))
        assert found == expected, [a if isinstance(a, str) else a == b for a, b in zip(found, expected)]
    """
    run(_dedent(script), layer)


@layers("omp")
def test_threads_fit_different_models_without_a_trace(layer: str) -> None:
    script = """
    expected = [fitted(network(seed, drop=0.3), seed) for seed in (1, 2)]
    models = [network(seed, drop=0.3) for seed in (1, 2)]
    nn.seed(9)
    assert together(lambda: fitted(models[0], 1, threads=1), lambda: fitted(models[1], 2)) == expected
    assert random_state() == {"seed": 9, "offset": 0}
    """
    run(_dedent(script), layer)


@layers("omp", "workqueue")
def test_a_fork_after_use_works_or_gets_one_line(layer: str) -> None:
    script = """
    model = network()
    prediction, gradient = Prediction(model), Gradient(network(1), ops.cross_entropy)
    expected = prediction(X), minidl.predict(model, X), gradient(X, Y), trained(network(2))
    actions = [lambda: prediction(X), lambda: minidl.predict(model, X), lambda: gradient(X, Y),
               lambda: trained(network(2)), lambda: fitted(network(3), 0)]
    for action in actions:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            try:
                action()
                print("works")
            except minidl.MinidlError as error:
                print(error)
            sys.stdout.flush()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert (prediction(X) == expected[0]).all()  # the parent process continues
    """
    found = run(_dedent(script), layer).splitlines()
    assert len(found) == 5 and len(set(found)) == 1
    assert found[0] == "works" if layer != "omp" else "'spawn', or set NUMBA_THREADING_LAYER=workqueue" in found[0]


def _dedent(script: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in script.splitlines())
