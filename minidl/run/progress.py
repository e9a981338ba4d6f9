"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BEST = ("best_step", "best_accuracy", "best_loss")  # what replicas know in common


@dataclass
class Progress:
    """Where a run stands: with the weights, the optimizer and dropout's counter, all that the next step depends on."""

    step: int = 0  # steps made; where the number of replicas has changed, by the one that has made most of them
    shift: int = 0  # those of them that as many replicas as now would not have made to come here
    epoch: int = 0  # epochs finished
    batch: int = 0  # batches made of the epoch after those
    lr: float = 0.0  # of the last step
    loss_sum: float = 0.0  # over the images of that epoch so far, as are the next two
    correct: int = 0
    images: int = 0
    train_loss: float = 0.0  # of the last finished epoch, while its weights moved
    best_step: int = -1  # on the validation images; -1: none yet
    best_accuracy: float = 0.0
    best_loss: float = 0.0
    seconds: float = 0.0  # since the beginning, without the time between a stop and its resume
    timed_images: int = 0  # trained on in timed_seconds; without each process's first step, which compiles
    timed_seconds: float = 0.0

    @property
    def images_per_second(self) -> float:
        return self.timed_images / self.timed_seconds if self.timed_seconds else 0.0

    @property
    def result(self) -> int:
        """The step whose weights are the result: that did best on the validation images, if there are any; the last."""
        return self.best_step if self.best_step >= 0 else self.step

    @property
    def best(self) -> dict[str, Any]:
        """For a summary."""
        if self.best_step < 0:
            return {}
        return {"validation_accuracy": self.best_accuracy, "validation_loss": self.best_loss,
                "best_step": self.best_step}  # fmt: skip
