"""The timeline: rows are packed into a vector and restored, and the file conforms to the Trace Event Format."""

from __future__ import annotations

import json
import tempfile
import threading
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl.comm.stats import Stats
from minidl.comm.trace import COLUMNS, LIMIT, MAIN, MESSAGES, TOTAL, Timeline, Trace, from_vector, write
from minidl.errors import ConfigError

ROW = st.tuples(
    st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 6), st.integers(0, 2), st.integers(-1, 4095),
    st.integers(0, 2**40),
)  # fmt: skip


def events_of(path: Path) -> list[dict[str, Any]]:
    """Check the file against the format's documentation and Perfetto's requirements; return its events."""
    file = json.loads(path.read_text())
    assert isinstance(file["traceEvents"], list)
    assert file["displayTimeUnit"] in ("ms", "ns")
    spans = defaultdict(list)
    flows: dict[int, dict[str, Any]] = defaultdict(dict)
    for event in file["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        match event["ph"]:
            case "X":
                assert {"cat", "ts", "dur", "tid"} <= event.keys()
                assert isinstance(event["ts"], int) and isinstance(event["dur"], int)  # microseconds
                assert event["ts"] >= 0 and event["dur"] >= 0
                spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            case "s" | "f":
                assert {"cat", "ts", "id", "tid"} <= event.keys()
                assert event["ph"] == "s" or event["bp"] == "e"  # an arrow ends at the span around it, not at the next
                assert event["ph"] not in flows[event["id"]]
                flows[event["id"]][event["ph"]] = event
            case "M":
                field = "sort_index" if event["name"].endswith("sort_index") else "name"
                assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
                assert field in event["args"]
            case phase:
                pytest.fail(f"phase {phase}")
    for thread in spans.values():  # spans of a thread are nested or disjoint
        open_until: list[int] = []
        for began, ended in sorted(thread, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= began:
                open_until.pop()
            assert not open_until or ended <= open_until[-1]
            open_until.append(ended)
    for ends in flows.values():
        assert ends.keys() == {"s", "f"}
        for end in ends.values():
            assert any(began <= end["ts"] < ended for began, ended in spans[end["pid"], end["tid"]])
    return file["traceEvents"]


def test_a_run_of_two_replicas_on_two_nodes(tmp_path: Path) -> None:
    time = [0.0]
    both = [Stats(rank, trace=True, size=2, now=lambda: time[0]) for rank in range(2)]
    for step in range(3):
        for stats in both:
            stats.worked("gradient", step, step + 0.4 + 0.1 * stats.rank)
            stats.worked("update", step + 0.5, step + 0.6000004)
        time[0] = step + 0.61
        both[0].sent(1, 4000)
        both[0].sent(1, 16)  # another size: arrows connect messages of equal size
        time[0] = step + 0.62
        both[1].sent(0, 4000)
        time[0] = step + 0.7
        both[1].received(0, 16)
        both[1].received(0, 4000)
        both[0].waited(step + 0.6000004, step + 0.7)
        both[0].received(1, 4000)
        both[0].worked("mix", step + 0.7, step + 0.8)
    path = tmp_path / "trace.json"
    write(path, [from_vector(stats.trace.vector(stats.rank)) for stats in both if stats.trace], nodes=[0, 5])
    events = events_of(path)
    names = {(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert names == {
        (0, "node 0"), (5, "node 5"), (0, "replica 0"), (5, "replica 1"), (0, "replica 0, messages"),
        (5, "replica 1, messages"),
    }  # fmt: skip
    spans = [e for e in events if e["ph"] == "X"]
    assert next((e["ts"], e["dur"]) for e in spans if e["name"] == "waiting") == (600000, 100000)
    assert all(e["pid"] == 0 and e["tid"] == 0 for e in spans if e["name"] in ("waiting", "mix"))
    assert sum(e["name"] == "gradient" and (e["pid"], e["tid"]) == (5, 1) for e in spans) == 3
    assert {e["args"]["bytes"] for e in spans if e["name"] == "received"} == {16, 4000}
    assert sum(e["ph"] == "s" for e in events) == sum(e["ph"] == "f" for e in events) == 9


def test_background_work_has_a_separate_thread(tmp_path: Path) -> None:
    stats = Stats(trace=True)

    class Pending:
        def __init__(self, work: Any) -> None:
            self.thread = threading.Thread(target=work)
            self.thread.start()

        def wait(self) -> None:
            self.thread.join()

    stats.beside(Pending, lambda: stats.waited(1.0, 2.0)).wait()
    stats.worked("gradient", 0.5, 2.5)
    assert stats.trace is not None
    write(tmp_path / "t.json", [from_vector(stats.trace.vector(0))])
    events = events_of(tmp_path / "t.json")
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [(threads[e["tid"]], e["name"]) for e in events if e["ph"] == "X" and e["dur"] >= 1e6]
    assert sorted(spans) == [("replica 0", "gradient"), ("replica 0, beside", "waiting")]


@settings(max_examples=60, deadline=None)
@given(st.lists(ROW, max_size=30), st.integers(1, 20), st.integers(0, 4095))
def test_a_vector_keeps_all_rows(rows: list[tuple[float, float, int, int, int, int]], limit: int, rank: int) -> None:
    trace = Trace(limit)
    for row in rows:
        trace.keep(*row)
    vector = trace.vector(rank)
    assert vector.dtype == np.float64
    assert vector.size == Trace(limit).vector(0).size
    timeline = from_vector(vector)
    assert timeline.rank == rank
    assert timeline.lost == max(0, len(rows) - limit)
    kept = [tuple(map(float, row)) for row in rows[-limit:]]
    assert sorted(map(tuple, timeline.rows.tolist())) == sorted(kept)
    assert (np.diff(timeline.rows[:, 1]) >= 0).all()
    vector[:] = 0
    assert sorted(map(tuple, timeline.rows.tolist())) == sorted(kept)  # a copy, because `gather` reuses the vector


def test_arrows_where_older_sends_are_lost(tmp_path: Path) -> None:
    """If the oldest sends were overwritten in the ring buffer, no arrow leads to a wrong message."""
    sender, receiver = Trace(4), Trace(100)
    for step in range(10):
        sender.keep(step, step, 5, MESSAGES, 1, 8)
        receiver.keep(step + 0.5, step + 0.5, 6, MESSAGES, 0, 8)
    write(tmp_path / "t.json", [from_vector(sender.vector(0)), from_vector(receiver.vector(1))])
    events = events_of(tmp_path / "t.json")
    starts = [e["ts"] for e in events if e["ph"] == "s"]
    ends = [e["ts"] for e in events if e["ph"] == "f"]
    assert [end - start for start, end in zip(starts, ends)] == [500000] * 4
    assert "replica 0 (6 older events not kept)" not in [e["args"].get("name") for e in events if e["ph"] == "X"]
    assert "replica 0 (6 older events not kept)" in [e["args"].get("name") for e in events if e["ph"] == "M"]


def test_messages_at_one_moment_do_not_overlap(tmp_path: Path) -> None:
    trace = Trace()
    for peer in range(1, 9):
        trace.keep(1.0, 1.0, 5, MESSAGES, peer, 8)
    write(tmp_path / "t.json", [from_vector(trace.vector(0))])
    assert len({e["ts"] for e in events_of(tmp_path / "t.json") if e["ph"] == "X"}) == 8


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1e-9, 0.01), min_size=1, max_size=40), st.floats(0, 1e6))
def test_spans_that_touch_stay_apart(lengths: list[float], now: float) -> None:
    """A span must not overlap the next one after rounding, for any start of the clock."""
    ends = np.concatenate([[now], now + np.cumsum(lengths)])
    trace = Trace()
    for began, ended in pairwise(ends):
        trace.keep(began, ended, 1, MAIN, -1, 0)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "t.json"), [from_vector(trace.vector(0))])
        events_of(Path(folder, "t.json"))


def test_an_empty_trace(tmp_path: Path) -> None:
    write(tmp_path / "none.json", [])
    write(tmp_path / "empty.json", [from_vector(Trace(1).vector(3))])
    assert events_of(tmp_path / "none.json") == []
    assert len(events_of(tmp_path / "empty.json")) == 3


def test_with_many_ranks_each_trace_keeps_fewer_rows() -> None:
    assert Trace.for_ranks(1).limit == LIMIT
    assert Trace.for_ranks(1024).limit * 1024 <= TOTAL
    assert Trace.for_ranks(100_000).limit == 256


def test_a_vector_of_a_wrong_length() -> None:
    with pytest.raises(ConfigError, match="10 numbers"):
        from_vector(np.zeros(10))


def test_a_timeline_can_be_constructed_directly(tmp_path: Path) -> None:
    write(tmp_path / "t.json", [Timeline(2, np.zeros((0, COLUMNS)), 0)], nodes=[0, 0, 1])
    assert events_of(tmp_path / "t.json")[0]["args"] == {"name": "node 1"}
