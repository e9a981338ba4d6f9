"""The page that compares several runs, and the CSV file. Runs that differ only in their seed form a group."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minidl.errors import ConfigError, nearest
from minidl.report import data, page
from minidl.report.data import RunData, seconds_of, short_name
from minidl.report.figures import Figures, curves, logarithmic, unit, whole_numbers
from minidl.report.page import Html
from minidl.report.run_page import ending, save
from minidl.run.options import plain_number

MOST_RUNS = 64
MOST_DRAWN = 8  # groups with curves
CONFIDENCE = 0.95
RESULTS = ("test_accuracy", "test_loss", "validation_accuracy", "seconds", "images_per_second", "bytes_sent",
           "wait_fraction", "consensus_distance", "accuracy_best", "accuracy_worst")  # fmt: skip
PERCENT = ("test_accuracy", "validation_accuracy", "wait_fraction", "accuracy_best", "accuracy_worst")
NOT_COMPARED = ("data_dir", "threads", "keep", "stall")  # options that change no result
SECONDS_TO = "seconds-to:"


@dataclass
class Group:
    """Runs with equal options, except the seed. options: those in which the groups differ."""

    runs: list[RunData]
    options: dict[str, str]

    @property
    def name(self) -> str:
        first = self.runs[0].name
        return first if len(self.runs) == 1 else f"{first} and {len(self.runs) - 1} more"

    def values(self, key: str) -> list[float]:
        """Return the values of a result, or of `seconds-to:X`, of the runs that have it."""
        found = (result_of(run, key) for run in self.runs)
        return [value for value in found if value is not None]


def write_comparison(folders: Sequence[str], out: str, sort: str = "", csv_file: str = "") -> Path:
    """Write the page that compares the runs in these folders; return its path.

    sort, csv_file: see `python -m minidl.report --help`. Raises CheckpointError if a folder is no run, ConfigError for
    an unknown sort, MinidlError if a file cannot be written.
    """
    if len(folders) > MOST_RUNS:
        raise ConfigError(f"{len(folders)} runs: expected at most {MOST_RUNS}")
    runs = named_apart([data.read(folder) for folder in folders], folders)
    runs, groups = sorted_by(sort, runs), sorted_groups(sort, grouped(runs))
    if csv_file:
        save(Path(csv_file), csv_of(runs, sort))
    save(Path(out), comparison(groups, sort))
    return Path(out)


def named_apart(runs: list[RunData], folders: Sequence[str]) -> list[RunData]:
    """Use the whole path as the name of runs whose folders have equal names."""
    names = [run.name for run in runs]
    for run, folder in zip(runs, folders):
        if names.count(run.name) > 1:
            run.label = str(folder)
    return runs


def comparison(groups: list[Group], sort: str) -> str:
    """Return the page as HTML."""
    drawn, total = Figures(), sum(len(group.runs) for group in groups)
    runs = [run for group in groups for run in group.runs]
    about = (f"{len(groups)} settings. Runs that differ only in their seed are in one row; ± is half of the "
             f"{CONFIDENCE:.0%} confidence interval of the mean (Student's t).")  # fmt: skip
    ends = page.table(("run", "end"), [(run.name, ending(run)) for run in runs], "Each run")
    missing = (page.note(f"{run.name}: {words}") for run in runs for words in run.missing)
    return page.page(
        f"{total} runs: minidl",
        page.heading(1, f"{total} runs compared"),
        page.paragraph(about),
        page.section("Options and results", results(groups, sort)),
        page.section("Curves", *overlaid(groups, drawn)),
        page.section("How they ended", ends, *missing),
    )


# -- options and results ---------------------------------------------------------------------------------


def shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "none"
    return short_name(value) if isinstance(value, str) else str(value)


def options_of(run: RunData) -> dict[str, str]:
    found = {name: shown(value) for name, value in run.options.items() if name not in NOT_COMPARED}
    if run.simulated:
        found["cluster"] = str(run.result.get("cluster", "a simulation"))
    return found


def differing(runs: Sequence[RunData]) -> list[str]:
    """Return the options in which the runs differ."""
    every = [options_of(run) for run in runs]
    names = dict.fromkeys(name for each in every for name in each)
    return [name for name in names if len({each.get(name, "-") for each in every}) > 1]


def grouped(runs: Sequence[RunData]) -> list[Group]:
    names = [name for name in differing(runs) if name != "seed"]
    found: dict[tuple[str, ...], Group] = {}
    for run in runs:
        values = options_of(run)
        key = tuple(values.get(name, "-") for name in names)
        found.setdefault(key, Group([], dict(zip(names, key)))).runs.append(run)
    return list(found.values())


def result_of(run: RunData, key: str) -> float | None:
    """Return a result of a run, or the seconds until an accuracy in percent; None if the run has none."""
    if key.startswith(SECONDS_TO):
        return seconds_to(run, float(key.removeprefix(SECONDS_TO)) / 100)
    value = run.result.get(key)
    return float(value) if isinstance(value, int | float) else None


def accuracy_curve(run: RunData) -> tuple[str, list[data.Entry]]:
    """Return the accuracy that is compared, and its entries: validation, else test of the average, else training."""
    for name in ("validation_accuracy", "accuracy_average", "accuracy"):
        if entries := run.curve(name):
            return name, entries
    return "accuracy", []


def seconds_to(run: RunData, accuracy: float) -> float | None:
    """Return the seconds of training until the accuracy is at least this one; None if it never is."""
    name, entries = accuracy_curve(run)
    return next((seconds_of(entry) for entry in entries if entry[name] >= accuracy), None)


def sorting(sort: str, runs: Sequence[RunData]) -> tuple[str, bool]:
    """Return the key to sort by, and whether the largest comes first. Raises ConfigError if there is no such key."""
    word = sort.removeprefix("-")
    if word.startswith(SECONDS_TO):
        try:
            value = plain_number(word.removeprefix(SECONDS_TO), float)
        except ValueError:
            value = math.nan
        if not 0 < value <= 100:
            raise ConfigError(f"--sort {sort}: expected a percentage after {SECONDS_TO}, such as {SECONDS_TO}98.5")
        return word, sort.startswith("-")
    known = [*RESULTS, *dict.fromkeys(name for run in runs for name in options_of(run)), "name"]
    key = word.replace("-", "_")
    if key not in known:
        words = [name.replace("_", "-") for name in known]
        raise ConfigError(f"--sort: unknown {word!r}.{nearest(word, words)} Known: {SECONDS_TO}X, {', '.join(words)}")
    return key, sort.startswith("-")


def rank(key: str, run: RunData) -> tuple[int, float, str]:
    """Return where a run belongs: numbers first, then words, then runs without a value."""
    value: Any = result_of(run, key) if key in RESULTS or key.startswith(SECONDS_TO) else (
        run.name if key == "name" else run.options.get(key, options_of(run).get(key)))  # fmt: skip
    if isinstance(value, int | float):
        return 0, float(value), ""
    return (2, 0.0, "") if value is None else (1, 0.0, shown(value))


def _ordered(items: Sequence[Any], place: Callable[[Any], tuple[int, float, str]], reverse: bool) -> list[Any]:
    """Sort, with what has no value at the end also if the largest comes first."""
    known = sorted((item for item in items if place(item)[0] < 2), key=place, reverse=reverse)
    return known + [item for item in items if place(item)[0] == 2]


def sorted_by(sort: str, runs: list[RunData]) -> list[RunData]:
    if not sort:
        return runs
    key, reverse = sorting(sort, runs)
    return _ordered(runs, lambda run: rank(key, run), reverse)


def sorted_groups(sort: str, groups: list[Group]) -> list[Group]:
    """Sort groups by the mean of a result over their runs, or by an option."""
    if not sort:
        return groups
    key, reverse = sorting(sort, [run for group in groups for run in group.runs])

    def place(group: Group) -> tuple[int, float, str]:
        values = group.values(key) if key in RESULTS or key.startswith(SECONDS_TO) else []
        return (0, sum(values) / len(values), "") if values else rank(key, group.runs[0])

    return _ordered(groups, place, reverse)


def columns(groups: Sequence[Group], sort: str) -> list[str]:
    """Return the results that at least one run has, and `seconds-to:X` if it is sorted by."""
    key = sort.removeprefix("-")
    own = [key] if key.startswith(SECONDS_TO) else []
    return own + [name for name in RESULTS if any(group.values(name) for group in groups)]


def results(groups: list[Group], sort: str) -> Html:
    names, found = list(groups[0].options), columns(groups, sort)
    rows = [(group.name, len(group.runs), *group.options.values(), *(cell(group, name) for name in found))
            for group in groups]  # fmt: skip
    head = ("run", "runs", *(name.replace("_", "-") for name in (*names, *found)))
    return page.table(head, rows, "Options in which the runs differ, and results")


def cell(group: Group, name: str) -> str:
    """Format the mean of a result, with its interval if several runs have it."""
    values = group.values(name)
    if not values:
        return "–"
    mean, half = interval(values)
    if name in PERCENT:
        return f"{mean:.2%}" + (f" ± {half:.2%}" if half is not None else "")
    return f"{mean:,.5g}" + (f" ± {half:,.2g}" if half is not None else "")


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean, and half of its confidence interval; None for a single value."""
    from scipy import stats

    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * error


