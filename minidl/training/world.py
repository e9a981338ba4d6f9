"""This process among the ranks of a script: its fabric, and what all ranks must have in common.

`python -m minidl.launch --workers 4 script.py` and `mpiexec -n 4 python script.py` start a script several times. The
functions that such a script calls (fit, join, allreduce ...) share one `World`, which the first of them creates:

    world()  ->  agree        all ranks have made the same call, with the same options, model and data
                 enter        the model becomes a replica: the weights of rank 0, memory for the method's messages
                 leave        it is no replica any more
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import sys
import time
import traceback
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType

import numpy as np

from minidl.comm.fabric.base import CHUNK, BufferSpec, Channel, Column, Fabric, Header, PeerLost, State
from minidl.comm.methods.base import Method
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.comm.transport.mailbox_transport import MailboxTransport
from minidl.comm.transport.mpi import MpiTransport
from minidl.data import Dataset
from minidl.errors import AbortedError, ConfigError, MinidlError
from minidl.nn import Module
from minidl.run.config import Config
from minidl.run.options import options
from minidl.training.job import find_job
from minidl.training.session import chosen

LEAVING = 2.0  # seconds that a rank which ends waits until others have received its last messages
DIFFERENT = ("model", "data", "threads", "data_dir", "stall")  # options that are compared in another way, or not at all
FRAME = 1 << 14  # bytes: more than the longest description of a call
LONGEST = 100  # characters of a value in this description


class World:
    """The ranks that run a script. Without a launcher, or with a single MPI rank, `job` is None and the size is 1."""

    def __init__(self) -> None:
        self.job = find_job()
        if self.job is None or (self.job.size == 1 and not self.job.launched):
            self.job = None
            self.fabric: Fabric = LoopbackTransport()
            return
        self.fabric = self.job.join(Config())
        if not self.job.launched:  # the launcher's ranks handle errors in minidl/launch.py
            self._previous_hook, sys.excepthook = sys.excepthook, self._uncaught
            atexit.register(self._end)
        self.fabric.join(BufferSpec(), "script")

    @property
    def rank(self) -> int:
        return self.fabric.rank

    @property
    def size(self) -> int:
        return self.fabric.size

    # -- agreement ---------------------------------------------------------------------------------------

    def agree(self, call: str, facts: Mapping[str, object]) -> None:
        """Raise ConfigError, on all ranks, if a rank makes another call or has other facts. All live ranks call this.

        call: the name of the function, for the message. facts: {what: value}, in the order in which they are compared.
        """
        if self.size == 1:
            return
        fabric = self.fabric
        fabric.replicas = members = tuple(rank for rank in range(self.size) if fabric.alive(rank))
        own = {"call": call, "version": sys.modules["minidl"].__version__}
        own |= {name: _short(str(value)) for name, value in facts.items()}
        text = json.dumps(own).encode()
        hashes = np.zeros(self.size)  # the other ranks add theirs
        hashes[self.rank] = int.from_bytes(hashlib.sha256(text).digest()[:6], "little")
        fabric.allreduce(hashes)
        odd = next((rank for rank in members if hashes[rank] != hashes[members[0]]), None)
        if odd is None:
            return
        frames = [np.frombuffer(text.ljust(FRAME), np.float64).copy() for _ in range(2)]
        for root, frame in zip((members[0], odd), frames, strict=True):
            spread(fabric, frame, root, members)
        first, other = (json.loads(frame.tobytes()) for frame in frames)
        raise ConfigError(_difference(call, (members[0], first), (odd, other)))

    # -- a replica ---------------------------------------------------------------------------------------

    def enter(self, call: str, model: Module, config: Config, facts: Mapping[str, object]) -> type[Method]:
        """Make the model a replica, with the weights of rank 0; return its method. All ranks call this.

        Raises ConfigError if the ranks differ in version, model, facts or options, or if memory is short.
        """
        fabric = self.fabric
        kind, replicas = chosen(config, self.size)
        arena = model.flatten()
        count = f"{type(model).__name__} of {sum(parameter.size for parameter in model.parameters()):,} parameters"
        given = {name: getattr(config, name) for name in options(Config)}
        alike = {name: value for name, value in given.items() if name not in DIFFERENT}
        self.agree(call, {"model": count, **facts, **alike, "layout of parameters": arena.layout_hash[:12]})
        if len(fabric.replicas) < self.size:
            dead = next(rank for rank in range(self.size) if not fabric.alive(rank))
            raise PeerLost(dead, "the beginning of another training")
        vectors = [arena.theta] if model.statistics is None else [arena.theta, model.statistics.theta]
        for vector in vectors:
            spread(fabric, vector, 0, fabric.replicas)
        arena.touch()
        if model.statistics is not None:
            model.statistics.touch()
        for column in (Column.STEP, Column.STOP, Column.SPEED, Column.ACCURACY, Column.LOSS, Column.STATE):
            fabric.set_status(column, 0)
        fabric.replicas = replicas
        fabric.stall, fabric.step, fabric.led_by = config.stall, 0, None
        if isinstance(fabric, MpiTransport):
            fabric.fast = config.reduce == "fast"
        fabric.join(kind.buffers(arena.size, config), arena.layout_hash)
        fabric.fail_fast = kind.synchronous and self.size > 1
        return kind

    def leave(self) -> None:
        """Make this process a rank without a replica, when all have the result. All live ranks call this."""
        fabric, leader = self.fabric, self.fabric.leader
        fabric.fail_fast = False
        if self.rank == leader:  # the others must receive the result before this rank may end
            others = [rank for rank in range(self.size) if rank != leader]
            received = lambda: all(fabric.state(rank) >= State.FINISHED for rank in others) or None  # noqa: E731
            fabric.wait(received, (), "the others to receive the result")
        fabric.set_status(Column.STATE, State.FINISHED)
        fabric.replicas = tuple(range(self.size))

    # -- the end of an MPI rank --------------------------------------------------------------------------

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """End the job after an uncaught exception, because other ranks would wait for this one forever."""
        assert self.job
        if isinstance(error, KeyboardInterrupt):
            os._exit(130)
        if isinstance(error, AbortedError):
            self.fabric.fail()
        elif isinstance(error, MinidlError):
            self.job.fail(place_of(trace) + str(error))
        elif self.job.reports():
            self._previous_hook(kind, error, trace)  # prints the traceback, and ends the job

    def _end(self) -> None:
        """Leave the job at the end of the script. Ranks that still wait for this one get an error."""
        fabric = self.fabric
        deadline = time.monotonic() + LEAVING
        while isinstance(fabric, MailboxTransport) and not fabric.delivered() and time.monotonic() < deadline:
            time.sleep(0.001)
        fabric.set_status(Column.STATE, State.DEAD)
        fabric.close()


@cache
def world() -> World:
    """Return the world of this process. The first call starts the communication, which all ranks must do."""
    return World()


# -- vectors between the ranks, over the fabric's messages -----------------------------------------------


def spread(
    fabric: Fabric, vector: np.ndarray, root: int, members: Sequence[int], channel: Channel = Channel.TREE
) -> None:
    """vector = the root's vector, on all members, along a binary tree. vector: float32 or float64 (n,), contiguous."""
    order = [root, *(rank for rank in members if rank != root)]
    at = order.index(fabric.rank)
    children = [order[child] for child in (2 * at + 1, 2 * at + 2) if child < len(order)]
    for part in chunks(vector):
        if at:
            receive(fabric, order[(at - 1) // 2], part, channel)
        send(fabric, children, part, channel)


def hand_out(fabric: Fabric, vector: np.ndarray, leader: int) -> None:
    """vector = the leader's vector, on all live ranks. The death of another rank than the leader changes nothing."""
    others = [rank for rank in range(fabric.size) if rank != leader]
    for part in chunks(vector):
        if fabric.rank == leader:
            sent = lambda: fabric.post(Channel.GATHER, [r for r in others if fabric.alive(r)], (part,), Header())  # noqa: B023, E731
            fabric.wait(lambda: sent() or None, (), "the others to receive the result")  # noqa: B023
        else:
            receive(fabric, leader, part, Channel.GATHER)


def hand_out_text(fabric: Fabric, text: str, leader: int) -> str:
    """Return the leader's text, on all live ranks."""
    content = text.encode()
    length = np.array([float(len(content))])
    hand_out(fabric, length, leader)
    size = int(length[0])
    frame = np.zeros(-(-size // 8))
    if fabric.rank == leader:
        frame = np.frombuffer(content.ljust(8 * frame.size), np.float64).copy()
    hand_out(fabric, frame, leader)
    return frame.tobytes()[:size].decode()


def send(fabric: Fabric, peers: Sequence[int], part: np.ndarray, channel: Channel = Channel.TREE) -> None:
    if peers:
        fabric.wait(lambda: fabric.post(channel, peers, (part,), Header()) or None, peers, "a collective operation")


def receive(fabric: Fabric, peer: int, out: np.ndarray, channel: Channel = Channel.TREE) -> None:
    with fabric.wait(lambda: fabric.take(channel, peer), (peer,), "a collective operation") as message:
        out[...] = message.vector


def chunks(vector: np.ndarray) -> list[np.ndarray]:
    step = CHUNK // vector.itemsize
    return [vector[at : at + step] for at in range(0, vector.size, step)]


# -- messages --------------------------------------------------------------------------------------------


def facts_of(data: Dataset) -> dict[str, str]:
    """Return what all ranks must have in common about a data set. A checksum stands for the values."""
    found = {}
    for name in ("x_train", "y_train"):
        array = getattr(data, name)
        checksum = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        found[name] = f"{array.dtype} {array.shape} with the checksum {checksum:08x}"
    return found


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


def place_of(trace: TracebackType | None) -> str:
    """Return "script.py, line 12: " for the line of the script in a traceback, or "" if the script is not in it."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(trace) if frame.filename == script]
    return f"{Path(script).name}, line {lines[-1]}: " if script and lines else ""

