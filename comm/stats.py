"""Statistics of a run: the messages of each replica, its waiting time, and the staleness of the models it mixed in.

    a replica's time, on the clock      gradient | waiting | mix | update | gradient | waiting | mix | ...
                                        `--------------- the rest is "other" ---------------´
    wait_fraction                       waiting / (waiting + gradient + update + mix + data)
    edges                               for each pair (sender, receiver): bytes, messages
    staleness                           age of a vector when it is mixed in: histogram over 0, 1, 2, 3-4, ... steps

Each rank has one Stats. The fabric reports messages and waits to it, the replica reports work, and the method
reports staleness. `start` and `stop` mark the periods of training. The time between these periods (evaluations,
checkpoints) is not counted. Bytes sent in that time are counted, and also reported separately.

A concurrent operation (`Fabric.allreduce_start`) waits while the replica computes. Later the replica may wait for the
result of the operation. `Stats.beside` counts these two kinds of waiting separately.

Edges connect ranks that the job began with; messages to newcomers count in the totals only. At the end the leader
gathers a `vector` of statistics from each live replica. `from_vector` converts a vector to a report, and `merge`
combines the reports.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from minidl.comm import staleness
from minidl.comm.staleness import BINS
from minidl.comm.trace import BESIDE, KINDS, MAIN, MESSAGES, OTHER, RECEIVED, SENT, WAITING, Trace
from minidl.comm.transport.messages import Pending
from minidl.errors import ConfigError

T = TypeVar("T")
Report = dict[str, Any]

WORK = ("gradient", "update", "mix", "data")
NEVER = -1.0  # instead of a time
DECIDED = ("exchanges", "exchanges_suppressed", "bytes_suppressed")  # with --adaptive
COUNTS = (
    "bytes_off_the_clock", "messages_off_the_clock", "bytes_before", "messages_before", "sends_skipped", "reads_missed",
    "reads_overlapped", *DECIDED,
)  # fmt: skip
NUMBERS = (
    "rank", "elapsed", "waiting", *WORK, "beside_working", "beside_waiting", *COUNTS, "staleness_sum", "staleness_max",
    "ended",
)  # fmt: skip
_KIND = {name: number for number, name in enumerate(KINDS)}

# True inside a concurrent operation. Each greenlet and each thread has its own value of a context variable.
_beside: ContextVar[bool] = ContextVar("beside", default=False)


class Stats:
    """The statistics of one of `size` ranks. now: the fabric's clock, in seconds.

    Two threads may write simultaneously. No lock is needed, because CPython switches threads at calls and jumps, not
    within `array[i] += number`.
    """

    def __init__(
        self, rank: int = 0, trace: bool = False, size: int = 1, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.rank = rank
        self.trace: Trace | None = Trace() if trace else None
        self.running = False
        self.attach(size, now)

    def attach(self, size: int, now: Callable[[], float]) -> None:
        """Reset the statistics, for `size` ranks. Called by the fabric."""
        self.size, self.now = size, now
        self.sent_bytes, self.sent_messages, self.received_bytes, self.received_messages = (
            array("q", bytes(8 * size)) for _ in range(4)
        )
        self.busy: set[int] = set()  # the peers to which the last attempt to send failed
        self.skipped = self.misses = self.overlaps = 0
        self.decided = dict.fromkeys(DECIDED, 0)
        self.ages = [0] * BINS
        self.age_sum = self.age_max = 0.0
        self.seconds = [[0.0] * len(KINDS), [0.0] * len(KINDS)]  # [lane][kind], for lanes MAIN and BESIDE
        self.elapsed, self.started = 0.0, NEVER
        self.ended = NEVER  # when this replica's last step ended, or if it has made none, when its clock started
        self.apart = [0, 0]  # bytes and messages sent while the clock was stopped
        self.mark = (0, 0)  # bytes and messages sent until the clock last stopped
        self.before = [0, 0]  # bytes and messages to newcomers, and of an earlier run with other ranks (`take_over`)
        if self.trace is not None:
            self.trace = Trace.for_ranks(size)

    # -- counting ----------------------------------------------------------------------------------------

    def sent(self, peer: int, size: int) -> None:
        """Count a message of `size` bytes that was sent to a peer."""
        if peer < self.size:
            self.sent_bytes[peer] += size
            self.sent_messages[peer] += 1
        else:
            self.before = [self.before[0] + size, self.before[1] + 1]
        self.busy.discard(peer)
        if self.trace is not None:
            now = self.now()
            self.trace.keep(now, now, SENT, MESSAGES, peer, size)

    def received(self, peer: int, size: int) -> None:
        """Count a message of `size` bytes that was received from a peer."""
        if peer < self.size:
            self.received_bytes[peer] += size
            self.received_messages[peer] += 1
        if self.trace is not None:
            now = self.now()
            self.trace.keep(now, now, RECEIVED, MESSAGES, peer, size)

    def sends_skipped(self, peer: int) -> None:
        """Count a message that could not be sent, usually because the edge was busy. Repeated attempts count once."""
        if peer not in self.busy:
            self.busy.add(peer)
            self.skipped += 1

    def reads_missed(self, peer: int) -> None:
        """Count a read that failed because a peer's state changed, or a publication for which no memory was free."""
        self.misses += 1

    def reads_overlapped(self) -> None:
        """Count a read of a shared vector during which another replica wrote to it (comm/methods/hogwild.py)."""
        self.overlaps += 1

    def exchanged(self) -> None:
        """Count an exchange for which a method with --adaptive decided (comm/methods/adaptive.py)."""
        self.decided["exchanges"] += 1

    def suppressed(self, exchanges: int, size: int) -> None:
        """Count exchanges that --adaptive left out, in which this rank would have sent `size` bytes."""
        self.decided["exchanges_suppressed"] += exchanges
        self.decided["bytes_suppressed"] += size

    def stale(self, steps: float) -> None:
        """Count the staleness of a vector that was mixed in: its sender has made this many steps since sending it.

        A parameter server calls this for each gradient. In this case, `steps` is the number of steps that the server
        has made since it sent its model to the worker.
        """
        self.ages[staleness.bin_of(steps)] += 1
        self.age_sum += steps
        if steps > self.age_max:
            self.age_max = float(steps)

    def waited(self, began: float, ended: float) -> None:
        """Count time during which this replica, or a concurrent operation, waited for other replicas."""
        self._spent(WAITING, began, ended)

    def worked(self, what: str, began: float, ended: float) -> None:
        """Count working time: one of WORK; anything else is "other". Spans must not be nested."""
        self._spent(_KIND.get(what, OTHER), began, ended)

    def _spent(self, kind: int, began: float, ended: float) -> None:
        lane = BESIDE if _beside.get() else MAIN
        if self.running:
            self.seconds[lane][kind] += ended - began
        if self.trace is not None:
            self.trace.keep(began, ended, kind, lane, -1, 0)

    def beside(self, start: Callable[[Callable[[], T]], Pending[T]], work: Callable[[], T]) -> Pending[T]:
        """Call start(work). The replica's waiting time includes its wait for the result, but no waits inside `work`."""
        return Beside(self, start(partial(_apart, work)))

    def stepped(self) -> None:
        """Note that a step of this replica has ended."""
        self.ended = self.now()

    # -- the clock ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the clock: training begins or continues."""
        if not self.running:
            count = self._count()
            self.apart = [apart + now - then for apart, now, then in zip(self.apart, count, self.mark)]
            now = self.now()
            if self.started == NEVER:
                self.ended = now
            self.running, self.started = True, now

    def stop(self) -> None:
        """Stop the clock: training pauses."""
        if self.running:
            self.elapsed += self.now() - self.started
            self.running, self.mark = False, self._count()

    def _count(self) -> tuple[int, int]:
        """Return (bytes, messages) sent so far."""
        return sum(self.sent_bytes), sum(self.sent_messages)

    # -- results -----------------------------------------------------------------------------------------

    def vector(self) -> np.ndarray:
        """Return the statistics, float64 (len(NUMBERS) + BINS + 4 * size,): the same length for all ranks of a job."""
        main, beside = self.seconds
        apart: Sequence[int] = self.apart
        elapsed = self.elapsed
        if self.running:
            elapsed += self.now() - self.started
        else:
            apart = [a + now - then for a, now, then in zip(apart, self._count(), self.mark)]
        numbers = [
            self.rank, elapsed, main[WAITING], *(main[_KIND[what]] for what in WORK),
            sum(beside) - beside[WAITING], beside[WAITING], *apart, *self.before,
            self.skipped, self.misses, self.overlaps, *self.decided.values(), self.age_sum, self.age_max, self.ended,
        ]  # fmt: skip
        return np.concatenate([np.asarray(part, np.float64) for part in (numbers, self.ages, *self._edges())])

    def _edges(self) -> tuple[array[int], ...]:
        return self.sent_bytes, self.sent_messages, self.received_bytes, self.received_messages

    def report(self) -> Report:
        """Return the statistics so far, in types for JSON: see `from_vector`."""
        return from_vector(self.vector())

    # -- after a stop ------------------------------------------------------------------------------------

    def go_on(self, vectors: np.ndarray) -> None:
        """Add the statistics of an earlier run, which was stopped. vectors: this rank's `vector` of that run."""
        self._add([vectors])
        self.ended = float(vectors[NUMBERS.index("ended")])
        edges = vectors[len(NUMBERS) + BINS :].astype(int).reshape(4, self.size).tolist()
        for counts, earlier in zip(self._edges(), edges):
            for peer, count in enumerate(earlier):
                counts[peer] += count
        self.mark = self._count()

    def take_over(self, vectors: Sequence[np.ndarray]) -> None:
        """Add the statistics of all ranks of an earlier run with different ranks. Only one rank may call this.

        vectors: the vectors of those ranks. Of their edges, only the total bytes and messages are kept.
        """
        self._add(vectors)
        report = merge(from_vector(vector) for vector in vectors)
        self.before = [report["bytes_sent"], report["messages"]]

    def _add(self, vectors: Sequence[np.ndarray]) -> None:
        """Add all statistics of these vectors except the edges."""
        numbers = np.array([vector[: len(NUMBERS)] for vector in vectors])
        total, largest = (dict(zip(NUMBERS, row.tolist())) for row in (numbers.sum(axis=0), numbers.max(axis=0)))
        main, beside = self.seconds
        for what in ("waiting", *WORK):
            main[_KIND[what]] += total[what]
        beside[WAITING] += total["beside_waiting"]
        beside[OTHER] += total["beside_working"]
        self.elapsed += largest["elapsed"]
        self.apart = [int(total[name]) for name in ("bytes_off_the_clock", "messages_off_the_clock")]
        self.before = [int(total[name]) for name in ("bytes_before", "messages_before")]
        self.skipped, self.misses = int(total["sends_skipped"]), int(total["reads_missed"])
        self.overlaps = int(total["reads_overlapped"])
        self.decided = {name: int(total[name]) for name in DECIDED}
        self.ages = np.sum([vector[len(NUMBERS) :][:BINS] for vector in vectors], axis=0).astype(int).tolist()
        self.age_sum, self.age_max = total["staleness_sum"], largest["staleness_max"]


