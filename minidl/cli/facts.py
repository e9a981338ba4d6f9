"""Facts about this machine and its software, for `python -m minidl.info`.

A section is a list of functions. Each returns {name: value}, in which every value can be written as JSON. A function
may fail, because the command must also work on a machine where something is missing: `collect` notes the reason and
goes on. Names that end with `_bytes` are numbers of bytes.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from textwrap import wrap
from typing import Any

from minidl import resources
from minidl.comm.launch import job as mpi_job
from minidl.engine.environment import isa, number
from minidl.errors import MinidlError
from minidl.run.config import DOWNLOADED, resolve

Facts = dict[str, Any]
PACKAGE = Path(resources.__file__).parent
SECONDS = 20  # that a command may take
FEATURES = {  # of a CPU, as LLVM calls them, which the compiler of the kernels may use
    "sse4.2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512bf16", "avx512vnni",
    "neon", "sve",
}  # fmt: skip
READ = ("MINIDL_", "NUMBA_", "OMP_", "GOMP_", "XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES")  # environment variables
LAUNCHERS = ("mpiexec", "mpirun", "srun")
WIDTH, INDENT = 110, 24  # columns of the text
LIBRARY = "from mpi4py import MPI; print(MPI.Get_library_version())"


def collect() -> dict[str, Facts]:
    """Return {section: {name: value}}. A function that fails leaves {its name: "not known: the reason"}."""
    return {section: _together(functions) for section, functions in SECTIONS.items()}


def _together(functions: tuple[Callable[[], Facts], ...]) -> Facts:
    found: Facts = {}
    for function in functions:
        try:
            found |= function()
        except Exception as error:  # any: what is broken here is what the user wants to know
            found[function.__name__] = f"not known: {type(error).__name__}: {' '.join(str(error).split())}"
    return found


def output(*command: str, without: tuple[str, ...] = ()) -> str:
    """Return what a command prints, or "" if it is missing, fails or takes too long.

    without: beginnings of environment variables that the command does not see.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(without or "\0")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment,
                              stdin=subprocess.DEVNULL, check=True)  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


# -- software ---------------------------------------------------------------------------------------------------------


def versions() -> Facts:
    place = str(PACKAGE)
    commit = output("git", "-C", place, "rev-parse", "--short", "HEAD") if (PACKAGE.parent / ".git").exists() else ""
    return {"minidl": f"{sys.modules['minidl'].__version__} in {place}" + (f", commit {commit}" if commit else ""),
            "python": f"{platform.python_version()}, {sys.executable}"}  # fmt: skip


def packages() -> Facts:
    """Return the versions of the packages that minidl needs, and those of its extras."""
    needed: Facts = {}
    optional: dict[str, str | None] = {}
    for line in metadata.requires("minidl") or ():
        name, extra = re.split(r"[^\w-]", line)[0], re.search(r"extra == ['\"]([\w-]+)", line)
        version = _version(name)
        if not extra:
            needed[name] = version or f"missing: pip install '{line.partition(';')[0].strip()}'"
        elif name not in needed and (version or name not in optional):
            optional[name] = version
    missing = sorted(name for name, version in optional.items() if not version)
    present = [f"{name} {version}" for name, version in optional.items() if version]
    return needed | {"of_the_extras": present, "not_installed": missing}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def variables() -> Facts:
    """Return the environment variables that minidl or its libraries read."""
    return {"environment": [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(READ)]}


# -- machine ----------------------------------------------------------------------------------------------------------


def system() -> Facts:
    return {"system": f"{platform.system()} {platform.release()}, {platform.machine()}"}


def cpu() -> Facts:
    fields = resources.processor()
    model = f", family {fields['cpu family']} model {fields['model']}" if "cpu family" in fields else ""
    return {"cpu": fields.get("model name", platform.machine()) + model}


def caches() -> Facts:
    return {"caches": [f"L{level} {size >> 10}K" for level, size in resources.caches().items()]}


def cores() -> Facts:
    """Return the cores: of the machine, those this process may run on, and those within the limits of its cgroups."""
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    return {"cores_of_the_machine": os.cpu_count(), "cores_allowed": len(os.sched_getaffinity(0)),
            "cores_used": resources.cores(), "numa_nodes": max(1, nodes)}  # fmt: skip


def memory() -> Facts:
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    return {"memory_bytes": total, "memory_free_bytes": resources.available()}


def shared_memory() -> Facts:
    """Return the size of /dev/shm, which other programs need. minidl's replicas share memory without it."""
    place = os.statvfs("/dev/shm")
    return {"dev_shm_bytes": place.f_blocks * place.f_frsize, "dev_shm_free_bytes": place.f_bavail * place.f_frsize}


def gpus() -> Facts:
    """Return NVIDIA's GPUs and their driver."""
    query = output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    driver = Path("/proc/driver/nvidia/version")
    return {"gpus": query.splitlines(),
            "gpu_driver": driver.read_text().splitlines()[0] if driver.exists() else None}  # fmt: skip


# -- kernels ----------------------------------------------------------------------------------------------------------


