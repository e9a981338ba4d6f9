"""Run a rank of `python -m minidl.train OPTIONS`: killed.py VICTIMS MODULE:FUNCTION OPTIONS...

VICTIMS: ranks, separated by commas. Each of them kills itself with SIGKILL when it calls FUNCTION of minidl.MODULE.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import Any

from minidl.train import main

victims, where, *options = sys.argv[1:]
if os.environ["MINIDL_RANK"].split()[0] in victims.split(","):
    module, _, attribute = where.partition(":")
    *path, name = attribute.split(".")
    owner: Any = import_module(f"minidl.{module}")
    for word in path:
        owner = getattr(owner, word)
    setattr(owner, name, lambda *arguments, **named: os.kill(os.getpid(), signal.SIGKILL))
sys.exit(main(options))
