"""`python -m minidl.train`, whose replicas write down what they train: noted.py FOLDER OPTIONS... (for faults.py)

    FOLDER/notes    a line for each event: seconds, rank, and one of
                      settles PIECE, settled PIECE     before and after a claimed piece is settled in the ledger
                      trained EPOCH IMAGES             a step on divided work
    FOLDER/go       while this file does not exist, a replica sleeps for $MINIDL_NAP seconds after every few ms of CPU
                    time. So a run takes long and little of the machine, and a fault may still hit any line of the code

SIGUSR2 prints the stack of each thread of a replica.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from minidl.comm.launch import local
from minidl.train import main

CPU = 0.004  # seconds of CPU time between two naps
NAP = "MINIDL_NAP"


def write_down(folder: Path, rank: int) -> None:
    """Change the classes of a replica such that it writes down what it trains, and naps."""
    from minidl.run.progress import Progress
    from minidl.training.trainer import Trainer
    from minidl.training.work import Claimed, Divided

    notes = os.open(folder / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    settle, train, run = Claimed.settle, Divided.settle, Trainer.run
    seconds = float(os.environ.get(NAP, 0))

    def note(*words: object) -> None:
        os.write(notes, f"{time.monotonic():.3f} {rank} {' '.join(map(str, words))}\n".encode())

    def settled(work: Claimed, at: Progress, *counts: Any) -> bool:
        note("settles", work.piece)
        done = settle(work, at, *counts)
        if done:
            note("settled", work.piece)
        return done

    def trained(work: Divided, at: Progress, images: int, *counts: Any) -> bool:
        done = train(work, at, images, *counts)
        note("trained", at.epoch, images)
        return done

    def running(trainer: Trainer) -> Any:
        if seconds:
            signal.setitimer(signal.ITIMER_PROF, CPU, CPU)
        return run(trainer)

    def nap(signum: int, frame: object) -> None:
        if (folder / "go").exists():
            signal.setitimer(signal.ITIMER_PROF, 0)
        else:
            time.sleep(seconds)

    signal.signal(signal.SIGPROF, nap)
    atexit.register(signal.setitimer, signal.ITIMER_PROF, 0)  # Python removes the handler when it ends
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    Claimed.settle, Divided.settle, Trainer.run = settled, trained, running  # type: ignore[method-assign]


if __name__ == "__main__":
    at = local.place()
    if at is None:
        local.run = partial(local.run, program=sys.argv[:2])
    else:
        write_down(Path(sys.argv[1]), at.rank)
    sys.exit(main(sys.argv[2:]))
