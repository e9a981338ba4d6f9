"""The tables of bench/papers/sc17.py, in Markdown: what the simulation found, beside what the paper reports."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from bench.papers import sc17_paper as paper
from bench.papers.costs import SHARES
from bench.papers.sc17_findings import Findings, Interval, interval
from bench.papers.sc17_jobs import NETWORKS, SCALED, searched

NONE = ""


def tables(found: Findings) -> str:
    """Return all tables for which there are results."""
    written = [_goals(found), _breakdown(found), _accuracy(found), _counterparts(found), _paired(found),
               _scaling(found), _parts(found)]  # fmt: skip
    return "\n\n".join(text for text in written if text)


def page(found: Findings, text: str) -> str:
    """Return RESULTS-sc17.md."""
    plan, search = found.plan, searched()
    seeds = f"{plan.seeds[0]} to {plan.seeds[-1]}" if len(plan.seeds) > 1 else str(plan.seeds[0])
    return f"""# You, Buluc, Demmel (SC 2017), repeated in a simulation

`python -m bench.papers.sc17 --write` has written this page, at commit {_commit()}, on {plan.cpu}. Cluster:
`{plan.where}`. Seeds of the trainings: {seeds}.

- **Calibrated**, that is, put in: the rate of `[host]` in the cluster's file, so that Original EASGD communicates in
  87% of its time. Everything else is **predicted**: it comes out of the simulation. The cluster's file gives the
  sources of its other constants.
- The numbers of the paper are recalled, except those of its abstract: 87%, 14%, 5.3 times, 91.5%.
- The time of a method is virtual. The arithmetic of the trainings is real.
- The network is the LeNet of that time, with {plan.task.network.parameters:,} parameters and batches of
  {plan.task.batch} images for each of 8 replicas. We do not know the batch of the paper.
- Original EASGD overlaps the gradient of a replica with the visits of the others (`--overlap`). Without this, at most
  1/8 of a replica's time would be computation, whatever the links: a row shows it.
- The vector that the replicas of the Hogwild methods share is in the host's memory: each read and write crosses the
  host link, after those of other replicas.
- Each pass over a vector takes the time of its bytes in the device's memory, and of the start of a kernel: updates,
  mixes, copies, the additions of a sum, codes. The rule is the same for all methods.
- In Async SGD and Async MSGD the server applies gradients as they come (`--staleness ignore`), as in the paper. By
  default, minidl's server divides the rate by the age of a gradient, which is another algorithm.

![Where the time goes, the time to the accuracy, weak scaling](sc17.svg)

{text}

## Learning rates

