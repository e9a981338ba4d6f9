"""Draws a topology: replicas on a circle, one panel per round (up to 16). Needs Matplotlib (the extra `report`)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minidl.comm.topology.mixing import Topology

MOST_REPLICAS = 256  # with more, lines and dots merge
MOST_PANELS = 16
LINE, DOT = "#4477aa", "#222222"


def draw(topology: Topology, path: str) -> None:
    """Draw a topology and write the picture to `path`, in the format of its suffix.

    A line joins two replicas that read from each other with equal weights. An arrow points from a replica to its reader
    in all other cases. A thicker line or arrow means a larger weight.
    Raises ImportError without Matplotlib, OSError if the file cannot be written.
    """
    from matplotlib.figure import Figure  # not pyplot: no window, no state

    panels = min(topology.period or 4, MOST_PANELS)
    columns = min(panels, 4)
    rows = math.ceil(panels / columns)
    side = 4.2 if panels == 1 else 2.8
    figure = Figure(figsize=(side * columns, side * rows + 0.4), layout="constrained")
    title = f"{topology.name}, {topology.size} replicas"
    if topology.period != panels:
        title += f" (the first {panels} " + (f"of {topology.period} rounds)" if topology.period else "random rounds)")
    figure.suptitle(title)
    for round, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        axes.set(aspect="equal", xlim=(-1.25, 1.25), ylim=(-1.25, 1.25))
        axes.axis("off")
        if round < panels:
            _panel(axes, topology, round)
            if topology.period != 1:
                axes.set_title(f"round {round}", fontsize=9)
    figure.savefig(path, dpi=150)


def _panel(axes: Any, topology: Topology, round: int) -> None:
    """Draw one round."""
    size = topology.size
    angle = np.pi / 2 - 2 * np.pi * np.arange(size) / size  # rank 0 on top, then clockwise
    at = np.column_stack([np.cos(angle), np.sin(angle)])
    links = {(source, rank): weight for rank in topology.alive
             for source, weight in topology.weights(rank, round).items() if source != rank}  # fmt: skip
    for (source, rank), weight in links.items():
        mutual = math.isclose(links.get((rank, source), 0.0), weight)
        if mutual and source > rank:
            continue  # one line for both directions
        (x, y), (dx, dy) = at[source], at[rank] - at[source]
        width = 0.3 + 2.2 * weight
        if mutual:
            axes.plot([x, x + dx], [y, y + dy], color=LINE, linewidth=width, zorder=1)
        else:
            short = max(0.0, 1 - (0.13 if size <= 24 else 0.03) / math.hypot(dx, dy))  # ends at the dot's edge
            axes.quiver(x, y, dx * short, dy * short, angles="xy", scale_units="xy", scale=1, color=LINE, zorder=1,
                        width=0.004 * width, headwidth=7, headlength=8, headaxislength=7)  # fmt: skip
    inside = size <= 24  # whether the rank numbers are inside the dots; with more ranks, outside the circle
    axes.scatter(*at.T, s=190 if inside else 12, color=DOT, zorder=2)
    for rank in range(size if size <= 64 else 0):
        axes.annotate(str(rank), at[rank] * (1 if inside else 1.1), ha="center", va="center", zorder=3,
                      fontsize=8 if inside else 6, color="white" if inside else DOT)  # fmt: skip
