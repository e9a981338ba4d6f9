"""Groups of parameters, as optimizers take them, and the arena that contains all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from minidl.checked import shown
from minidl.engine.arena import Arena
from minidl.engine.parameter import Parameter
from minidl.engine.tensor import Tensor
from minidl.errors import ConfigError
from minidl.nn.module import Module

Parameters = Module | Iterable[Parameter] | Sequence[Mapping[str, Any]]


def parameter_groups(model: Module) -> list[dict[str, Any]]:
    """Return two groups: the weights, and the parameters without weight decay (at most one axis: norms, biases)."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def groups_of(parameters: Parameters) -> list[dict[str, Any]]:
    """Return the parameters as a list of groups. Raises ConfigError if they are not valid."""
    items = _listed(parameters.parameters() if isinstance(parameters, Module) else parameters)
    given: list[Mapping[str, Any]] = items if any(isinstance(item, Mapping) for item in items) else [{"params": items}]
    for group in given:
        if not isinstance(group, Mapping):
            raise ConfigError(f"optimizer: groups and a {type(group).__name__} in one list; expected one kind only")
        if "params" not in group or not set(group) <= {"params", "lr", "weight_decay"}:
            raise ConfigError(f"parameter group with {', '.join(group)}; expected params, optionally lr, weight_decay")
    groups = [{**group, "params": _listed(group["params"])} for group in given]  # an iterator could be read only once
    every = [p for group in groups for p in group["params"]]
    for p in every:
        if not isinstance(p, Parameter):
            raise ConfigError(f"optimizer: a {type(p).__name__} among the parameters; expected nn.Parameter")
    if not every or len(set(every)) < len(every):
        raise ConfigError("optimizer: no parameters, or one given twice or in two groups")
    return groups


def _listed(parameters: Any) -> list[Any]:
    if isinstance(parameters, Tensor | str) or not isinstance(parameters, Iterable):
        raise ConfigError(f"optimizer: {shown(parameters)} in place of parameters; expected a model, or a list of "
                          "nn.Parameter or of groups")  # fmt: skip
    return list(parameters)


def arena_of(parameters: Parameters, groups: list[dict[str, Any]]) -> Arena:
    """Return the arena of the parameters: a new one if they are in none. Raises ConfigError if they are in several."""
    if isinstance(parameters, Module):
        return Module.flatten(parameters)
    every = [parameter for group in groups for parameter in group["params"]]
    arenas = {parameter.arena for parameter in every}
    if len(arenas) > 1:
        raise ConfigError("optimizer: its parameters are not in one arena; first flatten one model with all of them")
    arena = arenas.pop()
    return arena if isinstance(arena, Arena) else Arena({str(i): p for i, p in enumerate(every)})
