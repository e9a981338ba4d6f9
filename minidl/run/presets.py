"""Presets: values of options that are not given, for combinations of data set, model and optimizer.

A row applies if all its conditions hold; later rows override earlier ones. What the rows for VGG and the deep ResNets
are based on, and what each combination reaches, is in bench/RESULTS.md; `bench/presets.py` measures it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = tuple[dict[str, str], dict[str, Any]]  # conditions {option: value}, values {option: value}

PRESETS: tuple[Row, ...] = (
    ({"data": "digits"}, dict(epochs=15, batch_size=32)),
    ({"data": "mnist"}, dict(epochs=10, batch_size=64)),
    ({"data": "fashion-mnist"}, dict(epochs=15, batch_size=64, augment=("flip",))),
    ({"data": "cifar10"}, dict(epochs=60, batch_size=128, augment=("pad-crop", "flip"))),
    # Without normalisation a large rate kills ReLUs in the first steps: a lower one, approached slowly.
    ({"model": "vgg"}, dict(lr=0.02, schedule="one-cycle")),
    *[({"model": model}, dict(lr=0.1)) for model in ("resnet20", "resnet32")],
    # He et al. 2016 (4.2) start ResNet-110 with a lower rate, since 0.1 is too high at first.
    *[({"model": model}, dict(lr=0.1, schedule="one-cycle")) for model in ("resnet44", "resnet56", "resnet110")],
    ({"optimizer": "adam"}, dict(lr=1e-3, weight_decay=0.0)),
    ({"optimizer": "adamw"}, dict(lr=1e-3, weight_decay=0.05)),
    ({"optimizer": "lars"}, dict(lr=1.0)),
)


def preset(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preset values for the chosen data set, model and optimizer."""
    found: dict[str, Any] = {}
    for conditions, values in PRESETS:
        if all(chosen[name] == value for name, value in conditions.items()):
            found |= values
    return found


def depending_on(name: str) -> set[str]:
    """Return the options whose presets depend on an option, such as data."""
    return {key for conditions, values in PRESETS if name in conditions for key in values}
