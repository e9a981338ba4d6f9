"""The command line: `python -m minidl.train`, also installed as `minidl-train`."""

from __future__ import annotations

import minidl.start  # noqa: F401 (before all others: see there)

# isort: split
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from minidl.cli import arguments
from minidl.comm.launch import local
from minidl.engine.environment import number, prepare
from minidl.errors import EXPECTED, AbortedError, ConfigError, MinidlError, explained, printable, report
from minidl.report import at_end
from minidl.resources import cores
from minidl.run import declared, model_file
from minidl.run.config import CLAIMING, Config, resolve
from minidl.run.config_file import file_options
from minidl.run.display import count, left_out, speed
from minidl.run.folder import read_run, resuming
from minidl.run.help import Command, printed, show
from minidl.run.options import HelpWanted, parse
from minidl.run.shares import parse_devices
from minidl.run.signals import Signals, Stopped
from minidl.training.job import Job, find_job

DESCRIPTION = "Train a neural network on images. Without options: LeNet on the 8x8 digits that come with minidl."
EXAMPLES = """
examples:
  python -m minidl.train
  python -m minidl.train --data mnist --validation 0.1
  python -m minidl.train --data my.npz --model mlp --optimizer adamw --out runs/mine
  python -m minidl.train --model my_net.py:build --data mnist
  python -m minidl.train --resume runs/mine
  python -m minidl.train --resume runs/mine --epochs 20
  python -m minidl.train --config runs/mine/config.toml --seed 1
  python -m minidl.train --method gossip --workers 2 --max-workers 8 --out runs/long
  python -m minidl.train --join runs/long
  python -m minidl.train --evaluate runs/mine --json
"""
COMMAND = Command("python -m minidl.train", Config, DESCRIPTION, EXAMPLES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, 2 for an error, 128 + the number of the signal that ended it."""
    words = sys.argv[1:] if argv is None else list(argv)
    job: Job | None = None
    given: dict[str, Any] = {}
    everywhere = True  # whether an error is the same in all ranks of a job, because it depends only on `words`
    code = 0
    with Signals() as signals:
        try:
            job = find_job()
            if job and job.launched:
                local.follow()
                signals.quiet = True  # the launcher reports
            signals.shared = job is not None and not job.launched
            given = parse(Config, arguments.with_devices(words))
            arguments.check(given)
            if given.get("join"):
                if given.get("devices"):
                    raise ConfigError("--join takes a number of --workers: a list is for a job that begins")
                from minidl.cli.joining import join

                signals.message = "stopped; replicas that were already started join"
                return join(given, job)
            if given.get("resume"):
                again = resuming(given["resume"], given.get("model", ""))
                signals.message = f"stopped before the run continued; to continue: {again}"
            everywhere = not (given.get("config") or given.get("resume") or model_file.is_own(given.get("model")))
            config = read_config(given)
            if job and not job.launched and config.max_workers:
                raise ConfigError("--max-workers reserves places in a job of --workers: leave it out under MPI")
            everywhere = False
            workers = parse_devices(config.devices)
            if job is None:
                ranks = processes(config)
                if ranks > 1:
                    threads = [one.threads for one in workers] or config.threads
                    return local.run(words, ranks, threads, quiet=config.quiet, places=places(config, ranks))
            own = workers[job.rank] if job and job.rank < len(workers) else None  # servers have no place in the list
            threads = 0 if job and job.launched else own.threads if own else 0
            prepare(config.threads or threads or (job.threads() if job else 0))
            from minidl.cli.commands import execute  # slow: imports NumPy and Numba

            signals.prepare()
            fabric = job.join(config) if job else None
            if fabric and own and own.cycle < 1:
                from minidl.comm.transport.cycle import DutyCycle
                from minidl.comm.transport.mailbox_transport import MailboxTransport

                assert isinstance(fabric.transport, MailboxTransport)
                fabric.transport.cycle = DutyCycle(own.cycle, fabric.beat)
            result = execute(config, given, signals, fabric)
            if result is not None and (job is None or job.leads):
                code = printed(json.dumps(result) if given.get("json") else _text(result), "the result")
            if fabric is not None:
                fabric.close()
            if result is not None and (job is None or job.leads):
                at_end(result.get("out"), given, config.model if model_file.is_own(config.model) else "")
        except HelpWanted as wanted:
            return show(COMMAND, wanted.topic)
        except Stopped as stopped:
            if job is None or (job.leads and (signals.deferred or signals.shared)):
                stopped.report()
            # Closing waits for the other ranks. Before `defer`, they may not know of the signal: do not wait.
            if job is not None and job.fabric is not None and signals.deferred:
                job.fabric.close()
            at_end(stopped.run, given)
            return stopped.code
        except AbortedError:
            return 2
        except EXPECTED as error:
            message = explained(error, "use a lower --batch-size or a smaller model")
            code = job.fail(message, everywhere and isinstance(error, MinidlError)) if job else report(message)
            at_end(getattr(error, "run", None), given)
    return code


def read_config(given: Mapping[str, Any], simulated: bool = False) -> Config:
    """Return the options of the run that the command line begins or continues. Those of --evaluate are read later.

    simulated: whether the run is a simulated one.
    """
    if folder := given.get("resume"):
        known = read_run(folder, simulated)
        model_file.require_same_kind(known["model"], given, "--resume")
        model_file.require_named(known["model"], given, f"the run {folder}", resuming(folder))
        if data := given.get("data"):  # a file that has moved; with `given`, it would change presets
            if not (known["data"].endswith(".npz") and data.endswith(".npz")):
                raise ConfigError(f"--data cannot be given with --resume: the run keeps its data, {known['data']!r}")
            known["data"] = data
            given = {name: value for name, value in given.items() if name != "data"}
        elif arguments.lacks_file(known["data"]):
            raise ConfigError(f"--resume {folder}: there is no file {known['data']}, the run's data set; if it has "
                              "moved, give --data FILE.npz")  # fmt: skip
        return model_file.identified(resolve(known, given), given, known)
    if given.get("evaluate"):
        return replace(Config(), workers=1, **{name: given[name] for name in ("threads", "quiet") if name in given})
    file = file_options(given)
    model_file.require_named(file.get("model"), given, given.get("config", ""), "give")
    return model_file.identified(resolve(file, given), given)


def processes(config: Config) -> int:
    """Return the number of processes to start: replicas and servers."""
    workers = config.workers or number("MINIDL_WORKERS") or (min(2, cores()) if config.device == "cpu" else 1)
    return workers + declared.servers(config.method, config.center)


def places(config: Config, ranks: int) -> local.Places:
    """Return the places of a job that begins with this number of ranks. Raises ConfigError if there are too many."""
    servers = declared.servers(config.method, config.center)
    workers = ranks - servers
    if config.max_workers:
        if config.max_workers < workers:
            raise ConfigError(f"--max-workers {config.max_workers}: expected at least the {workers} workers with which "
                              "the run begins")  # fmt: skip
        local.require_room(config.max_workers + servers)
    twice = max(workers, min(2 * workers, local.PER_CORE * cores() - servers))
    most = config.max_workers or (twice if config.method in CLAIMING else workers)
    return local.Places(most + servers, range(workers, ranks))


def _text(result: dict[str, Any]) -> str:
    """Return the result as readable text."""
    lines = [f"test accuracy {result['test_accuracy']:.2%}, test loss {result['test_loss']:.4f}"]
    if "best_step" in result:
        lines[0] += f" (weights of step {result['best_step']}, the best on the validation images)"
    if "workers" in result:
        center = f"the center has {result['accuracy_center']:.2%}, " if "accuracy_center" in result else ""
        lines.append(f"average of {result['replicas_alive']} replicas ({result['method']}): {center}the best alone has "
                     f"{result['accuracy_best']:.2%}, the worst {result['accuracy_worst']:.2%}; their weights "
                     f"differ from the average by {result['consensus_distance']:.2%} (consensus distance)")  # fmt: skip
        lines.append(f"exchanged {result['bytes_sent'] / 1e6:,.1f} MB in {result['messages']:,} messages, "
                     f"{result['wait_fraction']:.1%} of the time spent waiting{left_out(result)}")  # fmt: skip
    if "steps" in result:
        seconds = result["seconds"]
        lines.append(f"{count(result['epochs'], 'epoch')}, {count(result['steps'], 'step')}, "
                     f"{seconds:.{1 if seconds >= 1 else 2}f} s, {speed(result['images_per_second'])}; "
                     f"all of it in {result['out']}")  # fmt: skip
    return "\n".join(map(printable, lines))  # a hostile summary.json may contain control characters


if __name__ == "__main__":
    sys.exit(main())
