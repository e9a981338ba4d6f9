"""The books: what a replica sent, what it waited for, and how old the news was.

    a replica's time, on the clock      gradient | waiting | mix | update | gradient | waiting | mix | ...
                                        `--------------- the rest is "other" ---------------´
    wait_fraction                       waiting / (waiting + gradient + update + mix)
    edges                               from whom to whom: bytes, messages
    staleness                           0, 1, 2, 3-4, 5-8, ... steps: how often was what was mixed in so old?

Each rank has one Meter. Its fabric tells it about messages and waiting, the replica about work, the method about
staleness; a call costs a few additions. `start` and `stop` say when training goes on and when it pauses for something
else (an evaluation, a checkpoint): the time between is left out, and the bytes are also shown apart.

What goes on beside a replica's own work (`Fabric.allreduce_start`) waits, too, but nobody waits for it until somebody
does: `Meter.beside` counts the two apart.

At the end each rank makes a `vector` of its books, which travels like any other; `from_vector` makes a report of it,
and `merge` one of all reports.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from minidl.comm.fabric.words import Pending
from minidl.comm.trace import BESIDE, KINDS, MAIN, MESSAGES, OTHER, RECEIVED, SENT, WAITING, Trace
from minidl.errors import ConfigError

T = TypeVar("T")
Report = dict[str, Any]

WORK = ("gradient", "update", "mix")
BINS = 16  # of staleness: 0, 1, 2, 3-4, 5-8, ..., over 8192 steps
NUMBERS = (
    "rank", "elapsed", "waiting", *WORK, "beside_working", "beside_waiting", "bytes_off_the_clock",
    "messages_off_the_clock", "bytes_before", "messages_before", "held", "missed", "staleness_sum", "staleness_max",
)  # fmt: skip
_KIND = {name: number for number, name in enumerate(KINDS)}

# A context, not the thread, since a simulation has no threads: a greenlet has a context of its own, as a thread has.
_beside: ContextVar[bool] = ContextVar("beside", default=False)


class Meter:
    """The books of one rank among `size`. Times are the fabric's seconds; now: its clock.

    Two threads may write at once. No lock is needed: CPython changes threads between calls and at jumps, not within
    `array[i] += number`.
    """

    def __init__(
        self, rank: int = 0, trace: bool = False, size: int = 1, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.rank = rank
        self.trace: Trace | None = Trace() if trace else None
        self.running = False
        self.attach(size, now)

    def attach(self, size: int, now: Callable[[], float]) -> None:
        """Called by the fabric that the meter is for: empty books for so many ranks."""
        self.size, self.now = size, now
        self.sent_bytes, self.sent_messages, self.received_bytes, self.received_messages = (
            array("q", bytes(8 * size)) for _ in range(4)
        )
        self.busy = bytearray(size)  # edges that were busy when they were last tried
        self.held_messages = self.misses = 0
        self.ages = [0] * BINS
        self.age_sum = self.age_max = 0.0
        self.seconds = [[0.0] * len(KINDS), [0.0] * len(KINDS)]  # of MAIN, and BESIDE it
        self.elapsed = self.started = 0.0
        self.apart = [0, 0]  # bytes and messages off the clock
        self.mark = (0, 0)  # and in all, when the clock last stopped
        self.before = [0, 0]  # and of another number of ranks: see `take_over`
        if self.trace is not None:
            self.trace = Trace.for_ranks(size)

    # -- what happens ------------------------------------------------------------------------------------

    def sent(self, peer: int, size: int) -> None:
        """A message of `size` bytes left for a peer."""
        self.sent_bytes[peer] += size
        self.sent_messages[peer] += 1
        self.busy[peer] = 0
        if self.trace is not None:
            now = self.now()
            self.trace.keep(now, now, SENT, MESSAGES, peer, size)

    def received(self, peer: int, size: int) -> None:
        """A message of `size` bytes was taken."""
        self.received_bytes[peer] += size
        self.received_messages[peer] += 1
        if self.trace is not None:
            now = self.now()
            self.trace.keep(now, now, RECEIVED, MESSAGES, peer, size)

    def held(self, peer: int) -> None:
        """A message was not sent, since the one before it was still on its way. Trying it again counts no more."""
        if not self.busy[peer]:
            self.busy[peer] = 1
            self.held_messages += 1

    def missed(self, peer: int) -> None:
        """A look at a peer found it half written, or a publication found no memory."""
        self.misses += 1

    def stale(self, steps: float) -> None:
        """What was mixed in was this many of its sender's steps old."""
        self.ages[_bin(steps)] += 1
        self.age_sum += steps
        if steps > self.age_max:
            self.age_max = float(steps)

    def waited(self, began: float, ended: float) -> None:
        """This replica, or what goes on beside it, waited for others."""
        self._spent(WAITING, began, ended)

    def worked(self, what: str, began: float, ended: float) -> None:
        """It computed: "gradient", "update", "mix"; anything else is "other". Spans do not lie within one another."""
        self._spent(_KIND.get(what, OTHER), began, ended)

    def _spent(self, kind: int, began: float, ended: float) -> None:
        lane = BESIDE if _beside.get() else MAIN
        if self.running:
            self.seconds[lane][kind] += ended - began
        if self.trace is not None:
            self.trace.keep(began, ended, kind, lane, -1, 0)

    def beside(self, start: Callable[[Callable[[], T]], Pending[T]], work: Callable[[], T]) -> Pending[T]:
        """start(work), where the work's waiting is not this replica's, but waiting for the result is."""
        return Beside(self, start(partial(_apart, work)))

    # -- the clock ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Training begins, or goes on."""
        if not self.running:
            count = self._count()
            self.apart = [apart + now - then for apart, now, then in zip(self.apart, count, self.mark)]
            self.running, self.started = True, self.now()

    def stop(self) -> None:
        """Training pauses: what follows is off the clock."""
        if self.running:
            self.elapsed += self.now() - self.started
            self.running, self.mark = False, self._count()

    def _count(self) -> tuple[int, int]:
        return sum(self.sent_bytes), sum(self.sent_messages)

    # -- what it came to ---------------------------------------------------------------------------------

    def vector(self) -> np.ndarray:
        """The books as float64, of one length for all ranks of a job: len(NUMBERS) + BINS + 4 size."""
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
            self.held_messages, self.misses, self.age_sum, self.age_max,
        ]  # fmt: skip
        return np.concatenate([np.asarray(part, np.float64) for part in (numbers, self.ages, *self._edges())])

    def _edges(self) -> tuple[array[int], ...]:
        return self.sent_bytes, self.sent_messages, self.received_bytes, self.received_messages

    def report(self) -> Report:
        """The books so far, ready for JSON: see `from_vector`."""
        return from_vector(self.vector())


    # -- after a stop ------------------------------------------------------------------------------------

    def go_on(self, books: np.ndarray) -> None:
        """Count on from what `vector` was before a stop."""
        self._add([books])
        edges = books[len(NUMBERS) + BINS :].astype(int).reshape(4, self.size).tolist()
        for counts, earlier in zip(self._edges(), edges):
            for peer, count in enumerate(earlier):
                counts[peer] += count
        self.mark = self._count()

    def take_over(self, books: Sequence[np.ndarray]) -> None:
        """Count on for all ranks of before a stop, which were others: their sums go on, edges begin anew."""
        self._add(books)
        report = merge(from_vector(vector) for vector in books)
        self.before = [report["bytes_sent"], report["messages"]]

    def _add(self, books: Sequence[np.ndarray]) -> None:
        """All but the edges."""
        numbers = np.array([vector[: len(NUMBERS)] for vector in books])
        total, largest = (dict(zip(NUMBERS, row.tolist())) for row in (numbers.sum(axis=0), numbers.max(axis=0)))
        main, beside = self.seconds
        for what in ("waiting", *WORK):
            main[_KIND[what]] += total[what]
        beside[WAITING] += total["beside_waiting"]
        beside[OTHER] += total["beside_working"]
        self.elapsed += largest["elapsed"]
        self.apart = [int(total[name]) for name in ("bytes_off_the_clock", "messages_off_the_clock")]
        self.before = [int(total[name]) for name in ("bytes_before", "messages_before")]
        self.held_messages, self.misses = int(total["held"]), int(total["missed"])
        self.ages = np.sum([vector[len(NUMBERS) :][:BINS] for vector in books], axis=0).astype(int).tolist()
        self.age_sum, self.age_max = total["staleness_sum"], largest["staleness_max"]


