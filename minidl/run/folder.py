"""The folder of a run.

    RUN/config.toml        the options: `--config RUN/config.toml` repeats the run
    RUN/metrics.jsonl      one line for each epoch, and for some of the steps
    RUN/checkpoints/       see checkpoint.py
    RUN/model.safetensors  the weights whose test accuracy is reported; written when the run has finished
    RUN/summary.json       the result; written when the run has finished
    RUN/history.jsonl      what happened to the run: see history.py
    RUN/report.html        the page of the run: see minidl/report

If a finished run is trained longer, model.safetensors and summary.json hold the old result until the new one is
written.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO

from minidl import schema
from minidl.errors import CheckpointError, ConfigError, MinidlError
from minidl.reading import TOML_LIMIT, Unreadable, blaming, json_value, opened, text
from minidl.run.config import Config, resolve
from minidl.run.config_file import read_toml, saved, to_toml
from minidl.run.model_file import is_own
from minidl.run.progress import LOSS
from minidl.schema import Mismatch

HEAD = "# The options of a run. To repeat the run: `python -m minidl.train --config FILE`\n\n"
COMMENT = re.compile(r"(#.*\n)*\n*")  # at the beginning of config.toml
LONGEST_LINE = 1 << 16  # bytes of an entry in metrics.jsonl
LONGEST_METRICS = 1 << 28  # bytes: a million lines, which is enough for 100 million steps
LONGEST_SUMMARY = 8 << 20  # bytes: it lists the edges between all replicas
ENTRY = schema.record({"event": schema.text(), "step": schema.whole(), "epoch": schema.whole()}, others=True)
_FRACTION, _POSITIVE = schema.number(0, 1), schema.number(0, schema.LARGEST)
_RESULT = dict.fromkeys(("epochs", "steps"), schema.whole()) | {
    "test_accuracy": _FRACTION, "test_loss": LOSS, "seconds": _POSITIVE, "images_per_second": _POSITIVE,
    "out": schema.text()}  # fmt: skip
_OF_REPLICAS = dict.fromkeys(("workers", "replicas_alive", "messages"), schema.whole()) | {
    "accuracy_best": _FRACTION, "accuracy_worst": _FRACTION, "wait_fraction": _POSITIVE, "consensus_distance": LOSS,
    "bytes_sent": _POSITIVE, "method": schema.text(words="the name of a method")}  # fmt: skip
BEST_STEP = {"best_step": schema.whole()}
SUMMARY = schema.record(_RESULT, BEST_STEP, others=True)
_OF_CENTER = {"accuracy_center": _FRACTION}  # of methods with a center
_ADAPTIVE = dict.fromkeys(("exchanges", "exchanges_suppressed", "bytes_suppressed"), _POSITIVE)
SUMMARY_OF_REPLICAS = schema.record(_RESULT | _OF_REPLICAS, BEST_STEP | _OF_CENTER | _ADAPTIVE, others=True)
CONTINUES = "continues_to"  # in summary.json: the new length of a run that became longer, such as "20 epochs"
# Options that config.toml of earlier versions lacks: they have their defaults.
ADDED = ("on_death", "parts", "compress", "messages", "reduce", "adaptive", "balance", "weighting", "staleness",
         "device", "views", "lookahead", "precision")  # fmt: skip
PAGE = "report.html"
CLUSTER = "cluster.toml"  # in the folder of a simulated run: the description of its cluster


class JournalError(MinidlError):
    """metrics.jsonl, model.safetensors or summary.json cannot be written. Checkpoints may still be written."""


class RunFolder:
    """A run's folder, locked against other processes until the end of the `with` block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.config = folder / "config.toml"
        self.metrics = folder / "metrics.jsonl"
        self.model = folder / "model.safetensors"
        self.summary = folder / "summary.json"
        self._lock = _lock(folder)
        self._new: list[Path] = []  # what `create` has made: files, then folders

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._lock)

    @classmethod
    def create(cls, config: Config, head: str = HEAD, cluster: str = "") -> RunFolder:
        """Create a run in `config.out`, or the next free runs/DATA-MODEL-N. Raises ConfigError if a run is there.

        head: the first lines of config.toml. cluster: the content of cluster.toml, which marks a simulated run.
        """
        with _creating(config.out or "runs"):
            if config.out:
                folder = Path(config.out)
                made = not folder.exists()
                folder.mkdir(parents=True, exist_ok=True)
            else:
                folder = _next_free(f"{Path(config.data).stem}-{Path(config.model).stem}")
                made = True
            run = cls(folder)
        try:
            run._begin(({CLUSTER: cluster} if cluster else {}) | {"config.toml": head + to_toml(config)})
        except BaseException:
            os.close(run._lock)
            if made:
                with suppress(OSError):  # it is not empty: another process has written into it
                    folder.rmdir()
            raise
        run._new += [folder] if made else []
        return run

    def discard(self) -> None:
        """Remove the run that `create` has made. Call this only if the run has written nothing since."""
        with suppress(OSError):  # a folder is not empty: another process has written into it
            for path in self._new:
                path.rmdir() if path.is_dir() else path.unlink()

    def require(self) -> None:
        """Raise JournalError if the folder was removed, moved or replaced after this process opened it."""
        with suppress(OSError):
            if os.path.samestat(os.stat(self.folder), os.fstat(self._lock)) and self.config.exists():
                return
        raise JournalError(f"the run folder {self.folder} was removed, moved or replaced while the run went on; "
                           "the run ends, and writes nothing more")  # fmt: skip

    def clean_up(self) -> None:
        """Remove the temporary files of a killed process."""
        for path in (self.config, self.metrics, self.model, self.summary, self.folder / PAGE):
            with suppress(OSError):
                _beside(path).unlink(missing_ok=True)

    def _begin(self, texts: Mapping[str, str]) -> None:
        """Make the folder a run folder, or leave it unchanged. texts: files to write, by name.

        config.toml must be the last one: it makes the folder a run. A process that is killed before leaves no run.
        """
        if self.config.exists():
            raise ConfigError(f"{self.folder} holds another run: --resume {quote(str(self.folder))} continues it, "
                              "another --out begins a new one")  # fmt: skip
        with _creating(str(self.folder)):
            try:
                self.checkpoints.mkdir()  # if two processes try, one of them fails
            except FileExistsError:
                raise ConfigError(f"{self.checkpoints} exists, but {self.folder} is not the folder of a run: "
                                  "give another --out") from None  # fmt: skip
        paths = [self.folder / name for name in texts]
        new = [path for path in paths if not path.exists()]
        try:
            for path, text in zip(paths, texts.values()):
                write(path, text.encode())
        except BaseException as error:
            for made in new:
                made.unlink(missing_ok=True)
            self.checkpoints.rmdir()
            if isinstance(error, OSError):
                raise ConfigError(f"cannot write {path}: {error.strerror}") from None
            raise
        self._new = [*reversed(new), self.checkpoints]  # config.toml first: without it, the folder is no run

    @classmethod
    def open(cls, folder: str | Path) -> RunFolder:
        """Open the run in this folder. Raises CheckpointError if there is none, or if it is incomplete."""
        read_run(folder, simulated=is_simulated(folder))  # may raise, so it comes before the lock
        run = cls(Path(folder))
        try:
            run.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            os.close(run._lock)
            reason = "it is not a folder" if isinstance(error, FileExistsError) else error.strerror
            raise CheckpointError(f"cannot write checkpoints to {run.checkpoints}: {reason}") from None
        return run

    def log(self, entry: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        with self._writing(self.metrics), open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def rewind(self, step: int, epoch: int) -> None:
        """Remove these lines of metrics.jsonl: steps after `step`, epochs after `epoch`, and invalid lines."""
        if not self.metrics.exists():
            return
        with blaming(str(self.metrics), JournalError), opened(self.metrics) as old:
            if (size := os.fstat(old.fileno()).st_size) > LONGEST_METRICS:
                raise Unreadable(f"it has {size:,} bytes; expected at most {LONGEST_METRICS:,}: move it elsewhere to "
                                 "continue without the earlier lines")  # fmt: skip
            lines = iter(lambda: old.readline(LONGEST_LINE), b"")
            with self._writing(self.metrics), replacing(self.metrics) as new:
                new.writelines(line.rstrip(b"\r\n") + b"\n" for line in lines if _happened(line, step, epoch))

    def finish(self, weights: Path, summary: dict[str, Any]) -> None:
        """Write model.safetensors, a copy of the file `weights`, and summary.json."""
        with self._writing(self.model), open(weights, "rb") as file, replacing(self.model) as copy:
            shutil.copyfileobj(file, copy)
        with self._writing(self.summary):
            write(self.summary, json.dumps(summary, indent=2).encode() + b"\n")

    def change(self, config: Config, longer: str = "") -> None:
        """Replace the options of the run: it continues with this config.

        longer: the new length, such as "20 epochs", if the run becomes longer. An earlier result remains in
        model.safetensors and in summary.json until the new one is written. Meanwhile summary.json says that the run
        continues (see `result_of`).
        """
        with blaming(str(self.summary), JournalError):
            old = json_value(text(self.summary, LONGEST_SUMMARY)) if longer and self.summary.exists() else None
        with self._writing(self.summary):
            if isinstance(old, dict):
                write(self.summary, json.dumps(old | {CONTINUES: longer}, indent=2).encode() + b"\n")
        with self._writing(self.config), blaming(str(self.config), JournalError):
            comment = COMMENT.match(text(self.config, TOML_LIMIT))
            write(self.config, ((comment[0] if comment else HEAD) + to_toml(config)).encode())

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise JournalError(f"cannot write {path}: {error.strerror}; the last checkpoint is complete: once the "
                               f"file can be written, use --resume {quote(str(self.folder))}") from None  # fmt: skip


def is_simulated(folder: str | Path) -> bool:
    """Return whether this folder contains a simulated run."""
    return (Path(folder) / CLUSTER).exists()


def is_new(folder: Path, config: Config) -> bool:
    """Return whether this folder contains a run with these options that has written nothing since its creation."""
    with suppress(OSError, MinidlError):
        written = [folder / "metrics.jsonl", folder / "summary.json", *(folder / "checkpoints").iterdir()]
        if not any(map(os.path.lexists, written)):
            return to_toml(resolve(read_options(folder / "config.toml"))) == to_toml(config)
    return False


def read_run(folder: str | Path, simulated: bool = False) -> dict[str, Any]:
    """Return the options of the run in this folder. Raises CheckpointError if there is none.

    simulated: whether it must be a simulated run, or a real one.
    """
    path = Path(folder) / "config.toml"
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} is not a folder: give the folder of a run"
                              if os.path.lexists(folder) else f"the folder {folder} does not exist")  # fmt: skip
    if not os.path.lexists(path):
        raise CheckpointError(f"{folder} is not the folder of a run: it has no config.toml")
    if simulated != is_simulated(folder):
        kind, other = ("real", "a simulation") if simulated else ("simulated", "a real run")
        raise CheckpointError(f"{folder} is a {kind} run, which cannot be resumed as {other}: {resuming(folder)}")
    return read_options(path)


