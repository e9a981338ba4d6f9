"""What all ranks of a job must have in common: the calls, the model, the data, the options, the version of minidl."""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections.abc import Mapping

import numpy as np

from minidl.comm.fabric.base import BufferSpec, Fabric
from minidl.data import Dataset
from minidl.errors import ConfigError
from minidl.nn import Module
from minidl.run.config import Config
from minidl.run.options import options
from minidl.training.vectors import hand_out_text, led

# Options that may differ, or that the model and the data stand for.
DIFFERENT = ("model", "data", "workers", "device", "devices", "threads", "data_dir", "stall", "out", "quiet", "json",
             "max_workers")  # fmt: skip
FRAME = 1 << 14  # bytes: more than the longest description of a call
SAMPLE = 256  # images that are compared
LONGEST = 100  # characters of a value in this description


def agree(fabric: Fabric, call: str, facts: Mapping[str, object]) -> None:
    """Raise ConfigError, on all ranks, if a rank makes another call or has other facts. All live ranks call this.

    call: the name of the function, for the message. facts: {what: value}, in the order in which they are compared.
    Afterwards, `fabric.replicas` contains all live ranks.
    """
    if fabric.size == 1:
        return
    fabric.replicas = members = tuple(rank for rank in range(fabric.size) if fabric.alive(rank))
    text = _described(call, facts)
    hashes = np.zeros(fabric.size)  # the other ranks add theirs
    hashes[fabric.rank] = int.from_bytes(hashlib.sha256(text).digest()[:6], "little")
    fabric.allreduce(hashes)
    odd = next((rank for rank in members if hashes[rank] != hashes[members[0]]), None)
    if odd is None:
        return
    frames = [np.frombuffer(text.ljust(FRAME), np.float64).copy() for _ in range(2)]
    for root, frame in zip((members[0], odd), frames, strict=True):
        fabric.group(members).broadcast(frame, root)
    first, other = (json.loads(frame.tobytes()) for frame in frames)
    raise ConfigError(_difference(call, (members[0], first), (odd, other)))


def agree_at_start(
    fabric: Fabric, config: Config, model: Module, data: Dataset, facts: dict[str, object] | None = None
) -> dict[str, object]:  # fmt: skip
    """Raise ConfigError if the ranks of a run have different options, models, data or initial weights.

    facts: what `facts_of_run` returns, if the caller has it.

    Return what they have in common. Call this before `fabric.join`. mpiexec can start ranks with different command
    lines, or on machines with different files. A user's own model may draw its initial weights from a generator that
    has another seed on each rank. Of the images, only a sample is compared (`facts_of_data`).
    If a rank dies meanwhile, the others go on without it. They raise PeerLost if it is a server, or with `fail_fast`.
    """
    if fabric.size == 1:
        return {}
    fabric.join(BufferSpec(), "start")
    replicas, fabric.replicas = fabric.replicas, tuple(range(fabric.began))  # servers are compared, too
    facts = facts or facts_of_run(config, model, data)
    weights = {"initial weights": checksum(model.flatten().theta)}
    frame = np.frombuffer(_described("minidl.train", facts | weights).ljust(FRAME), np.float64).copy()

    def compare(leader: int) -> str:
        found = {rank: other.tobytes() for rank, other in fabric.gather(frame)}
        odd = next((rank for rank in found if found[rank] != found[leader]), None)
        if odd is None:
            return hand_out_text(fabric, "", leader)
        one, other = json.loads(found[leader]), json.loads(found[odd])
        return hand_out_text(fabric, _difference("minidl.train", (leader, one), (odd, other)), leader)

    difference = led(fabric, compare)
    fabric.replicas = replicas
    if difference:
        raise ConfigError(difference)
    return facts


def facts_of_run(config: Config, model: Module, data: Dataset) -> dict[str, object]:
    """Return what all ranks of a run must have in common."""
    return {"--model": config.model, **facts_of_options(config), **facts_of_model(model), **facts_of_data(data)}


def _described(call: str, facts: Mapping[str, object]) -> bytes:
    """Return a call, its facts and the version of minidl as JSON."""
    own = {"call": call, "version": sys.modules["minidl"].__version__}
    return json.dumps(own | {name: _short(str(value)) for name, value in facts.items()}).encode()


def facts_of_options(config: Config) -> dict[str, object]:
    return {name: getattr(config, name) for name in options(Config) if name not in DIFFERENT}


def facts_of_model(model: Module) -> dict[str, str]:
    count = sum(parameter.size for parameter in model.parameters())
    return {"model": f"{type(model).__name__} of {count:,} parameters",
            "layout of parameters": model.flatten().layout_hash[:12]}  # fmt: skip


def facts_of_data(data: Dataset) -> dict[str, str]:
    """Return what all ranks must have in common about a data set: the shapes and types, and a checksum of the values.

    The checksum is that of all labels, and of SAMPLE images at equal distances: all images of CIFAR-10 would take half
    a second. So it notices another file, another order or another split, but not a change of a few images.
    """
    found = {}
    for name, array in (("x_train", data.x_train), ("y_train", data.y_train)):
        values = array if name == "y_train" else array[:: max(1, -(-len(array) // SAMPLE))]
        found[name] = f"{array.dtype} {array.shape} with the {checksum(values)}"
    return found


def checksum(array: np.ndarray) -> str:
    return f"checksum {zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data):08x}"


def _difference(call: str, first: tuple[int, dict[str, str]], other: tuple[int, dict[str, str]]) -> str:
    (rank, one), (odd, two) = first, other
    if one["version"] != two["version"]:
        return f"rank {odd} has minidl {two['version']}, rank {rank} has minidl {one['version']}: install one version"
    if one["call"] != two["call"]:
        return f"rank {odd} calls {two['call']}, rank {rank} calls {one['call']}: all ranks must make the same calls"
    name = next(name for name in one if one[name] != two[name])
    return f"{call}: {name} is {two[name]} on rank {odd}, and {one[name]} on rank {rank}: give all ranks the same"


def _short(text: str) -> str:
    """Shorten a long text, such as a path. A checksum stands for the rest."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... (checksum {zlib.crc32(text.encode()):08x})"
