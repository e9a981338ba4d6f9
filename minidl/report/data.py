"""Read the folder of a run: one that has finished, is still going, was stopped, died, or is from an earlier version.

Nothing in the folder is changed. Sizes and values are checked. A part of the folder that is missing or damaged is left
out, and `RunData.missing` says so. Only a folder without config.toml is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from minidl import schema
from minidl.errors import CheckpointError, MinidlError
from minidl.reading import TOML_LIMIT, Unreadable, json_value, opened, text, toml_table
from minidl.run import history
from minidl.run.config import Config, resolve
from minidl.run.folder import CLUSTER, LONGEST_LINE, LONGEST_METRICS, LONGEST_SUMMARY, is_locked, read_options
from minidl.run.progress import LOSS

Entry = dict[str, Any]

FULL = 4 << 20  # bytes of metrics.jsonl that are read completely; of a longer file, only some of the steps
_AMOUNT = schema.number(0, schema.LARGEST)
_FRACTION = schema.number(0, 1)
ENTRY = schema.record(
    {"event": schema.text(), "step": schema.whole(), "epoch": schema.whole()},
    dict.fromkeys(("loss", "validation_loss", "loss_average", "consensus_distance"), LOSS)
    | dict.fromkeys(("accuracy", "validation_accuracy", "accuracy_average", "wait_fraction"), _FRACTION)
    | dict.fromkeys(("lr", "images_per_second", "seconds", "time", "bytes_sent", "messages"), _AMOUNT),
    others=True,
)
_RANKS = schema.several(schema.whole())
EVENT = schema.record(
    {"event": schema.text(), "when": _AMOUNT},
    dict.fromkeys(("seconds", "memory_available"), _AMOUNT)
    | dict.fromkeys(("step", "epoch", "replicas", "servers", "nodes", "cores", "threads", "parameters", "images",
                     "epochs", "total_steps", "rank"), schema.whole())
    | dict.fromkeys(("machine", "system", "why"), schema.text())
    | {"members": _RANKS, "images_per_second": schema.several(_AMOUNT), "versions": schema.mapping(schema.text())},
    others=True,
)  # fmt: skip
_SECONDS = schema.mapping(_AMOUNT)
PARTS = {  # parts of summary.json that are left out if they are not as expected
    **dict.fromkeys(("test_loss", "train_loss", "consensus_distance", "loss_center"), LOSS),
    **dict.fromkeys(("test_accuracy", "accuracy_average", "accuracy_best", "accuracy_worst", "accuracy_center",
                     "validation_accuracy"), _FRACTION),
    **dict.fromkeys(("epochs", "steps", "best_step", "parameters", "workers", "replicas_alive", "messages", "ranks",
                     "samples", "batches_repeated", "sends_skipped", "reads_missed", "reads_overlapped", "exchanges",
                     "exchanges_suppressed", "events"), schema.whole()),
    **dict.fromkeys(("seconds", "images_per_second", "wait_fraction", "bytes_sent", "bytes_between_nodes",
                     "idle_seconds", "bytes_suppressed", "real_seconds"), _AMOUNT),
    **dict.fromkeys(("method", "time", "cluster"), schema.text()),
    "edges": schema.several(schema.several(schema.whole(), 4, 4)),
    "staleness": schema.record({"count": schema.whole(), "mean": _AMOUNT, "max": _AMOUNT,
                                "histogram": schema.mapping(schema.whole())}, others=True),
    "replicas": schema.several(schema.record(
        {"rank": schema.whole(), "accuracy": schema.maybe(_FRACTION), "images_per_second": _AMOUNT,
         "seconds": _SECONDS, "bytes_sent": schema.whole()})),
    "traffic": schema.record({"ranks_per_cell": schema.whole(1),
                              "bytes": schema.several(schema.several(schema.whole(), 1, 256), 1, 256)}),
    "virtual_seconds_by_kind": _SECONDS,
    "links": schema.mapping(schema.mapping(_AMOUNT)),
}  # fmt: skip


@dataclass
class RunData:
    """What a run's folder contains.

    options: of config.toml. config: the same, checked; None if this version of minidl does not know some of them.
    entries: lines of metrics.jsonl, in order. history: lines of history.jsonl. result: the valid parts of summary.json;
    empty if the run has not finished. cluster: the text of cluster.toml; "" if the run is not a simulation.
    running: whether a process trains in the folder now. missing: what could not be read, one sentence each. label: a
    name of the run; by default that of its folder.
    """

    folder: Path
    options: dict[str, Any]
    config: Config | None = None
    entries: list[Entry] = field(default_factory=list)
    history: list[Entry] = field(default_factory=list)
    result: Entry = field(default_factory=dict)
    cluster: str = ""
    running: bool = False
    missing: list[str] = field(default_factory=list)
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or self.folder.name or str(self.folder)

    @property
    def simulated(self) -> bool:
        return bool(self.cluster)

    @property
    def replicas(self) -> int:
        """The number of replicas with which the run began."""
        return int(self.result.get("workers") or self.options.get("workers") or 1)

    @property
    def began(self) -> Entry:
        """The last line of the history that says with what the training began or continued; or {}."""
        return next((line for line in reversed(self.history) if line["event"] == "begin"), {})

    @property
    def continued(self) -> list[Entry]:
        """The lines of the history that say that the training was continued."""
        return [line for line in self.history if line["event"] == "begin"][1:]

    @property
    def end(self) -> Entry:
        """The last line of the history after the last beginning: finished, stopped or failed; or {}."""
        for line in reversed(self.history):
            if line["event"] in ("finished", "stopped", "failed", "begin"):
                return {} if line["event"] == "begin" else line
        return {}

    @property
    def repeat(self) -> str:
        """The command that repeats the run."""
        folder = self.folder
        config = quote(str(folder / "config.toml"))
        if self.simulated:
            ranks = self.result.get("ranks") or self.began.get("replicas", self.replicas) + self.began.get("servers", 0)
            return (f"python -m minidl.simulate --cluster {quote(str(folder / CLUSTER))} --ranks {ranks} "
                    f"--config {config}")  # fmt: skip
        model = self.options.get("model", "")
        own = f" --model {quote(model)}" if isinstance(model, str) and ".py:" in model else ""
        return f"python -m minidl.train --config {config}{own}"

    def curve(self, name: str, event: str = "") -> list[Entry]:
        """Return the entries that have a value of this name. event: of these entries; "": any but steps."""
        return [entry for entry in self.entries if name in entry and entry["event"] == (event or entry["event"])
                and (event or entry["event"] != "step")]  # fmt: skip


def seconds_of(entry: Entry) -> float | None:
    """Return the seconds of training at a line of metrics.jsonl; None in runs of earlier versions."""
    found: float | None = entry.get("time", entry.get("seconds"))
    return found


def read(folder: str | Path) -> RunData:
    """Read a run's folder. Raises CheckpointError if it is no folder of a run."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: give the folder of a run"
                              if os.path.lexists(folder) else f"the folder {folder} does not exist")  # fmt: skip
    if not os.path.lexists(folder / "config.toml"):
        raise CheckpointError(f"{folder} is not the folder of a run: it has no config.toml")
    found = RunData(folder, {})
    _read_options(found)
    found.cluster = _small_text(found, CLUSTER, TOML_LIMIT)
    found.entries = list(_lines(found, "metrics.jsonl", ENTRY, thin=True))
    found.entries.sort(key=lambda entry: entry["step"])
    found.history = list(_lines(found, history.NAME, EVENT))
    _read_result(found)
    try:
        found.running = is_locked(folder)
    except OSError:
        found.missing.append("Whether the run is still going is unknown: the folder cannot be opened.")
    return found