class Beside(Generic[T]):
    """What goes on beside a replica's own work; counts how long the replica waits for it."""

    def __init__(self, meter: Meter, pending: Pending[T]) -> None:
        self.meter, self.pending = meter, pending

    def wait(self) -> T:
        began = self.meter.now()
        try:
            return _apart(self.pending.wait)  # should that wait by the fabric's means, it is not counted twice
        finally:
            self.meter.waited(began, self.meter.now())


def _apart(work: Callable[[], T]) -> T:
    token = _beside.set(True)
    try:
        return work()
    finally:
        _beside.reset(token)


def from_vector(vector: np.ndarray) -> Report:
    """The report that a rank's `Meter.vector` stands for.

    seconds: by kind, on the clock. beside: of what went on beside. edges: [from, to, bytes, messages] as sent by this
    rank; received: the same as taken by it; only those that were used. held, missed: see Meter. Bytes and messages off
    the clock are part of bytes_sent and messages; so are those before, which are in no edge. Raises ConfigError where
    the length is none that `vector` makes.
    """
    size, rest = divmod(len(vector) - len(NUMBERS) - BINS, 4)
    if size < 1 or rest:
        raise ConfigError(f"meter: {len(vector)} numbers; expected {len(NUMBERS) + BINS} and 4 for each rank")
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
        "bytes_before": int(numbers["bytes_before"]),
        "messages_before": int(numbers["messages_before"]),
        "bytes_off_the_clock": int(numbers["bytes_off_the_clock"]),
        "messages_off_the_clock": int(numbers["messages_off_the_clock"]),
        "elapsed": numbers["elapsed"],
        "seconds": seconds,
        "wait_fraction": _wait_fraction(seconds),
        "beside": {"working": numbers["beside_working"], "waiting": numbers["beside_waiting"]},
        "held": int(numbers["held"]),
        "missed": int(numbers["missed"]),
        "staleness": _staleness(ages, numbers["staleness_sum"], numbers["staleness_max"]),
        "edges": [[rank, peer, int(sent_bytes[peer]), int(sent[peer])] for peer in np.flatnonzero(sent).tolist()],
        "received": [
            [peer, rank, int(received_bytes[peer]), int(received[peer])] for peer in np.flatnonzero(received).tolist()
        ],
    }


