"""The command line `python -m minidl.launch --workers 4 script.py`: run a script as several ranks on this machine.

The launcher (comm/launch/local.py) starts and monitors the ranks. Each rank runs `python -m minidl.launch script.py`,
which executes the script as Python would: as the module `__main__`, with its arguments in `sys.argv` and its folder
first in `sys.path`. In the script, `minidl.fit` and `minidl.join` train one model with a replica in each rank.
"""

from __future__ import annotations

from minidl import start  # before all others: see there

# isort: split
import builtins
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

from minidl.comm.launch import local
from minidl.engine.environment import number, prepare
from minidl.errors import EXPECTED, AbortedError, ConfigError, MinidlError, ReplicaLeftError, explained, report
from minidl.resources import cores
from minidl.run.config import ONE_OR_MORE, THREADS
from minidl.run.help import Command, plain_page
from minidl.run.options import HelpWanted, option, options, parse
from minidl.training.job import Job, find_job

DESCRIPTION = "Run a Python script as several processes, in which minidl.fit and minidl.join train one model together."
EXAMPLES = """
examples:
  python -m minidl.launch --workers 4 my_script.py
  python -m minidl.launch my_script.py --an-option-of-the-script 3
  mpiexec -n 4 python my_script.py       (several machines; without this command)
"""
LONGEST = 10_000_000  # bytes of a script


@dataclass(frozen=True)
class Options:
    workers: int = option(2, "number of processes (default: MINIDL_WORKERS, or two if there are two cores)",
                          group="options", limits=ONE_OR_MORE)
    threads: int = option(0, "threads of each process; 0: a share of the cores", group="options", limits=THREADS)
    quiet: bool = option(False, "print no remarks of the launcher", group="options")


COMMAND = Command("python -m minidl.launch [options] script.py [arguments]", Options, DESCRIPTION, EXAMPLES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code of the script; 2 for an error, 128 + the signal that ended it."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        job = find_job()
        if job and job.launched:
            local.follow()
            prepare()
            start.restore()
            return run_script(job, words)
        own, script = _divided(words)
        given = parse(Options, own)
        if not script:
            raise ConfigError("no script is given; expected python -m minidl.launch [options] script.py [arguments]")
        if job:
            raise ConfigError(f"mpiexec has started {job.size} processes already: run python {script[0]} without "
                              "minidl.launch")  # fmt: skip
        load(script[0])
        workers = given.get("workers") or number("MINIDL_WORKERS") or min(2, cores())
        threads, quiet = given.get("threads", 0), given.get("quiet", False)
        code = local.run(script, workers, threads, quiet, program=("-m", "minidl.launch"))
        start.finish()
        return code
    except HelpWanted:
        print(plain_page(COMMAND))
        return 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except EXPECTED as error:
        return report(explained(error, "use fewer --workers"))


def _divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of this command, and the script with its arguments."""
    takes_value = {"--" + entry.words for entry in options(Options).values() if entry.kind is not bool}
    at = 0
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in takes_value else 1
    return list(words[:at]), list(words[at:])


def load(script: str) -> CodeType:
    """Return the compiled script. Raises ConfigError if it is no Python script."""
    path = Path(script)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is no file" if path.exists() else "does not exist"
        raise ConfigError(f"{script} {what}; expected a Python script")
    if path.stat().st_size > LONGEST:
        raise ConfigError(f"{script} has {path.stat().st_size:,} bytes; expected a Python script")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        except SyntaxError as error:
            line = f", line {error.lineno}" if error.lineno else ""
            raise ConfigError(f"{script}{line}: {error.msg}; expected a Python script") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f"{script} cannot be compiled ({error}); expected a Python script") from None


def run_script(job: Job, words: Sequence[str]) -> int:
    """Execute a script in a rank that the launcher has started. Returns the exit code. SystemExit passes through.

    An error of minidl is reported in one line, and any other exception as Python does, by one rank for all.
    """
    code = load(words[0])
    os.environ.pop("PYTHONSAFEPATH", None)  # the launcher has set it for `-m minidl.launch`
    main_module = ModuleType("__main__")
    vars(main_module).update(__file__=words[0], __builtins__=builtins)
    sys.modules["__main__"] = main_module
    sys.argv[:], sys.path[:0] = words, [str(Path(words[0]).resolve().parent)]
    try:
        exec(code, vars(main_module))  # the user's own script, whose path the user has given
    except KeyboardInterrupt:
        stopped_by = job.stop or signal.SIGINT
        _end()
        return 128 + stopped_by
    except SystemExit as end:
        if end.code in (None, 0):
            _end()
        raise
    except AbortedError:
        return 2
    except MinidlError as error:
        return _failed(job, error)
    except Exception as error:
        trace = error.__traceback__ and error.__traceback__.tb_next  # without this file
        kind, value = type(error), error
        return job.crash(lambda: traceback.print_exception(kind, value, trace))
    _end()
    return 0


def _end() -> None:
    """Leave the job without an error, if the script has used it: ranks that still wait for this one get an error."""
    if "minidl.training.world" in sys.modules:
        from minidl.training.world import begun

        if (here := begun()) and here.job:
            here.end()


def _failed(job: Job, error: MinidlError) -> int:
    from minidl.training.world import place_of  # imports NumPy, like the code that raised the error

    _attach(job)
    secondary = isinstance(error, ReplicaLeftError)
    return job.fail(place_of(error.__traceback__) + str(error), secondary=secondary)


def _attach(job: Job) -> None:
    """Let the job fail through the fabric that the script's functions use, if they have created one."""
    from minidl.training.world import begun

    if (here := begun()) and here.job:
        job.fabric = here.job.fabric


if __name__ == "__main__":
    sys.exit(main())
