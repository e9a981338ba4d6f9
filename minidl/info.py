"""The command line `python -m minidl.info`: what a bug report needs, and what minidl would do on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from minidl.cli import facts
from minidl.errors import EXPECTED, explained, printable, report
from minidl.run.help import plain_page
from minidl.run.options import HelpWanted, option, parse
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, 2 for an error, 130 if interrupted."""
    try:
        given = Options(**parse(Options, sys.argv[1:] if argv is None else list(argv)))
        _run(given)
    except HelpWanted:
        print(plain_page("python -m minidl.info [options]", Options, DESCRIPTION, EXAMPLES))
    except KeyboardInterrupt:
        return 130
    except EXPECTED as error:
        return report(explained(error, "close other programs"))
    return 0


def _run(given: Options) -> None:
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
