"""The command line `python -m minidl.info`: what a bug report needs, and what minidl would do on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from minidl.cli import facts
from minidl.errors import printable
from minidl.run.help import Command, run_plain
from minidl.run.options import option, parse
from minidl.training.job import find_job

DESCRIPTION = (
    "Print the versions of the software, what this machine has and what minidl uses of it, where data sets were found, "
    "and what python -m minidl.train would do here."
)
EXAMPLES = """
examples:
  python -m minidl.info
  python -m minidl.info --json > report.json
  mpiexec -n 4 python -m minidl.info --measure
"""


@dataclass(frozen=True)
class Options:
    measure: bool = option(False, "measure the speed of the links: between two processes here, or between the ranks "
                           "that mpiexec has started", group="options")  # fmt: skip
    json: bool = option(False, "print JSON; names ending in _bytes are numbers of bytes", group="options")


COMMAND = Command("python -m minidl.info [options]", Options, DESCRIPTION, EXAMPLES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, 2 for an error, 130 if interrupted."""
    return run_plain(COMMAND, _run, argv, "close other programs")


def _run(words: list[str]) -> None:
    given = Options(**parse(Options, words))
    job = find_job()
    leads = job is None or job.rank == 0
    found: dict[str, Any] = {**facts.collect()} if leads else {}
    if given.measure:
        from minidl.cli import links

        measured = links.of_job(job) if job else links.between_processes()
        found["links"] = measured if given.json else {f"ranks {link['from']} and {link['to']}": links.text(link)
                                                      for link in measured}  # fmt: skip
    if leads:
        print(json.dumps(found) if given.json else printable_lines(facts.lines(found)), flush=True)


def printable_lines(lines: Iterable[str]) -> str:
    return "\n".join(map(printable, lines)).strip()


if __name__ == "__main__":
    sys.exit(main())
