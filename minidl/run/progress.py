"""The progress of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minidl.schema import LARGEST, Kind, Mismatch, number, record, whole

BEST = ("best_step", "best_accuracy", "best_loss")  # the leader measures them; a resume gives them to all replicas


@dataclass
class Progress:
    """The progress of a run.

    Together with the weights, the optimizer and dropout's counter, this is everything that the next step depends on.
    """

    step: int = 0  # steps done; if the number of replicas changes, counting continues from the largest count
    shift: int = 0  # `step` minus the steps that the present number of replicas would have made so far
    epoch: int = 0  # epochs finished
    batch: int = 0  # batches done in the current epoch
    lr: float = 0.0  # learning rate of the last step
    loss_sum: float = 0.0  # over the images of the current epoch so far; the next two likewise
    correct: int = 0
    images: int = 0
    train_loss: float = 0.0  # mean of the last finished epoch, measured while the weights changed
    best_step: int = -1  # on the validation images; -1: none yet
    best_accuracy: float = 0.0
    best_loss: float = 0.0
    seconds: float = 0.0  # of training: excludes the handling of finished epochs, and the time between stop and resume
    timed_images: int = 0  # images trained on in timed_seconds; excludes each process's first step, which compiles
    timed_seconds: float = 0.0

    @property
    def images_per_second(self) -> float:
        return self.timed_images / self.timed_seconds if self.timed_seconds else 0.0

    @property
    def result(self) -> int:
        """The step whose weights are the result: the best on the validation images if there are any, else the last."""
        return self.best_step if self.best_step >= 0 else self.step

    @property
    def best(self) -> dict[str, Any]:
        """The best validation results, for a summary; empty if there are none."""
        if self.best_step < 0:
            return {}
        return {"validation_accuracy": self.best_accuracy, "validation_loss": self.best_loss,
                "best_step": self.best_step}  # fmt: skip


def _progress() -> Kind:
    """Return the description of a saved Progress (schema.py)."""
    counts = ("step", "epoch", "batch", "correct", "images", "timed_images")
    numbers = ("lr", "loss_sum", "train_loss", "best_loss")
    seconds = ("seconds", "timed_seconds")
    fields = record({**dict.fromkeys(counts, whole()), **dict.fromkeys(numbers, number()),
                     **dict.fromkeys(seconds, number(0.0)), "shift": whole(-LARGEST), "best_step": whole(-1),
                     "best_accuracy": number(0.0, 1.0)})  # fmt: skip

    def check(value: Any, name: str = "") -> None:
        fields(value, name)
        for less, more in (("correct", "images"), ("shift", "step")):
            if value[less] > value[more]:
                raise Mismatch(f"{name}.{less} is {value[less]}, but {name}.{more} is {value[more]}")

    return check


PROGRESS = _progress()
