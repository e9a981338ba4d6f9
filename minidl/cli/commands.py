"""What the command line does with its options: start a run, resume a run, or evaluate a checkpoint."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from minidl.cli import arguments
from minidl.comm.fabric.base import Fabric
from minidl.comm.stats import Stats
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.errors import CheckpointError, ConfigError, printable
from minidl.run import checkpoint as files
from minidl.run import model_file
from minidl.run.config import FREE, LENGTH, Config, resolve
from minidl.run.config_file import file_options, to_toml
from minidl.run.display import count
from minidl.run.evaluation import evaluate
from minidl.run.folder import RunFolder, read_run, result_of, resuming
from minidl.run.signals import Signals
from minidl.run.trained import check_data, described_options, find_weights, load_weights, run_options
from minidl.training import local_snapshots
from minidl.training.output import parameter_count, reopen
from minidl.training.resume import restore
from minidl.training.session import Session, prepare
from minidl.training.trainer import Entry


def execute(config: Config, given: Mapping[str, Any], signals: Signals, fabric: Fabric | None = None) -> Entry | None:
    """Execute a command line. With several replicas, the leader returns the result, ready for JSON.

    config: the options of the run (--evaluate does not use it). given: the options of the command line.
    Raises the MinidlErrors of the command that the options select.
    """
    fabric = fabric or Fabric(LoopbackTransport(Stats(trace=bool(given.get("trace")))))
    if fabric.newcomer:
        return begin(config, {}, signals, fabric)
    if given.get("resume"):
        return resume(config, given, signals, fabric)
    if given.get("evaluate"):
        return evaluate_checkpoint(given, signals)
    return begin(config, given, signals, fabric)


def begin(config: Config, given: Mapping[str, Any], signals: Signals, fabric: Fabric) -> Entry | None:
    """Start a new run and train it, or join a running one; the leader returns the result."""
    session = Session(config, signals, fabric, fresh=not fabric.newcomer)  # may raise: before the folder is created
    if config.workers and "workers" in given and config.workers != session.config.workers:
        raise ConfigError(f"--workers {config.workers}, but mpiexec has started {session.config.workers} replicas: "
                          "leave --workers out")  # fmt: skip
    with session.output.opened(lambda: RunFolder.create(session.config)):
        return session.train()


def resume(config: Config, given: Mapping[str, Any], signals: Signals, fabric: Fabric) -> Entry | None:
    """Resume the run in --resume from its last checkpoint, or from the start if it has none yet.

    A finished run is not trained again: its result is returned. With --epochs or --steps, it is trained longer.
    """
    folder, longer = Path(given["resume"]), any(name in given for name in LENGTH)
    result = result_of(folder)
    if result and not longer:
        if fabric.rank:  # if rank 0 has printed the result and ended, this rank may lead
            return None
        if not given.get("quiet"):
            print(printable(_already_finished(folder, config)), file=sys.stderr, flush=True)
        return result
    session = Session(config, signals, fabric, fresh=not files.steps(folder / "checkpoints"))
    session.resumed = True
    with session.output.opened(lambda: reopen(folder)):  # the leader opens it first; then all ranks read it
        if made := files.steps(folder / "checkpoints"):
            _restore(session, folder / "checkpoints", made)
        if result and (not made or session.trainer.finished):
            raise ConfigError(_cannot_be_longer(folder, session, bool(made)))
        if run := session.output.run:
            _update_options(run, config, _length(config) if longer else "")
            run.rewind(session.trainer.progress.step, session.trainer.progress.epoch)
        return session.train()


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
    before = resolve(read_run(run.folder))
    kept = {name: getattr(before, name) for name in FREE}
    after = replace(config, **kept)
    if to_toml(after) != to_toml(before):
        run.change(after, longer)


def _restore(session: Session, checkpoints: Path, made: Sequence[int]) -> None:
    """Restore a run from its last checkpoint. made: the steps that have a checkpoint."""
    folder = files.folder_of(checkpoints, made[-1])
    try:
        checkpoint = files.load_step(checkpoints, made[-1])
    except CheckpointError as error:
        earlier = "; delete this checkpoint to continue from the one before it" if len(made) > 1 else ""
        raise CheckpointError(f"{error}{earlier}") from None
    if local_snapshots.exist(checkpoints):
        checkpoint = local_snapshots.add(checkpoints, checkpoint)
        found = len(checkpoint.state.get("members", ()))  # 0 if a single replica has continued the run
        mass = ", with a mass of 1 each" if session.config.mix == "mass" else ""
        session.origin = f", from the states that {found} replicas saved after an epoch{mass}" if found else ""
    try:
        restore(session.trainer, checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {folder}: {error}") from None
    _forget_missing_best(session, checkpoints)


def _forget_missing_best(session: Session, checkpoints: Path) -> None:
    """If the best checkpoint is missing, choose the result among the later ones.

    If the user deletes the newest checkpoint because it is damaged, the run continues from the one before it. The best
    checkpoint at that earlier time may be missing: `prune` has deleted it if the damaged one was better.
    """
    at = session.trainer.progress
    if at.best_step >= 0 and not files.folder_of(checkpoints, at.best_step).is_dir():
        session.origin += f"; the best checkpoint, of step {at.best_step:,}, is missing: later ones replace it"
        at.best_step, at.best_accuracy, at.best_loss = -1, 0.0, 0.0


def evaluate_checkpoint(given: Mapping[str, Any], signals: Signals) -> Entry:
    """Test the weights that --evaluate names on the test images; return their scores."""
    weights = find_weights(Path(given["evaluate"]))
    file, about = file_options(given), weights.metadata
    if known := run_options(weights.path):
        # With another seed, for example, the data would be split differently: training images could be test images.
        arguments.allow(given, arguments.OF_A_RUN, "--evaluate of a run: it is tested with the options of its training")
        model_file.require_same_kind(known["model"], given, "--evaluate of a run")
    named = {**about, **file, **known}.get("model")
    command = f"python -m minidl.train --evaluate {quote(given['evaluate'])}"
    model_file.require_named(named, given, str(weights.path), command)
    config = resolve(known or described_options(weights, {**file, **given}), file, given)
    config = model_file.identified(config, given, {**about, **known}.get("model_hash"))
    dataset, model = prepare(config, fresh=False)
    check_data(weights, dataset)
    try:
        load_weights(model, weights)
    except CheckpointError as error:
        raise CheckpointError(f"{weights.path}, as {config.model} for {config.data}: {error}") from None
    score = evaluate(model, dataset.x_test, dataset.y_test, check=signals.check)
    return {
        "test_accuracy": score.accuracy,
        "test_loss": score.loss,
        "images": len(dataset.y_test),
        "parameters": parameter_count(model),
        "model": config.model,
        "data": config.data,
        "checkpoint": str(weights.path),
    }