class Beside(Generic[T]):
    """A concurrent operation. `wait` counts how long the replica waits for it."""

    def __init__(self, stats: Stats, pending: Pending[T]) -> None:
        self.stats, self.pending = stats, pending

    def wait(self) -> T:
        began = self.stats.now()
        try:
            return _apart(self.pending.wait)  # waits inside count as BESIDE; this wait is added to MAIN below
        finally:
            self.stats.waited(began, self.stats.now())


def concurrent() -> bool:
    """Return whether the caller runs inside a concurrent operation, or waits for the result of one."""
    return _beside.get()


def _apart(work: Callable[[], T]) -> T:
    """Run `work`, and count its waits in the lane BESIDE."""
    token = _beside.set(True)
    try:
        return work()
    finally:
        _beside.reset(token)


def from_vector(vector: np.ndarray) -> Report:
    """Return the report for a rank's `Stats.vector`.

    seconds: by kind, while the clock ran. beside: seconds of concurrent operations.
    edges: [from, to, bytes, messages] for each peer to which this rank sent. received: the same for each peer that sent
    to this rank.
    sends_skipped, reads_missed, reads_overlapped: see the methods of Stats.
    bytes_sent, messages: totals, including the time off the clock and earlier runs with other ranks (`take_over`).
    Raises ConfigError for a length that `Stats.vector` never has.
    """
    size, rest = divmod(len(vector) - len(NUMBERS) - BINS, 4)
    if size < 1 or rest:
        raise ConfigError(f"statistics: {len(vector)} numbers; expected {len(NUMBERS) + BINS} plus 4 for each rank")
    numbers = dict(zip(NUMBERS, vector.tolist()))
    ages = vector[len(NUMBERS) :][:BINS].astype(int).tolist()
    sent_bytes, sent, received_bytes, received = vector[len(NUMBERS) + BINS :].astype(int).reshape(4, size)
    rank = int(numbers["rank"])
    seconds = {what: numbers[what] for what in (*WORK, "waiting")}
    seconds["other"] = max(0.0, numbers["elapsed"] - sum(seconds.values()))
    return {
        "rank": rank,
        "bytes_sent": int(sent_bytes.sum() + numbers["bytes_before"]),
        "messages": int(sent.sum() + numbers["messages_before"]),
        **{name: int(numbers[name]) for name in COUNTS},
        "elapsed": numbers["elapsed"],
        "ended": numbers["ended"],
        "seconds": seconds,
        "wait_fraction": _wait_fraction(seconds),
        "beside": {"working": numbers["beside_working"], "waiting": numbers["beside_waiting"]},
        "staleness": staleness.report(ages, numbers["staleness_sum"], numbers["staleness_max"]),
        "edges": [[rank, peer, int(sent_bytes[peer]), int(sent[peer])] for peer in np.flatnonzero(sent).tolist()],
        "received": [
            [peer, rank, int(received_bytes[peer]), int(received[peer])] for peer in np.flatnonzero(received).tolist()
        ],
    }


