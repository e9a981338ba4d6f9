"""Optimizers: each update is one fused pass over the arena's flat vectors. Clipping and LARS first compute norms.

Muon multiplies matrices besides. kernels/optim/README.md explains the updates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from minidl import models
from minidl.checked import one_of
from minidl.errors import ConfigError
from minidl.nn.groups import parameter_groups
from minidl.nn.module import Module
from minidl.optim.muon import Muon, orthogonalise
from minidl.optim.optimizer import Optimizer, Parameters
from minidl.optim.rules import LARS, SGD, Adam, AdamW

__all__ = [
    "ABOUT", "LARS", "OPTIMIZERS", "OPTIONS", "SGD", "Adam", "AdamW", "Muon", "Optimizer", "Parameters", "build",
    "orthogonalise", "parameter_groups",
]  # fmt: skip


# What the command line offers (see run/declared.py). All take lr, weight_decay, clip and lookahead.
ABOUT = {
    "sgd": "SGD with momentum; weight decay is added to the gradient",
    "nesterov": "SGD with Nesterov's momentum",
    "sgdw": "SGD with momentum and decoupled weight decay (Loshchilov and Hutter 2019)",
    "adam": "Adam (Kingma and Ba 2015); weight decay is added to the gradient",
    "adamw": "Adam with decoupled weight decay (Loshchilov and Hutter 2019)",
    "lars": "SGD with momentum and a rate for each layer, for large batches (You, Gitman, Ginsburg 2017)",
    "muon": "orthogonal updates of matrices and filters, Nesterov's momentum for the others (Jordan et al. 2024)",
}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "sgd": {"momentum": {"default": 0.9, "min": 0, "below": 1, "help": "fraction of the previous update that is kept"}},
    "nesterov": {"momentum": {"like": "sgd"}},
    "sgdw": {"momentum": {"like": "sgd"}},
    "adam": {},
    "adamw": {},
    "lars": {"momentum": {"like": "sgd"}},
    "muon": {
        "momentum": {"like": "sgd", "default": 0.95},
        "ns_steps": {"default": 5, "min": 1, "max": 100, "help": "Newton-Schulz steps that orthogonalise an update"},
        "normalise": {
            "default": False,
            "help": "before each update, scale each orthogonalised matrix to the norm sqrt(outputs); for layers "
                    "followed by batch norm",
        },
        "head_lr": {"default": 0.05, "min": 0, "help": "learning rate of the last layer's matrix"},
        "bias_lr": {"default": 0.05, "min": 0, "help": "learning rate of biases and norms"},
        "bias_decay": {"default": 0.0, "min": 0, "help": "weight decay of biases and norms"},
        "sgd_momentum": {
            "default": 0.9,
            "min": 0,
            "below": 1,
            "help": "momentum of the last layer, biases and norms, which are updated as by nesterov",
        },
    },
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": SGD,
    "nesterov": partial(SGD, nesterov=True),
    "sgdw": partial(SGD, decoupled=True),
    "adam": Adam,
    "adamw": AdamW,
    "lars": LARS,
    "muon": Muon,
}


def build(
    name: str, model: Module, lr: float, weight_decay: float = 0.0, clip: float | None = None, **options: Any
) -> Optimizer:
    """Return the optimizer of that name, without weight decay for norms and biases (muon: with bias_decay).

    options: the options that OPTIONS declares for this optimizer, with the same defaults as on the command line.
    Raises ConfigError for an unknown name or option.
    """
    one_of("optimizer", name, OPTIMIZERS)
    models.check(f"optimizer {name}", model)
    defaults = {key: (OPTIONS[entry.get("like", name)][key] | entry)["default"] for key, entry in OPTIONS[name].items()}
    if unknown := options.keys() - defaults.keys():
        raise ConfigError(f"optimizer {name}: unknown option {', '.join(sorted(unknown))}; expected "
                          f"{', '.join(['lr', 'weight_decay', 'clip', *defaults])}; the classes of minidl.optim take "
                          "more")  # fmt: skip
    Module.flatten(model)
    options = defaults | options
    groups = muon_groups(model, options) if name == "muon" else parameter_groups(model)
    return OPTIMIZERS[name](groups, lr, weight_decay=weight_decay, clip=clip, **options)


def muon_groups(model: Module, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return three groups: matrices and filters, the last of them, and the other parameters.

    options: of muon; those that are for groups are removed from it.
    """
    weights, others = (group["params"] for group in parameter_groups(model))
    head_lr, bias_lr, bias_decay = (options.pop(name) for name in ("head_lr", "bias_lr", "bias_decay"))
    groups = [
        {"params": weights[:-1]},
        {"params": weights[-1:], "lr": head_lr, "orthogonal": False},
        {"params": others, "lr": bias_lr, "weight_decay": bias_decay, "orthogonal": False},
    ]
    return [group for group in groups if group["params"]]
