"""What You, Buluc and Demmel report (SC 2017, "Scaling Deep Learning on GPU and Knights Landing clusters"), and the
methods of their comparison under their names in minidl.

The abstract of the paper states 87%, 14%, 5.3 times and 91.5%. All other numbers are recalled, not looked up again.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Row(NamedTuple):
    """A method of the paper. options: of `--method name`. seconds: until LeNet reaches 98.8% on MNIST, with 8 GPUs.

    bits_of: another row. The weights of both have the same bits after the same number of steps, at other times. So
    only the other row is trained. trained: whether the row is in the table of times to an accuracy. paired: whether
    the accuracy after a fixed number of images is compared with that of Sync EASGD 3.
    """

    title: str
    name: str
    options: dict[str, Any]
    seconds: float | None = None
    bits_of: str = ""
    trained: bool = True
    paired: bool = False


PLAIN: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0}
MOMENTUM: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.0}
RANK: dict[str, Any] = {"center": "rank"}
AS_THEY_COME: dict[str, Any] = {"staleness": "ignore"}  # by default, minidl's server divides the rate by the age

ORIGINAL, FIRST, SECOND, THIRD = "Original EASGD", "Sync EASGD 1", "Sync EASGD 2", "Sync EASGD 3"
OWN, OWN_1 = "minidl's own", "minidl's own, period 1"
# The configuration of our own. Its options are this line.
OWN_OPTIONS: dict[str, Any] = {"center": "copies", "overlap": True, "period": 4, "compress": "bf16"}

# In Original EASGD a replica computes its gradient while others visit the center (--overlap). Without this, 7 of 8
# replicas would wait at each moment, however fast the links are: a replica would compute in less than 1/8 of its time,
# so less than 1/8 would be left for all but communication, and the paper has 13%.
ROWS = (
    Row(ORIGINAL, "easgd", {**PLAIN, **RANK, "overlap": True}, 41.0),
    Row("Original EASGD without overlap", "easgd", {**PLAIN, **RANK}, bits_of=ORIGINAL),
    Row("Async SGD", "ps", {**PLAIN, **AS_THEY_COME}),
    Row("Async MSGD", "ps", {**MOMENTUM, **AS_THEY_COME}),
    Row("Hogwild SGD", "hogwild-sgd", PLAIN),
    Row("Async EASGD", "async-easgd", {**PLAIN, **RANK}),
    Row("Async MEASGD", "async-easgd", {**MOMENTUM, **RANK}),
    Row("Hogwild EASGD", "hogwild-easgd", PLAIN),
    Row(FIRST, "sync-easgd", {**PLAIN, **RANK}, 11.0, bits_of=SECOND),
    Row(SECOND, "sync-easgd", {**PLAIN, "center": "beside"}, 8.2, paired=True),
    Row(THIRD, "sync-easgd", {**PLAIN, "center": "beside", "overlap": True}, 7.7, bits_of=SECOND),
    Row(OWN, "sync-easgd", {**PLAIN, **OWN_OPTIONS}, paired=True),
    Row(OWN_1, "sync-easgd", {**PLAIN, **OWN_OPTIONS, "period": 1}, paired=True),
    Row("Sync SGD (not in the paper)", "allreduce", PLAIN, trained=False),
)
COUNTERPARTS = (("Async EASGD", "Async SGD"), ("Async MEASGD", "Async MSGD"), ("Hogwild EASGD", "Hogwild SGD"))

COMMUNICATION = {ORIGINAL: 0.87, THIRD: 0.14}  # of the time
SPEEDUPS = {FIRST: 3.7, SECOND: 3.7 * 1.3, THIRD: 5.3}  # over Original EASGD, in time to 98.8%
GOOGLENET = (1533, 1590, 1608, 1641, 1630, 1662, 1674)  # s with 1, 2, 4, ..., 64 nodes of 68 cores
PARTS = {1: 1605, 4: 1025, 8: 823, 16: 490}  # s until AlexNet reaches 62.5% on CIFAR-10, on one KNL in so many parts


def row(title: str) -> Row:
    """Return the row with this title."""
    return next(row for row in ROWS if row.title == title)
