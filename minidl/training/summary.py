"""The result of several replicas: their entries in summary.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from minidl.comm import stats
from minidl.run.evaluation import Score
from minidl.training.collecting import Replicas
from minidl.training.output import RunOutput
from minidl.training.trainer import Trainer

MOST_REPLICAS = 1024  # in the list of what each replica did
MOST_CELLS = 64  # rows of a traffic matrix


def summarise(
    output: RunOutput,
    replicas: Replicas,
    score: Score,
    results: Sequence[dict[str, Any]],
    every: Sequence[np.ndarray],
) -> dict[str, Any]:
    """Return the entries of summary.json that describe several replicas.

    score: of the replicas' average. results: {"rank", "score", "speed"} of each replica; a simulation tests only some
    of many.
    every: each replica's `Stats.vector`.
    """
    accuracies = [result["score"][1] for result in results if result["score"]]
    reports = [stats.from_vector(vector) for vector in every]
    statistics = stats.merge(reports, output.fabric.nodes)
    return {
        "workers": output.trainer.config.workers,
        "method": output.trainer.config.method,
        "replicas_alive": len(results),
        "train_loss": float(np.mean([one["progress"]["train_loss"] for one in replicas.members.values()])),
        "accuracy_average": score.accuracy,
        "accuracy_best": max(accuracies),
        "accuracy_worst": min(accuracies),
        "consensus_distance": replicas.distance,
        "images_per_second": round(sum(result["speed"] for result in results), 1),
        **{name: statistics[name] for name in ("bytes_sent", "messages", "wait_fraction", "bytes_between_nodes",
                                               "idle_seconds", "staleness", "sends_skipped", "reads_missed",
                                               "reads_overlapped", "exchanges", "exchanges_suppressed",
                                               "bytes_suppressed", "edges")},
        **counted(output.trainer.method.counters, [one["method"] for one in replicas.members.values()]),
        **worked(output.trainer),
        "replicas": of_each(results, reports),
    }  # fmt: skip


def of_each(results: Sequence[dict[str, Any]], reports: Sequence[stats.Report]) -> list[dict[str, Any]]:
    """Return what each replica did: accuracy, images/s, its seconds by kind, with those after its last step (idle).

    Of more than MOST_REPLICAS replicas, some are left out, at equal distances. Servers have no accuracy and no speed.
    """
    known = {result["rank"]: result for result in results}
    last = max((report["ended"] for report in reports), default=0.0)
    found = []
    for report in sorted(reports, key=lambda report: report["rank"])[:: -(-len(reports) // MOST_REPLICAS)]:
        result = known.get(report["rank"], {"score": None, "speed": 0.0})
        idle = last - report["ended"] if report["rank"] in known and report["ended"] != stats.NEVER else 0.0
        found.append({
            "rank": report["rank"],
            "accuracy": result["score"][1] if result["score"] else None,
            "images_per_second": round(result["speed"], 1),
            "seconds": {kind: round(value, 6) for kind, value in (report["seconds"] | {"idle": idle}).items()},
            "bytes_sent": report["bytes_sent"],
        })  # fmt: skip
    return found


def traffic(edges: Sequence[Sequence[int]], ranks: int) -> dict[str, Any]:
    """Return {"ranks_per_cell": g, "bytes": matrix}: what ranks i * g to (i + 1) * g - 1 sent to those of each j.

    edges: (sender, receiver, bytes, messages). The matrix has at most MOST_CELLS rows, so g is 1 for few ranks.
    """
    together = -(-ranks // MOST_CELLS)
    size = -(-ranks // together)
    found = np.zeros((size, size), int)
    for sender, receiver, count, _ in edges:
        found[sender // together, receiver // together] += count
    return {"ranks_per_cell": together, "bytes": found.tolist()}


def counted(names: Iterable[str], numbers: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums of the method's counters over all replicas. numbers: of the method, by replica."""
    return {name: sum(one[name] for one in numbers) for name in names}


def worked(trainer: Trainer) -> dict[str, Any]:
    """Return the entries of summary.json about the work of all replicas: see training/work.py."""
    return {
        "samples": trainer.work.samples(trainer.progress),
        "batches_repeated": trainer.work.repeated,
        "images_left_out": trainer.work.left_out,  # of each epoch
    }
