"""The folder of a run, and its journal.

    RUN/config.toml        every option: `--config RUN/config.toml` runs it again, to the bit
    RUN/metrics.jsonl      one line for each epoch, and for some steps between
    RUN/checkpoints/       see checkpoint.py
    RUN/summary.json       the result, once there is one
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

from minidl.config import Config
from minidl.errors import CheckpointError, ConfigError
from minidl.options import read_toml, to_toml


class Run:
    """A run's folder, ours alone while a `with` holds it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.metrics = folder / "metrics.jsonl"
        self.summary = folder / "summary.json"
        self._lock = _lock(folder)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._lock)

    @classmethod
    def create(cls, config: Config) -> Run:
        """A new run in `config.out`, or in the next free runs/DATA-MODEL-N. Raises ConfigError where a run is."""
        text = to_toml(config)
        if config.out:
            folder = Path(config.out)
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = _next_free(f"{Path(config.data).stem}-{config.model}")
        try:
            with open(folder / "config.toml", "x", encoding="utf-8") as file:  # "x": of two processes one gets it
                file.write(f"# python -m minidl.train --config {folder / 'config.toml'}\n\n{text}")
        except FileExistsError:
            raise ConfigError(f"{folder} holds another run: --resume {folder} goes on with it, "
                              "another --out begins a new one") from None
        run = cls(folder)
        run.checkpoints.mkdir()
        return run

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """The run that this folder holds. Raises CheckpointError where there is none."""
        if not (Path(folder) / "config.toml").is_file():
            raise CheckpointError(f"{folder} holds no run: it has no config.toml")
        run = cls(Path(folder))
        run.checkpoints.mkdir(exist_ok=True)
        return run

    def options(self) -> dict[str, Any]:
        """The options that the run was begun with."""
        return read_toml(Config, self.folder / "config.toml")

    def log(self, entry: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        with open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def rewind(self, step: int, epoch: int) -> None:
        """Keep those lines of metrics.jsonl that were written up to `step`, with `epoch` epochs finished."""
        if self.metrics.exists():
            lines = self.metrics.read_text(encoding="utf-8").splitlines()
            write_text(self.metrics, "".join(line + "\n" for line in lines if _happened(line, step, epoch)))

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json."""
        write_text(self.summary, json.dumps(summary, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole: whoever looks, also after a crash, finds the old text or the new."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _happened(line: str, step: int, epoch: int) -> bool:
    try:
        entry = json.loads(line)
        return entry["step"] <= step and (entry["event"] == "step" or entry["epoch"] <= epoch)
    except (ValueError, KeyError, TypeError):
        return False  # the half line that a killed process leaves


def _next_free(name: str) -> Path:
    runs = Path("runs")
    runs.mkdir(exist_ok=True)
    name = re.sub(r"[^\w.-]+", "_", name)
    for number in itertools.count(1):
        folder = runs / f"{name}-{number}"
        try:
            folder.mkdir()  # fails where another process was faster
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def _lock(folder: Path) -> int:
    """Hold the folder until the handle is closed, which the system does for a killed process."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(f"another process is training in {folder}") from None
    except OSError:  # a file system without locks: then nobody watches but the user
        pass
    return handle
