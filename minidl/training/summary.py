"""The result of several replicas: their averages during training, and their entries in summary.json."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from minidl.comm import stats
from minidl.run.checkpoint import Checkpoint
from minidl.run.evaluation import Score
from minidl.training.collecting import Replicas
from minidl.training.output import RunOutput
from minidl.training.replica_state import averaged, mean_and_distance
from minidl.training.resume import make_checkpoint
from minidl.training.trainer import Trainer


class Snapshots:
    """The weights of this replica at the end of each epoch, for asynchronous methods.

    The averages over all replicas are evaluated after training, so that no replica waits. Each average needs a snapshot
    of every replica after the same epoch. If a run is resumed with replicas in different epochs, snapshots are taken
    only of epochs that no replica had finished before the stop.
    """

    def __init__(self, output: RunOutput) -> None:
        self.output, self.trainer = output, output.trainer
        self.taken: list[tuple[int, float, np.ndarray]] = []  # step, seconds, theta (the weights)

    def take(self) -> None:
        """Take a snapshot at the end of an epoch, unless it is the last one: the final weights are validated anyway."""
        trainer, at = self.trainer, self.trainer.progress
        if trainer.data.x_validation is not None and at.epoch > trainer.furthest and not trainer.finished:
            self.taken.append((at.step, at.seconds, trainer.replica.theta.copy()))

    def validate(self, last: Replicas | None) -> None:
        """Validate the average of each epoch, and keep the best. All replicas call it.

        last: the final states of all replicas, at the leader; elsewhere None.
        """
        trainer, output, at = self.trainer, self.output, self.trainer.progress
        for number, (step, seconds, theta) in enumerate(self.taken):
            gathered = (vector for _, vector in trainer.fabric.gather(theta))
            if last is None:
                deque(gathered, maxlen=0)
                continue
            epoch = at.epoch - len(self.taken) + number
            checkpoint = self._validate_average(*mean_and_distance(gathered), step, epoch, seconds)
            if at.best_step == step:
                output.write(checkpoint, step)
        if last is not None and not trainer.method.synchronous and trainer.data.x_validation is not None:
            self._validate_average(last.theta, last.distance, at.step, at.epoch, at.seconds)
            output.rewrite()

    def _validate_average(
        self, theta: np.ndarray, distance: float, step: int, epoch: int, seconds: float
    ) -> Checkpoint:  # fmt: skip
        """Validate and log an average; return its checkpoint."""
        with averaged(self.trainer, theta):
            scores = self.trainer.validate(step)
            checkpoint = make_checkpoint(self.trainer)
        position = {"step": step, "epoch": epoch, "batch": 0, "loss_sum": 0.0, "correct": 0, "images": 0}
        checkpoint.state["progress"] |= position
        self.output.log({"event": "average", "step": step, "epoch": epoch, **scores,
                         "consensus_distance": distance, "seconds": seconds})  # fmt: skip
        return checkpoint


def summarise(
    output: RunOutput,
    replicas: Replicas,
    score: Score,
    results: Sequence[dict[str, Any]],
    every: Sequence[np.ndarray],
) -> dict[str, Any]:
    """Return the entries of summary.json that describe several replicas.

    score: of the replicas' average. results: {"score", "speed"} of each replica; a simulation tests only some of many.
    every: each replica's `Stats.vector`.
    """
    accuracies = [result["score"][1] for result in results if result["score"]]
    statistics = stats.merge([stats.from_vector(vector) for vector in every], output.fabric.nodes)
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
                                               "idle_seconds", "staleness", "sends_skipped", "reads_missed", "edges")},
        **worked(output.trainer),
    }  # fmt: skip


def worked(trainer: Trainer) -> dict[str, Any]:
    """Return the entries of summary.json about the work of all replicas: see training/work.py."""
    return {
        "samples": trainer.work.samples(trainer.progress),
        "batches_repeated": trainer.work.repeated,
        "images_left_out": trainer.work.left_out,  # of each epoch
    }
