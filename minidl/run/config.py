"""All options of training and their defaults.

Most options are fields of `Config`. A model, an optimizer or a method may declare further ones in its own file
(declared.py). These become fields of `Config`, too, and are None if another model, optimizer or method is chosen.

The values of a run come from four layers, of which later ones override earlier ones: the defaults; the presets of the
data set, the model, the optimizer and the method (presets.py); the file of --config; the command line.

An option that has no effect is refused, for example --mix without --method gossip. One exception: if the command line
chooses another method than the file, the options of the file's method are dropped. If the command line chooses another
data set, model or optimizer, the file's values of options with a preset (such as lr) are also dropped.

Names of data sets, schedules and so on are repeated here as strings, so that --help does not import NumPy. A test
compares them with the code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from minidl.engine.gpus import PRECISIONS
from minidl.errors import ConfigError
from minidl.run import declared
from minidl.run.options import Option, limits, matches, option, options, unmet
from minidl.run.presets import NAMED, depending_on, preset
from minidl.run.shares import check_shares

CHOOSERS = ("model", "optimizer", "method")  # options whose values declare further options


def _abouts(chooser: str) -> dict[str, str]:
    return {name: choice.about for name, choice in declared.choices(chooser).items()}


HASHES = {
    "any": "every content is accepted; the run records the hash",
    "HASH": "the first digits of the file's SHA-256, at least 8; --resume accepts a changed file with its new hash",
}
DATA = {
    "digits": "1,797 handwritten digits of 8x8 pixels, which come with minidl",
    "mnist": "70,000 handwritten digits of 28x28 pixels",
    "fashion-mnist": "70,000 pictures of clothes, 28x28 pixels",
    "cifar10": "60,000 colour photos of animals and vehicles, 32x32 pixels",
    "synthetic": "random images; the same as synthetic:4096x8x8x1:10",
    "synthetic:COUNTxHxWxC:CLASSES": "COUNT random images of height H, width W and C channels, in CLASSES classes",
    "FILE.npz": "your own: arrays x_train (N, H, W, C), y_train (N,), x_test, y_test",
}
DOWNLOADED = ("mnist", "fashion-mnist", "cifar10")
DATASETS = tuple(name for name in DATA if name == name.lower())
SCHEDULES = {
    "constant": "always --lr",
    "steps": "--lr; a tenth of it from half of the run, a hundredth in the last quarter",
    "cosine": "from --lr to 0 along half a cosine period (Loshchilov and Hutter 2017)",
    "one-cycle": "up to --lr in the first 30% of the run, then down to almost 0 (Smith and Topin 2018)",
    "linear": "from --lr to 0 along a line",
    "triangle": "from a fifth of --lr up to it in the first 23% of the run, then down to 7%, along lines (Jordan 2024)",
}
AUGMENTATIONS = {
    "pad-crop": "padding by an eighth of the side, then a random crop of the original size",
    "translate": "a random move by up to a sixteenth of the side, with mirrored edges",
    "flip": "left and right are exchanged in half of the images",
    "alternating-flip": "left and right are exchanged in each image in every second epoch (Jordan 2024)",
    "cutout": "a square with half the side is erased",
}
VIEWS = {
    "none": "the image itself",
    "mirror": "it and its mirror image",
    "mirror-shift": "also those of the image moved by a pixel, to two sides (Jordan 2024)",
}
RECIPES = {
    "none": "the defaults",
    "speedrun": "CIFAR-10 in few epochs: whitened-cnn with muon (Jordan 2024; run/presets.py)",
}
PLACES = {"cpu": "on the cores", "cuda": "on GPUs, which the replicas of a machine take in turn",
          "cuda:NUMBER": "on this GPU; the first one is cuda:0"}  # fmt: skip
LAYOUTS = {"channels-last": "images (N, H, W, C)", "channels-first": "images (N, C, H, W)"}
SHARDS = {
    "iid": "at random",
    "skewed:ALPHA": "by label: each replica gets its own mixture of classes, drawn from a Dirichlet "
                    "distribution; the smaller ALPHA, the fewer classes",
}  # fmt: skip

THREADS, PARTS = limits(min=0, max=4096), limits(min=1, max=4096)
ABOVE_ZERO, ZERO_OR_MORE, ONE_OR_MORE = limits(above=0), limits(min=0), limits(min=1)
FRACTION, SEED = limits(min=0, below=1), limits(min=0, max=2**32 - 1)

# Options that may differ when a run is resumed. If `workers` differs, all replicas start from the average.
FREE = ("data_dir", "device", "precision", "threads", "keep", "stall", "workers", "devices", "on_death", "parts",
        "shares")  # fmt: skip
LENGTH = ("epochs", "steps")  # a resumed run may become longer
CLAIMING = ("gossip", "fast", "ps", "async-easgd", "eamsgd")  # methods whose replicas claim their batches
JOINABLE = (*CLAIMING, "dpsgd", "allreduce", "local-sgd")  # methods of jobs that new replicas may join
OWN_MODEL = "FILE.py:FUNCTION"

GROUPS = {  # topics of --help, and sections of config.toml
    "model": "the network",
    "data": "the images and their labels",
    "training": "the length of the run, and the batch",
    "optimizer": "the update rule and the learning rate",
    "method": "several replicas of the model, and what they exchange",
    "run": "random numbers, cores, checkpoints",
    "command": "what this command does; not saved in config.toml",
}
ConfigT = TypeVar("ConfigT", bound=type)


def _with_declared(config: ConfigT) -> ConfigT:
    """Add a field for each option that models, optimizers or methods declare, with the choices of all declarations."""
    found: dict[str, Option] = {}
    for chooser in CHOOSERS:
        for choice in declared.choices(chooser).values():
            for name, entry in choice.options.items():
                allowed = {**found[name].choices, **entry.choices} if name in found else entry.choices
                found[name] = replace(found.get(name, entry), group=chooser, choices=allowed)
    for name, entry in found.items():
        described = {key: value for key, value in vars(entry).items() if key not in ("name", "kind")}
        config.__annotations__[name] = entry.kind
        setattr(config, name, field(default=None, metadata=described))
    return config


@dataclass(frozen=True)
@_with_declared
class Config:
    """The options of a training run. Those that have no effect are None (see `no_effect`).

    Raises ConfigError if a value is unknown or out of range, or if the chosen model, optimizer and method do not take a
    given option.
    """

    model: str = option("lenet", "the network", group="model", choices=_abouts("model"))
    model_hash: str = option("any", "refuse a FILE.py with another content", group="model", choices=HASHES,
                             needs={"model": OWN_MODEL})
    init: str = option("", "begin with the weights of a run folder, a checkpoint or a .safetensors file; a last layer "
                       "for another number of classes begins with random weights", group="model")

    data: str = option("digits", "the data set", group="data", choices=DATA)
    data_dir: str = option("", "first folder to search for the files of data sets; then $MINIDL_DATA and the user's "
                           "cache folder", group="data", used_with={"data": DOWNLOADED})
    layout: str = option("channels-last", "order of the axes in FILE.npz", group="data", choices=LAYOUTS,
                         needs={"data": "FILE.npz"})
    validation: float = option(0.0, "fraction of the training set held out to select the best checkpoint",
                               group="data", limits=FRACTION)
    augment: tuple[str, ...] = option((), "random changes of training images, separated by commas, or none",
                                      group="data", choices=AUGMENTATIONS)

    views: str = option("none", "the views of a validation or test image over which the model's outputs are averaged",
                        group="data", choices=VIEWS)

    epochs: int = option(10, "passes over the training set", group="training", limits=ONE_OR_MORE)
    steps: int = option(0, "train for this many steps instead of --epochs; 0: use --epochs", group="training",
                        limits=ZERO_OR_MORE, instead_of="epochs")
    batch_size: int = option(64, "images per step and replica", group="training", limits=ONE_OR_MORE)
    label_smoothing: float = option(0.0, "fraction of each label spread over all classes", group="training",
                                    limits=FRACTION)

    optimizer: str = option("sgd", "the update rule", group="optimizer", choices=_abouts("optimizer"))
    lr: float = option(0.05, "maximum learning rate", group="optimizer", limits=ABOVE_ZERO)
    schedule: str = option("cosine", "the learning rate during the run", group="optimizer", choices=SCHEDULES)
    warmup: int = option(0, "number of initial steps in which the learning rate rises from 0", group="optimizer",
                         limits=ZERO_OR_MORE)
    weight_decay: float = option(5e-4, "weight decay, for matrices and filters only", group="optimizer",
                                 limits=ZERO_OR_MORE)
    clip: float = option(0.0, "maximum norm of the gradient; 0: no limit", group="optimizer", limits=ZERO_OR_MORE)
    lookahead: int = option(0, "number of steps after which the weights return to a slow average of themselves, each "
                            "time halfway (Zhang et al. 2019); 0: never", group="optimizer", limits=ZERO_OR_MORE)

    workers: int = option(0, "replicas on this machine, one process each; 0: MINIDL_WORKERS, or two if there are two "
                          "cores; under mpiexec, the number of its processes", group="method", limits=ZERO_OR_MORE)
    devices: str = option("", "what each of the --workers has, such as cpu:2,cpu:0.5: two threads, and one thread for "
                          "half of the time; --workers cpu:2,cpu:0.5 sets both", group="method", instead_of="threads")
    method: str = option("dpsgd", "how replicas exchange models or gradients", group="method",
                         choices=_abouts("method"))
    max_workers: int = option(0, "places for replicas, also for those that join later (--join); 0: twice the workers "
                              f"with {', '.join(CLAIMING)}, else the workers",
                              group="method", limits=ZERO_OR_MORE, saved=False,
                              used_with={"method": JOINABLE})
    shards: str = option("iid", "which training images each replica gets", group="method", choices=SHARDS)
    stall: float = option(30.0, "seconds after which a replica that gives no sign of life is suspected to be frozen, "
                          "and after which one that waits reports for which others",
                          group="method", limits=ABOVE_ZERO)

    seed: int = option(0, "seed of all random numbers: weights, splits, order and so on", group="run", limits=SEED)
    device: str = option("cpu", "where replicas compute; a list of --workers says it for each", group="run",
                         choices=PLACES)
    precision: str = option("float32", "what matrix products on GPUs multiply; sums are float32", group="run",
                            choices=PRECISIONS)
    threads: int = option(0, "threads per process; 0: MINIDL_THREADS, or one per core (for several --workers: a share "
                          "of the cores); does not change results", group="run", limits=THREADS)
    parts: int = option(1, "groups of a replica's cores, each with its own copy of the weights and its part of the "
                        "batch; a number that divides --threads and --batch-size", group="run", limits=PARTS)
    keep: int = option(2, "number of newest checkpoints kept, besides the best one", group="run", limits=ONE_OR_MORE)

    out: str = option("", "the run folder (default: the next free runs/DATA-MODEL-N)", group="command", saved=False)
    config: str = option("", "read options from this file, such as a run's config.toml; the command line overrides it",
                         group="command", saved=False)
    preset: str = option("none", "values of many options at once; options that are given override them",
                         group="command", saved=False, choices=RECIPES)
    resume: str = option("", "continue the run in this folder (synchronous methods: with the same result as without "
                         "the stop). With --epochs or --steps, train it longer, also if it has finished",
                         group="command", saved=False)
    join: str = option("", "add --workers N (default: 1) replicas to the run in this folder, which trains on this "
                       "machine", group="command", saved=False)
    evaluate: str = option("", "only test the weights of a run folder, a checkpoint or a .safetensors file",
                           group="command", saved=False)
    trace: bool = option(False, "write trace.json, a timeline of all replicas for ui.perfetto.dev", group="command",
                         saved=False)
    tensorboard: bool = option(False, "write RUN/tensorboard: what each replica measures while it trains, its weights, "
                               "gradients and answers (needs tensorboardX: pip install 'minidl[tensorboard]')",
                               group="command", saved=False)
    no_report: bool = option(False, "write no report.html, the page of the run, at its end", group="command",
                             saved=False)
    json: bool = option(False, "print the result as one line of JSON", group="command", saved=False)
    quiet: bool = option(False, "print the result only", group="command", saved=False)

    if TYPE_CHECKING:  # the declared options

        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        values = complete(given)
        own = options_of(values)
        for name, value in given.items():
            if name not in own and not _is_default(name, value):
                raise ConfigError(no_effect(name, values))
        checked = {name: entry.check(values[name]) for name, entry in own.items()}
        if checked["batch_size"] % checked["parts"]:
            raise ConfigError(f"parts {checked['parts']} and batch-size {checked['batch_size']}: expected a batch-size "
                              "that is a multiple of the parts")  # fmt: skip
        check_shares(checked)
        for name in options(Config):
            idle = name not in own or no_effect(name, checked)
            object.__setattr__(self, name, None if idle else checked[name])


def joinable(config: Config) -> bool:
    """Return whether replicas may join a run. The methods in CLAIMING cannot divide the images again in mid-run."""
    in_advance = config.method in CLAIMING and config.balance == "equal"
    return config.method in JOINABLE and (config.shards or "iid") == "iid" and not in_advance


# Which options have an effect.


def options_of(values: Mapping[str, Any]) -> dict[str, Option]:
    """Return the options that all runs take, and those of the chosen model, optimizer and method."""
    return _options_of(*(declared.choice_of(chooser, values[chooser]) for chooser in CHOOSERS))


@cache
def _options_of(model: str, optimizer: str, method: str) -> dict[str, Option]:
    own = [declared.choices(chooser)[name].options for chooser, name in zip(CHOOSERS, (model, optimizer, method))]
    further = {name for chooser in CHOOSERS for name in takers(chooser)}
    common = {name: entry for name, entry in options(Config).items() if name not in further}
    return {**common, **own[0], **own[1], **own[2]}


@cache
def takers(chooser: str) -> dict[str, list[str]]:
    """Return the declared options, and for each the models, optimizers or methods that take it."""
    found: dict[str, list[str]] = {}
    for name, choice in declared.choices(chooser).items():
        for entry in choice.options:
            found.setdefault(entry, []).append(name)
    return found


def no_effect(name: str, values: Mapping[str, Any]) -> str:
    """Return why an option has no effect with these values of the other options, or "" if it has one."""
    own, words = options_of(values), name.replace("_", "-")
    if name not in own:
        chooser = options(Config)[name].group
        found = takers(chooser)[name]
        several = "s" if len(found) > 1 else ""
        return (f"{words} is an option of the {chooser}{several} {', '.join(found)}, not of {values[chooser]}: "
                f"leave it out, or choose another {chooser}")  # fmt: skip
    if reason := unmet(own[name], values, own[name].needs):
        return reason
    for entry in own.values():
        if entry.instead_of == name and values[entry.name]:
            return f"{entry.words} and {words} exclude each other: give only one of them"
    return ""


def unused(name: str, values: Mapping[str, Any]) -> str:
    """Return why an option changes nothing, or "" if it has an effect. `resolve` refuses it, except in a file."""
    entry = options_of(values)[name]
    alone = "." in entry.group and declared.choices("method")[values["method"]].alone  # it trains a single replica
    of_replicas = entry.group.partition(".")[0] == "method" and name not in ("method", "workers")
    if of_replicas and not alone and values["workers"] == 1:
        return f"{entry.words} has an effect only with several replicas, and there is one: leave it out"
    return unmet(entry, values, entry.used_with)


def _is_default(name: str, value: Any) -> bool:
    chooser = options(Config)[name].group
    return any(choice.options[name].default == value for choice in declared.choices(chooser).values()
               if name in choice.options)  # fmt: skip


def complete(given: Mapping[str, Any]) -> dict[str, Any]:
    """Add the defaults of options: those that all runs take, and those of the chosen model, optimizer and method.

    Raises ConfigError for an unknown model, optimizer or method.
    """
    known = options(Config)
    chosen = {name: known[name].check(given.get(name, known[name].default)) for name in CHOOSERS}
    return {name: entry.default for name, entry in options_of(chosen).items()} | dict(given)


# Layers.


def resolve(*layers: Mapping[str, Any]) -> Config:
    """Combine layers of options into a config. Later layers override earlier ones; paths become absolute.

    The option `preset` of any layer adds a layer below all others.

    Raises ConfigError if an option has no effect in its own layer, and gains none by a later one. Options that lose
    their effect by a later layer are dropped. A layer with the attribute `source` is from a file: `source` is put
    before messages, and `unused` options are accepted.
    """
    named = next((given["preset"] for given in reversed(layers) if "preset" in given), "none")
    layers = (NAMED[options(Config)["preset"].check(named)], *layers)
    given: dict[str, Any] = {}
    refused: dict[str, str] = {}  # options without effect in their layer, and the layer's source
    for layer in layers:
        source = getattr(layer, "source", "")
        new = _with_absolute_paths(layer)
        try:
            outdated = _outdated(given, new)
            given = {name: value for name, value in given.items() if name not in outdated} | new
            values = _with_presets(given)
            for name in new.keys() & options_of(values).keys():
                options_of(values)[name].check(new[name])
        except ConfigError as error:
            raise ConfigError(source + str(error)) from None
        refused |= {name: source for name in new if no_effect(name, values)}
        if not hasattr(layer, "source"):
            for reason in (unused(name, values) for name in new if name not in refused):
                if reason:
                    raise ConfigError(reason)
    values = _with_presets(given)
    for name in given:
        if reason := no_effect(name, values):
            if name in refused:
                raise ConfigError(refused[name] + reason)
            del values[name]
    folder = values.get("data_dir") or os.environ.get("MINIDL_DATA")
    return Config(**values | ({"data_dir": _absolute(folder)} if folder else {}))


def _with_presets(given: Mapping[str, Any]) -> dict[str, Any]:
    values = complete(given)
    return values | preset(values) | dict(given)


def _outdated(given: Mapping[str, Any], new: Mapping[str, Any]) -> set[str]:
    """Return the options in `given` that are dropped, because `new` replaces the option that they belong to."""
    before, after = complete(given), complete({**given, **new})
    found = {entry.name for entry in options(Config).values() if entry.instead_of in new}
    if "data" in given and before["data"] != after["data"]:
        found |= depending_on("data")
    for name in CHOOSERS:
        if name in given and declared.choice_of(name, before[name]) != declared.choice_of(name, after[name]):
            found |= depending_on(name)
    if "model" in new:  # the hash is that of another file
        found.add("model_hash")
    if "workers" in new:  # the devices are those of other workers
        found.add("devices")
    for name, entry in options_of(before).items():
        other = options_of(after).get(name)
        if other and (other.default, other.choices) != (entry.default, entry.choices):
            found.add(name)
    return found - new.keys()


def _with_absolute_paths(layer: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(layer)
    if matches("FILE.npz", found.get("data")):
        found["data"] = _absolute(found["data"])
    if matches(OWN_MODEL, found.get("model")):
        found["model"] = _absolute(found["model"])
    if found.get("init"):
        found["init"] = _absolute(found["init"])
    if matches("file:PATH", found.get("topology")):
        found["topology"] = "file:" + _absolute(found["topology"].removeprefix("file:"))
    return found


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))
