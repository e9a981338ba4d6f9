"""The job of which this process is a rank, if any: a job of the launcher on this machine, or an MPI job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from minidl.comm import memory
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
    """This process as one of the `size` ranks of a job.

    launched: True if comm/launch/local.py started it, False if MPI did.
    """

    def __init__(self, rank: int, launched: bool, size: int = 0) -> None:
        self.rank, self.launched, self.size = rank, launched, size
        self.fabric: Fabric | None = None

    def join(self, config: Config) -> Fabric:
        """Create this rank's fabric and return it."""
        from minidl.comm.fabric.base import Fabric
        from minidl.comm.stats import Stats

        stats, stall = Stats(self.rank, trace=config.trace), config.stall
        if self.launched:
            from minidl.comm.transport.shm import ShmTransport

            self.fabric = Fabric(ShmTransport.from_environment(stats, stall))
        else:
            from minidl.comm.transport.mpi import MpiTransport

            self.fabric = Fabric(MpiTransport.from_environment(stats, stall, config.reduce == "fast"))
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

    def fail(self, words: str, everywhere: bool = False, secondary: bool = False) -> int:
        """Report an error, once per job, and make the other ranks exit. Returns the exit code.

        everywhere: whether all ranks certainly have this error; in this case, only the leader reports it.
        secondary: whether the error follows from one of another rank, which probably reports that one.
        """
        if self.outside:  # the job goes on
            return report(f"replica {self.rank}, which was about to join: {words}")
        if everywhere and not self.leads:
            return 2
        if self.reports(secondary):
            name = f"replica {self.rank}: " if self.rank else ""
            report(name + words)
        if self.fabric:
            self.fabric.fail()
        return 2

    def crash(self, show: Callable[[], None]) -> int:
        """Report an uncaught exception of a user's script, once per job. Returns the exit code.

        show: prints the traceback.
        """
        if self.reports():
            show()
            report(f"replica {self.rank} raised this exception, which ends the script on all ranks")
        if self.fabric and not self.launched:  # the launcher ends the other ranks when this one exits
            self.fabric.fail(1)
        return 1

    def reports(self, secondary: bool = False) -> bool:
        """Return whether this rank must report its error: no other rank has reported one.

        A rank that does not lead waits first: if the leader has the same error, it reports it and aborts the job. Under
        MPI, a rank does not see that another one has reported: each waits a little longer than the one before. With a
        secondary error, every rank waits longer than any rank with another error.
        """
        longer = 0.0 if self.launched else 0.4
        patience = 0 if self.leads else PATIENCE + longer * min(self.rank - 1, 10)
        if secondary:
            patience += 2 * PATIENCE + longer * min(self.size, 10)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and not self.aborted():
            time.sleep(0.01)
        return not self.aborted()

    def aborted(self) -> bool:
        """Return whether another rank has failed."""
        return self.fabric.aborted() if self.fabric else bool(self.launched and self._word(memory.ABORT))

    @property
    def outside(self) -> bool:
        """Whether this rank is a newcomer, and is no member of the job yet."""
        place = local.place() if self.launched else None
        return place is not None and place.incarnation > 0 and (self.fabric is None or self.fabric.newcomer)

    @property
    def stop(self) -> int:
        """The signal by which the launcher was asked to stop the job, or 0."""
        return self._word(memory.STOP) if self.launched else 0

    def _word(self, index: int) -> int:
        """Return a word of the memory that the launcher shares with all ranks."""
        place = local.place()
        if place is None:
            return 0
        control = memory.Segment(place.fd).map(memory.control_size(place.ranks))
        return int.from_bytes(control[memory.WORD * index : memory.WORD * (index + 1)], "little")


def find_job() -> Job | None:
    """Return the job that the environment variables describe, or None. Raises ConfigError if they are not valid."""
    if place := local.place():
        return Job(place.rank, launched=True, size=place.ranks)
    found = mpi_job.recognise()
    return Job(found.rank, launched=False, size=found.size) if found else None
