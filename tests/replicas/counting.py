"""A replica of `python -m minidl.train` that writes each piece of work that it settles into a file.

Arguments: the file; RANK:STEPS:SIGNAL, a replica that sends itself a signal in this step; the command line. There may
be several RANK:STEPS:SIGNAL, separated by commas, or none. A replica with signal 0 waits until the file FILE.go exists.
A server counts its updates as steps. Replicas that claim their batches wait in step STEPS until one sends itself a
signal: otherwise they could claim all batches before.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from minidl.comm.fabric.base import Message
from minidl.comm.methods.elastic import Served
from minidl.comm.methods.ps import ParameterServer
from minidl.run.progress import Progress
from minidl.train import main
from minidl.training.trainer import Trainer
from minidl.training.work import Claimed

log, victim, *arguments = sys.argv[1:]
file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
victims = {(int(rank), int(steps)): int(signum) for rank, steps, signum in
           (word.split(":") for word in victim.split(",") if word)}  # fmt: skip
settle, step, answer, visited = Claimed.settle, Trainer.step, ParameterServer.answer, Served.answer


def counted(work: Claimed, at: Progress, *counts: Any) -> bool:
    done = settle(work, at, *counts)
    if done:
        os.write(file, f"{work.piece}\n".encode())
    return done


def interrupted(trainer: Trainer, x: Any, y: Any) -> tuple[float, int]:
    result = step(trainer, x, y)
    rank, steps, servers = trainer.fabric.rank, trainer.replica.steps, trainer.fabric.servers
    if signal_in(rank, steps) == 0:
        wait_for(trainer, ".go")
    reached = any(steps >= step and signum and other not in servers for (other, step), signum in victims.items())
    if reached and isinstance(trainer.work, Claimed):
        wait_for(trainer, ".sent")
    return result


def wait_for(trainer: Trainer, file: str) -> None:
    while not Path(log + file).exists():
        trainer.check()
        time.sleep(0.01)


def served(method: ParameterServer, message: Message) -> Any:
    reply = answer(method, message)
    signal_in(method.fabric.rank, method.replica.optimizer_steps)
    return reply


def center_visited(method: Served, visit: Message) -> Any:
    reply = visited(method, visit)
    if method.fabric.rank in method.fabric.servers:
        signal_in(method.fabric.rank, method.version)
    return reply


def signal_in(rank: int, steps: int) -> int | None:
    """Return the signal of this step, if there is any. The process sends it to itself."""
    signum = victims.get((rank, steps))
    if signum:
        Path(log + ".sent").touch()
        os.kill(os.getpid(), signum)
    return signum


Claimed.settle, Trainer.step, ParameterServer.answer = counted, interrupted, served  # type: ignore[assignment,method-assign]
Served.answer = center_visited  # type: ignore[method-assign]
sys.exit(main(arguments))
