"""The description of a cluster in a TOML file, for simulations (transport/sim.py).

    [devices.core]                  # a kind of device; each device runs one replica
    flops = 40e9                    # FLOP/s that training reaches; or `speed`, relative to [measured]
    jitter = 0.05                   # sigma of the lognormal factor on each gradient's time

    [[nodes]]
    name = "left"                   # left-0 ... left-3
    count = 4
    devices = ["core", "core"]

    [inside]                        # the link between devices of a node
    alpha = 1e-6                    # seconds: a message of n bytes takes alpha + n * beta seconds
    rate = 80e9                     # bit/s, which is 8 / beta
    [between]                       # the link between nodes; a node's network card sends one message at a time
    alpha = 50e-6
    rate = 10e9
    [host]                          # the link between a node's host and its devices, if these have their own memory
    alpha = 10e-6
    rate = 96e9

With [host], each batch is copied to its device first, and messages between nodes pass through the hosts. A kind of
device with `host = true` is the host itself, for example for the server of `ps`.

Further tables: [[links]], [stragglers], [[deaths]], [[joins]] and [[freezes]]. A table [[links]] replaces [between] for
two groups of nodes. `python -m minidl.simulate --measure` writes the table [measured]: the seconds per image for each
model and data set. All other numbers are entered by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from minidl import errors, reading
from minidl.comm.cluster_tables import Wrong, check_keys, read_table, table_of, tables_of
from minidl.errors import ConfigError, nearest
from minidl.reading import Unreadable, blaming
from minidl.run.options import Limits, limits, option, options

EXAMPLES = Path(errors.__file__).with_name("clusters")  # in the package's folder

LARGEST = 1_000_000  # devices of a cluster
POSITIVE = limits(above=0)
NATURAL = limits(min=0)
JITTER = limits(min=0, max=10)
CHANCE = limits(min=0, below=1)
MANY = limits(min=1, max=LARGEST)
UNSET = -1  # default of an option that may be omitted


def _entry(default: Any, limits: Limits | None = None) -> Any:
    return option(default, "", group="", limits=limits)


@dataclass(frozen=True)
class Device:
    """A kind of device, with either flops or speed.

    flops: FLOP/s. speed: relative to [measured]. memory: bytes/s that updates and mixes reach. batch: seconds that each
    gradient takes in addition to the time of its images. host: whether it is the host of its node (see [host]).
    kernel: seconds that each pass over a vector takes in addition to its bytes: the start of a kernel on a GPU.
    additions: whether the work of a collective, its additions and codes, takes time; by default it takes none.
    """

    flops: float = _entry(0.0, POSITIVE)
    speed: float = _entry(0.0, POSITIVE)
    memory: float = _entry(10e9, POSITIVE)
    jitter: float = _entry(0.0, JITTER)
    batch: float = _entry(0.0, NATURAL)
    kernel: float = _entry(0.0, NATURAL)
    host: bool = _entry(False)
    additions: bool = _entry(False)


@dataclass(frozen=True)
class Link:
    """A link: a message of n bytes takes alpha + n * beta seconds.

    `drop` is the probability that a message between nodes is lost. A lost message is repeated after `timeout` seconds.
    shared: for [inside] and [host], whether the link of a node carries one message at a time.
    """

    alpha: float = _entry(0.0, NATURAL)
    beta: float = _entry(0.0, NATURAL)
    rate: float = _entry(0.0, POSITIVE)  # bit/s, an alternative to beta
    drop: float = _entry(0.0, CHANCE)
    timeout: float = _entry(0.2, POSITIVE)
    shared: bool = _entry(False)


@dataclass(frozen=True)
class Stragglers:
    """With `probability`, a gradient's duration is multiplied by `factor`."""

    probability: float = _entry(0.0, CHANCE)
    factor: float = _entry(10.0, POSITIVE)


@dataclass(frozen=True)
class Event:
    """A death or join at `time` seconds. Either one rank dies or joins, or all ranks of a node or group of nodes."""

    time: float = _entry(0.0, NATURAL)
    rank: int = _entry(UNSET, NATURAL)
    node: str = _entry("")


