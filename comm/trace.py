"""A timeline of all replicas: --trace writes trace.json, which ui.perfetto.dev and chrome://tracing open.

    node 0   replica 0            |--- gradient ---|update|waiting|mix|--- gradient ---|
             replica 0, messages                          s   r                           s: sent, r: received
                                                           `------------.                 arrows: sender to receiver
             replica 1, messages                                  s      r
             replica 1            |------ gradient ------|update|        |mix|--- gradient ---|

Each rank keeps its last events in a ring buffer of fixed length, with a row of numbers for each event. At the end the
leader gathers the buffers as vectors and writes the file.

The file has the JSON object format of Chrome's "Trace Event Format": events under traceEvents, times in microseconds.
The event types ("phases") are X, a span with its duration; s and f, the two ends of an arrow, each inside a span; and
M, a name. Perfetto drops spans of a thread that overlap partially. Both ends of a span are rounded down to whole
microseconds, so nested spans remain nested, and disjoint spans remain disjoint.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minidl.errors import ConfigError

KINDS = ("waiting", "gradient", "update", "mix", "data", "other", "sent", "received")
WAITING, GRADIENT, UPDATE, MIX, DATA, OTHER, SENT, RECEIVED = range(8)
LANES = ("", ", beside", ", messages")  # a replica's threads in the timeline: main, concurrent operations, messages
MAIN, BESIDE, MESSAGES = range(3)

COLUMNS = 6  # numbers in a row: began, ended (s), kind, lane, peer (-1: none), bytes
LIMIT = 1 << 14  # events that a rank keeps: about the last thousand steps
TOTAL = 1 << 20  # events that all ranks keep together: a file of about 100 MB
HEAD = 2  # numbers before the rows: rank, number of events

Event = dict[str, Any]


class Trace:
    """The last `limit` events of one rank, 48 bytes each. Two threads may write simultaneously."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.rows = array("d")
        self.places = count()  # the next free place; `next` is atomic
        self.total = 0

    @classmethod
    def for_ranks(cls, ranks: int) -> Trace:
        """Create a trace that keeps at most TOTAL events over all ranks, but at least 256 for each."""
        return cls(max(256, min(LIMIT, TOTAL // ranks)))

    def keep(self, began: float, ended: float, kind: int, lane: int, peer: int, size: int) -> None:
        """Add an event. If the buffer is full, replace the oldest event."""
        place = next(self.places)
        if place < self.limit:
            self.rows.extend((began, ended, kind, lane, peer, size))
        else:
            at = place % self.limit * COLUMNS
            self.rows[at : at + COLUMNS] = array("d", (began, ended, kind, lane, peer, size))
        self.total = place + 1

    def vector(self, rank: int) -> np.ndarray:
        """Return the events as float64 (HEAD + limit * COLUMNS,), the same length for all ranks, for `from_vector`."""
        packed = np.zeros(HEAD + self.limit * COLUMNS)
        packed[:HEAD] = rank, self.total
        packed[HEAD : HEAD + len(self.rows)] = self.rows
        return packed


class Timeline(NamedTuple):
    """The events that a rank kept. rows (n, COLUMNS), ordered by end. lost: number of older events, not kept."""

    rank: int
    rows: np.ndarray
    lost: int


def from_vector(vector: np.ndarray) -> Timeline:
    """Return the timeline of a rank's `Trace.vector`, as a copy. Raises ConfigError if the length is wrong."""
    limit, rest = divmod(len(vector) - HEAD, COLUMNS)
    if limit < 1 or rest:
        raise ConfigError(f"trace: {len(vector)} numbers; expected {HEAD} plus {COLUMNS} for each event")
    total = int(vector[1])
    rows = vector[HEAD:].reshape(limit, COLUMNS)[: min(total, limit)]
    return Timeline(int(vector[0]), rows[np.argsort(rows[:, 1], kind="stable")], max(0, total - limit))


def write(path: str | Path, timelines: Iterable[Timeline], nodes: Sequence[int] = ()) -> None:
    """Write the file. nodes[r]: the node of rank r, displayed as a process; without it, all ranks are on node 0."""
    with open(path, "w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for number, event in enumerate(_events(list(timelines), dict(enumerate(nodes)))):
            file.write(("," if number else "") + "\n" + json.dumps(event))
        file.write("\n]}\n")


def _events(timelines: list[Timeline], nodes: dict[int, int]) -> Iterator[Event]:
    """Yield all events of the file."""
    ranks = 1 + max((t.rank for t in timelines), default=0)
    origin = min((float(t.rows[:, 0].min()) for t in timelines if len(t.rows)), default=0.0)
    sent: Messages = defaultdict(list)
    received: Messages = defaultdict(list)
    for node in sorted({nodes.get(t.rank, 0) for t in timelines}):
        yield {"ph": "M", "name": "process_name", "pid": node, "args": {"name": f"node {node}"}}
    for rank, rows, lost in timelines:
        node = nodes.get(rank, 0)
        threads = [{"pid": node, "tid": rank + lane * ranks} for lane in range(len(LANES))]
        for lane in sorted({MAIN, *rows[:, 3].astype(int).tolist()}):
            note = f" ({lost} older events not kept)" if lost and lane == MAIN else ""
            name = {"name": f"replica {rank}{LANES[lane]}{note}"}
            yield {"ph": "M", "name": "thread_name", **threads[lane], "args": name}
            order = {"sort_index": rank * len(LANES) + lane}
            yield {"ph": "M", "name": "thread_sort_index", **threads[lane], "args": order}
        times = np.floor((rows[:, :2] - origin) * 1e6).astype(int).tolist()
        free = 0  # a message is a span of 1 us that begins after the end of the previous one
        for (began, ended), (kind, lane, peer, size) in zip(times, rows[:, 2:].astype(int).tolist()):
            event = {"ph": "X", "name": KINDS[kind], "cat": "work", **threads[lane]}
            if lane != MESSAGES:
                yield event | {"ts": began, "dur": ended - began}
                continue
            place = max(began, free)
            free = place + 1
            yield event | {"ts": place, "dur": 1, "cat": "message", "args": {"peer": peer, "bytes": size}}
            end = {"ts": place, **threads[lane]}
            if kind == SENT:
                sent[rank, peer, size].append((began, end))
            else:
                received[peer, rank, size].append((began, end))
    yield from _arrows(sent, received)


Messages = dict[tuple[int, int, int], list[tuple[int, Event]]]  # (sender, receiver, bytes): [(time, end of the arrow)]


def _arrows(sent: Messages, received: Messages) -> Iterator[Event]:
    """Yield both ends of an arrow for each received message.

    An arrow begins at the last earlier message from this sender to this receiver with the same length, because usually
    only one message is in flight. There is no arrow if the clocks differ too much, or if the sender's buffer no longer
    contains the message.
    """
    numbers = count(1)
    for key, ends in received.items():
        starts = sent.get(key, [])
        used = 0
        for when, end in ends:
            last = bisect_right(starts, when, key=lambda start: start[0])
            if last > used:
                used = last
                arrow = {"name": "message", "cat": "message", "id": next(numbers)}
                yield {"ph": "s", **arrow, **starts[last - 1][1]}
                yield {"ph": "f", "bp": "e", **arrow, **end}
