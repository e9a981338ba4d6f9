"""The script of a rank in the tests of own models. Usage: script.py SCENARIO ARGUMENTS...

A scenario is a function. Its return value is printed as one line of JSON, with the rank.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any

import numpy as np

import minidl
from minidl.errors import ConfigError, ReplicaLeftError
from minidl.run.evaluation import evaluate
from minidl.training import regroup
from minidl.training.world import world

SIZES = {"float32": (2, 3), "float64": (), "large": (300_000,), "empty": (0, 4)}


def tell(**values: Any) -> None:
    """Print one line with a single write: several ranks share the pipe."""
    os.write(1, (json.dumps({"rank": minidl.rank(), **values}) + "\n").encode())


def model(classes: int = 4) -> minidl.nn.Sequential:
    layers = minidl.nn.Flatten(), minidl.nn.Linear(16, 8), minidl.nn.ReLU(), minidl.nn.Linear(8, classes)
    return minidl.nn.Sequential(*layers)


def images(count: int = 96) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return rng.standard_normal((count, 4, 4, 1)).astype(np.float32), rng.integers(0, 4, count)


def weights(net: minidl.nn.Module) -> list[float]:
    return [float(value) for parameter in net.parameters() for value in parameter.numpy().ravel()]


def fit(method: str, validation: str = "0") -> dict[str, Any]:
    minidl.seed(minidl.rank())  # the ranks build other weights; those of rank 0 count
    data, net = minidl.data.load("synthetic:400x4x4x1:4", validation=float(validation)), model()
    told: list[int] = []
    history = minidl.fit(net, data, method=method, epochs=3, batch_size=16, lr=0.05,
                         progress=lambda entry: told.append(entry["epoch"]))  # fmt: skip
    again = evaluate(net, data.x_test, data.y_test)
    return {"weights": weights(net), "told": told, "epochs": history.epochs, "test": history.test, "again": again}


def workers_die() -> None:
    """Kill all workers of a parameter server before their first step."""
    regroup.train = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    fit("ps")


def loop(method: str, steps: str, **options: Any) -> dict[str, Any]:
    """Train in a loop of one's own, each replica on its shards."""
    minidl.seed(minidl.rank())
    (x, y), net, used = images(), model(), []
    with minidl.join(net, method=method, lr=0.1, momentum=0.0, weight_decay=0.0, **options) as replica:
        for step in range(int(steps)):
            mine = replica.shard(len(x), step)[:8]
            used.append(mine.tolist())
            loss = replica.step(x[mine], y[mine])
    return {"weights": weights(net), "used": used, "steps": replica.steps, "size": replica.size, "loss": loss}


def twice() -> list[Any]:
    """Use collectives, train, use collectives, and train again with another method."""
    return [collectives(), loop("gossip", "3")["steps"], collectives(), fit("allreduce")["told"], collectives()]


def slow_loop(method: str) -> dict[str, Any]:
    """Make steps until the test ends this process, or for long."""
    (x, y), net = images(), model()
    replica = minidl.join(net, method=method)
    for step in range(400):
        replica.step(x[:8], y[:8])
        if step == 0:
            tell(pid=os.getpid())
        time.sleep(0.005)
    replica.finish()
    return {"weights": weights(net)}


def stopped(method: str) -> dict[str, Any]:
    """Catch the interrupt of a loop, whose `with` block has averaged the weights.

    Rank 1 is slow. With gossip, the others wait for it in `allreduce`.
    """
    (x, y), net = images(), model()
    try:
        with minidl.join(net, method=method) as replica:
            while True:
                loss = replica.step(x[:8], y[:8])
                if replica.steps == 1:
                    tell(pid=os.getpid())
                time.sleep(0.005 + 0.05 * (minidl.rank() == 1))
                if replica.steps % 10 == 0:
                    minidl.allreduce(loss)
    except KeyboardInterrupt as error:
        tell(steps=replica.steps, weights=weights(net), error=str(error))
        raise


def ends_first() -> float:
    """Ranks 1 and 2 end after a training. The others notice this while they wait, and continue with collectives."""
    loop("gossip", "3")
    if minidl.rank() == 1:
        sys.exit(0)
    if minidl.rank() == 2:
        return 0.0
    fabric = world().fabric
    fabric.wait(lambda: None if fabric.alive(1) or fabric.alive(2) else True, (), "the end of ranks 1 and 2")
    return float(minidl.allreduce(1.0))


def fast() -> list[Any]:
    """Let MPI compute the sums of a training. The sums of the script afterwards are minidl's own."""
    steps = loop("allreduce", "2", reduce="fast")["steps"]
    return [steps, world().fabric.transport.native_allreduce(np.zeros(3))]