@dataclass(frozen=True)
class FreezeEvent(Event):
    """The processes are stopped for `seconds`, as by SIGSTOP."""

    seconds: float = _entry(10.0, POSITIVE)


EVENTS: dict[str, type[Event]] = {"deaths": Event, "joins": Event, "freezes": FreezeEvent}  # in the order of `Place`


@dataclass(frozen=True)
class Group:
    """A group of `count` equal nodes."""

    name: str = _entry("")
    count: int = _entry(1, MANY)
    devices: tuple[str, ...] = _entry(())


class Place(NamedTuple):
    """The placement of ranks. nodes and devices have an entry for each rank, groups and names for each node."""

    nodes: tuple[int, ...]
    devices: tuple[Device, ...]
    groups: tuple[str, ...]
    names: tuple[str, ...]
    deaths: tuple[tuple[float, int], ...]  # (time, rank)
    joins: tuple[tuple[float, int], ...]
    freezes: tuple[tuple[float, int, float], ...]  # (time, rank, seconds)


@dataclass(frozen=True)
class Cluster:
    """A cluster, as a file describes it.

    links: (group, group) -> link, in both orders. measured: "model data" -> seconds per image at speed 1.
    repeat: whether the list of nodes repeats if there are more ranks than devices. file: for error messages.
    """

    groups: tuple[Group, ...]
    devices: Mapping[str, Device]
    inside: Link = Link()
    between: Link | None = None
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    stragglers: Stragglers = Stragglers()
    deaths: tuple[Event, ...] = ()
    joins: tuple[Event, ...] = ()
    freezes: tuple[FreezeEvent, ...] = ()
    measured: Mapping[str, float] = field(default_factory=dict)
    repeat: bool = False
    file: str = "cluster"
    host: Link | None = None

    @property
    def size(self) -> int:
        """The number of devices."""
        return sum(group.count * len(group.devices) for group in self.groups)

    def link(self, one: str, other: str) -> Link:
        """Return the link between nodes of two groups. Raises ConfigError if there is none."""
        found = self.links.get((one, other)) or self.between
        if found is None:
            raise self.wrong(f"no link between nodes of {one!r} and {other!r}: give [between], or a [[links]] for them")
        return found

    def wrong(self, message: str) -> ConfigError:
        return ConfigError(f"cluster file {self.file!r}: {message}")

    def place(self, ranks: int) -> Place:
        """Place ranks on devices, in the order of the file.

        Raises ConfigError if there are too few devices, or if the rank or node of an event does not exist.
        """
        if ranks < 1 or (ranks > self.size and not self.repeat):
            raise self.wrong(f"{ranks} ranks on {self.size} devices: give fewer ranks, more devices, or repeat = true")
        nodes: list[int] = []
        devices: list[Device] = []
        groups: list[str] = []
        names: list[str] = []
        counts: Counter[str] = Counter()
        every = [group for group in self.groups for _ in range(group.count)]
        for group in cycle(every) if self.repeat else every:
            if len(nodes) == ranks:
                break
            alone = group.count == 1 and not self.repeat
            names.append(group.name if alone else f"{group.name}-{counts[group.name]}")
            groups.append(group.name)
            counts[group.name] += 1
            for name in group.devices[: ranks - len(nodes)]:
                nodes.append(len(groups) - 1)
                devices.append(self.devices[name])
        ranks_at: dict[str, list[int]] = {}
        for rank, node in enumerate(nodes):
            for name in {names[node], groups[node]}:
                ranks_at.setdefault(name, []).append(rank)
        events = (self._at(key, getattr(self, key), ranks, ranks_at) for key in EVENTS)
        return Place(tuple(nodes), tuple(devices), tuple(groups), tuple(names), *events)

    def _at(
        self, key: str, events: tuple[Event, ...], ranks: int, ranks_at: Mapping[str, list[int]]
    ) -> tuple[tuple[Any, ...], ...]:
        """Return (time, rank) of the events of one kind. ranks_at: the ranks of each node and each group of nodes."""
        found: list[tuple[Any, ...]] = []
        for event in events:
            if event.node:
                which = ranks_at.get(event.node, [])
            else:
                which = [event.rank] if event.rank < ranks else []
            if not which:
                what = f"node {event.node[:60]!r}" if event.node else f"rank {event.rank}"
                raise self.wrong(f"[[{key}]] {what}: there is no such {what.split()[0]} among {ranks} ranks"
                                 + nearest(event.node, list(ranks_at)[:1000]))  # fmt: skip
            more = (event.seconds,) if isinstance(event, FreezeEvent) else ()
            found += [(event.time, rank, *more) for rank in which]
            if len(found) > LARGEST:
                raise self.wrong(f"[[{key}]] of over {LARGEST:,} ranks in all: expected each rank at most once")
        return tuple(sorted(found))

    def seconds_per_image(self, device: Device, work: str, flops: float) -> float:
        """Return the time of a gradient in s per image. work: "model data", a key of [measured]. flops: FLOP per image.

        Raises ConfigError if the device has a `speed` and [measured] has no such key.
        """
        if device.flops:
            return flops / device.flops
        if work not in self.measured:
            raise self.wrong(f"[measured] has no {work!r}, but a device with `speed` needs this time: "
                             "write it with --measure, or give the device flops")  # fmt: skip
        return self.measured[work] / device.speed


