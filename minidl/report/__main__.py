"""The command line `python -m minidl.report RUN [RUN ...]`: the page of a run, or a comparison of several runs."""

from __future__ import annotations

import minidl.start  # noqa: F401 (before all others: see there)

# isort: split
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minidl.engine.environment import prepare
from minidl.errors import ConfigError, printable
from minidl.report import require_matplotlib
from minidl.run.help import Command, run_plain
from minidl.run.options import option, parse

DESCRIPTION = ("Write the page of a run, RUN/report.html, also of a run that is still going, was stopped or died. With "
               "several runs, write a page that compares them.")  # fmt: skip
EXAMPLES = """
examples:
  python -m minidl.report runs/digits-lenet-1
  python -m minidl.report runs/* --sort seconds-to:98.5 --csv runs.csv
"""
COMPARISON = "comparison.html"


@dataclass(frozen=True)
class Options:
    out: str = option("", f"the file of the page (default: RUN/report.html; of a comparison: {COMPARISON})",
                      group="options")  # fmt: skip
    model: str = option("", "FILE.py:FUNCTION of a run whose model is from a file: a file is imported only if it is "
                        "named here", group="options")  # fmt: skip
    sort: str = option("", "of a comparison: sort by an option, by a result such as test-accuracy or seconds, or by "
                       "seconds-to:98.5, the seconds until 98.5% (validation, else training) accuracy; -NAME: the "
                       "largest first", group="options")  # fmt: skip
    csv: str = option("", "of a comparison: also write the table to this CSV file", group="options")


COMMAND = Command("python -m minidl.report RUN [RUN ...] [options]", Options, DESCRIPTION, EXAMPLES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, 2 for an error, 130 if interrupted."""
    return run_plain(COMMAND, _run, argv, "give fewer runs")


def _belongs_to_option(words: Sequence[str], at: int) -> bool:
    """Return whether a word is an option, or its value; the others are folders of runs."""
    before = words[at - 1] if at else ""
    return words[at].startswith("-") or (before.startswith("--") and "=" not in before and before != "--help")


def _run(words: list[str]) -> None:
    folders = [word for at, word in enumerate(words) if not _belongs_to_option(words, at)]
    given = parse(Options, [word for at, word in enumerate(words) if _belongs_to_option(words, at)])
    print(f"report: {printable(str(_write(folders, Options(**given))))}")


def _write(folders: list[str], chosen: Options) -> Path:
    if not folders:
        raise ConfigError("expected the folder of a run, such as python -m minidl.report runs/digits-lenet-1")
    for folder in folders:  # before slow imports
        if not os.path.lexists(os.path.join(folder, "config.toml")):
            from minidl.report.data import read

            read(folder)  # raises
    alone = len(folders) == 1
    runs = "several runs" if alone else "one run"
    for name in ("sort", "csv") if alone else ("model",):
        if getattr(chosen, name):
            raise ConfigError(f"--{name} has an effect only with {runs}: leave it out")
    prepare()
    require_matplotlib("a report")
    if alone:
        from minidl.report.run_page import write_page  # slow

        return write_page(Path(folders[0]), chosen.model, chosen.out)
    from minidl.report.compare import write_comparison  # slow

    return write_comparison(folders, chosen.out or COMPARISON, chosen.sort, chosen.csv)


if __name__ == "__main__":
    sys.exit(main())