def again(method: str) -> list[Any]:
    """Leave trainings by exceptions of the loop, with messages that nobody reads. Then train once more.

    First all ranks leave, then only rank 1. A second `join` within the first one is refused.
    """
    (x, y), found = images(), []
    for odd in (minidl.rank(), 1):
        try:
            with minidl.join(model(), method=method) as replica:
                for _ in range(40):
                    replica.step(x[:8], y[:8])
                try:
                    minidl.join(model())
                except ConfigError as error:
                    found.append(str(error))
                if minidl.rank() == odd:
                    raise RuntimeError("a fault of the loop")
        except (RuntimeError, ReplicaLeftError) as error:
            found.append(str(error))
    return [*found, float(minidl.allreduce(1.0)), loop(method, "2")["steps"]]


def asleep() -> None:
    minidl.allreduce(1.0)
    tell(pid=os.getpid())
    time.sleep(1000)


def collectives() -> dict[str, Any]:
    """Return sums, broadcasts and the first rounds of neighbour averages of random arrays, which the test repeats."""
    rank, found = minidl.rank(), {}
    for name, shape in SIZES.items():
        own = array(name, rank)
        before = own.copy()
        total, sent = minidl.allreduce(own), minidl.broadcast(own, root=1 % minidl.size())
        mixed = minidl.neighbor_average(own, topology="ring")
        assert total.shape == sent.shape == mixed.shape == shape and (own == before).all()
        assert total.dtype == sent.dtype == mixed.dtype == own.dtype
        found[name] = [[float(value) for value in result.ravel()[-3:]] for result in (total, sent, mixed)]
    return found


def array(name: str, rank: int) -> np.ndarray:
    kind = "float32" if name == "float32" else "float64"
    return np.asarray(np.random.default_rng(rank).standard_normal(SIZES[name]).astype(kind))


def mistakes() -> dict[str, str]:
    """Make calls in which rank 1 differs. Every rank gets the same error, and goes on."""
    odd, data, (x, y) = minidl.rank() == 1, minidl.data.load("synthetic:96x4x4x1:4"), images()
    calls = {
        "shape": lambda: minidl.allreduce(np.zeros((2, 4 if odd else 3))),
        "type": lambda: minidl.broadcast(np.zeros(2, np.float32 if odd else np.float64)),
        "root": lambda: minidl.broadcast(1.0, root=int(odd)),
        "topology": lambda: minidl.neighbor_average(1.0, topology="ring" if odd else "complete"),
        "call": lambda: (minidl.allreduce if odd else minidl.broadcast)(1.0),
        "join": lambda: minidl.fit(model(), data) if odd else minidl.join(model()),
        "model": lambda: minidl.join(model(5 if odd else 4)),
        "data": lambda: minidl.fit(model(), (x + odd, y)),
        "lr": lambda: minidl.join(model(), lr=0.2 if odd else 0.1),
        "method": lambda: minidl.fit(model(), data, method="gossip" if odd else "dpsgd"),
        "period": lambda: minidl.join(model(), method="gossip", period=3 if odd else 2),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except ConfigError as error:
            found[name] = str(error)
    version, minidl.__version__ = minidl.__version__, "9.9" if odd else "9.8"
    try:
        minidl.allreduce(1.0)
    except ConfigError as error:
        found["version"] = str(error)
    minidl.__version__ = version
    assert minidl.allreduce(1.0) == minidl.size()
    return found


def uncaught(what: str) -> None:
    odd = minidl.rank() == 1
    if what == "shape":
        minidl.allreduce(np.zeros(3 + odd))
    if what == "everywhere":
        minidl.fit(model(), images(), epoch=3)
    if what == "fault":
        minidl.allreduce(1.0)
        if odd:
            raise ZeroDivisionError("a fault of the script")
    if what == "ended":
        if odd:
            sys.exit(0)
        minidl.join(model())
    if what == "left":
        x, y = images()
        with suppress(ZeroDivisionError), minidl.join(model(), method="allreduce") as replica:
            for step in range(3):
                replica.step(x[:8], y[:8])
                if odd and step:
                    raise ZeroDivisionError("a fault that the script catches")
    if what == "exit":
        sys.exit(5)
    if what == "steps":
        x, y = images()
        with minidl.join(model(), method="allreduce") as replica:
            for _ in range(3 + odd):
                replica.step(x[:8], y[:8])
    minidl.allreduce(1.0)


def place() -> list[Any]:
    return [sys.argv, sys.path[0], __name__, __file__, minidl.size()]


if __name__ == "__main__":
    scenario, *arguments = sys.argv[1:]
    result = globals()[scenario](*arguments)
    tell(result=result)
