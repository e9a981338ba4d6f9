"""The deaths of ranks, as Open MPI reports them to a job that survives them.

    mpiexec --with-ft ulfm        a rank that is killed is dead, and the others go on
    mpiexec                       a rank that is killed ends the job; so it does with other MPI libraries

ULFM is the extension of MPI with which ranks can go on (Bland, Bouteiller, Herault, Bosilca, Dongarra 2013). MPI knows
which ranks have died (`Get_failed`). It also reports a death as an error of an operation, but not of each one: a send
to a dead rank may succeed. A receive from any rank fails until the death is acknowledged (`Ack_failed`). Then messages
between live ranks go on over the same communicator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI


class Failures:
    """The deaths among the ranks of a communicator. mpi: the module mpi4py.MPI. Only one thread may use the object."""

    def __init__(self, mpi: Any, world: MPI.Intracomm) -> None:
        self._world, self._group = world, world.Get_group()
        self._classes = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING)
        self._known = 0

    def new(self) -> list[int]:
        """Acknowledge the deaths that MPI has noticed since the last call; return these ranks."""
        failed = self._world.Get_failed()
        count, known = failed.Get_size(), self._known
        ranks = failed.Translate_ranks(range(known, count), self._group) if count > known else ()
        failed.Free()
        if count > known:
            self._world.Ack_failed(count)
            self._known = count
        return list(ranks)

    def reports(self, error: MPI.Exception) -> bool:
        """Return whether an error of an operation reports a death."""
        return error.Get_error_class() in self._classes