def _read_options(found: RunData) -> None:
    path = found.folder / "config.toml"
    try:
        known = read_options(path)
        found.config, found.options = resolve(known), dict(known)
    except MinidlError as error:
        try:
            tables = toml_table(text(path, TOML_LIMIT))
        except (Unreadable, OSError):
            raise CheckpointError(str(error)) from None
        found.options = _flat(tables)
        found.missing.append(f"The options are not those of this version of minidl: {error}.")


def _flat(tables: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tables.items():
        found |= _flat(value) if isinstance(value, dict) else {key: value}
    return found


def _small_text(found: RunData, name: str, limit: int) -> str:
    """Return the text of a file in the folder; "" if it does not exist, or cannot be read."""
    try:
        return text(found.folder / name, limit)
    except FileNotFoundError:
        return ""
    except (Unreadable, OSError) as error:
        found.missing.append(f"{name} cannot be read: {error}.")
        return ""


def _lines(found: RunData, name: str, kind: schema.Kind, thin: bool = False) -> Iterator[Entry]:
    """Yield the valid lines of a file. thin: of a long file, only some of the lines about single steps."""
    damaged = number = 0
    try:
        with opened(found.folder / name) as file:
            size = os.fstat(file.fileno()).st_size
            every = 1 + size // FULL if thin else 1
            read = 0
            for line in iter(lambda: file.readline(LONGEST_LINE), b""):
                read += len(line)
                if read > LONGEST_METRICS:
                    found.missing.append(f"{name} is too long: only its first {LONGEST_METRICS:,} bytes are shown.")
                    break
                number += 1
                if every > 1 and number % every and b'"event": "step"' in line:
                    continue
                try:
                    entry = json_value(line.decode("utf-8", "replace"))
                    kind(entry)
                    yield entry
                except (Unreadable, schema.Mismatch):
                    damaged += bool(line.strip())
    except FileNotFoundError:
        why = "no epoch has ended yet" if name == "metrics.jsonl" else (
            "machine, deaths and joins are unknown: the run is of an earlier version, or has not begun")  # fmt: skip
        found.missing.append(f"{name} does not exist: {why}.")
    except (Unreadable, OSError) as error:
        found.missing.append(f"{name} cannot be read: {getattr(error, 'strerror', '') or error}.")
    if damaged:
        one = damaged == 1
        found.missing.append(f"{damaged} line{'' if one else 's'} of {name} {'is' if one else 'are'} damaged, and left "
                             "out.")  # fmt: skip


def _read_result(found: RunData) -> None:
    content = _small_text(found, "summary.json", LONGEST_SUMMARY)
    if not content:
        return
    try:
        summary = json_value(content)
        schema.record({}, others=True)(summary)
    except (Unreadable, schema.Mismatch) as error:
        found.missing.append(f"summary.json is damaged, and left out: {error}.")
        return
    if "continues_to" in summary:
        found.missing.append("summary.json holds an earlier result: the run is trained longer.")
        return
    for name, kind in PARTS.items():
        if name in summary:
            try:
                kind(summary[name], name)
                found.result[name] = summary[name]
            except schema.Mismatch as error:
                found.missing.append(f"A part of summary.json is left out: {error}.")
    matrix = found.result.get("traffic", {}).get("bytes", [])
    if any(len(row) != len(matrix) for row in matrix):
        del found.result["traffic"]
        found.missing.append("A part of summary.json is left out: traffic is not square.")


def short_name(value: object) -> str:
    """Return a data set or a model without the folder of its file."""
    return re.sub(r"^.*/", "", str(value))
