"""`fit`: training from Python.

    history = fit(model, "digits", epochs=10, optimizer="adam")
    history.test.accuracy
    predict(model, images).argmax(axis=1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minidl import models
from minidl.checked import shown
from minidl.data import Dataset, from_arrays, load
from minidl.engine.jit import set_threads, threads
from minidl.engine.random import isolated
from minidl.errors import ConfigError
from minidl.nn import Module
from minidl.ops.conv import with_winograd
from minidl.run.checkpoint import Arrays
from minidl.run.config import DATASETS, Config, resolve
from minidl.run.display import Display, epoch_line
from minidl.run.evaluation import Score, evaluate
from minidl.run.live import LiveCurve
from minidl.training.keywords import checked, of_training, with_options
from minidl.training.together import Together
from minidl.training.trainer import Entry, Trainer
from minidl.training.world import world

Data = Dataset | str | Path | tuple[np.ndarray, ...]
# model and data are arguments, minidl.load fills a model with weights, model.to chooses the device, and `fit` keeps no
# checkpoints.
OPTIONS = of_training("model", "model_hash", "init", "data", "keep", "workers", "device", "devices")


@dataclass
class History:
    """The result of `fit`: an entry for each epoch, and the score on the test images if there are any."""

    epochs: list[Entry]
    test: Score | None = None


def tell(entry: Entry) -> None:
    """Print the results of an epoch."""
    print(epoch_line(entry), flush=True)


@with_options(OPTIONS)
def fit(
    model: Module,
    data: Data,
    *,
    progress: Callable[[Entry], None] | None = tell,
    live: bool = False,
    **given: Any,
) -> History:
    """Train a model, and test it once at the end.

    data      a Dataset, a name for `minidl.data.load`, or arrays (x, y) or (x, y, x_test, y_test): images
              (N, H, W, C), which `fit` does not standardise, and labels (N,)
    progress  called with an entry (a dict: step, epoch, loss, accuracy, ...) after each epoch; the default prints
              a line. With None nothing is printed, not even notices of compilation on standard error
    live      in a notebook, with Matplotlib: draw loss and accuracy while it trains, in place of the default's lines

    In a script of several processes (`python -m minidl.launch --workers 4 script.py` or `mpiexec -n 4 python
    script.py`), each has a replica of the model, and `method` and its options determine what they exchange. All give
    the same data, which `fit` divides, and begin with the weights of rank 0. Every rank gets the average model and the
    same History; rank 0 calls `progress`. After Ctrl-C, KeyboardInterrupt is raised in all ranks.

    The defaults of some options depend on the data set and the optimizer, as on the command line. `conv` is allowed
    only if the model has a convolution. An option that the chosen method or optimizer does not take is refused.

    At the end, it restores the earlier settings: random numbers, threads, the kind of convolution, each module's mode.

    The model ends with the weights that scored best on the validation part, or with the last weights if there is none.
    Raises ConfigError for invalid options, DataError for invalid data, DivergedError if the loss is not finite.
    """
    here = world()
    models.check("fit", model)
    config = _library_config(model, data, given, here.size)
    if progress is not None and not callable(progress):
        raise ConfigError(f"fit: progress is {shown(progress)}; expected a function of an entry, or None")
    if not isinstance(live, bool):
        raise ConfigError(f"fit: live is {shown(live)}; expected True or False")
    dataset = _as_dataset(data, config)
    models.check_images("fit", model, dataset.x_train.shape)
    curve = LiveCurve("fit") if live else None
    with _settings(model, config):
        if here.job is not None:
            here.require_finished("fit")
            with here.abandoning():
                return History(*Together(here, model, dataset, config, progress).train())
        return _train(model, dataset, config, progress, curve)


@contextmanager
def _settings(model: Module, config: Config) -> Iterator[None]:
    """Apply the settings of a training in the `with` block, and restore the earlier settings and modes afterwards."""
    modes, number = [(module, module.training) for _, module in model.named_modules()], threads()
    try:
        if config.threads:
            set_threads(config.threads)
        with with_winograd(config.conv == "auto"), isolated(config.seed):
            yield
    finally:
        set_threads(number)
        for module, training in modes:
            module.training = training


def _train(
    model: Module, dataset: Dataset, config: Config, progress: Callable[[Entry], None] | None, curve: LiveCurve | None
) -> History:
    trainer = Trainer(model, dataset, config)
    compiling = Display(quiet=progress is None).compiling
    trainer.engine.gradient.progress = trainer.engine.prediction.progress = compiling
    history, best = History([]), Arrays()
    for entry in trainer.run():
        if entry["event"] == "epoch":
            history.epochs.append(entry)
            if trainer.progress.best_step == entry["step"]:
                best = model.state_dict()
            if curve:
                curve.epoch(entry)
            if progress and not (curve and progress is tell):
                progress(entry)
        elif curve and entry["event"] == "step":
            done, batches = trainer.work.within(trainer.progress)
            curve.step(trainer.progress.epoch + done / batches, entry["loss"])
    if curve:
        curve.draw()
    if best:
        model.load_state_dict(best)
    if len(dataset.y_test):
        history.test = evaluate(model, dataset.x_test, dataset.y_test, prediction=trainer.engine.prediction)
    return history


def _library_config(model: Module, data: Data, given: dict[str, Any], size: int) -> Config:
    """Return the options of a training of `size` replicas.

    Raises ConfigError for those that are invalid or have no effect.
    """
    if not isinstance(data, Dataset | str | Path | tuple | list):
        raise ConfigError(f"fit: the data are {shown(data)}; expected arrays (x, y) or (x, y, x_test, y_test), a "
                          "Dataset or the name of a data set")  # fmt: skip
    given = checked("fit", given, OPTIONS)
    for name in given:
        if isinstance(data, Dataset) and name in ("data_dir", "layout", "validation"):
            raise ConfigError(f"fit: {name} has no effect on a Dataset, which is loaded already: give it to load()")
        if isinstance(data, tuple | list) and name in ("data_dir", "layout"):
            raise ConfigError(f"fit: {name} has no effect on arrays; it is for data sets in files")
    if "conv" in given and not any(parameter.ndim == 4 for parameter in model.parameters()):
        raise ConfigError("fit: conv has no effect on this model, which has no convolution: leave it out")
    if size > 1:
        given["workers"] = size
    # A user's own Dataset may have a name that is not in DATASETS. In this case, no preset applies.
    name = str(data) if isinstance(data, (str, Path)) else getattr(data, "name", "")
    return resolve({"data": name} if name in DATASETS or isinstance(data, (str, Path)) else {}, given)


def _as_dataset(data: Data, config: Config) -> Dataset:
    if isinstance(data, Dataset):
        return data
    if isinstance(data, (str, Path)):
        return load(data, config.data_dir or None, config.validation, config.seed, config.layout)
    return from_arrays(data, config.validation, config.seed)
