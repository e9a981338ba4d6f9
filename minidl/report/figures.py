"""Figures as SVG, drawn by Matplotlib. They have no background, and colours that the style of the page defines.

Matplotlib draws with the colours INK, GRID and SERIES. In the SVG, these become CSS variables, so one figure serves a
light page and a dark one. Text remains text.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from minidl.report.page import Html, figure, text

INK, GRID = "#010101", "#020202"
SERIES = tuple(f"#03030{number}" for number in range(1, 9))
VARIABLES = {INK: "var(--ink)", GRID: "var(--grid)"} | {
    colour: f"var(--c{number})" for number, colour in enumerate(SERIES, 1)
}
STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "minidl", "text.parse_math": False,
    "font.family": "sans-serif", "font.size": 10,
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none", "legend.frameon": False,
    "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "axes.axisbelow": True, "lines.linewidth": 1.6, "legend.fontsize": 8.5, "axes.formatter.useoffset": False,
    "path.simplify": True, "path.simplify_threshold": 0.5,
}  # fmt: skip
SIZE = (4.8, 2.9)  # inches
MOST_POINTS = 400  # of a curve
SHADES = LinearSegmentedColormap.from_list("shades", [(0.28, 0.5, 0.78, 0.0), (0.28, 0.5, 0.78, 1.0)])
Points = Sequence[tuple[float, float]]


class Figures:
    """The figures of one page: each has unique ids."""

    def __init__(self) -> None:
        self.drawn = 0

    def draw(
        self, what: str, caption: str, draw: Callable[[Any], None], size: tuple[float, float] = SIZE
    ) -> Html:
        """Return a figure with its caption. what: the alternative text. draw: draws on Matplotlib axes."""
        self.drawn += 1
        with matplotlib.rc_context(STYLE):
            canvas = FigureCanvasSVG(Figure(figsize=size, layout="constrained"))
            draw(canvas.figure.subplots())
            stream = io.StringIO()
            canvas.print_svg(stream, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        return figure(inline(stream.getvalue(), f"f{self.drawn}-", what), caption)


def inline(svg: str, prefix: str, what: str) -> str:
    """Return Matplotlib's SVG as an element of a page: with unique ids, and colours of the page's style."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    view = re.search(r'viewBox="([\d. ]+)"', svg)
    svg = re.sub(r"<svg.*?>", f'<svg viewBox="{view[1] if view else "0 0 360 209"}" role="img" '
                 f'aria-label="{text(what)}">', svg, count=1, flags=re.DOTALL)  # fmt: skip
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}', svg).replace("url(#", f"url(#{prefix}").replace("xlink:href", "href")
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return re.sub(r"\n\s*", "\n", svg).strip()


def thinned(points: Points) -> np.ndarray:
    """Return points (n, 2), at most MOST_POINTS of them: the last, and others at equal distances."""
    every = -(-len(points) // MOST_POINTS) or 1
    kept = list(points[::-every])[::-1]
    return np.array(kept, float).reshape(-1, 2)


def curves(
    axes: Any, lines: Mapping[str, Points], x: str, y: str, best: Sequence[float] = (), percent: bool = False
) -> None:
    """Draw lines by name. best: the x and y of a point to mark, or nothing."""
    for number, (name, points) in enumerate(lines.items()):
        xy = thinned(points)
        dots = "o" if len(xy) < 25 else ""
        axes.plot(*xy.T, color=SERIES[number % len(SERIES)], label=name, marker=dots, markersize=3,
                  linestyle=("-", "--", ":")[number // len(SERIES) % 3])  # fmt: skip
    if best:
        axes.plot(*best, marker="*", markersize=12, color=SERIES[5], linestyle="", label="best")
    if percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}%")
    axes.set(xlabel=x, ylabel=y)
    if len(lines) + bool(best) > 1:
        axes.legend()


def whole_numbers(axes: Any) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def logarithmic(axes: Any, lines: Mapping[str, Points]) -> None:
    """Use a logarithmic scale if all values are positive, and their range is large."""
    values = [value for points in lines.values() for _, value in points]
    if values and min(values) > 0 and max(values) > 30 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


def dots(axes: Any, points: Points, x: str, y: str, percent: bool = False) -> None:
    """Draw a value for each whole number, such as the accuracy of each replica."""
    axes.plot(*thinned(points).T, color=SERIES[0], marker="o", markersize=4, linestyle="", clip_on=False)
    low, high = min(value for _, value in points), max(value for _, value in points)
    if percent:
        axes.set_ylim(max(0, low - 1), min(100, high + 1))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}%")
    else:
        axes.set_ylim(0, 1.1 * high or 1)
    axes.set(xlabel=x, ylabel=y)
    whole_numbers(axes)


def bars(axes: Any, names: Sequence[str], values: Sequence[float], x: str, y: str) -> None:
    axes.bar(range(len(values)), values, color=SERIES[0], width=0.8)
    axes.set_xticks(range(len(names)), names, rotation=45 if len(names) > 8 else 0)
    axes.set(xlabel=x, ylabel=y)
    axes.grid(axis="x", visible=False)


def stacked(axes: Any, names: Sequence[str], parts: Mapping[str, Sequence[float]], x: str) -> None:
    """Draw a horizontal bar for each name, from parts side by side."""
    places, left = np.arange(len(names)), np.zeros(len(names))
    for number, (name, values) in enumerate(parts.items()):
        axes.barh(places, values, left=left, color=SERIES[number % len(SERIES)], label=name, height=0.8, linewidth=0)
        left += np.asarray(values)
    axes.set(xlabel=x)
    name_rows(axes, names)
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), handlelength=1, columnspacing=1)


