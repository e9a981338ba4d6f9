"""What You, Buluc and Demmel report (SC 2017, "Scaling Deep Learning on GPU and Knights Landing clusters"), and the
methods of their comparison under their names in minidl.

The abstract of the paper states 87%, 14%, 5.3 times and 91.5%. All other numbers are recalled, not looked up again.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Row(NamedTuple):
    """A method of the paper. options: of `--method name`. seconds: until LeNet reaches 98.8% on MNIST, with 8 GPUs."""

    title: str
    name: str
    options: dict[str, Any]
    seconds: float | None = None


PLAIN: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0}
MOMENTUM: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.0}
ORIGINAL, FIRST, SECOND, THIRD = "Original EASGD", "Sync EASGD 1", "Sync EASGD 2", "Sync EASGD 3"
ROWS = (
    Row(ORIGINAL, "easgd", {**PLAIN, "center": "rank"}, 41.0),
    Row("Async SGD", "ps", PLAIN),
    Row("Async MSGD", "ps", MOMENTUM),
    Row("Hogwild SGD", "hogwild-sgd", PLAIN),
    Row("Async EASGD", "async-easgd", {**PLAIN, "center": "rank"}),
    Row("Async MEASGD", "async-easgd", {**MOMENTUM, "center": "rank"}),
    Row("Hogwild EASGD", "hogwild-easgd", {**PLAIN, "center": "rank"}),
    Row(FIRST, "sync-easgd", {**PLAIN, "center": "rank"}, 11.0),
    Row(SECOND, "sync-easgd", {**PLAIN, "center": "beside"}, 8.2),
    Row(THIRD, "sync-easgd", {**PLAIN, "center": "beside", "overlap": True}, 7.7),
    Row("Sync SGD (not in the paper)", "allreduce", PLAIN),
)
COUNTERPARTS = (("Async EASGD", "Async SGD"), ("Async MEASGD", "Async MSGD"), ("Hogwild EASGD", "Hogwild SGD"))

COMMUNICATION = {ORIGINAL: 0.87, THIRD: 0.14}  # of the time
SPEEDUPS = {FIRST: 3.7, SECOND: 3.7 * 1.3, THIRD: 5.3}  # over Original EASGD, in time to 98.8%
GOOGLENET = (1533, 1590, 1608, 1641, 1630, 1662, 1674)  # s with 1, 2, 4, ..., 64 nodes of 68 cores
PARTS = {1: 1605, 4: 1025, 8: 823, 16: 490}  # s until AlexNet reaches 62.5% on CIFAR-10, on one KNL in so many parts
