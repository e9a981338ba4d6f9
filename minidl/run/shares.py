"""Values of options that are lists: --shares, and --devices, which a list of --workers sets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from minidl.errors import ConfigError
from minidl.run.hints import shown

SUM = 1e-6  # by which the sum of shares may differ from 1
MOST_THREADS, LEAST_CYCLE = 4096, 0.01
DIGITS = 4  # of the number of a GPU
FORM = ("cpu:THREADS, cpu:FRACTION of the time of one thread, or cuda:NUMBER for a GPU, for each replica, separated by "
        "commas")  # fmt: skip


def parse_shares(text: str, replicas: int = 0) -> tuple[float, ...]:
    """Return the shares of the replicas: (0.7, 0.25, 0.05) for "0.7,0.25,0.05", and () for "".

    replicas: their number; 0: unknown. Raises ConfigError unless there is one share for each, and they sum to 1.
    """
    if not text:
        return ()
    numbers = [_number(word) for word in text.split(",")]
    for word, value in zip(text.split(","), numbers, strict=True):
        if not 0 < value <= 1:
            raise ConfigError(f"shares: expected numbers above 0 and of at most 1, separated by commas, got "
                              f"{shown(word)}")  # fmt: skip
    if replicas and len(numbers) != replicas:
        raise ConfigError(f"shares: {len(numbers)} numbers for {replicas} replicas: expected one for each")
    if abs(sum(numbers) - 1) > SUM:
        raise ConfigError(f"shares: {shown(text)} sums to {sum(numbers):.6g}: expected 1")
    return tuple(numbers)


def check_shares(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if options about shares or devices contradict others. values: all options of a run."""
    devices, workers = len(parse_devices(values["devices"])), values["workers"]
    if devices not in (0, workers):
        raise ConfigError(f"devices: {devices} devices for {workers} workers: give --workers a list of this length, or "
                          "only their number")  # fmt: skip
    parse_shares(values.get("shares") or "", values["workers"])
    on_gpu = {one.device for one in parse_devices(values["devices"])} | {values["device"]} != {"cpu"}
    for name, refused in (("parts", values["parts"] > 1), ("method", values["method"].startswith("hogwild"))):
        if on_gpu and refused:
            raise ConfigError(f"{name} {values[name]} needs cores, and a replica has a GPU: leave one of them out")
    if values["precision"] != "float32" and not on_gpu:
        raise ConfigError(f"precision {values['precision']} needs the tensor cores of a GPU, and all replicas compute "
                          "on cores: add --device cuda:0, or leave it out")  # fmt: skip
    if values.get("balance") in ("static", "dynamic") and values["shards"] != "iid":
        raise ConfigError(f"balance {values['balance']} divides the images of all, and with shards {values['shards']} "
                          "each replica has its own: leave one of them out")  # fmt: skip
    if values.get("weighting") == "share" and values["method"] != "allreduce" and values["optimizer"] != "sgd":
        raise ConfigError(f"weighting share: with method {values['method']}, {values['optimizer']} divides each "
                          "gradient by its size, so the weight would be lost: expected optimizer sgd")  # fmt: skip


class Worker(NamedTuple):
    """What a replica has. cycle: the fraction of the time in which it computes (comm/transport/cycle.py).

    device: cpu, or a GPU, such as cuda:0; one thread then prepares its work.
    """

    threads: int
    cycle: float = 1.0
    device: str = "cpu"


def parse_devices(text: str) -> tuple[Worker, ...]:
    """Return the workers for "cuda:0,cpu:2,cpu:0.5": a GPU, two threads, and a thread for half of the time.

    Returns () for "". Raises ConfigError if the text has another form, or names a single worker.
    """
    workers = []
    for word in text.split(",") if text else ():
        kind, colon, amount = word.partition(":")
        value = _number(amount)
        if kind == "cuda" and amount.isdecimal() and len(amount) <= DIGITS:
            workers.append(Worker(1, device=word))
            continue
        if kind != "cpu" or not colon:
            raise ConfigError(f"workers: {shown(word)} is no worker; expected a whole number, or {FORM}")
        if LEAST_CYCLE <= value < 1:
            workers.append(Worker(1, value))
        elif amount.isdecimal() and 1 <= value <= MOST_THREADS:
            workers.append(Worker(int(value)))
        else:
            raise ConfigError(f"workers: {shown(word)}: expected 1 to {MOST_THREADS} threads, or a fraction from "
                              f"{LEAST_CYCLE} to below 1")  # fmt: skip
    if len(workers) == 1:
        raise ConfigError(f"workers: {shown(text)} is a list of one worker; expected two or more, or a whole number")
    return tuple(workers)


def _number(word: str) -> float:
    """Return the number that a word stands for; NaN if it is none."""
    with suppress(ValueError):
        if word.isascii() and "_" not in word and word == word.strip():
            return float(word)
    return math.nan
