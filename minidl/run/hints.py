"""Messages about unknown options: the option of minidl with another name, or the reason why there is none."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from minidl.errors import ConfigError

# Names in other tools -> options of minidl. A message suggests those of the options that the command has.
ALIASES = {
    "learning-rate learningrate eta alpha step-size base-lr max-lr initial-lr": ("lr",),
    "batch bs batchsize mini-batch minibatch mini-batch-size batch-sz train-batch-size per-device-batch-size":
        ("batch-size",),
    "wd l2 decay weightdecay l2-reg regularization": ("weight-decay",),
    "arch architecture net network backbone": ("model",),
    "dataset data-set datasets train-data input dataset-name": ("data",),
    "data-path data-root root datadir dataset-dir data-folder": ("data-dir",),
    "num-epochs n-epochs nb-epochs max-epochs epoch e passes": ("epochs",),
    "iterations iters iter num-steps n-steps max-steps max-iter num-iterations": ("steps",),
    "opt optim solver algorithm": ("optimizer",),
    "scheduler lr-scheduler lr-schedule sched lr-policy lr-decay gamma milestones": ("schedule",),
    "warmup-steps warmup-epochs warmup-iters warm-up num-warmup-steps": ("warmup",),
    "grad-clip clip-grad clip-norm max-norm max-grad-norm gradient-clipping clip-grad-norm gradient-clip": ("clip",),
    "smoothing labelsmoothing": ("label-smoothing",),
    "random-seed manual-seed rng-seed random-state": ("seed",),
    "output output-dir output-folder outdir save-dir save logdir log-dir run-dir save-path o": ("out",),
    "load restore continue checkpoint ckpt load-checkpoint resume-from restart": ("resume", "evaluate"),
    "pretrained weights finetune fine-tune init-from init-weights initial-weights": ("init",),
    "eval test eval-only evaluation evaluate-only inference predict": ("evaluate",),
    "val val-split validation-split valid val-size validation-size val-fraction": ("validation",),
    "augmentation augmentations data-augmentation transforms": ("augment",),
    "silent q no-progress": ("quiet",),
    "tta test-time-augmentation": ("views",),
    "ema swa": ("lookahead",),
    "cfg conf config-file": ("config",),
    "replicas nproc nprocs np n world-size nproc-per-node num-replicas num-processes processes nodes ranks workers":
        ("workers", "ranks"),
    "gpu gpus cuda cpu no-cuda use-cuda accelerator mps": ("device",),
    "amp bf16 tf32 mixed-precision allow-tf32": ("precision",),
    "num-threads nthreads omp-num-threads cores cpus n-threads": ("threads",),
    "graph network-topology": ("topology",),
    "partition sharding split noniid non-iid": ("shards",),
    "profile profiler timeline": ("trace",),
    "strategy backend dist-backend sync": ("method",),
}  # fmt: skip

REASONS = {  # names in other tools -> why minidl has no such option
    "device gpu gpus cuda cpu no-cuda use-cuda accelerator mps": "a simulation computes on the CPU: leave it out; "
                                                                 "--threads sets the number of cores",
    "num-workers nworkers j jobs loader-workers": "a thread of each replica loads the images: leave it out; --workers "
                                                  "sets the number of replicas",
    "dropout drop-rate dropout-rate p-dropout": "the models of --model have no dropout; put nn.Dropout into a model of "
                                                "your own: --model my_net.py:build",
    "hidden hidden-size hidden-dim layers num-layers depth width units": "the models of minidl have fixed sizes; "
        "train a model of your own: --model my_net.py:build",
    "fp16 half dtype float16": "minidl trains in float32: leave it out; --precision is for products on a GPU",
    "beta1 beta2 betas eps epsilon": "adam and adamw use the betas 0.9 and 0.999 and eps 1e-8; minidl.optim.Adam takes "
                                     "others",
    "num-classes classes n-classes": "the data set determines the number of classes: leave it out",
    "image-size img-size input-size input-shape resize": "the data set determines the size of images: leave it out",
    "shuffle no-shuffle": "the training images are always shuffled, in an order that --seed determines",
    "verbose v debug log-interval print-freq log-level": "every epoch is printed unless --quiet is given: leave it out",
    "version": "python -m minidl.info prints the versions",
    "download": "missing files of --data are downloaded: leave it out",
    "compile jit": "kernels are always compiled: leave it out",
    "distributed local-rank rank master-addr master-port init-method": "--workers starts replicas on this machine, "
        "mpiexec or srun on several",
}  # fmt: skip


def shown(value: Any) -> str:
    """Return a value as Python writes it, shortened to one line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number with thousands of digits; deeply nested lists
        return f"a very long {'number' if isinstance(value, int) else 'value'}"
    return text if len(text) <= 100 else text[:80] + "..." + text[-3:]


def unknown_option(word: str, known: Mapping[str, Collection[str]]) -> ConfigError:
    """Return the error for an argument that is no option. known: the options of the command, with their choices."""
    name = word.split("=")[0]
    text = name if name.isprintable() and len(name) <= 60 else shown(name)
    if name[:1] in ("\u2013", "\u2014", "\u2212"):
        return ConfigError(f"{text} begins with a dash of another kind: type two hyphens, --")
    if not name.startswith("-") or not name.strip("-"):
        return ConfigError(f"unexpected argument {shown(word)}: every option begins with --; see --help")
    bare = name.strip("-").replace("_", "-").lower()
    if " " in bare and bare.partition(" ")[0] in known:
        return ConfigError(f"unknown option {shown(name)}: the option and its value are separate words, without quotes")
    if other := meant(bare, known):
        return ConfigError(f"unknown option {text}. Did you mean '{other}'? --help lists all options")
    if bare in (reasons := reasons_for(known)):
        return ConfigError(f"unknown option {text}: {reasons[bare]}")
    return ConfigError(f"unknown option {text}; --help lists all options")


def reasons_for(known: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Return why minidl has no such option, by its name. known: only reasons whose options the command has count."""
    given = {names: text for names, text in REASONS.items() if set(re.findall("--([a-z]+)", text)) <= known.keys()}
    return {name: text for names, text in given.items() for name in names.split()}


def meant(bare: str, known: Mapping[str, Collection[str]]) -> str:
    """Return the option that is probably meant, such as --lr for learning-rate, or ""."""
    if bare in known:
        return "--" + bare
    if bare in ("h", "help", "?", "usage"):
        return "--help"
    for names, others in ALIASES.items():
        found = ["--" + other for other in others if other in known]
        if bare in names.split() and found:
            return "' or '".join(found)
    reasons = reasons_for(known)
    from difflib import get_close_matches  # here, because --help does not need it

    close = get_close_matches(bare, known, n=1, cutoff=0.93 if bare in reasons else 0.65)
    taking = [f"--{words} {bare}" for words, choices in known.items() if bare in choices and bare not in reasons]
    if taking and not get_close_matches(bare, close, cutoff=0.85):  # --sgd means --optimizer sgd, but --rank --ranks
        return "' or '".join(taking)
    return "--" + close[0] if close else ""