def features() -> Facts:
    from llvmlite import binding

    from minidl.engine.jit import HAS_AMX, HAS_FMA, REGISTERS, VECTOR_BYTES

    limit = f" (MINIDL_ISA={isa()})" if isa() else ""
    fused = "multiply-add is one instruction" if HAS_FMA else "no multiply-add instruction"
    amx = "; AMX for large products" if HAS_AMX else ""
    return {"cpu_features": sorted(name for name, has in binding.get_host_cpu_features().items()
                                   if has and name in FEATURES),
            "vectors": f"{REGISTERS} of {8 * VECTOR_BYTES} bits; {fused}{amx}{limit}"}  # fmt: skip


def threading_layer() -> Facts:
    """Load Numba's threading layer and return its name and the number of its threads."""
    import numba
    from numba.np.ufunc import parallel

    import minidl.engine.jit  # noqa: F401 (sets the number of threads)

    parallel._launch_threads()
    return {"threading_layer": numba.threading_layer(), "threads": numba.get_num_threads()}


def kernel_cache() -> Facts:
    from minidl.engine import jit

    files = [file for file in jit._folder.glob("*") if file.is_file()] if jit._folder else []
    return {"kernel_cache": str(jit._folder) if jit._folder else "none: kernels are compiled in every process",
            "files_in_the_cache": len(files), "size_of_the_cache_bytes": sum(file.stat().st_size for file in files),
            "folders_refused": jit._refused}  # fmt: skip


# -- MPI --------------------------------------------------------------------------------------------------------------


def library() -> Facts:
    """Return the MPI library that mpi4py loads. A separate process loads it: this one may be no rank of a job."""
    import mpi4py  # noqa: F401 (loads no library; raises the reason if mpi4py is missing)

    text = output(sys.executable, "-c", LIBRARY, without=("OMPI_", "PMI", "PMIX_", "SLURM_"))
    return {"library": _first_line(text) or "none that mpi4py can load: pip install 'minidl[mpich]'"}


def launchers() -> Facts:
    """Return the programs that start MPI jobs: those in $PATH, else those in the folder of this Python."""
    found: Facts = {}
    for name in LAUNCHERS:
        path = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
        found[name] = f"{path}, {_version_of(output(path, '--version'))}" if path else None
    return found


def _version_of(text: str) -> str:
    """Return the version that a launcher prints. MPICH's launcher is called Hydra."""
    found = re.search(r"^\s*Version:\s*(\S+)", text, re.MULTILINE) if text.startswith("HYDRA") else None
    return f"MPICH {found[1]}" if found else _first_line(text) or "does not run"


def _first_line(text: str) -> str:
    return " ".join(text.partition("\n")[0].split())


# -- data, and the default run ----------------------------------------------------------------------------------------


def data_folders() -> Facts:
    from minidl.data import cifar, files, mnist

    groups = {**mnist.GROUPS, "cifar10": cifar.GROUPS}
    folder = files.cache_folder()
    to = f"{folder}{'' if _writable(folder) else ', not writable'}"
    found: Facts = {"digits": "comes with minidl"}
    for name in DOWNLOADED:
        try:
            paths = files.search(name, groups[name], None)
        except MinidlError as error:
            found[name] = str(error)
            continue
        where = str(next(iter(paths.values())).parent) if paths else ""
        found[name] = where or f"not here; --data {name} downloads it to {to}"
    return found


def _writable(folder: Path) -> bool:
    """Return whether this process may write into a folder, or create it."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def default_run() -> Facts:
    """Return what `python -m minidl.train` does here without options, with the reasons."""
    config = resolve({})
    given, cores = number("MINIDL_WORKERS"), resources.cores()
    job = mpi_job.recognise()
    workers = job.size if job else given or min(2, cores)
    why = (f"the ranks of {job.launcher}" if job else "MINIDL_WORKERS" if given else
           f"two, since there are {cores} cores" if workers > 1 else "one, since there is one core")  # fmt: skip
    threads = number("MINIDL_THREADS") if job else 0
    each = threads or max(1, cores // (mpi_job.local_ranks() if job else workers))
    return {"data": f"{config.data}: comes with minidl", "model": f"{config.model}: the default",
            "workers": f"{workers}: {why}", "threads": f"{each} per replica: {cores} cores divided by the replicas",
            "method": f"{config.method}: the default of --method" if workers > 1 else "none: one replica",
            "length": f"{config.epochs} epochs, batches of {config.batch_size}"}  # fmt: skip


SECTIONS: Mapping[str, tuple[Callable[[], Facts], ...]] = {
    "software": (versions, packages, variables),
    "machine": (system, cpu, caches, cores, memory, shared_memory, gpus),
    "kernels": (features, threading_layer, kernel_cache),
    "mpi": (library, launchers),
    "data": (data_folders,),
    "default run": (default_run,),
}


def lines(sections: Mapping[str, Facts]) -> Iterator[str]:
    """Yield the facts as lines of text: a title for each section, and a line for each fact."""
    for section, facts in sections.items():
        yield from ("", section)
        for name, value in facts.items():
            text = resources.size(value) if name.endswith("_bytes") else _text(value)
            label = "  " + name.removesuffix("_bytes").replace("_", " ")
            yield from wrap(text, WIDTH, initial_indent=label.ljust(INDENT), subsequent_indent=" " * INDENT,
                            break_on_hyphens=False, break_long_words=False)  # fmt: skip


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return "none" if value is None else str(value)
