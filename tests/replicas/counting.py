"""A replica of `python -m minidl.train` that writes each piece of work that it settles into a file.

Arguments: the file; RANK:STEPS:SIGNAL, a replica that sends itself a signal in this step, or ""; the command line.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from minidl.run.progress import Progress
from minidl.train import main
from minidl.training.trainer import Trainer
from minidl.training.work import Claimed

log, victim, *arguments = sys.argv[1:]
file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
rank, steps, signum = map(int, victim.split(":")) if victim else (-1, 0, 0)
settle, step = Claimed.settle, Trainer.step


def counted(work: Claimed, at: Progress, *counts: Any) -> bool:
    done = settle(work, at, *counts)
    if done:
        os.write(file, f"{work.piece}\n".encode())
    return done


def interrupted(trainer: Trainer, x: Any, y: Any) -> tuple[float, int]:
    result = step(trainer, x, y)
    if (trainer.fabric.rank, trainer.replica.steps) == (rank, steps):
        os.kill(os.getpid(), signum)
    return result


Claimed.settle, Trainer.step = counted, interrupted  # type: ignore[method-assign]
sys.exit(main(arguments))
