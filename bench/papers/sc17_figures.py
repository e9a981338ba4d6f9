"""The figures of bench/papers/sc17.py, as SVG and PNG: where the time goes, the time to an accuracy, weak scaling."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.papers import sc17_paper as paper
from bench.papers.costs import SHARES
from bench.papers.sc17_findings import Findings, interval
from bench.papers.sc17_jobs import NETWORKS, SCALED

Result = Mapping[str, Any]
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red")
NAME = "sc17"
BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.15)}  # legends hide no bars


def draw(found: Findings, folder: Path) -> list[Path]:
    """Draw what there is results for. Returns the files."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = NAME  # the same figure has the same bytes
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 5), layout="constrained")
    shares(left, found.steps)
    times = {title: [time for time in every if time is not None] for title, every in found.times.items()}
    accuracy(middle, times, found.plan.task.target)
    efficiency(right, found)
    files = [folder / f"{NAME}.{kind}" for kind in ("svg", "png")]
    for file in files:
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else {"Software": None})
    pyplot.close(figure)
    return files


def shares(axes: Any, steps: Mapping[str, Result]) -> None:
    left = dict.fromkeys(steps, 0.0)
    for name, colour in zip(SHARES, COLOURS, strict=True):
        widths = {title: 100 * found["shares"][name] for title, found in steps.items()}
        axes.barh([*widths], [*widths.values()], left=[*left.values()], color=colour, label=name)
        left = {title: left[title] + width for title, width in widths.items()}
    axes.set(title="Where the time goes (LeNet, 8 replicas)", xlabel="% of the time", xlim=(0, 100))
    axes.invert_yaxis()
    if steps:
        axes.legend(fontsize="small", ncols=len(SHARES), **BELOW)


def accuracy(axes: Any, times: Mapping[str, list[float]], target: float) -> None:
    """Bars with 95% intervals; crosses for the paper."""
    found = {title: interval(every) for title, every in times.items() if every}
    widths = [half if half == half else 0.0 for _, half in found.values()]  # NaN: one seed only
    axes.barh([*found], [each.mean for each in found.values()], xerr=widths, color=COLOURS[0], label="predicted")
    known = {row.title: row.seconds for row in paper.ROWS if row.title in found and row.seconds}
    axes.plot([*known.values()], [*known], "kx", label="paper")
    axes.set(title=f"Time to {target:.1%}", xlabel="virtual seconds", xscale="log" if found else "linear")
    axes.invert_yaxis()
    if found:
        axes.legend(fontsize="small", ncols=2, **BELOW)


def efficiency(axes: Any, found: Findings) -> None:
    for network, colour in zip(NETWORKS, COLOURS):
        for title, style in zip(SCALED, ("o-", "s:")):
            if values := found.efficiency(network, title):
                axes.plot([*values], [100 * value for value in values.values()], style, color=colour,
                          label=f"{network}, {title} (predicted)")  # fmt: skip
    known = {2**k: 100 * paper.GOOGLENET[0] / time for k, time in enumerate(paper.GOOGLENET)}
    axes.plot([*known], [*known.values()], "kx--", label="GoogLeNet, paper")
    axes.set(title="Weak scaling on KNL nodes", xlabel="nodes", ylabel="efficiency in %", xscale="log", ylim=(80, 102))
    axes.legend(fontsize="small", **BELOW)