`--tune` searches one grid with a factor of sqrt(2) for every method, baselines included, on `{search["cluster"]}` with
the seeds {" and ".join(map(str, search["seeds"]))}, which no other table uses: from an earlier rate upward, else
downward, while the accuracy grows. The accuracy is the mean of these seeds, and of the tests after
{search["images"] * 2 // 3:,} and {search["images"]:,} images. "Diverged": with at least one of the seeds the loss
became infinite. The learning rate is the best one, or, if the next higher one diverges, the next lower one: the
trainings of the tables above are longer than those of the search. Sync EASGD 1 and 3 have the bits of Sync EASGD 2.

{tuning()}
"""


def tuning() -> str:
    """Return the table of the search: accuracies by row and rate."""
    rows = []
    for title, row in searched()["rows"].items():
        cells = [f"{rate}: {'diverged' if value is None else f'{value:.2%}'}"
                 for rate, value in row["accuracy"].items()]  # fmt: skip
        rows.append([title, f"{row['rate']:g}", ", ".join(cells)])
    return table(["method", "learning rate", "accuracy by learning rate"], rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> str:
    return f"## {title}\n\n" + (f"{note}\n\n" if note else "") + table(head, rows) if rows else NONE


def _goals(found: Findings) -> str:
    """The figures that this comparison must reach, and whether it does."""
    rows: list[list[str]] = []

    def goal(what: str, value: float | None, shown: str, least: float, most: float, wanted: str) -> None:
        if value is not None:
            rows.append([what, shown.format(value), wanted, "yes" if least <= value <= most else "**no**"])

    times, many = "{:.2f} times", 1e9
    for title, low, high in ((paper.FIRST, 2.8, many), (paper.THIRD, 4.2, 6.6), (paper.OWN, 6.0, many)):
        wanted = f"at least {low:g} times" if high == many else f"{low:g} to {high:g} times"
        goal(f"{title} over Original EASGD, in the time to the accuracy", found.sooner(title), times, low, high, wanted)
    for title, most in ((paper.THIRD, 0.18), (paper.OWN, 0.08)):
        goal(f"{title}: communication", found.communication(title), "{:.1%}", 0, most, f"at most {most:.0%}")
    for network in NETWORKS:
        end = found.efficiency(network, paper.OWN).get(64)
        goal(f"{paper.OWN}: weak scaling at 64 nodes, {network}", end, "{:.1%}", 0.95, 2, "at least 95%")
    for one, other in paper.COUNTERPARTS:
        if won := found.wins(one, other):
            enough = 0.8 * won[1]
            goal(f"{one} before {other}", won[0], f"{{:.0f}} of {won[1]} seeds", enough, many, "4 of 5 seeds")
    if difference := found.paired(paper.OWN, paper.THIRD):
        what = f"{paper.OWN}: mean accuracy, less that of Sync EASGD 3"
        goal(what, 100 * difference.mean, "{:+.3f} points", -0.1, many, "at most 0.1 point less")  # fmt: skip
    return _section("Goals", ["figure", "found", "goal", "reached"], rows)


def _breakdown(found: Findings) -> str:
    rows = []
    for title, result in found.steps.items():
        known = paper.COMMUNICATION.get(title)
        kind = "calibrated" if title == paper.ORIGINAL else "predicted"
        shares = [f"{result['shares'][name]:.1%}" for name in SHARES]
        rows.append([title, f"{result['milliseconds']:.3f}", *shares, f"{found.communication(title):.1%} ({kind})",
                     f"{known:.0%}" if known else NONE])  # fmt: skip
    head = ["method", "ms for a batch of each replica", *SHARES, "communication (weights and data)", "paper"]
    note = ("What a replica does in its time (a mean of 8 replicas). In \"weights\" it waits for a message, for its "
            "turn, for the center or for others. An exchange beside a gradient is hidden, so it does not count.")
    return _section("Where the time goes: LeNet, 8 replicas", head, rows, note)


def _accuracy(found: Findings) -> str:
    target, rows = found.plan.task.target, []
    for title, every in found.times.items():
        row = paper.row(title)
        good = [time for time in every if time is not None]
        images = [count for count in found.images[title] if count is not None]
        sooner, faster = found.sooner(title), found.faster(title)
        rows.append([
            title, f"{len(good)} of {len(every)}", shown(interval(good)) if good else "not reached",
            f"{row.seconds:g}" if row.seconds else NONE, f"{sum(images) / len(images) / 1e3:.0f}" if images else NONE,
            f"{sooner:.2f}" if sooner else NONE,
            f"{paper.SPEEDUPS[title]:.1f}" if title in paper.SPEEDUPS else NONE, f"{faster:.2f}" if faster else NONE,
        ])  # fmt: skip
    head = ["method", "runs", f"virtual s to {target:.1%}, mean and 95% interval (predicted)", "paper, s",
            "thousands of images", "times Original's speed", "paper", "for equal samples"]  # fmt: skip
    note = ("Rows with the same bits are trained once: Sync EASGD 1, 2 and 3, and Original with and without overlap. "
            "Of such a row, the time of a step comes from the simulation of costs.")  # fmt: skip
    return _section(f"Time to {target:.1%}", head, rows, note)


def shown(found: Interval) -> str:
    return f"{found.mean:.4g}" + (f" ± {found.half:.2g}" if found.half == found.half else "")


def _counterparts(found: Findings) -> str:
    rows = []
    for elastic, plain in paper.COUNTERPARTS:
        if won := found.wins(elastic, plain):
            rows.append([elastic, plain, f"{won[0]} of {won[1]}", "always"])
    head = ["method", "counterpart", "seeds it wins", "paper"]
    return _section("Each method against its SGD counterpart", head, rows)


def _paired(found: Findings) -> str:
    rows = []
    for title, ends in found.ends.items():
        difference = found.paired(title, paper.THIRD)
        points = shown(Interval(*(100 * value for value in difference))) if difference else NONE
        rows.append([title, f"{100 * sum(ends) / len(ends):.3f}%", points])
    head = ["method", "mean accuracy", "less that of Sync EASGD 3, in points, with 95% interval"]
    return _section(f"Accuracy after {found.plan.task.paired:,} images, in pairs with equal seeds", head, rows)


def _scaling(found: Findings) -> str:
    rows = []
    for network in NETWORKS:
        for title in SCALED:
            for place, (nodes, efficiency) in enumerate(found.efficiency(network, title).items()):
                known = paper.GOOGLENET[0] / paper.GOOGLENET[place] if network == "GoogLeNet" else None
                rows.append([network, title, str(nodes), f"{found.scaling(network, title)[nodes]:.4g}",
                             f"{efficiency:.1%}", f"{known:.1%}" if known else NONE])  # fmt: skip
    head = ["network", "method", "nodes", "s for a step", "efficiency (predicted)", "paper"]
    note = "Costs only: the messages and schedules of the networks, no gradients (`knl-aries`). The paper: GoogLeNet."
    return _section("Weak scaling on KNL nodes", head, rows, note)


def _parts(found: Findings) -> str:
    rows, real = [], found.measured_parts
    for number, value in found.parts.items():
        speed = f"{real[1] / real[number]:.2f}" if number in real and 1 in real else NONE
        rows.append([str(number), f"{value:.3f}", f"{found.parts[1] / value:.2f}", speed,
                     f"{paper.PARTS[1] / paper.PARTS[number]:.2f}" if number in paper.PARTS else NONE])  # fmt: skip
    head = ["parts", "ms for an image", "times the speed of one part (predicted)", "measured", "paper (to an accuracy)"]
    note = f"Predicted: AlexNet on a KNL chip. Measured: LeNet on {found.plan.cpu} (`bench/parts.py`)."
    return _section("A chip in parts", head, rows, note)


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