def merge(reports: Iterable[Mapping[str, Any]], nodes: Sequence[int] = ()) -> Report:
    """One report of many ranks': sums, and wait_fraction and staleness over all.

    Both ends of an edge have counted, and the one who counted more knows: what is on its way was sent but not taken;
    what a server sent, a replica that died, or one whose publication was read, only the other end can tell.
    nodes[r]: the node of rank r, for bytes_between_nodes; without it, all are on one.
    """
    sums = dict.fromkeys(("bytes_off_the_clock", "messages_off_the_clock", "bytes_before", "messages_before", "held",
                          "missed"), 0)  # fmt: skip
    seconds = dict.fromkeys((*WORK, "waiting", "other"), 0.0)
    beside = dict.fromkeys(("working", "waiting"), 0.0)
    edges: dict[tuple[int, int], tuple[int, int]] = {}
    ages, age_sum, age_max = [0] * BINS, 0.0, 0.0
    replicas, elapsed = 0, 0.0
    for report in reports:
        replicas += 1
        elapsed = max(elapsed, report["elapsed"])
        for total, part in ((sums, report), (seconds, report["seconds"]), (beside, report["beside"])):
            for name in total:
                total[name] += part[name]
        for source, target, *counted in (*report["edges"], *report["received"]):
            edges[source, target] = max(edges.get((source, target), (0, 0)), tuple(counted))
        staleness = report["staleness"]
        ages = [a + staleness["histogram"].get(_label(i), 0) for i, a in enumerate(ages)]
        age_sum += staleness["mean"] * staleness["count"]
        age_max = max(age_max, staleness["max"])
    place = dict(enumerate(nodes))
    between = sum(size for (source, target), (size, _) in edges.items() if place.get(source) != place.get(target))
    return {
        "replicas": replicas,
        "bytes_sent": sum(size for size, _ in edges.values()) + sums["bytes_before"],
        "messages": sum(count for _, count in edges.values()) + sums["messages_before"],
        "bytes_between_nodes": between,
        **sums,
        "elapsed": elapsed,
        "seconds": seconds,
        "wait_fraction": _wait_fraction(seconds),
        "beside": beside,
        "staleness": _staleness(ages, age_sum, age_max),
        "edges": [[*edge, *edges[edge]] for edge in sorted(edges)],
    }


def _wait_fraction(seconds: Mapping[str, float]) -> float:
    waiting = seconds["waiting"]
    busy = waiting + sum(seconds[what] for what in WORK)
    return waiting / busy if busy > 0 else 0.0


# -- staleness: bin 0 is 0 steps, bin 1 up to 1, bin 2 up to 2, bin 3 up to 4, bin i up to 2^(i-1) ---------------------


def _bin(steps: float) -> int:
    whole = int(-(-min(steps, 1e9) // 1))  # rounded up
    return 0 if whole <= 0 else min((whole - 1).bit_length() + 1, BINS - 1)


def _label(number: int) -> str:
    low, high = (2 ** (number - 2) + 1, 2 ** (number - 1)) if number > 2 else (number, number)
    return f"{low} or more" if number == BINS - 1 else str(high) if low == high else f"{low}-{high}"


def _staleness(ages: Sequence[int], total: float, largest: float) -> Report:
    """p50, p90, p99: so many percent were at most that old; the upper end of a bin."""
    count = sum(ages)
    below = np.cumsum(ages)

    def percentile(percent: int) -> float:
        number = int(np.searchsorted(below, count * percent / 100)) if count else 0
        return min(largest, 0.0 if number == 0 else largest if number == BINS - 1 else 2.0 ** (number - 1))

    return {
        "count": count,
        "mean": total / count if count else 0.0,
        "max": largest,
        **{f"p{percent}": percentile(percent) for percent in (50, 90, 99)},
        "histogram": {_label(number): age for number, age in enumerate(ages) if age},
    }
