"""Run a rank of `python -m minidl.train OPTIONS`; one rank finds the disk full: full.py RANK OPTIONS..."""

from __future__ import annotations

import errno
import os
import sys

from minidl.train import main

victim, *options = sys.argv[1:]


def fsync(handle: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


if os.environ["MINIDL_RANK"].split()[0] == victim:
    os.fsync = fsync
sys.exit(main(options))
