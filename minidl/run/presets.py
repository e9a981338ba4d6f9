"""Presets: values of options that are not given, for combinations of data set, model, optimizer and method.

A row applies if all its conditions hold; later rows override earlier ones. A method's file declares its row (PRESET in
declared.py), which comes last. bench/RESULTS.md has the measurements on which the rows for VGG and the deep ResNets are
based, and the result of each combination. To measure these results again, run bench/presets.py.

`NAMED` has whole recipes, for --preset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minidl.run import declared

Row = tuple[dict[str, str], dict[str, Any]]  # conditions {option: value}, values {option: value}

PRESETS: tuple[Row, ...] = (
    ({"data": "digits"}, dict(epochs=15, batch_size=32)),
    ({"data": "mnist"}, dict(epochs=10, batch_size=64)),
    ({"data": "fashion-mnist"}, dict(epochs=15, batch_size=64, augment=("flip",))),
    ({"data": "cifar10"}, dict(epochs=60, batch_size=128, augment=("pad-crop", "flip"))),
    # VGG has no normalisation: on MNIST it diverges (in step 22) with lr 0.05 and a schedule that does not rise first.
    ({"model": "vgg"}, dict(lr=0.02, schedule="one-cycle")),
    ({"model": "resnet20"}, dict(lr=0.1)),
    ({"model": "resnet20-gn"}, dict(lr=0.1)),
    # Deep networks need a low rate in the first steps (He et al. 2016, 4.2), and clipping: in 150 steps on the digits,
    # the loss of ResNet-110 falls steadily to 0.05. Without clipping it first rises (to 14 with lr 0.05) and ends at 1.
    *[({"model": f"resnet{depth}"}, dict(lr=0.1, schedule="one-cycle", clip=1.0)) for depth in (32, 44, 56, 110)],
    ({"optimizer": "adam"}, dict(lr=1e-3, weight_decay=0.0)),
    ({"optimizer": "adamw"}, dict(lr=1e-3, weight_decay=0.05)),
    ({"optimizer": "lars"}, dict(lr=1.0)),
    ({"optimizer": "muon"}, dict(lr=0.02)),
)

# --preset NAME: a layer of options below those that are given.
NAMED: dict[str, dict[str, Any]] = {
    "none": {},
    # After Jordan's "94% on CIFAR-10" with Muon, with 10 epochs, not 8: the published mean after 8, 94.01%, is too near
    # 94% for a t-test over ten seeds. There, the loss is a sum over 2,000 images, here their mean; so rates are 2,000
    # times as high, and decays as much lower. The head's weights are 16 times as small as there.
    "speedrun": dict(
        data="cifar10", model="whitened-cnn", epochs=10, batch_size=2000, augment=("translate", "alternating-flip"),
        label_smoothing=0.2, optimizer="muon", lr=0.24, momentum=0.6, ns_steps=3, normalise=True, head_lr=5.2,
        weight_decay=7.7e-4, bias_lr=106.0, bias_decay=3.8e-5, sgd_momentum=0.85, schedule="linear",
        views="mirror-shift", workers=1,
    ),
}  # fmt: skip


def rows() -> list[Row]:
    """Return PRESETS, and the rows of the methods that declare one."""
    methods = declared.choices("method").items()
    return [*PRESETS, *(({"method": name}, dict(choice.preset)) for name, choice in methods if choice.preset)]


def preset(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preset values for the chosen data set, model, optimizer and method."""
    found: dict[str, Any] = {}
    for conditions, values in rows():
        if all(chosen[name] == value for name, value in conditions.items()):
            found |= values
    return found


def depending_on(name: str) -> set[str]:
    """Return the options whose presets depend on an option, such as data."""
    return {key for conditions, values in rows() if name in conditions for key in values}