def csv_of(runs: Sequence[RunData], sort: str) -> str:
    """Return a table with a line for each run: its folder, the options in which the runs differ, all results."""
    names, key = differing(runs), sort.removeprefix("-")
    found = [*([key] if key.startswith(SECONDS_TO) else []), *RESULTS]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["run", *names, *found])
    for run in runs:
        values = options_of(run)
        numbers = (result_of(run, name) for name in found)
        writer.writerow([str(run.folder), *(values.get(name, "") for name in names),
                         *("" if value is None else repr(value) for value in numbers)])  # fmt: skip
    return stream.getvalue()


# -- curves ----------------------------------------------------------------------------------------------


def overlaid(groups: list[Group], drawn: Figures) -> Iterator[Html]:
    """Draw the runs over each other: per epoch, second and byte. Of a group, its first run is drawn."""
    shown = groups[:MOST_DRAWN]
    if len(groups) > MOST_DRAWN or any(len(group.runs) > 1 for group in groups):
        yield page.paragraph(f"Curves of the first run of each row; of the first {MOST_DRAWN} rows at most.", "small")
    kinds = {accuracy_curve(group.runs[0])[0] for group in shown}
    name = kinds.pop() if len(kinds) == 1 else "accuracy"
    words = {"validation_accuracy": "validation accuracy", "accuracy_average": "test accuracy of the average"}
    inside = []
    virtual = {group.runs[0].simulated for group in shown}
    time = "seconds of training" + (" (virtual, in simulations)" if True in virtual else "")
    for x, of in (("epoch", lambda run, entry: float(entry["epoch"])), (time, lambda run, entry: seconds_of(entry)),
                  ("bytes", bytes_at)):  # fmt: skip
        for what, factor in ((name, 100.0), ("loss", 1.0)):
            inside.append(_curves(shown, drawn, (what, words.get(what, f"training {what}")), factor, (x, of)))
    yield page.figures(*inside)


