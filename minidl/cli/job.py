"""The job of which this process is a rank, if any: a job of the launcher on this machine, or an MPI job."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from minidl.comm.launch import job as mpi_job
from minidl.comm.launch import local
from minidl.engine.environment import number
from minidl.errors import report
from minidl.resources import share
from minidl.run.config import Config

if TYPE_CHECKING:
    from minidl.comm.fabric.base import Fabric

PATIENCE = 1.0  # seconds that a rank waits for the leader to report the same error


class Job:
    """This process as a rank of a job. launched: True if comm/launch/local.py started it, False if MPI did."""

    def __init__(self, rank: int, launched: bool) -> None:
        self.rank, self.launched = rank, launched
        self.fabric: Fabric | None = None

    def join(self, config: Config) -> Fabric:
        """Create this rank's fabric and return it."""
        from minidl.comm.stats import Stats

        stats, stall = Stats(self.rank, trace=config.trace), config.stall
        if self.launched:
            from minidl.comm.transport.shm import ShmTransport

            self.fabric = ShmTransport.from_environment(stats, stall)
        else:
            from minidl.comm.transport.mpi import MpiTransport

            self.fabric = MpiTransport.from_environment(stats, stall, config.reduce == "fast")
        return self.fabric

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader, which prints for all."""
        return self.rank == (self.fabric.leader if self.fabric else 0)

    def threads(self) -> int:
        """Return the number of threads for this rank, or 0 to keep the default.

        The launcher sets the threads of its ranks. Under mpiexec, the ranks of a machine divide its cores.
        """
        if self.launched or number("MINIDL_THREADS") or "NUMBA_NUM_THREADS" in os.environ:
            return 0
        return share(mpi_job.local_ranks())

    def fail(self, words: str, everywhere: bool = False) -> int:
        """Report an error, once per job, and make the other ranks exit. Returns the exit code.

        everywhere: whether all ranks certainly have this error; in this case, only the leader reports it.
        """
        fabric = self.fabric
        if everywhere and not self.leads:
            return 2
        if not self.leads:  # wait: if the leader has the same error, it reports it and aborts the job
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline and not (fabric and fabric.aborted()):
                time.sleep(0.01)
        if not (fabric and fabric.aborted()):
            name = f"replica {self.rank}: " if self.rank else ""
            report(name + words)
        if fabric:
            fabric.fail()
        return 2


def find_job() -> Job | None:
    """Return the job that the environment variables describe, or None. Raises ConfigError if they are not valid."""
    if place := local.place():
        return Job(place.rank, launched=True)
    found = mpi_job.recognise()
    return Job(found.rank, launched=False) if found else None
