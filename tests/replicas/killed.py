"""Run a rank of `python -m minidl.train OPTIONS`: killed.py VICTIMS MODULE:FUNCTION OPTIONS...

VICTIMS: ranks, separated by commas. Each of them kills itself with SIGKILL when it calls FUNCTION of minidl.MODULE. In
`training.shutdown:_save`, it first waits until the others have ended training, too: until then, they may need it.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import Any

from minidl.comm.fabric.base import State
from minidl.train import main


def die(*arguments: Any, **named: Any) -> None:
    if where == "training.shutdown:_save":
        fabric = arguments[0].fabric
        others = tuple(rank for rank in fabric.replicas if rank != fabric.rank)
        fabric.wait(lambda: all(fabric.state(rank) >= State.PAUSED for rank in others) or None, others, "the others")
    os.kill(os.getpid(), signal.SIGKILL)


victims, where, *options = sys.argv[1:]
if os.environ["MINIDL_RANK"].split()[0] in victims.split(","):
    module, _, attribute = where.partition(":")
    *path, name = attribute.split(".")
    owner: Any = import_module(f"minidl.{module}")
    for word in path:
        owner = getattr(owner, word)
    setattr(owner, name, die)
sys.exit(main(options))
