"""Which job this process is a rank of: one that the launcher started here, or an MPI job; mostly of none."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minidl.comm.fabric import job as mpi_job
from minidl.errors import report

if TYPE_CHECKING:
    from minidl.comm.fabric.base import Fabric

PATIENCE = 1.0  # seconds that another rank is given to say first what is wrong with all


class Job:
    """launched: by comm/launch.py, not by an mpiexec."""

    def __init__(self, rank: int, launched: bool) -> None:
        self.rank, self.launched = rank, launched
        self.fabric: Fabric | None = None

    def join(self, given: Mapping[str, Any]) -> Fabric:
        """This rank's fabric."""
        from minidl.comm.meter import Meter

        meter, stall = Meter(self.rank, trace=bool(given.get("trace"))), float(given.get("stall", 30.0))
        if self.launched:
            from minidl.comm.fabric.shm import ShmFabric

            self.fabric = ShmFabric.from_environment(meter, stall)
        else:
            from minidl.comm.fabric.mpi import MpiFabric

            self.fabric = MpiFabric.from_environment(meter, stall, given.get("reduce") == "fast")
        return self.fabric

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for all."""
        return self.rank == (self.fabric.leader if self.fabric else 0)

    def fail(self, words: str) -> int:
        """Say what is wrong, once; the other ranks end, too. Returns the exit code."""
        fabric = self.fabric
        if not self.leads:  # what is wrong with all, the first says
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
    """The job that the environment speaks of."""
    if place := os.environ.get("MINIDL_RANK"):
        return Job(int(place.split()[0]), launched=True)
    found = mpi_job.recognise()
    return Job(found.rank, launched=False) if found else None
