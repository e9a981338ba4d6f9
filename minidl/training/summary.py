"""What several replicas have come to: their average along the way, and the summary of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minidl.comm import meter
from minidl.comm.consensus import consensus_distance
from minidl.run.checkpoint import Checkpoint
from minidl.run.evaluation import Score
from minidl.training.replica_state import Member, averaged

if TYPE_CHECKING:
    from minidl.training.session import Session
    from minidl.training.trainer import Trainer


def distance(members: Sequence[Member]) -> float:
    """How far the replicas are from their mean, as a fraction of it (comm/consensus.py)."""
    return consensus_distance(one.vectors["theta"] for one in members)


class Snapshots:
    """A replica's weights at the end of each epoch, for a method in which replicas never all stop at once.

    Their averages are evaluated when training is over: off the clock, and nobody has waited for it. Replicas that were
    resumed in different epochs take them from the first that is ahead of all, so each takes equally many.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.taken: list[tuple[int, float, np.ndarray]] = []  # step, seconds, theta

    def take(self) -> None:
        """At the end of an epoch, but for the last: what is kept at the end is validated itself."""
        trainer, at = self.trainer, self.trainer.progress
        if trainer.data.x_validation is not None and at.epoch > trainer.furthest and not trainer.finished:
            self.taken.append((at.step, at.seconds, trainer.replica.theta.copy()))

    def validate(self, session: Session, last: list[Member]) -> None:
        """Called by all replicas; the leader says which average did best on the validation images, and keeps it.

        last: all replicas as they are at the end, at the leader.
        """
        trainer, at = self.trainer, self.trainer.progress
        for number, (step, seconds, theta) in enumerate(self.taken):
            members = [Member(rank, {"theta": vector.copy()}, {}) for rank, vector in trainer.fabric.gather(theta)]
            if members:
                checkpoint = self._look(session, members, step, at.epoch - len(self.taken) + number, seconds)
                if at.best_step == step:
                    session.write(checkpoint, step)
        if last and not trainer.method.synchronous and trainer.data.x_validation is not None:
            self._look(session, last, at.step, at.epoch, at.seconds)
            session.keep(last, None)  # anew, since it says which one is best

    def _look(self, session: Session, members: list[Member], step: int, epoch: int, seconds: float) -> Checkpoint:
        """Validate an average; returns what would keep it."""
        with averaged(self.trainer, members):
            scores = self.trainer.validate(step)
            checkpoint = self.trainer.checkpoint()
        session.log({"event": "average", "step": step, "epoch": epoch, **scores,
                     "consensus_distance": distance(members), "seconds": seconds})  # fmt: skip
        return checkpoint


def together(
    session: Session,
    members: Sequence[Member],
    score: Score,
    words: Sequence[dict[str, Any]],
    reports: Sequence[np.ndarray],
) -> dict[str, Any]:
    """The part of the summary that speaks of several replicas.

    score: of their average. words: what each says of itself. reports: each one's books.
    """
    accuracies = [one["score"][1] for one in words]
    books = meter.merge([meter.from_vector(vector) for vector in reports], session.fabric.nodes)
    return {
        "workers": session.config.workers,
        "method": session.config.method,
        "replicas_alive": len(words),
        "accuracy_average": score.accuracy,
        "accuracy_best": max(accuracies),
        "accuracy_worst": min(accuracies),
        "consensus_distance": distance(members),
        "images_per_second": round(sum(one["speed"] for one in words), 1),
        **{name: books[name] for name in ("bytes_sent", "messages", "wait_fraction", "bytes_between_nodes", "staleness",
                                          "held", "missed", "edges")},
    }  # fmt: skip
