"""What the command line does with its options: start a run, resume a run, or evaluate a checkpoint."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from minidl.cli import arguments
from minidl.comm.fabric.base import Fabric
from minidl.comm.stats import Stats
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.errors import CheckpointError, ConfigError, printable
from minidl.run import checkpoint as files
from minidl.run.config import Config, resolve
from minidl.run.config_file import file_options
from minidl.run.evaluation import evaluate
from minidl.run.folder import RunFolder, result_of
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
    if given.get("resume"):
        return resume(config, given, signals, fabric)
    if given.get("evaluate"):
        return evaluate_checkpoint(given, signals)
    return begin(config, given, signals, fabric)


def begin(config: Config, given: Mapping[str, Any], signals: Signals, fabric: Fabric) -> Entry | None:
    """Start a new run and train it; the leader returns the result."""
    session = Session(config, signals, fabric)  # may raise, so it comes before the folder is created
    if config.workers and "workers" in given and config.workers != session.config.workers:
        raise ConfigError(f"--workers {config.workers}, but mpiexec has started {session.config.workers} replicas: "
                          "leave --workers out")  # fmt: skip
    with session.output.opened(lambda: RunFolder.create(session.config)):
        return session.train()


def resume(config: Config, given: Mapping[str, Any], signals: Signals, fabric: Fabric) -> Entry | None:
    """Resume the run in --resume from its last checkpoint, or from the start if it has none yet.

    A finished run is not trained again: its result is returned.
    """
    folder = Path(given["resume"])
    if result := result_of(folder):
        if fabric.rank:  # if rank 0 has printed the result and ended, this rank may lead
            return None
        if not given.get("quiet"):
            print(printable(_already_finished(folder, config)), file=sys.stderr, flush=True)
        return result
    session = Session(config, signals, fabric)
    session.resumed = True
    with session.output.opened(lambda: reopen(folder)):  # the leader opens it first; then all ranks read it
        if made := files.steps(folder / "checkpoints"):
            _restore(session, folder / "checkpoints", made)
        if session.output.run:
            session.output.run.rewind(session.trainer.progress.step, session.trainer.progress.epoch)
        return session.train()


def _already_finished(folder: Path, config: Config) -> str:
    length = "steps" if config.steps else "epochs"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime((folder / "summary.json").stat().st_mtime))
    command = f"python -m minidl.train --config {quote(str(folder / 'config.toml'))} --{length} N"
    return (f"minidl: {folder} finished on {when} and is not trained again; this is its result. "
            f"To train longer, begin a new run: {command}")  # fmt: skip


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
    if known := run_options(weights.path):
        # With another seed, for example, the data would be split differently: training images could be test images.
        arguments.allow(given, arguments.OF_A_RUN, "--evaluate of a run: it is tested with the options of its training")
    file = file_options(given)
    config = resolve(known or described_options(weights, {**file, **given}), file, given)
    dataset, model = prepare(config)
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
