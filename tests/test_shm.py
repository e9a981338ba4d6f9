"""Communication in shared memory, between real processes."""

from __future__ import annotations

import os
import re
from functools import partial
from itertools import islice

import numpy as np
import pytest
from launching import Launched, job
from replicas.shm import SUMS, digest, vector

from minidl.comm.stats import Stats
from minidl.comm.transport.mailbox_transport import LONGEST, SHORTEST, YIELDS, Worker
from minidl.comm.transport.shm import ShmTransport


def tree_sum(vectors: list[np.ndarray], at: int = 0) -> np.ndarray:
    """Return the sum of the vectors, added in the same order as by minidl: (own + left subtree) + right subtree."""
    total = vectors[at].copy()
    for child in (2 * at + 1, 2 * at + 2):
        if child < len(vectors):
            total += tree_sum(vectors, child)
    return total


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow), 5])
def test_sums_shared_vectors_and_messages(ranks: int) -> None:
    code, said, errors = job(ranks, "several")
    assert (code, errors) == (0, "") and len(said) == ranks
    sums = [digest(tree_sum([vector(rank, size, dtype) for rank in range(ranks)])) for size, dtype in SUMS]
    for rank in range(ranks):
        assert said[rank]["allreduce"] == [*sums, digest(vector(0, 10))]
        assert said[rank]["shared"] == ranks * (ranks + 1) / 2
    mass = np.sum([said[rank]["drain"] for rank in range(ranks)], axis=0)
    assert np.allclose(mass, [ranks, ranks * (ranks - 1) / 2], rtol=1e-12)


def test_gathering_continues_without_a_dead_replica() -> None:
    code, said, errors = job(4, "gather", "2")
    assert code == 0 and errors == "minidl: replica 2 was killed by SIGKILL\n"
    assert said == {0: [[0, 0.0], [1, 1.0], [3, 3.0]], 1: [], 3: []}


def test_calls_and_replies() -> None:
    code, said, errors = job(3, "serve")
    assert (code, errors) == (0, "")
    assert said == {0: [], 1: [], 2: [200.0] * 4}


def test_replicas_that_train_and_serve() -> None:
    code, said, errors = job(3, "mutual")
    assert code == 0, errors
    assert said == {0: [160.0] * 4, 1: [150.0] * 4, 2: [150.0] * 4}


def test_a_replica_that_waits_too_long_names_the_silent_one() -> None:
    """Replica 2 waits for replica 0, which waits for replica 1."""
    words = r"minidl: replica 2 has waited \d+ s for a collective .*; no sign of life from replica 1 \(host [^,]+, " \
            r"process \d+\) for \d+ s, in step 7$"  # fmt: skip
    with Launched(3, "hang") as launched:
        assert launched.process.stderr
        assert any(re.match(words, line) for line in islice(launched.process.stderr, 100))


def test_models_that_differ() -> None:
    code, said, errors = job(3, "unequal")
    assert code == 2 and not said
    assert errors.startswith("minidl: error: replica 1: ") and errors.count("\n") == 1


def test_too_little_memory() -> None:
    code, said, errors = job(2, "greedy")
    assert code == 2 and not said
    assert "MiB are needed and" in errors and errors.count("\n") == 1


def test_slots_of_all_types_arrive_bit_for_bit() -> None:
    code, said, errors = job(3, "slots", "200", "3")
    assert (code, errors) == (0, "")
    assert all(said[rank] >= 200 * 2 for rank in range(3))  # the scenario checks the content


@pytest.mark.parametrize(("size", "count"), [(1000, 1500), (300_000, 400)])
def test_nothing_is_torn(size: int, count: int) -> None:
    """Three ranks write at full speed, and each reads what the others write."""
    code, said, errors = job(3, "stress", str(count), str(size))
    assert (code, errors) == (0, "")
    assert all(said[rank]["torn"] == 0 and said[rank]["seen"] >= count for rank in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 20_000])
def test_nothing_is_torn_in_a_million(size: int) -> None:
    with Launched(2, "stress", "500000", str(size)) as launched:
        out, errors = launched.process.communicate()
    assert errors == "" and out.count('"torn": 0') == 2


def test_a_concurrent_operation_sleeps_while_the_replica_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither yields the core, which may come back only after a time slice, nor wakes often."""
    done: list[float | str] = []
    monkeypatch.setattr(os, "sched_yield", lambda: done.append("yield"))
    monkeypatch.setattr(ShmTransport, "sleep", lambda self, seconds: done.append(seconds))
    transport = object.__new__(ShmTransport)
    transport._worker = Worker(lambda: None)
    for awaited, expected in ((False, [LONGEST, LONGEST]), (True, ["yield", SHORTEST])):
        transport._worker.awaited = awaited
        for attempt in (0, YIELDS):
            Stats().beside(lambda work: work(), partial(transport.idle, attempt))
        assert done == expected
        done.clear()