def _curves(
    groups: Sequence[Group], drawn: Figures, what: tuple[str, str], factor: float, along: tuple[str, Any]
) -> Html:
    key, words = what
    x, of = along
    lines: dict[str, list[tuple[float, float]]] = {}
    for group in groups:
        run = group.runs[0]
        points = [(at, factor * entry[key]) for entry in run.curve(key) if (at := of(run, entry)) is not None]
        if points:
            lines[label(group)] = points
    if not lines:
        return page.note(f"The {words} over {x} is left out: no run has the data.")
    label_x = x
    if x == "bytes":
        scale, label_x = unit([at for points in lines.values() for at, _ in points], "bytes")
        lines = {name: [(scale * at, value) for at, value in points] for name, points in lines.items()}

    def draw(axes: Any) -> None:
        curves(axes, lines, label_x, words, percent=factor == 100)
        if key == "loss":
            logarithmic(axes, lines)
        if x == "epoch":
            whole_numbers(axes)

    caption = f"{words.capitalize()} over {x}" + (" that all replicas have sent" if x == "bytes" else "") + "."
    return drawn.draw(f"Curves of {len(lines)} runs: {caption}", caption, draw)


def label(group: Group) -> str:
    """Return a short name of a group: the options in which it differs, or the name of its run."""
    words = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in group.options.items() if value != "-")
    return words if words and len(words) <= 40 else group.name


def bytes_at(run: RunData, entry: data.Entry) -> float | None:
    """Return the bytes that all replicas have sent until this entry.

    A real run logs those of its leader: they are scaled to the known total of all, or else to the number of replicas.
    """
    if "bytes_sent" not in entry:
        return None
    if run.simulated:
        return float(entry["bytes_sent"])
    last = max((e["bytes_sent"] for e in run.curve("bytes_sent")), default=0) or 1
    return float(entry["bytes_sent"] * run.result.get("bytes_sent", last * run.replicas) / last)
