"""The tables of bench/papers/sc17.py, in Markdown: what the simulation found, beside what the paper reports."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.papers import sc17_paper as paper
from bench.papers.costs import DATA_MOVES, SHARES, WEIGHTS

Result = Mapping[str, Any]
Reached = Callable[[Sequence[Sequence[float]]], float | None]
CONFIDENCE = 0.95


def tables(results: Mapping[str, Result], target: float, reached: Reached) -> str:
    """Return all tables for which there are results. reached: the time at which a curve reaches the target."""
    times = {title: [reached(result["curve"]) for result in found]
             for title, found in by_title(results, "accuracy").items()}  # fmt: skip
    steps = {title: found[0] for title, found in by_title(results, "breakdown").items()}
    written = [_breakdown(steps), _accuracy(times, steps, target), _counterparts(times), _scaling(results),
               _parts(results)]  # fmt: skip
    return "\n\n".join(text for text in written if text)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and the half width of its 95% confidence interval by Student's t distribution."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, float("nan")
    from scipy import stats  # only needed for several seeds

    error = statistics.stdev(values) / len(values) ** 0.5
    return mean, float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * error


def by_title(results: Mapping[str, Result], part: str) -> dict[str, list[Result]]:
    """Return the results of a part of the comparison, by the title in their keys."""
    found: dict[str, list[Result]] = {}
    for key, result in results.items():
        words = key.split(" | ")
        if words[0] == part:
            found.setdefault(words[2], []).append(result)
    return found


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(row) for row in (head, ["---"] * len(head), *rows)]
    return f"## {title}\n\n" + "\n".join(f"| {line} |" for line in lines) if rows else ""


def _breakdown(steps: Mapping[str, Result]) -> str:
    rows = []
    for title, found in steps.items():
        both = found["shares"][WEIGHTS] + found["shares"][DATA_MOVES]
        known = paper.COMMUNICATION.get(title)
        kind = "calibrated" if title == paper.ORIGINAL else "predicted"
        shares = [f"{found['shares'][name]:.1%}" for name in SHARES]
        rows.append([title, f"{found['milliseconds']:.2f}", *shares, f"{both:.1%} ({kind})",
                     f"{known:.0%}" if known else ""])  # fmt: skip
    head = ["method", "ms for a batch of each replica", *SHARES, "communication (weights and data)", "paper"]
    return _table("Where the time goes: LeNet, 8 replicas", head, rows)


def _accuracy(times: Mapping[str, list[float | None]], steps: Mapping[str, Result], target: float) -> str:
    rows, seconds = [], {row.title: row.seconds for row in paper.ROWS}
    first = _mean(times.get(paper.ORIGINAL, []))
    for title, every in times.items():
        good = [time for time in every if time is not None]
        mean, half = interval(good) if good else (None, None)
        equal = (steps[paper.ORIGINAL]["milliseconds"] / steps[title]["milliseconds"]
                 if {title, paper.ORIGINAL} <= steps.keys() else None)  # fmt: skip
        rows.append([
            title, f"{len(good)} of {len(every)}", f"{mean:.4g} ± {half:.2g}" if mean is not None else "not reached",
            f"{seconds[title]:g}" if seconds[title] else "",
            f"{first / mean:.2f}" if first and mean else "", f"{paper.SPEEDUPS[title]:.1f}" if title in paper.SPEEDUPS
            else "", f"{equal:.2f}" if equal else "",
        ])  # fmt: skip
    head = ["method", "runs", f"virtual s to {target:.1%}, mean and 95% interval (predicted)", "paper, s",
            "times Original's speed", "paper", "for equal samples"]  # fmt: skip
    return _table(f"Time to {target:.1%}", head, rows)


def _mean(every: Sequence[float | None]) -> float | None:
    good = [time for time in every if time is not None]
    return statistics.fmean(good) if good else None


def _counterparts(times: Mapping[str, list[float | None]]) -> str:
    rows = []
    for elastic, plain in paper.COUNTERPARTS:
        if elastic in times and plain in times:
            pairs = list(zip(times[elastic], times[plain], strict=True))
            wins = sum(one is not None and (other is None or one < other) for one, other in pairs)
            rows.append([elastic, plain, f"{wins} of {len(pairs)}", "always"])
    return _table("Each method against its SGD counterpart", ["method", "counterpart", "seeds it wins", "paper"], rows)


def scaled(results: Mapping[str, Result], network: str) -> dict[int, Result]:
    """Return {number of nodes: result} for a network, ascending."""
    begin = f"scaling | {network} | "
    found = {int(key.removeprefix(begin)): result for key, result in results.items() if key.startswith(begin)}
    return dict(sorted(found.items()))


def _scaling(results: Mapping[str, Result]) -> str:
    rows = []
    for network in ("GoogLeNet", "VGG-19"):
        found = scaled(results, network)
        for place, (nodes, result) in enumerate(found.items()):
            known = paper.GOOGLENET[0] / paper.GOOGLENET[place] if network == "GoogLeNet" else None
            efficiency = found[1]["seconds"] / result["seconds"]
            rows.append([network, result["method"], str(nodes), f"{result['seconds']:.4g}", f"{efficiency:.1%}",
                         f"{known:.1%}" if known else ""])  # fmt: skip
    head = ["network", "method", "nodes", "s for a step", "efficiency (predicted)", "paper"]
    return _table("Weak scaling on KNL nodes", head, rows)


def _parts(results: Mapping[str, Result]) -> str:
    found = {int(key.split(" | ")[1]): result for key, result in results.items() if key.startswith("parts | ")}
    rows = [[str(number), f"{result['milliseconds']:.3f}", f"{found[1]['milliseconds'] / result['milliseconds']:.2f}",
             f"{paper.PARTS[1] / paper.PARTS[number]:.2f}" if number in paper.PARTS else ""]
            for number, result in sorted(found.items())]  # fmt: skip
    head = ["parts", "ms for an image", "times the speed of one part (predicted)", "paper (to an accuracy)"]
    return _table("A chip in parts", head, rows)
