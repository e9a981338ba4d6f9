"""A scenario for mpi.py: a rank is frozen. The others go on without it, until it wakes or they end."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from replicas.deaths import PIECES, claimed, communicate, work

from minidl.comm.fabric.base import BufferSpec, Column, Fabric, Freeze, State


def freezes(fabric: Fabric, word: str, wakes: str) -> dict[str, Any]:
    """The rank `word` stops itself while it holds a piece of work. wakes: "yes" or "no".

    Returns the pieces that this rank has settled, and how many pieces of all were begun in vain.
    """
    victim = int(word)
    fabric.join(BufferSpec(nbytes=4000, mail=2, publish=True), "layout")
    fabric.handle_freezes(Freeze.LEAVE_OUT)
    fabric.set_status(Column.STEP, 1)
    fabric.set_status(Column.STATE, State.TRAINING)
    settled = work(fabric, 3)
    communicate(fabric, 1)
    others = [rank for rank in range(fabric.size) if rank != victim]
    fabric.set_status(Column.ACCURACY, 1)
    if fabric.rank == victim:
        fabric.claims.begin(claimed(fabric))
        ready = lambda: bool((fabric.status[:, Column.ACCURACY] == 1).all()) or None  # noqa: E731
        fabric.wait(ready, (), "the others to receive its messages")
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        fabric.wait(lambda: victim not in fabric.look().members or None, (), "the suspicion")
        settled += work(fabric, 5)
        fabric.group(others).allreduce(fabric.status[:, Column.STEP].copy())
        if wakes == "no":
            return end_without(fabric, victim, settled + work(fabric, PIECES))
        if fabric.rank == others[0]:
            os.kill(int(fabric.status[victim, Column.PID]), signal.SIGCONT)
        fabric.wait(lambda: victim in fabric.look().members or None, (), "the one that wakes")
    communicate(fabric, 2)
    settled += work(fabric, PIECES)
    communicate(fabric, 3)
    return {"settled": settled, "repeated": fabric.claims.repeated, "alive": fabric.survivors()}


def end_without(fabric: Fabric, victim: int, settled: list[int]) -> dict[str, Any]:
    """End the job, and with it the frozen rank."""
    fabric.set_status(Column.STATE, State.PAUSED)
    fabric.wait(lambda: not fabric.alive(victim) or None, (), "the end of the frozen rank")
    result = {"settled": settled, "repeated": fabric.claims.repeated, "alive": fabric.survivors()}
    (Path(os.environ["RESULTS"]) / str(fabric.rank)).write_text(json.dumps(result))
    fabric.group(fabric.survivors()).allreduce(fabric.status[:, Column.STEP].copy())  # all have written their results
    return result
