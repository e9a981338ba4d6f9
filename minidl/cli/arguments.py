"""Checks of a command line's options. They need no NumPy, and open none of the files that the options name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from minidl.errors import ConfigError, require_package
from minidl.run.config import FREE, LENGTH
from minidl.run.shares import parse_devices

# --model and --data only name the place of a file again.
WITH_RESUME = (*FREE, *LENGTH, "max_workers", "model", "model_hash", "data", "resume", "json", "quiet", "trace",
               "tensorboard", "no_report")  # fmt: skip
# With --evaluate of a run. --model only names the file of a model again.
OF_A_RUN = ("evaluate", "model", "model_hash", "data", "data_dir", "layout", "views", "threads", "json", "quiet")
OF_A_FILE = (*OF_A_RUN, "conv", "validation", "seed", "config")  # with --evaluate of other weights
TARGETS = {"out": "begins a run", "resume": "continues a run", "join": "adds replicas to a running job",
           "evaluate": "tests weights"}  # fmt: skip


def check(given: Mapping[str, Any]) -> None:
    """Raise ConfigError if options exclude each other, or if a path is obviously wrong."""
    targets = [name for name in TARGETS if name in given]
    if len(targets) > 1:
        each = ", ".join(f"--{name} {TARGETS[name]}" for name in targets)
        raise ConfigError(f"give only one of these: {each}")
    if "resume" in given:
        allow(given, WITH_RESUME, "--resume: the run keeps its options")
    if "evaluate" in given:
        allow(given, OF_A_FILE, "--evaluate, which does not train")
    if given.get("tensorboard"):
        require_package("--tensorboard", "tensorboardX", "tensorboard")
    out = given.get("out", "")
    if out and os.path.lexists(out) and not os.path.isdir(out):
        raise ConfigError(f"--out {out} is a file: expected a folder, which is created if it does not exist")
    for name in ("evaluate", "init"):
        weights = os.path.expanduser(given.get(name, ""))
        if weights and not os.path.exists(weights):
            raise ConfigError(f"--{name} {weights} does not exist: expected a run folder, a checkpoint or a "
                              ".safetensors file")  # fmt: skip
    data = given.get("data", "")
    if lacks_file(data):
        raise ConfigError(f"--data {data}: there is no such file")


def lacks_file(data: str) -> bool:
    """Return whether `data` is the path of a .npz file that does not exist."""
    return data.endswith(".npz") and not os.path.exists(os.path.expanduser(data))


def with_devices(words: Sequence[str]) -> list[str]:
    """Return a command line in which `--workers LIST` is `--workers NUMBER --devices LIST`.

    Raises ConfigError if the list is not valid, or contradicts another option.
    """
    found, devices = list(words), list[str]()
    for at, word in enumerate(found):
        name, equals, text = word.partition("=")
        if name != "--workers":
            continue
        if not equals:
            text = found[at + 1] if at + 1 < len(found) else ""
        if not text or text.startswith("-") or text.removeprefix("+").isdecimal():
            devices = []
            continue
        number, devices = len(parse_devices(text)), ["--devices", text]
        found[at if equals else at + 1] = f"--workers={number}" if equals else str(number)
    for name, what in (("--threads", "how many threads each has"), ("--device", "where each computes")):
        if devices and any(word.partition("=")[0] == name for word in found):
            raise ConfigError(f"{name} and a list of --workers exclude each other: the list says {what}")
    return found + devices


def allow(given: Mapping[str, Any], names: tuple[str, ...], reason: str) -> None:
    """Raise ConfigError for an option that is not among `names`."""
    for name in given:
        if name not in names:
            raise ConfigError(f"--{name.replace('_', '-')} cannot be given with {reason}")
