"""The table that `Module.summary` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minidl.checked import shown, whole
from minidl.errors import ConfigError

Row = tuple[str, str, str, int, int]  # name, layer, shape of the output, number of parameters, FLOPs


def checked_shape(shape: Any) -> tuple[int, ...]:
    """Return the shape of one input as a tuple. Raises ConfigError unless it consists of whole numbers above 0."""
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise ConfigError(f"summary: input_shape {shown(shape)}; expected sizes such as (28, 28, 1)")
    return tuple(whole("summary", "a size of input_shape", size, 1) for size in shape)


def table(rows: list[Row], parameters: int, input_shape: tuple[int, ...]) -> str:
    """Format the rows as a table. parameters: the number of parameters of the whole model."""
    header = ("name", "layer", "output")
    widths = [max(len(text) for text in column) for column in zip(header, *(row[:3] for row in rows), strict=True)]
    lines = [f"{'name':<{widths[0]}}  {'layer':<{widths[1]}}  {'output':<{widths[2]}}  parameters         FLOPs"]
    for name, layer, shape, count, flops in rows:
        lines.append(f"{name:<{widths[0]}}  {layer:<{widths[1]}}  {shape:<{widths[2]}}  {count:>10,}  {flops:>12,}")
    lines.append(f"{parameters:,} parameters, {sum(row[4] for row in rows):,} FLOPs for one input of {input_shape}")
    return "\n".join(lines)
