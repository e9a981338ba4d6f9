"""A replica joins a running job: how it gets the state of the leader, before it trains with the others.

    launcher     starts the newcomer's process in a free place (comm/launch/local.py)
    newcomer     COMING: loads the data, allocates memory, compiles ── ARRIVED ─┐            ┌─> TRAINING: claims work
                                                                                v            │
    leader       ... a step ── a step ─────────────────────────────────── `admit`: its state ── a step ── ...

The state is a text (the numbers) and vectors (the weights, those of the optimizer and of the method), in messages of at
most CHUNK bytes on the channel TREE, which asynchronous methods use for nothing else while they train.

The leader does not depend on the newcomer: if the newcomer takes no message for PATIENCE seconds, the leader withdraws
its offer (ARRIVED -> COMING) and trains on. When the newcomer wakes, it drops what it has received, and asks again. If
the leader dies, the newcomer asks the next one. Each message contains the number of the attempt. Each change of the
newcomer's state is atomic (`change_state`), so both agree on whether the newcomer is a member.

In a synchronous method, all members pause after the same step, and the leader admits one newcomer (regroup.py). The
newcomer also takes the plan with which all go on. It waits until a member has written into the status table that it
follows this plan. If a member dies meanwhile, the others may go on without the newcomer, which then asks again.

No replica misses a member at the end of the run. Only a leader that trains admits newcomers, and it goes on only when
they are TRAINING. A replica that has finished waits for the leader's last message (`Fabric.drain`), or for the server,
which waits for the leader. Then all newcomers that were ever admitted are in its view.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from minidl.comm.fabric.base import ANY, Channel, Column, Fabric, Header, Message, PeerLost, State
from minidl.comm.fabric.group import chunks
from minidl.comm.transport.messages import CHUNK
from minidl.data.sampler import replica_seed
from minidl.errors import ConfigError, MinidlError
from minidl.nn import set_random_state
from minidl.run.progress import Progress
from minidl.training import regroup
from minidl.training.regroup import Plan
from minidl.training.replica_state import METHOD, ReplicaState, own_state, restore_replica
from minidl.training.trainer import Trainer
from minidl.training.vectors import packed
from minidl.training.work import Claimed

PATIENCE = 0.5  # seconds that the leader waits for the newcomer to take a message
WHAT = "the state of a member"
OTHERS = [channel for channel in Channel if channel is not Channel.TREE]


class Withdrawn(Exception):
    """The leader and the newcomer do not complete the transfer."""


# -- in the leader -----------------------------------------------------------------------------------------------------


def admit(trainer: Trainer, folder: Path, facts: Mapping[str, object]) -> list[int]:
    """Before a step of the leader: make the newcomers that have arrived members. Return their ranks.

    With a synchronous method, when all have paused: admit one of them.
    folder: of the run. facts: what all ranks have in common (agreement.py).
    """
    fabric = trainer.fabric
    arrived = np.flatnonzero(fabric.status[:, Column.STATE] == State.ARRIVED)
    if not arrived.size or fabric.rank != fabric.leader or fabric.state(fabric.rank) is not State.TRAINING:
        return []  # most often
    if fabric.fail_fast and (lost := fabric.lost(())) is not None:
        raise PeerLost(lost, "a newcomer")  # regroup first: the newcomer may be in the place of this member
    admitted: list[int] = []
    for rank in arrived.tolist():
        if _give(trainer, rank, admitted, folder, facts):
            admitted.append(rank)
            if trainer.method.synchronous:
                break
    return admitted


def _give(trainer: Trainer, rank: int, others: Sequence[int], folder: Path, facts: Mapping[str, object]) -> bool:
    """Give the state of this replica to a newcomer. Returns whether it is a member now. others: admitted before it."""
    fabric, offer = trainer.fabric, trainer.method.offer()
    if offer is None:
        return False
    vectors, numbers = offer
    attempt = int(fabric.status[rank, Column.STEP])
    state = own_state(trainer)
    state.vectors |= {METHOD + name: vector for name, vector in vectors.items()}
    text = {
        "facts": {name: str(value) for name, value in facts.items()},
        "folder": str(folder),
        "members": [*fabric.survivors(), *others],
        "work": _work(trainer),
        "plan": regroup.with_newcomer(trainer, rank).described() if trainer.method.synchronous else None,
        "numbers": state.numbers | {"method": numbers, "progress": asdict(trainer.progress)},
    }
    try:
        for vector in (packed(json.dumps(text)), *state.vectors.values()):
            for part in chunks(np.ascontiguousarray(vector).reshape(-1), CHUNK):
                _post(fabric, rank, part, Header(start=attempt, round=vector.size))
        _until(fabric, rank, lambda: fabric.state(rank) is not State.ARRIVED)
    except Withdrawn:
        pass
    except PeerLost:  # a member has died: the others regroup first
        fabric.change_state(rank, State.ARRIVED, State.COMING)
        raise
    if fabric.change_state(rank, State.ARRIVED, State.COMING) or not fabric.alive(rank):
        return False
    trainer.method.accepted(vectors)
    return True


def _post(fabric: Fabric, rank: int, part: np.ndarray, header: Header) -> None:
    def posted() -> bool:
        if fabric.state(rank) is not State.ARRIVED or fabric.status[rank, Column.STEP] != header.start:
            raise Withdrawn
        return fabric.post(Channel.TREE, (rank,), (part,), header)

    _until(fabric, rank, posted)


def _until(fabric: Fabric, rank: int, ready: Callable[[], bool]) -> None:
    """Wait until ready(), but at most PATIENCE seconds: then raise Withdrawn."""
    deadline = fabric.now() + PATIENCE

    def done() -> bool | None:
        if ready():
            return True
        if fabric.now() >= deadline:
            raise Withdrawn
        return None

    fabric.wait(done, (), f"replica {rank}, which joins", until=deadline)


def _work(trainer: Trainer) -> dict[str, Any] | None:
    """Return what is left to claim; None if the work is divided."""
    work = trainer.work
    if not isinstance(work, Claimed):
        return None
    return {"total": work.total, "first": work.first, "left": list(work.left)}


# -- in the newcomer ---------------------------------------------------------------------------------------------------


def become_member(trainer: Trainer, facts: Mapping[str, object]) -> Path:
    """Wait for the state of the leader, and take it. Return the folder of the run. This replica is a member then.

    Raises ConfigError if this process has other options, another model or other data than the job.
    """
    fabric = trainer.fabric
    for attempt in count(1):
        fabric.set_status(Column.STATE, State.COMING)
        fabric.set_status(Column.STEP, attempt)
        fabric.set_status(Column.STATE, State.ARRIVED)
        try:
            sender, text = _receive_text(fabric, facts)
            trainer.method.require([*text["members"], fabric.rank])
            own = own_state(trainer)
            vectors = {name: _receive(fabric, sender, vector) for name, vector in own.vectors.items()}
        except (Withdrawn, PeerLost):
            continue
        plan = text["plan"] and Plan.read(text["plan"])
        fabric.set_status(Column.EPOCH, text["numbers"]["progress"]["epoch"])
        fabric.transport.drop_messages()  # see `_next`
        if not fabric.change_state(fabric.rank, State.ARRIVED, State.TRAINING):
            continue
        fabric.set_status(Column.STEP, 0)
        if plan is None or _is_taken_in(fabric, plan):
            break
    if plan is not None:
        fabric.set_status(Column.JOINED, 1 + plan.step)
        fabric.fail_fast = True
    elif not fabric.alive(sender):  # others may have finished without this replica: see above
        fabric.set_status(Column.STATE, State.COMING)
        raise MinidlError(f"replica {sender} died while it sent its state to this one, which does not join")
    fabric.newcomer = False
    fabric.set_status(Column.STATE, State.TRAINING)  # in addition, this binds the process to its cores
    _take_over(trainer, ReplicaState(fabric.rank, vectors, text["numbers"]), text["work"], plan)
    return Path(text["folder"])


def _is_taken_in(fabric: Fabric, plan: Plan) -> bool:
    """Wait until the members follow the plan, in which this replica is a member, or go on without it."""
    others = [rank for rank in plan.view.members if rank != fabric.rank]

    def decided() -> bool | None:
        live = [rank for rank in others if fabric.alive(rank)]
        views = fabric.status[live, Column.VIEW]
        # A member with an odd number has begun another view. Then no member applies the plan any more.
        over = ((views % 2 == 1) & (views > 2 * plan.view.number + 1)).any()
        ends = not live or any(fabric.state(rank) >= State.PAUSED for rank in live)
        if (fabric.status[others, Column.JOINED] == 1 + plan.step).any():  # look at this after the rest
            return True
        return False if over or ends else None

    return fabric.wait(decided, (), "the others to take it in")


def _receive_text(fabric: Fabric, facts: Mapping[str, object]) -> tuple[int, dict[str, Any]]:
    """Return the rank that sends its state, and its text."""
    with _next(fabric, ANY) as message:
        sender, size = message.sender, message.header.round
        parts = [message.vector.copy()]
    while sum(part.size for part in parts) < size:
        with _next(fabric, sender) as message:
            parts.append(message.vector.copy())
    text = json.loads(np.concatenate(parts).tobytes())
    for name, value in facts.items():
        if str(value) != text["facts"].get(name):
            raise ConfigError(f"{name} is {value}, and {text['facts'].get(name)} in the running job: "
                              "a file has changed since it began")  # fmt: skip
    return sender, text


def _receive(fabric: Fabric, sender: int, like: np.ndarray) -> np.ndarray:
    """Receive a vector of this shape and type."""
    found = np.empty_like(like)
    for part in chunks(found.reshape(-1), CHUNK):
        with _next(fabric, sender) as message:
            part[...] = message.vector
    return found


def _next(fabric: Fabric, peer: int) -> Message:
    """Wait for the next message of the present attempt.

    Drop the others: those of earlier attempts, and those to a dead member whose place this replica has. Members send
    them until they notice the death, and each such message occupies one of the sender's slots.
    """

    def arrived() -> Message | None:
        if fabric.state(fabric.rank) is not State.ARRIVED:
            raise Withdrawn
        fabric.transport.drop_messages(OTHERS)
        while (message := fabric.take(Channel.TREE, peer)) is not None:
            if message.header.start == fabric.status[fabric.rank, Column.STEP]:
                return message
            message.release()
        return None

    return fabric.wait(arrived, () if peer == ANY else (peer,), WHAT)


def _take_over(trainer: Trainer, state: ReplicaState, work: Mapping[str, Any] | None, plan: Plan | None) -> None:
    """Continue with the state of another replica, as a replica that has made no step of the present epoch."""
    fabric, replica = trainer.fabric, trainer.replica
    restore_replica(trainer, state)
    fresh = {"batch": 0, "loss_sum": 0.0, "correct": 0, "images": 0, "timed_images": 0, "timed_seconds": 0.0}
    trainer.progress = Progress(**state.numbers["progress"] | fresh)
    if plan is not None:
        regroup.follow(trainer, plan)
    elif work is not None:
        fabric.look()
        trainer.go_on_with(work["total"], work["first"], work["left"])
    number = fabric.size + int(fabric.status[fabric.rank, Column.INCARNATION])
    replica.random = {"seed": replica_seed(trainer.config.seed, number), "offset": 0}
    set_random_state(replica.random)
