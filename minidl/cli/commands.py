"""What the command line does with its options: start a run, resume a run, or evaluate a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from minidl.cli import arguments
from minidl.comm.fabric.base import Fabric
from minidl.comm.stats import Stats
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.errors import CheckpointError, ConfigError
from minidl.run import checkpoint as files
from minidl.run import model_file
from minidl.run.config import Config, resolve
from minidl.run.config_file import file_options
from minidl.run.evaluation import evaluate
from minidl.run.folder import RunFolder
from minidl.run.signals import Signals
from minidl.run.trained import check_data, described_options, find_weights, load_weights, run_options
from minidl.training.continuing import earlier_result, go_on
from minidl.training.output import parameter_count
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
    # May raise, so it comes before the folder is created.
    session = Session.of_process(config, signals, fabric, fresh=not fabric.newcomer)
    if config.workers and "workers" in given and config.workers != session.config.workers:
        raise ConfigError(f"--workers {config.workers}, but mpiexec has started {session.config.workers} replicas: "
                          "leave --workers out")  # fmt: skip
    with session.output.opened(lambda: RunFolder.create(session.config)):
        return session.train()


def resume(config: Config, given: Mapping[str, Any], signals: Signals, fabric: Fabric) -> Entry | None:
    """Resume the run in --resume from its last checkpoint, or from the start if it has none yet.

    A finished run is not trained again: its result is returned. With --epochs or --steps, it is trained longer.
    """
    folder = Path(given["resume"])
    if result := earlier_result(config, given, leads=not fabric.rank):
        return None if fabric.rank else result  # if rank 0 has printed the result and ended, this rank may lead
    session = Session.of_process(config, signals, fabric, fresh=not files.steps(folder / "checkpoints"))
    return go_on(session, folder, given)


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
    config = model_file.identified(config, given, {**about, **known})
    dataset, model = prepare(config, fresh=False)
    check_data(weights, dataset)
    try:
        load_weights(model, weights)
    except CheckpointError as error:
        raise CheckpointError(f"{weights.path}, as {config.model} for {config.data}: {error}") from None
    score = evaluate(model, dataset.x_test, dataset.y_test, check=signals.check, views=config.views)
    return {
        "test_accuracy": score.accuracy,
        "test_loss": score.loss,
        "images": len(dataset.y_test),
        "parameters": parameter_count(model),
        "model": config.model,
        "data": config.data,
        "checkpoint": str(weights.path),
    }
