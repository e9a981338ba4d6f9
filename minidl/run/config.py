"""Every option of training, and what it is when nobody says: the one place to look.

A run is decided in layers, the stronger one last: the defaults of `Config`, the presets of the data set, of the
optimizer and of the method, the file of --config, the command line. The result is complete, and a run folder's
config.toml holds it. Where the command line names another data set than the file, those values of the file fall away
that presets of data sets speak of (lr, say): they were meant for the one that is no longer there. Optimizers and
methods likewise.

Names of models, optimizers and so on stand here as words, so that --help needs no NumPy; a test holds them against
the code that they name.
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

# What may differ when a run is resumed. Of these only `workers` changes results: all then begin with the average.
FREE = ("data_dir", "threads", "keep", "stall", "workers")

WHAT, HOW, TOGETHER = "what to train", "optimization", "several replicas"
RUN, CALL = "the run", "this call"


@dataclass(frozen=True)
class Config:
    """A training run. Raises ConfigError for a value that is unknown or out of range."""

    model: str = option("lenet", "the network", group=WHAT, choices=MODELS)
    data: str = option("digits", "the data set, or your own file.npz (x_train, y_train, x_test, y_test)", group=WHAT,
                       choices=DATASETS, besides=OWN_DATA)
    data_dir: str = option("", "where the files of data sets lie or are loaded to; else $MINIDL_DATA or the user's "
                           "cache folder", group=WHAT)
    layout: str = option("channels-last", "order of the axes in an npz file", group=WHAT,
                         choices=("channels-last", "channels-first"))
    validation: float = option(0.0, "fraction of the training set held out to choose the best checkpoint",
                               group=WHAT, limits=FRACTION)
    augment: tuple[str, ...] = option((), "changes made to training images, or none", group=WHAT,
                                      choices=AUGMENTATIONS)

    epochs: int = option(10, "passes over the training set", group=HOW, limits=ONE_OR_MORE)
    steps: int = option(0, "train for this many steps instead; 0: epochs decide", group=HOW, limits=ZERO_OR_MORE)
    batch_size: int = option(64, "images in a step", group=HOW, limits=ONE_OR_MORE)
    optimizer: str = option("sgd", "the update rule", group=HOW, choices=OPTIMIZERS)
    lr: float = option(0.05, "learning rate, at its highest", group=HOW, limits=ABOVE_ZERO)
    momentum: float = option(0.9, "momentum of sgd, nesterov, sgdw and lars", group=HOW, limits=FRACTION)
    weight_decay: float = option(5e-4, "weight decay, of matrices and filters only", group=HOW, limits=ZERO_OR_MORE)
    schedule: str = option("cosine", "how the learning rate falls", group=HOW, choices=SCHEDULES)
    warmup: int = option(0, "steps over which the learning rate first rises from 0", group=HOW, limits=ZERO_OR_MORE)
    clip: float = option(0.0, "largest norm of the gradient; 0: any", group=HOW, limits=ZERO_OR_MORE)
    label_smoothing: float = option(0.0, "part of each label spread over all classes", group=HOW, limits=FRACTION)

    workers: int = option(0, "replicas that train on this machine, a process each; 0: two where there are two cores; "
                          "under mpiexec its ranks", group=TOGETHER, limits=ZERO_OR_MORE)
    method: str = option("dpsgd", "what replicas say to each other", group=TOGETHER, choices=METHODS)
    topology: str = option("one-peer-exponential", "who talks to whom (dpsgd; gossip with --peer topology)",
                           group=TOGETHER, choices=TOPOLOGIES, besides=OWN_GRAPH)
    period: int = option(1, "steps between exchanges (gossip) or averages (local-sgd; there 8 if not given)",
                         group=TOGETHER, limits=ONE_OR_MORE)
    probability: float = option(0.0, "of an exchange after a step, in place of --period (gossip)", group=TOGETHER,
                                limits=PROBABILITY)
    exchange: str = option("push", "who starts an exchange of gossip gives, takes, or both", group=TOGETHER,
                           choices=("push", "pull", "push-pull"))
    peer: str = option("uniform", "with whom gossip exchanges: anybody, a neighbour, mostly within the node, mostly "
                       "the fast", group=TOGETHER, choices=("uniform", "topology", "hierarchical", "speed"))
    inside: float = option(0.9, "of an exchange within the node (--peer hierarchical)", group=TOGETHER,
                           limits=PROBABILITY)
    mix: str = option("half", "how gossip weighs two models: equally, by mass (push-sum), or by images seen",
                      group=TOGETHER, choices=("half", "mass", "clock"))
    block: str = option("whole", "what a message of gossip holds: the model, or its layers in turn", group=TOGETHER,
                        choices=("whole", "layers"))
    velocity: str = option("local", "momentum where models are mixed: stays local, is mixed too, or follows the mixed "
                           "models", group=TOGETHER, choices=("local", "mixed", "quasi-global"))
    overlap: bool = option(False, "exchange beside the next gradient (dpsgd)", group=TOGETHER)
    bucket: float = option(1.0, "MB of gradient in each message of allreduce", group=TOGETHER, limits=ABOVE_ZERO)
    reduce: str = option("tree", "sums by minidl's tree, the same bits everywhere, or by MPI's", group=TOGETHER,
                         choices=("tree", "fast"))
    shards: str = option("iid", "training images of each replica: by chance, or by label", group=TOGETHER,
                         choices=("iid",), besides=SHARDS)
    stall: float = option(30.0, "seconds of waiting after which a replica says for whom", group=TOGETHER,
                          limits=ABOVE_ZERO)

    seed: int = option(0, "decides weights, splits, order and every other chance", group=RUN, limits=SEED)
    threads: int = option(0, "threads of this process, 0: MINIDL_THREADS, or one for each core; results do not depend "
                          "on it", group=RUN, limits=ZERO_OR_MORE)
    conv: str = option("auto", "convolution by Winograd's method where that is faster, or always directly, which "
                       "rounds less", group=RUN, choices=CONVOLUTIONS)
    keep: int = option(2, "checkpoints kept, besides the best", group=RUN, limits=ONE_OR_MORE)

    out: str = option("", "the run folder (default: the next free runs/DATA-MODEL-N)", group=CALL, saved=False)
    config: str = option("", "take options from this TOML file; the command line goes before it", group=CALL,
                         saved=False)
    resume: str = option("", "go on with the run in this folder, exactly as if it had never stopped", group=CALL,
                         saved=False)
    evaluate: str = option("", "only test a run folder, a checkpoint or a .safetensors file", group=CALL, saved=False)
    trace: bool = option(False, "write a timeline of all replicas, trace.json, for ui.perfetto.dev", group=CALL,
                         saved=False)
    json: bool = option(False, "print the result as one line of JSON", group=CALL, saved=False)
    quiet: bool = option(False, "print the result only", group=CALL, saved=False)

    def __post_init__(self) -> None:
        for name, entry in options(Config).items():
            object.__setattr__(self, name, entry.check(getattr(self, name)))


# What an option is where it was not given. Values for the update rule "sgd"; other rules follow below.
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
    "local-sgd": dict(period=8),  # with 1 it is allreduce
}
PRESETS = {"data": DATA_PRESETS, "optimizer": OPTIMIZER_PRESETS, "method": METHOD_PRESETS}  # the stronger ones last


def resolve(*layers: Mapping[str, Any]) -> Config:
    """The complete config from layers of options, the weakest first; paths become absolute."""
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
