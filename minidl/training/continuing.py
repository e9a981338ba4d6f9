"""Continue a run from its last checkpoint, or from the start if it has none yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from minidl.errors import CheckpointError, ConfigError, printable, tell
from minidl.run import checkpoint as files
from minidl.run.config import FREE, LENGTH, Config, resolve
from minidl.run.config_file import to_toml
from minidl.run.display import count
from minidl.run.folder import RunFolder, read_options, result_of, resuming
from minidl.training import local_snapshots
from minidl.training.output import reopen
from minidl.training.resume import Restoration
from minidl.training.session import Session
from minidl.training.trainer import Entry, Trainer
from minidl.training.work import Claimed


class Saved:
    """The last checkpoint of a run, with the local snapshots of its replicas.

    found: the replicas whose states come from local snapshots; 0 if the checkpoint has the states of all.
    Raises CheckpointError if it is damaged.
    """

    def __init__(self, checkpoints: Path) -> None:
        made = files.steps(checkpoints)
        self.checkpoints, self.step = checkpoints, made[-1]
        try:
            self.checkpoint = files.load_step(checkpoints, self.step)
        except CheckpointError as error:
            earlier = "; delete this checkpoint to continue from the one before it" if len(made) > 1 else ""
            raise CheckpointError(f"{error}{earlier}") from None
        self.found = 0
        if local_snapshots.exist(checkpoints):
            self.checkpoint = local_snapshots.add(checkpoints, self.checkpoint)
            self.found = len(self.checkpoint.state.get("members", ()))  # 0 if a single replica has continued the run
        self._restoration: Restoration | None = None

    def restore(self, trainer: Trainer) -> None:
        """Restore a trainer. In a simulation, all trainers are compared with the checkpoint by the first call."""
        try:
            self._restoration = self._restoration or Restoration(trainer, self.checkpoint)
            self._restoration.apply(trainer)
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {files.folder_of(self.checkpoints, self.step)}: {error}") from None

    def seconds(self) -> float:
        """Return how long the run has trained: the longest time of a replica."""
        state = self.checkpoint.state
        each = [state["progress"], *(member["progress"] for member in state.get("members", {}).values())]
        return max(float(progress["seconds"]) for progress in each)


def last_saved(checkpoints: Path) -> Saved | None:
    """Read the last checkpoint in this folder; None if there is none."""
    return Saved(checkpoints) if files.steps(checkpoints) else None


def earlier_result(config: Config, given: Mapping[str, Any], leads: bool = True) -> Entry | None:
    """Return the result of the run in --resume if it has finished, and is not to become longer.

    config: the options of the run. given: the options of the command line. leads: whether this rank says so.
    """
    folder = Path(given["resume"])
    result = result_of(folder)
    if not result or _is_longer(given):
        return None
    if leads and not given.get("quiet"):
        tell(printable(_already_finished(folder, config)))
    return result


def go_on(
    session: Session,
    folder: Path,
    given: Mapping[str, Any],
    read: Callable[[Path], Saved | None] = last_saved,
) -> Entry | None:
    """Continue the run in this folder with a new session; the leader returns the result. Every rank calls this.

    given: the options of the command line; with --epochs or --steps, a finished run becomes longer. read: returns what
    `last_saved` returns, for the same argument.
    """
    session.resumed, result = True, result_of(folder)
    with session.output.opened(lambda: reopen(folder)):  # the leader opens it first; then all ranks read it
        if saved := read(folder / "checkpoints"):
            _restore(session, saved)
            session.origin += _meaning_of_steps(session)
        if result and (saved is None or session.trainer.finished):
            raise ConfigError(_cannot_be_longer(folder, session, saved is not None))
        if run := session.output.run:
            _update_options(run, session.config, _length(session.config) if _is_longer(given) else "")
            run.rewind(session.trainer.progress.step, session.trainer.progress.epoch)
        return session.train()


def _meaning_of_steps(session: Session) -> str:
    """Return a note if --steps counts the steps of another number of replicas: those with which the run began."""
    work, steps = session.trainer.work, session.config.steps
    if not steps or not isinstance(work, Claimed) or work.total == steps * session.config.workers:
        return ""
    first = count(work.total // steps, "replica")
    return f"; --steps {steps:,} means steps of each of {first}, as at the start of the run"


def _is_longer(given: Mapping[str, Any]) -> bool:
    return any(name in given for name in LENGTH)


def _already_finished(folder: Path, config: Config) -> str:
    length = "steps" if config.steps else "epochs"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime((folder / "summary.json").stat().st_mtime))
    return (f"minidl: {folder} finished on {when} and is not trained again; this is its result. "
            f"To train longer: {resuming(folder, config.model)} --{length} N")  # fmt: skip


def _cannot_be_longer(folder: Path, session: Session, has_checkpoint: bool) -> str:
    """Return why a finished run cannot be trained longer."""
    if not has_checkpoint:
        return f"{folder} has finished, and has no checkpoint to continue from: begin a new run with another --out"
    made = _length(session.config)
    return f"{folder} has already been trained for {made}: give a larger number to train it longer"


def _length(config: Config) -> str:
    return count(config.steps, "step") if config.steps else count(config.epochs, "epoch")


def _update_options(run: RunFolder, config: Config, longer: str) -> None:
    """Write config.toml again if the run becomes longer, or if its model file has moved or changed.

    longer: the length that the command line gives, such as "20 epochs", or "". Other options remain: those in `FREE`
    are for one resume only.
    """
    before = resolve(read_options(run.config))
    kept = {name: getattr(before, name) for name in FREE}
    after = replace(config, **kept)
    if to_toml(after) != to_toml(before):
        run.change(after, longer)


def _restore(session: Session, saved: Saved) -> None:
    """Restore a run from its last checkpoint."""
    if saved.found:
        mass = ", with a mass of 1 each" if session.config.mix == "mass" else ""
        session.origin = f", from the states that {saved.found} replicas saved after an epoch{mass}"
    saved.restore(session.trainer)
    _forget_missing_best(session, saved.checkpoints)


def _forget_missing_best(session: Session, checkpoints: Path) -> None:
    """If the best checkpoint is missing, choose the result among the later ones.

    If the user deletes the newest checkpoint because it is damaged, the run continues from the one before it. The best
    checkpoint at that earlier time may be missing: `prune` has deleted it if the damaged one was better.
    """
    at = session.trainer.progress
    if at.best_step >= 0 and not files.folder_of(checkpoints, at.best_step).is_dir():
        session.origin += f"; the best checkpoint, of step {at.best_step:,}, is missing: later ones replace it"
        at.best_step, at.best_accuracy, at.best_loss = -1, 0.0, 0.0