def name_rows(axes: Any, names: Sequence[str]) -> None:
    """Name some of the bars, from top to bottom."""
    every = -(-len(names) // 16) or 1
    axes.set_yticks(range(0, len(names), every), list(names)[::every])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)


def heat(axes: Any, matrix: np.ndarray, each: int, x: str, y: str, scale: str) -> None:
    """Draw a matrix: zero is transparent, the largest value is blue. each: the ranks that one row stands for."""
    end = len(matrix) * each - 0.5
    shown = axes.imshow(matrix, cmap=SHADES, vmin=0, interpolation="nearest", extent=(-0.5, end, end, -0.5))
    axes.grid(visible=False)
    axes.set(xlabel=x, ylabel=y)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.figure.colorbar(shown, ax=axes, label=scale)


def graph(axes: Any, matrix: np.ndarray, names: Sequence[str]) -> None:
    """Draw nodes on a circle. A line is as wide as the traffic between its two nodes, in both directions together."""
    size = len(matrix)
    angle = np.pi / 2 - 2 * np.pi * np.arange(size) / size
    at = np.column_stack([np.cos(angle), np.sin(angle)])
    both = np.triu(matrix + matrix.T, 1)
    rows, columns = np.nonzero(both)
    if len(rows):
        crowd = min(1.0, 60 / len(rows))  # of many lines, each is thin and pale
        widths = 0.3 + 4.0 * crowd**0.5 * both[rows, columns] / both.max()
        ends = [at[[i, j]].tolist() for i, j in zip(rows, columns)]
        axes.add_collection(LineCollection(ends, linewidths=widths.tolist(), colors=SERIES[0],
                                           alpha=max(0.25, 0.55 * crowd**0.5), zorder=1))  # fmt: skip
    axes.scatter(*at.T, s=20, color=INK, zorder=2)
    for name, place in zip(names, at):
        axes.annotate(name, place * 1.13, ha="center", va="center", fontsize=8)
    axes.set(aspect="equal", xlim=(-1.3, 1.3), ylim=(-1.3, 1.3))
    axes.axis("off")


def spans(axes: Any, names: Sequence[str], present: Sequence[Sequence[tuple[float, float]]], x: str) -> None:
    """Draw when each replica trains: present holds its intervals."""
    for row, intervals in enumerate(present):
        axes.broken_barh([(start, stop - start) for start, stop in intervals], (row - 0.35, 0.7), color=SERIES[0],
                         linewidth=0)  # fmt: skip
    axes.set(xlabel=x)
    name_rows(axes, names)


def marks(axes: Any, moments: Iterable[tuple[float, str]]) -> None:
    """Draw a vertical line at each moment, with a word."""
    for moment, word in moments:
        axes.axvline(moment, color=SERIES[1], linewidth=1, linestyle="--")
        axes.annotate(word, (moment, 1.0), xycoords=("data", "axes fraction"), fontsize=7.5, rotation=90, va="top",
                      ha="right", color=SERIES[1])  # fmt: skip


def time_axis(simulated: bool, seconds: Iterable[float]) -> tuple[float, str]:
    """Return (factor, label) of an axis for these seconds of training, which are virtual in a simulation."""
    factor, name = unit(seconds, "seconds")
    name = "seconds" if name == "s" else name
    return factor, f"virtual {name}" if simulated else f"{name} of training"


def unit(values: Iterable[float], kind: str) -> tuple[float, str]:
    """Return (factor, unit) with which the largest value has 1 to 3 digits before the point. kind: bytes or seconds."""
    largest = max(values, default=0.0)
    if not largest or not math.isfinite(largest):
        return 1.0, "MB" if kind == "bytes" else "s"
    steps = [(1e-12, "TB"), (1e-9, "GB"), (1e-6, "MB"), (1e-3, "kB"), (1.0, "bytes")]
    if kind == "seconds":
        steps = [(1 / 3600, "h"), (1 / 60, "min"), (1.0, "s"), (1e3, "ms"), (1e6, "µs")]
    least = {"h": 3, "min": 3, "s": 0.2}
    return next((step for step in steps if largest * step[0] >= least.get(step[1], 1)), steps[-1])
