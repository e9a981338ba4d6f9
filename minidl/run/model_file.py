"""Models from a user's file: `--model my_net.py:build`. This module imports neither the file nor NumPy.

    def build(input_shape, classes):        # my_net.py; input_shape: (height, width, channels)
        return nn.Sequential(...)           # any nn.Module: images (N, H, W, C) -> (N, classes)

To import a file is to run its code. So minidl imports a file only if the command line names it in --model. The paths in
config.toml, in the metadata of weights and in a file of --config are shown to the user, and never imported.

A run records the SHA-256 of the file. With --resume and --evaluate, the file must have the recorded hash, or the one in
--model-hash. The hash does not cover other files that this file imports.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any

from minidl.errors import ConfigError
from minidl.reading import blaming, content
from minidl.run.config import OWN_MODEL, Config
from minidl.run.hints import shown
from minidl.run.options import matches

LONGEST = 4 << 20  # bytes of a model file
DIGITS = 12  # of a hash in a message


def is_own(model: object) -> bool:
    """Return whether this value of --model names a function in a user's file."""
    return matches(OWN_MODEL, model)


def split(model: str) -> tuple[Path, str]:
    """Return the file and the function of FILE.py:FUNCTION."""
    path, _, function = model.rpartition(":")
    return Path(path), function


def short(model: str) -> str:
    """Return a model's name without the folder of its file: my_net.py:build."""
    return Path(model).name


def read(model: str) -> tuple[bytes, str]:
    """Return the content of a model's file and its SHA-256. Raises ConfigError if it cannot be read."""
    path, _ = split(model)
    with blaming(f"--model: the file {shown(str(path))}", ConfigError):
        source = content(path, LONGEST)
    return source, hashlib.sha256(source).hexdigest()


def require_named(named: object, given: Mapping[str, Any], where: str, command: str) -> None:
    """Raise ConfigError if a file names a model file, and the command line does not choose the model.

    named: the model in the file. given: the options of the command line. where: the file or folder, for the message.
    command: the command to which --model must be added.
    """
    if is_own(named) and "model" not in given:
        file = shown(short(str(named)))
        raise ConfigError(f"{where} has a model from a file, {file}, and a file is imported only if the command line "
                          f"names it: {command} --model FOLDER/{quote(short(str(named)))}")  # fmt: skip


def require_same_kind(named: object, given: Mapping[str, Any], command: str) -> None:
    """Raise ConfigError if the command line gives another model than a run has. A model file may have been moved."""
    if "model" in given and not (is_own(named) and is_own(given["model"])):
        raise ConfigError(f"--model cannot be given with {command}: the run keeps its model, {shown(named)}")


def identified(config: Config, given: Mapping[str, Any], known: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """Return the config with the SHA-256 of its model file.

    given: the options of the command line. known: those that the run recorded, if it has begun.
    Raises ConfigError if the file cannot be read, or does not have the hash in --model-hash, or else the recorded one.
    """
    if not is_own(config.model):
        return config
    path, _ = split(config.model)
    _, found = read(config.model)
    wanted = given.get("model_hash", "")
    if wanted not in ("", "any") and not found.startswith(wanted):
        raise ConfigError(f"--model-hash {wanted}: {path} has another SHA-256, {found[:DIGITS]}...")
    recorded, begun = known.get("model_hash"), split(str(known.get("model", "")))[0].name
    if not wanted and isinstance(recorded, str) and recorded != "any" and found != recorded:
        if begun != path.name:
            raise ConfigError(f"the run was begun with {shown(begun)}, and {path} is another file: give --model the "
                              f"first one, or add --model-hash {found[:DIGITS]} to use the other")  # fmt: skip
        raise ConfigError(f"{path} has changed since the run began: its SHA-256 begins with {found[:DIGITS]}, and the "
                          f"run's with {shown(recorded[:DIGITS])}: restore the file, or add --model-hash "
                          f"{found[:DIGITS]} to use the changed one")  # fmt: skip
    return replace(config, model_hash=found)