def resuming(folder: str | Path, model: str = "") -> str:
    """Return the command that continues the run in this folder. model: the model of the run, or ""."""
    program, own = "simulate" if is_simulated(folder) else "train", f" --model {quote(model)}" if is_own(model) else ""
    return f"python -m minidl.{program} --resume {quote(str(folder))}{own}"


def result_of(folder: str | Path) -> dict[str, Any] | None:
    """Return the content of a run's summary.json; None if the run has not finished, or if the file is damaged.

    A run that became longer after its first result has not finished.
    """
    try:
        summary = json_value(text(Path(folder) / "summary.json", LONGEST_SUMMARY))
        (SUMMARY_OF_REPLICAS if isinstance(summary, dict) and "workers" in summary else SUMMARY)(summary)
    except (FileNotFoundError, NotADirectoryError, Unreadable, Mismatch):
        return None
    if CONTINUES in summary:
        return None
    return dict(summary) | {"out": str(folder)}  # the folder may have been moved


def read_options(path: Path) -> dict[str, Any]:
    """Return the options in a run's config.toml. Raises CheckpointError if some are missing, ConfigError if invalid."""
    given = read_toml(path)
    optional = {*ADDED, "data_dir"}  # data_dir: the run may have begun without $MINIDL_DATA
    missing = [name for name in saved(resolve(given)) if name not in given and name not in optional]
    if missing:
        more = f" and {len(missing) - 3} more options" if len(missing) > 3 else ""
        raise CheckpointError(f"{path} is incomplete: it lacks {', '.join(missing[:3])}{more}; "
                              "begin a new run with another --out")  # fmt: skip
    return given


