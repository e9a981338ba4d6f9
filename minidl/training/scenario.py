"""Scenarios: runs with faults, drawn from a seed. `python -m minidl.simulate --scenario SEED` plays one (playing.py).

    scenario    a cluster, a method with its options, and a few parts
    part        a run from its start, or from a resume, until it ends or a fault ends it

Times are virtual seconds since the beginning of a part. A fault that comes after the end has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from minidl.comm.cluster import Cluster, Device, Event, FreezeEvent, Group, Link, Stragglers
from minidl.run import declared
from minidl.run.config import CLAIMING, JOINABLE

PIECE = 8  # images of a batch
IMAGES = 48  # of an epoch
SECONDS = 1e-3  # per image, at speed 1
FOREVER = 1e6  # seconds of a freeze that does not end
FIFTH = 5  # every fifth seed draws one of ELASTIC, those that end with SEVEN one of OUTER, the others one of OTHERS
SEVEN, EIGHT = 7, 8  # with the seeds that end with EIGHT, gossip swaps
OTHERS = ("fast", "gossip", "gossip", "ps", "local", "allreduce", "dpsgd", "local-sgd")
ELASTIC = ("async-easgd", "async-easgd", "eamsgd", "eamsgd", "easgd", "sync-easgd", "hogwild-easgd", "hogwild-sgd")
OUTER = ("diloco", "diloco", "noloco", "gasloc", "sparta", "epidemic")
SHARED = ("hogwild-easgd", "hogwild-sgd")  # methods that need one node
CLAIMED = (*CLAIMING, *SHARED)
COMPRESSING = ("allreduce", "dpsgd", "ps", "sync-easgd", "easgd", "async-easgd", "eamsgd")  # take --compress
CODES = ("bf16", "int8", "sign", "topk:0.1", "randk:0.1")
SWAPPED = ("none", "bf16", "int8")  # codes of gossip by swaps
DATA = f"synthetic:{IMAGES}x2x2x1:2"
MODEL = f"{Path(__file__).with_name('tiny.py')}:build"
# What the engine depends on. There are few variants, because each of them records its step anew.
VARIANTS: tuple[dict[str, Any], ...] = (
    {"seed": 0, "optimizer": "sgd"},
    {"seed": 1, "optimizer": "adam"},
    {"seed": 2, "optimizer": "sgd", "validation": 0.25},
)  # fmt: skip


@dataclass(frozen=True)
class Death:
    time: float
    rank: int


@dataclass(frozen=True)
class Freeze:
    time: float
    rank: int
    seconds: float


@dataclass(frozen=True)
class Join:
    """A newcomer is started in the place of a rank: a new place, or that of a rank that may have died."""

    time: float
    rank: int


@dataclass(frozen=True)
class Stop:
    """A signal to all ranks, or to one of them. rank: -1 stands for all."""

    time: float
    rank: int = -1


@dataclass(frozen=True)
class Cut:
    """For some time, no message leaves or reaches a node. Messages wait."""

    time: float
    node: int
    seconds: float


@dataclass(frozen=True)
class FullDisk:
    """For some time, writing to a file fails."""

    time: float
    seconds: float


@dataclass(frozen=True)
class PowerCut:
    """All ranks die at once."""

    time: float


@dataclass(frozen=True)
class Part:
    """replicas: their number at the beginning. faults: what happens. places: for others that join, above the ranks that
    are there from the beginning."""

    replicas: int
    faults: tuple[Any, ...] = ()
    places: int = 0

    def of(self, kind: type) -> list[Any]:
        """Return the faults of this kind."""
        return [fault for fault in self.faults if type(fault) is kind]


@dataclass(frozen=True)
class Machines:
    """speeds: of the devices, which nodes take in turn. devices: of each node. slow: the factor of the slow links.

    slow_node: the node whose links are slow, or -1.
    """

    speeds: tuple[float, ...]
    devices: int
    inside: Link
    between: Link
    jitter: float = 0.0
    stragglers: float = 0.0
    slow_node: int = -1
    slow: float = 1.0


@dataclass(frozen=True)
class Scenario:
    """options: of the run, besides the folder. markers: whether replicas find out with markers that no message is in
    flight, as in a real job, and not from the simulation (Fabric.drain)."""

    seed: int
    machines: Machines
    options: Mapping[str, Any]
    parts: tuple[Part, ...]
    markers: bool = True

    @property
    def method(self) -> str:
        return str(self.options["method"])

    @property
    def servers(self) -> int:
        return declared.servers(self.method, self.options.get("center"))

    def cluster(self, part: Part, ranks: int, work: str, begin: float) -> Cluster:
        """Return the cluster of a part, with its deaths, joins and freezes; playing.py causes the other faults.

        work: the key under [measured]. begin: the virtual time at which the part begins.
        """
        machines = self.machines
        nodes = -(-ranks // machines.devices)
        kinds = [f"device{kind}" for kind in range(len(machines.speeds))]
        devices = {name: Device(speed=speed, jitter=machines.jitter) for name, speed in zip(kinds, machines.speeds)}
        groups = tuple(Group(f"node{node}", 1, (kinds[node % len(kinds)],) * machines.devices) for node in range(nodes))
        slow = Link(machines.between.alpha * machines.slow, machines.between.beta * machines.slow,
                    drop=machines.between.drop, timeout=machines.between.timeout)  # fmt: skip
        name = f"node{machines.slow_node}"
        links = {pair: slow for other in groups for pair in ((name, other.name), (other.name, name))}
        return Cluster(
            groups, devices, machines.inside, machines.between, links if machines.slow_node >= 0 else {},
            Stragglers(machines.stragglers),
            deaths=tuple(Event(begin + one.time, one.rank) for one in part.of(Death)),
            joins=tuple(Event(begin + one.time, one.rank) for one in part.of(Join)),
            freezes=tuple(FreezeEvent(begin + one.time, one.rank, seconds=one.seconds) for one in part.of(Freeze)),
            measured={work: SECONDS}, file=f"scenario {self.seed}",
        )  # fmt: skip

    def __str__(self) -> str:
        chosen = ", ".join(f"{name} {value}" for name, value in self.options.items())
        return f"scenario {self.seed}: {chosen}; {'; then '.join(_described(part) for part in self.parts)}"


def _described(part: Part) -> str:
    faults = [f"{type(one).__name__} {' '.join(f'{getattr(one, each.name):.4g}' for each in fields(one))}"
              for one in part.faults]  # fmt: skip
    return f"{part.replicas} replicas: {', '.join(faults) or 'no faults'}"


# -- drawing ---------------------------------------------------------------------------------------------


class Drawing:
    """Draws the parts of a scenario from one random generator."""

    def __init__(self, seed: int) -> None:
        self.seed, self.chance = seed, np.random.default_rng(seed)

    def happens(self, probability: float) -> bool:
        return bool(self.chance.random() < probability)

    def one_of(self, values: Any) -> Any:
        return values[int(self.chance.integers(len(values)))]

    def between(self, least: float, most: float) -> float:
        return float(self.chance.uniform(least, most))

    def magnitude(self, least: float, most: float) -> float:
        """Return a number between two powers of ten: its logarithm is uniform."""
        return float(10.0 ** self.between(least, most))

    def scenario(self) -> Scenario:
        machines, options = self.machines(), self.options()
        replicas = int(self.chance.integers(2, 9))
        if options["method"] in SHARED:
            machines = replace(machines, devices=8)
        asynchronous = options["method"] in (*CLAIMED, "local")
        servers = declared.servers(options["method"], options.get("center"))
        parts: list[Part] = []
        while not parts or (len(parts) < 3 and self.happens(0.45)):
            if parts and self.happens(0.4):
                replicas = int(self.chance.integers(2, 9))
            faults = self.faults(options, machines, replicas, replicas + servers, asynchronous)
            parts.append(Part(replicas, tuple(faults)))
        markers = self.happens(0.75)
        if options["method"] in JOINABLE:
            parts = [self.with_joins(part, options, machines, servers) for part in parts]
        parts = [replace(part, faults=tuple(sorted(self.early(part.faults), key=lambda fault: fault.time)))
                 for part in parts]  # fmt: skip
        return Scenario(self.seed, machines, options, tuple(parts), markers)

    def machines(self) -> Machines:
        inside = Link(self.magnitude(-6, -3), self.magnitude(-10, -6))
        drop = self.between(0, 0.3) if self.happens(0.2) else 0.0
        between = Link(self.magnitude(-5, -2), self.magnitude(-9, -5), drop=drop, timeout=self.magnitude(-3, -1))
        speeds = [self.magnitude(-0.5, 0.5) for _ in range(self.one_of((1, 2, 3)))]
        slow = self.happens(0.2)
        return Machines(
            tuple(speeds), self.one_of((1, 1, 2, 4)), inside, between, self.one_of((0.0, 0.1, 0.5)),
            0.1 if self.happens(0.2) else 0.0, self.one_of((0, 1)) if slow else -1,
            self.magnitude(0, 2) if slow else 1.0,
        )  # fmt: skip

    def options(self) -> dict[str, Any]:
        method = self.one_of(OUTER if self.seed % 10 == SEVEN else OTHERS if self.seed % FIFTH else ELASTIC)
        variant = self.one_of(VARIANTS)
        options: dict[str, Any] = {"method": method, **variant, "stall": self.between(0.5, 10) * PIECE * SECONDS}
        if self.happens(0.75):
            options["epochs"] = self.one_of((1, 1, 2, 3))
        else:
            options["steps"] = int(self.chance.integers(1, 9))
        if method == "gossip":
            options["mix"] = self.one_of(("mass", "mass", "half", "clock"))
            kinds = ("push", "push-pull") if options["mix"] == "mass" else ("push", "push-pull", "pull")
            options["exchange"] = self.one_of(kinds)
            options["peer"] = self.one_of(("uniform", "hierarchical", "speed", "topology"))
            options["block"] = self.one_of(("whole", "layers"))
            options["period"] = self.one_of((1, 1, 2))
            if self.seed % 10 == EIGHT:
                code = SWAPPED[self.seed // 10 % 3]
                options |= {"exchange": "swap", "mix": "half", "block": "whole", "compress": code}
        elif method == "fast":
            options["exchange"] = self.one_of(("gradients", "gradients", "models"))
            options["max_age"] = self.one_of((1, 8))
        elif method == "local-sgd":
            options["period"] = self.one_of((1, 2, 4))
        elif method == "allreduce":
            options["bucket"] = self.one_of((1.0, 1e-5))
        elif method in ELASTIC:
            options |= self.elastic(method)
        elif method in OUTER:
            options |= self.outer(method)
        if method == "dpsgd" or options.get("peer") == "topology":
            options["topology"] = self.one_of(("ring", "one-peer-exponential", "complete"))
        if method in ("allreduce", "dpsgd", "local-sgd"):
            options["on_death"] = self.one_of(("stop", "continue"))
        if method == "dpsgd":
            options["overlap"] = self.happens(0.3)
        if method in ("gossip", "dpsgd") and options["optimizer"] == "sgd" and self.happens(0.3):
            options["velocity"] = self.one_of(("mixed", "quasi-global"))
        return options | self.codes(options)

    def codes(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Draw --compress for a third of the runs that can take it.

        A separate generator draws it, so all other draws stay the same.
        """
        chance = np.random.default_rng((self.seed, 1))
        fixed = options.get("topology") != "one-peer-exponential" and not {"velocity"} & options.keys()
        apt = options["method"] != "dpsgd" or (fixed and not options["overlap"])
        apt &= options["method"] != "sync-easgd" or options["center"] != "rank"
        if options["method"] not in COMPRESSING or not apt or chance.random() > 1 / 3:
            return {}
        return {"compress": CODES[int(chance.integers(len(CODES)))]}

    def elastic(self, method: str) -> dict[str, Any]:
        """Draw the options of a method with a center."""
        options: dict[str, Any] = {"optimizer": "sgd"} if method == "eamsgd" else {}
        if method == "hogwild-sgd":
            return options
        options["period"] = self.one_of((1, 1, 2, 4))
        if method == "hogwild-easgd":
            return options
        options["center"] = self.one_of(("rank", "beside", "copies") if method == "sync-easgd" else ("rank", "beside"))
        if method in ("easgd", "sync-easgd"):
            options["overlap"] = self.happens(0.5)
            if options["center"] != "rank":
                options["on_death"] = self.one_of(("stop", "continue"))
        return options

    def outer(self, method: str) -> dict[str, Any]:
        """Draw the options of a method with outer steps."""
        options: dict[str, Any] = {"on_death": self.one_of(("stop", "continue"))}
        if method == "sparta":
            return {**options, "mask": self.one_of((0.01, 0.5))}
        period = options["period"] = self.one_of((1, 2, 2, 4))
        if method == "diloco":
            options["fragments"] = self.one_of([count for count in (1, 1, 2) if count <= period])
            options["merge_after"] = int(self.chance.integers(period))
            options["merge_weight"] = self.one_of((0.0, 0.25))
        elif method == "gasloc":
            options["topology"] = self.one_of(("ring", "complete", "star"))
        return options

    def moment(self, options: Mapping[str, Any], machines: Machines, replicas: int) -> float:
        """Draw the time of a fault: usually during the training, sometimes soon after it."""
        pieces = options["epochs"] * IMAGES / PIECE if "epochs" in options else options["steps"] * replicas
        nodes = [machines.speeds[(rank // machines.devices) % len(machines.speeds)] for rank in range(replicas)]
        together = sum(nodes) if options["method"] in CLAIMED else min(nodes) * replicas
        return self.between(0, 1.4) * pieces * PIECE * SECONDS / together

    def faults(
        self, options: Mapping[str, Any], machines: Machines, replicas: int, ranks: int, asynchronous: bool
    ) -> list[Any]:
        found: list[Any] = []

        def time() -> float:
            """Draw a time, sometimes soon after another fault."""
            if found and self.happens(0.4):
                return float(self.one_of(found).time + self.magnitude(-5, -1.5))
            return self.moment(options, machines, replicas)

        rank: Callable[[], int] = lambda: int(self.chance.integers(ranks))  # noqa: E731
        while self.happens(0.55) and len(found) < 6:
            match self.one_of(("stop", "stop", "death", "death", "freeze", "cut", "disk", "power")):
                case "stop":
                    found.append(Stop(time(), rank() if self.happens(0.3) else -1))
                case "death":
                    found.append(Death(time(), rank()))
                case "freeze":
                    # Synchronous methods wait for a frozen rank.
                    endless = asynchronous and self.happens(0.3)
                    seconds = FOREVER if endless else options["stall"] * self.magnitude(-1, 1)
                    found.append(Freeze(time(), rank(), seconds))
                case "cut":
                    found.append(Cut(time(), int(self.chance.integers(-(-ranks // machines.devices))),
                                     self.magnitude(-3, 0)))  # fmt: skip
                case "disk":
                    found.append(FullDisk(time(), self.magnitude(-4, -1)))
                case "power":
                    found.append(PowerCut(time()))
        return found

    def with_joins(self, part: Part, options: Mapping[str, Any], machines: Machines, servers: int) -> Part:
        """Add newcomers, and faults at about the time at which they join."""
        faults: list[Any] = [*part.faults]
        times: list[float] = []
        while self.happens(0.4) and len(times) < 4:
            if faults and self.happens(0.5):
                times.append(self.one_of(faults).time + self.magnitude(-5, -1))
            else:
                times.append(self.moment(options, machines, part.replicas))
        ranks, places = part.replicas + servers, 0
        for time in sorted(times):
            died = [fault.rank for fault in part.of(Death) if fault.time < time and fault.rank != ranks - servers]
            if died and self.happens(0.6):
                rank = self.one_of(died)
            else:
                rank, places = ranks + places, places + 1
            faults.append(Join(time, rank))
            if self.happens(0.5):
                soon, other = time + self.magnitude(-5, -1), int(self.chance.integers(part.replicas))
                rank = rank if self.happens(0.6) else other
                endless = options["method"] in CLAIMING and self.happens(0.5)
                seconds = FOREVER if endless else self.magnitude(-3, 1)
                faults.append(Death(soon, rank) if self.happens(0.5) else Freeze(soon, rank, seconds))
        return Part(part.replicas, tuple(faults), places)

    def early(self, faults: tuple[Any, ...]) -> tuple[Any, ...]:
        """Sometimes let a fault come earlier: while the ranks agree on how to begin."""
        if not faults or not self.happens(0.15):
            return faults
        first, *others = faults
        if isinstance(first, Join):
            return faults
        return (replace(first, time=min(first.time, self.magnitude(-5, -1.5))), *others)


def draw(seed: int) -> Scenario:
    """Return the scenario of a seed, always the same one."""
    return Drawing(seed).scenario()
