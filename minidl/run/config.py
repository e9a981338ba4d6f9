"""All options of training and their defaults.

The values of a run come from layers; later layers override earlier ones: the defaults of `Config`; the presets of the
data set, of the optimizer and of the method; the file of --config; the command line. The result is complete and is
saved as config.toml in the run folder. If the command line and the file name different data sets, the file's values of
all options that occur in a data preset (such as lr) are dropped: they were chosen for the other data set. The same
holds for optimizers and methods.

Names of models, optimizers and so on are repeated here as strings, so that --help does not import NumPy. A test
compares them with the code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minidl.run.options import Limits, option, options

MODELS = ("mlp", "lenet", "vgg", "resnet20", "resnet32", "resnet44", "resnet56", "resnet110")
DATASETS = ("digits", "mnist", "fashion-mnist", "cifar10", "synthetic")
OPTIMIZERS = ("sgd", "nesterov", "sgdw", "adam", "adamw", "lars")
CONVOLUTIONS = ("auto", "direct")
SCHEDULES = ("constant", "steps", "cosine", "one-cycle")
AUGMENTATIONS = ("pad-crop", "flip", "cutout")
METHODS = ("local", "allreduce", "local-sgd", "dpsgd", "gossip", "ps")
TOPOLOGIES = ("ring", "torus", "complete", "star", "hypercube", "exponential", "one-peer-exponential", "base-2",
              "matching", "uniform", "hierarchical")

ABOVE_ZERO = Limits("above 0", lambda value: value > 0)
ZERO_OR_MORE = Limits("of 0 or more", lambda value: value >= 0)
ONE_OR_MORE = Limits("of 1 or more", lambda value: value >= 1)
FRACTION = Limits("of 0 or more and below 1", lambda value: 0 <= value < 1)
OWN_DATA = Limits(
    "synthetic:COUNTxHEIGHTxWIDTHxCHANNELS:CLASSES, the path of a .npz file",
    lambda value: value.endswith(".npz") or value.startswith("synthetic:"),
)
OWN_GRAPH = Limits(
    "torus:ROWSxCOLUMNS, base-K, file:PATH of a graph",
    lambda value: value.startswith(("torus:", "base-", "file:")),
)
SHARDS = Limits("skewed:ALPHA", lambda value: value.startswith("skewed:"))
PROBABILITY = Limits("of 0 to 1", lambda value: 0 <= value <= 1)
SEED = Limits("between 0 and 2^32 - 1", lambda value: 0 <= value < 2**32)

# Options that may differ when a run is resumed. If `workers` differs, all replicas start from the average.
FREE = ("data_dir", "threads", "keep", "stall", "workers")

WHAT, HOW, TOGETHER = "what to train", "optimization", "several replicas"
RUN, CALL = "the run", "this command only"


@dataclass(frozen=True)
class Config:
    """The options of a training run. Raises ConfigError if a value is unknown or out of range."""

    model: str = option("lenet", "the network", group=WHAT, choices=MODELS)
    data: str = option("digits", "the data set, or your own file.npz (x_train, y_train, x_test, y_test)", group=WHAT,
                       choices=DATASETS, besides=OWN_DATA)
    data_dir: str = option("", "first folder to search for the files of data sets; then $MINIDL_DATA and the "
                           "user's cache folder", group=WHAT)
    layout: str = option("channels-last", "order of the axes in an npz file", group=WHAT,
                         choices=("channels-last", "channels-first"))
    validation: float = option(0.0, "fraction of the training set held out to select the best checkpoint",
                               group=WHAT, limits=FRACTION)
    augment: tuple[str, ...] = option((), "random changes of training images, or none", group=WHAT,
                                      choices=AUGMENTATIONS)

    epochs: int = option(10, "passes over the training set", group=HOW, limits=ONE_OR_MORE)
    steps: int = option(0, "train for this many steps instead of --epochs; 0: use --epochs", group=HOW,
                        limits=ZERO_OR_MORE)
    batch_size: int = option(64, "images per step and replica", group=HOW, limits=ONE_OR_MORE)
    optimizer: str = option("sgd", "the update rule", group=HOW, choices=OPTIMIZERS)
    lr: float = option(0.05, "maximum learning rate", group=HOW, limits=ABOVE_ZERO)
    momentum: float = option(0.9, "momentum of sgd, nesterov, sgdw and lars", group=HOW, limits=FRACTION)
    weight_decay: float = option(5e-4, "weight decay, for matrices and filters only", group=HOW, limits=ZERO_OR_MORE)
    schedule: str = option("cosine", "learning rate schedule", group=HOW, choices=SCHEDULES)
    warmup: int = option(0, "number of initial steps in which the learning rate rises from 0", group=HOW,
                         limits=ZERO_OR_MORE)
    clip: float = option(0.0, "maximum norm of the gradient; 0: no limit", group=HOW, limits=ZERO_OR_MORE)
    label_smoothing: float = option(0.0, "fraction of each label spread over all classes", group=HOW, limits=FRACTION)

    workers: int = option(0, "replicas on this machine, one process each; 0: MINIDL_WORKERS, or two if there are two "
                          "cores; mpiexec sets it", group=TOGETHER, limits=ZERO_OR_MORE)
    method: str = option("dpsgd", "how replicas exchange models or gradients", group=TOGETHER, choices=METHODS)
    topology: str = option("one-peer-exponential", "which replicas exchange models (dpsgd; gossip with --peer "
                           "topology)", group=TOGETHER, choices=TOPOLOGIES, besides=OWN_GRAPH)
    period: int = option(1, "steps between exchanges (gossip) or averages (local-sgd, default 8)",
                         group=TOGETHER, limits=ONE_OR_MORE)
    probability: float = option(0.0, "probability of an exchange after a step, instead of --period (gossip)",
                                group=TOGETHER, limits=PROBABILITY)
    exchange: str = option("push", "the replica that starts an exchange of gossip sends, receives, or both",
                           group=TOGETHER, choices=("push", "pull", "push-pull"))
    peer: str = option("uniform", "gossip partner: any replica, a neighbour in the topology, mostly one on the same "
                       "node, mostly a fast one", group=TOGETHER,
                       choices=("uniform", "topology", "hierarchical", "speed"))
    inside: float = option(0.9, "probability of an exchange within the node (--peer hierarchical)", group=TOGETHER,
                           limits=PROBABILITY)
    mix: str = option("half", "weights of the two models in gossip: equal, by mass (push-sum), or by images processed",
                      group=TOGETHER, choices=("half", "mass", "clock"))
    block: str = option("whole", "contents of a gossip message: the whole model, or one layer at a time",
                        group=TOGETHER, choices=("whole", "layers"))
    velocity: str = option("local", "momentum when models are mixed: stays local, is mixed too, or follows the mixed "
                           "models", group=TOGETHER, choices=("local", "mixed", "quasi-global"))
    overlap: bool = option(False, "exchange models while the next gradient is computed (dpsgd)", group=TOGETHER)
    bucket: float = option(1.0, "MB of gradient per message of allreduce", group=TOGETHER, limits=ABOVE_ZERO)
    reduce: str = option("tree", "sum by minidl's tree, bit-identical on every transport, or by MPI",
                         group=TOGETHER, choices=("tree", "fast"))
    shards: str = option("iid", "assign training images to replicas at random, or by label", group=TOGETHER,
                         choices=("iid",), besides=SHARDS)
    stall: float = option(30.0, "seconds of waiting after which a replica reports which others it waits for",
                          group=TOGETHER, limits=ABOVE_ZERO)

    seed: int = option(0, "seed of all random numbers: weights, splits, order and so on", group=RUN, limits=SEED)
    threads: int = option(0, "threads per process; 0: MINIDL_THREADS or one per core (for several --workers: a share "
                          "of the cores); does not change results", group=RUN, limits=ZERO_OR_MORE)
    conv: str = option("auto", "use Winograd's convolution if it is faster, or always direct convolution, which has a "
                       "smaller rounding error", group=RUN, choices=CONVOLUTIONS)
    keep: int = option(2, "number of newest checkpoints kept, besides the best one", group=RUN, limits=ONE_OR_MORE)

    out: str = option("", "the run folder (default: the next free runs/DATA-MODEL-N)", group=CALL, saved=False)
    config: str = option("", "read options from this TOML file; the command line overrides it", group=CALL,
                         saved=False)
    resume: str = option("", "resume the run in this folder (synchronous methods: with the same result as "
                         "without the stop)", group=CALL, saved=False)
    evaluate: str = option("", "only test the weights of a run folder, a checkpoint or a .safetensors file",
                           group=CALL, saved=False)
    trace: bool = option(False, "write trace.json, a timeline of all replicas for ui.perfetto.dev", group=CALL,
                         saved=False)
    json: bool = option(False, "print the result as one line of JSON", group=CALL, saved=False)
    quiet: bool = option(False, "print the result only", group=CALL, saved=False)

    def __post_init__(self) -> None:
        for name, entry in options(Config).items():
            object.__setattr__(self, name, entry.check(getattr(self, name)))


# Presets: values of options that are not given. Data presets are for "sgd"; presets of other optimizers override them.
DATA_PRESETS: dict[str, dict[str, Any]] = {
    "digits": dict(epochs=15, batch_size=32),
    "mnist": dict(epochs=10, batch_size=64),
    "fashion-mnist": dict(epochs=15, batch_size=64, augment=("flip",)),
    "cifar10": dict(epochs=60, batch_size=128, lr=0.1, augment=("pad-crop", "flip")),
}
OPTIMIZER_PRESETS: dict[str, dict[str, Any]] = {
    "adam": dict(lr=1e-3, weight_decay=0.0),
    "adamw": dict(lr=1e-3, weight_decay=0.05),
    "lars": dict(lr=1.0),
}
METHOD_PRESETS: dict[str, dict[str, Any]] = {
    "local-sgd": dict(period=8),  # averaging after each step would cost as much as allreduce
}
PRESETS = {"data": DATA_PRESETS, "optimizer": OPTIMIZER_PRESETS, "method": METHOD_PRESETS}  # later ones override


def resolve(*layers: Mapping[str, Any]) -> Config:
    """Combine layers of options into a complete config. Later layers override earlier ones; paths become absolute."""
    given: dict[str, Any] = {}
    for layer in layers:
        stronger = dict(layer)
        if stronger.get("data", "").endswith(".npz"):
            stronger["data"] = _absolute(stronger["data"])
        for name, presets in PRESETS.items():
            if {name} <= given.keys() & stronger.keys() and given[name] != stronger[name]:
                theirs = {key for preset in presets.values() for key in preset}
                given = {key: value for key, value in given.items() if key not in theirs}
        given |= stronger
    config: dict[str, Any] = {}
    for name, presets in PRESETS.items():
        config |= presets.get(given.get(name, getattr(Config, name)), {})
    config |= given
    folder = config.get("data_dir") or os.environ.get("MINIDL_DATA")
    if folder:
        config["data_dir"] = _absolute(folder)
    return Config(**config)


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))