def write(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers find the old content or the new one, even if this process is killed."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file for new content, which replaces the old content atomically at the end of the `with` block."""
    with replaced(path) as beside, open(beside, "wb") as file:
        yield file


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file. The block writes this file, which then replaces the old one atomically."""
    beside = _beside(path)
    try:
        yield beside
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def _beside(path: Path) -> Path:
    """Return the path of the temporary file that replaces a file."""
    return path.with_name(f".{path.name}.new")


def _happened(line: bytes, step: int, epoch: int) -> bool:
    """Return whether a line of metrics.jsonl is valid, and not later than this step and this epoch."""
    try:
        entry = json_value(line.decode("utf-8", "replace"))
        ENTRY(entry)
    except (Unreadable, Mismatch):
        return False  # an incomplete line, left by a killed process
    return bool(entry["step"] <= step and (entry["event"] == "step" or entry["epoch"] <= epoch))


@contextmanager
def _creating(folder: str) -> Iterator[None]:
    """Convert errors of the system while a run folder is created."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot create the run folder {folder}: {error.strerror}: give another --out") from None


def _next_free(name: str) -> Path:
    runs = Path("runs")
    runs.mkdir(exist_ok=True)
    name = re.sub(r"[^\w.-]+", "_", name)
    for number in itertools.count(1):
        folder = runs / f"{name}-{number}"
        try:
            folder.mkdir()  # fails if another process created it first
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def is_locked(folder: str | Path) -> bool:
    """Return whether a process trains in this folder. Without effect on other processes."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the file system has no locks
        pass
    finally:
        os.close(handle)
    return False


def _lock(folder: Path) -> int:
    """Lock the folder until the returned handle is closed. The system also closes the handles of a killed process."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(f"another process is training in {folder}") from None
    except OSError:  # the file system has no locks: the user must avoid two runs in one folder
        pass
    return handle