def merge(reports: Iterable[Mapping[str, Any]], nodes: Sequence[int] = (), dead: Collection[int] = ()) -> Report:
    """Combine the reports of many ranks into one.

    Sender and receiver both count the messages of an edge, and the larger count is used. The receiver's count lacks the
    messages in flight. The sender's count is missing for servers, dead replicas and states published in shared memory.
    nodes[r]: the node of rank r, for bytes_between_nodes; without it, all ranks are on one node.
    idle_seconds: between a replica's last step and the last step of all, summed over the replicas that are not `dead`.
    A replica without a step is idle from the start of its clock.
    """
    sums = dict.fromkeys(COUNTS, 0)
    seconds = dict.fromkeys((*WORK, "waiting", "other"), 0.0)
    beside = dict.fromkeys(("working", "waiting"), 0.0)
    edges: dict[tuple[int, int], tuple[int, int]] = {}
    ages, age_sum, age_max = [0] * BINS, 0.0, 0.0
    replicas, elapsed = 0, 0.0
    ends: list[float] = []
    for report in reports:
        replicas += 1
        elapsed = max(elapsed, report["elapsed"])
        if report["ended"] != NEVER and report["rank"] not in dead:
            ends.append(report["ended"])
        for total, part in ((sums, report), (seconds, report["seconds"]), (beside, report["beside"])):
            for name in total:
                total[name] += part[name]
        for source, target, *counted in (*report["edges"], *report["received"]):
            edges[source, target] = max(edges.get((source, target), (0, 0)), tuple(counted))
        old = report["staleness"]
        ages = [a + old["histogram"].get(staleness.label(i), 0) for i, a in enumerate(ages)]
        age_sum += old["mean"] * old["count"]
        age_max = max(age_max, old["max"])
    place = dict(enumerate(nodes))
    between = sum(size for (source, target), (size, _) in edges.items() if place.get(source) != place.get(target))
    return {
        "replicas": replicas,
        "bytes_sent": sum(size for size, _ in edges.values()) + sums["bytes_before"],
        "messages": sum(count for _, count in edges.values()) + sums["messages_before"],
        "bytes_between_nodes": between,
        **sums,
        "elapsed": elapsed,
        "idle_seconds": sum(max(ends) - end for end in ends),
        "seconds": seconds,
        "wait_fraction": _wait_fraction(seconds),
        "beside": beside,
        "staleness": staleness.report(ages, age_sum, age_max),
        "edges": [[*edge, *edges[edge]] for edge in sorted(edges)],
    }


def _wait_fraction(seconds: Mapping[str, float]) -> float:
    waiting = seconds["waiting"]
    busy = waiting + sum(seconds[what] for what in WORK)
    return waiting / busy if busy > 0 else 0.0