def uniform(ranks: int, per_node: int = 1, **link: Any) -> Cluster:
    """Return a cluster of equal devices with 10 GFLOP/s, `per_node` on each node.

    link: alpha, beta, ... for both [inside] and [between].
    """
    groups = (Group("node", -(-ranks // per_node), ("core",) * per_node),)
    return Cluster(groups, {"core": Device(flops=10e9)}, inside=Link(**link), between=Link(**link))


def load(path: str | Path) -> Cluster:
    """Load a cluster from a file. path: a path, or the name of an example that comes with minidl.

    Raises ConfigError if there is no such file, or if a key in it is wrong.
    """
    return parse(read(path), str(path))


def read(path: str | Path) -> str:
    """Return the text of a file or example, as for `load`. Raises ConfigError if it cannot be read."""
    file = Path(path)
    known = sorted(example.stem for example in EXAMPLES.glob("*.toml"))
    if str(path) in known:
        file = EXAMPLES / f"{path}.toml"
    with blaming(f"cluster file {str(path)!r}", ConfigError):
        try:
            return reading.text(file, reading.TOML_LIMIT)
        except FileNotFoundError:
            raise ConfigError(f"there is no cluster file {str(path)!r}.{nearest(str(path), known)} "
                              f"Examples that come with minidl: {', '.join(known)}") from None  # fmt: skip


def parse(text: str, file: str = "cluster") -> Cluster:
    """Return the cluster that a TOML text describes. Raises ConfigError, which names `file` and the wrong key."""
    try:
        return _Reader(reading.toml_table(text), file).cluster()
    except (Wrong, Unreadable) as error:
        raise ConfigError(f"cluster file {file!r}: {error}") from None


class _Reader:
    """A reader of the tables of a file, which checks them and returns a Cluster."""

    def __init__(self, top: dict[str, Any], file: str) -> None:
        self.top, self.file = top, file

    def cluster(self) -> Cluster:
        keys = ("repeat", "devices", "nodes", "inside", "between", "host", "links", "stragglers", *EVENTS, "measured")
        check_keys(self.top, keys, "")
        devices = {name: self.device(name, table) for name, table in table_of(self.top, "devices").items()}
        groups = tuple(self.group(table, devices) for table in tables_of(self.top, "nodes"))
        if not groups:
            raise Wrong("no replicas: it has no [[nodes]]")
        names = [group.name for group in groups]
        for name, count in Counter(names).items():
            if count > 1:
                raise Wrong(f"[[nodes]] name: {name!r} is used twice")
        devices_in_all = sum(group.count * len(group.devices) for group in groups)
        if devices_in_all > LARGEST:
            raise Wrong(f"[[nodes]] have {devices_in_all:,} devices; expected at most {LARGEST:,}")
        repeat = self.top.get("repeat", False)
        if not isinstance(repeat, bool):
            raise Wrong(f"repeat: expected true or false, got {repeat!r}")
        cluster = Cluster(
            groups, devices, self.link(table_of(self.top, "inside"), "[inside]"),
            self.link(table_of(self.top, "between"), "[between]") if "between" in self.top else None,
            self.links(names), read_table(Stragglers, table_of(self.top, "stragglers"), "[stragglers]"),
            measured=self.measured(), repeat=repeat, file=self.file, host=self.host(devices),
            **{key: self.events(key) for key in EVENTS},
        )  # fmt: skip
        self.check_links(cluster)
        return cluster

    def device(self, name: str, table: Any) -> Device:
        where = f"[devices.{name}]"
        device = read_table(Device, table, where)
        if bool(device.flops) == bool(device.speed):
            raise Wrong(f"{where} expected flops or speed, {'not both' if device.flops else 'got neither'}")
        return device

    def group(self, table: dict[str, Any], devices: Mapping[str, Device]) -> Group:
        own = {key: value for key, value in table.items() if key != "devices"}
        group = read_table(Group, own, "[[nodes]]", besides=("devices",))
        where = f"[[nodes]] {group.name!r}"
        if not group.name:
            raise Wrong("[[nodes]] name: expected a name")
        names = table.get("devices")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise Wrong(f"{where} devices: expected a list of kinds of devices, got {names!r}")
        for name in names:
            if name not in devices:
                raise Wrong(f"{where} devices: there is no [devices.{name}].{nearest(name, list(devices))}")
        return Group(group.name, group.count, tuple(names))

    def link(self, table: dict[str, Any], where: str) -> Link:
        link = read_table(Link, table, where)
        if link.rate and "beta" in table:
            raise Wrong(f"{where} expected beta or rate, not both")
        return replace(link, beta=8 / link.rate, rate=0.0) if link.rate else link

    def host(self, devices: Mapping[str, Device]) -> Link | None:
        if "host" in self.top:
            return self.link(table_of(self.top, "host"), "[host]")
        for name, device in devices.items():
            if device.host:
                raise Wrong(f"[devices.{name}] host: without a table [host] all devices are hosts; give the table")
        return None

    def links(self, names: list[str]) -> dict[tuple[str, str], Link]:
        found = {}
        for table in tables_of(self.top, "links"):
            pair = table.get("groups")
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(name, str) for name in pair):
                raise Wrong(f"[[links]] groups: expected names of two groups of nodes, got {pair!r}")
            for name in pair:
                if name not in names:
                    raise Wrong(f"[[links]] groups: there are no nodes {name!r}.{nearest(name, names)}")
            link = self.link({key: value for key, value in table.items() if key != "groups"}, f"[[links]] {pair}")
            found[pair[0], pair[1]] = found[pair[1], pair[0]] = link
        return found

    def events(self, key: str) -> tuple[Any, ...]:
        found = tuple(read_table(EVENTS[key], table, f"[[{key}]]") for table in tables_of(self.top, key))
        for event in found:
            if (event.rank == UNSET) == (event.node == ""):
                raise Wrong(f"[[{key}]] expected a rank or a node{', not both' if event.node else ''}")
        return found

    def measured(self) -> dict[str, float]:
        check = options(Device)["flops"]
        found = {}
        for name, value in table_of(self.top, "measured").items():
            try:
                found[name] = check.check(value)
            except ConfigError:
                raise Wrong(f"[measured] {name!r}: expected seconds per image above 0, got {value!r}") from None
        return found

    def check_links(self, cluster: Cluster) -> None:
        """Raise Wrong if two nodes have no link: messages are not routed through other nodes."""
        if cluster.between is not None:
            return
        for i, one in enumerate(cluster.groups):
            for other in cluster.groups[i:]:
                several = one is not other or one.count > 1 or cluster.repeat
                if several and (one.name, other.name) not in cluster.links:
                    raise Wrong(f"nodes {other.name!r} cannot be reached from {one.name!r}: there is no [between], "
                                 f'and no [[links]] with groups = ["{one.name}", "{other.name}"]')  # fmt: skip
