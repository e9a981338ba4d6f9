"""Pages about runs: report.html in a run's folder, and comparisons of several runs. Needs Matplotlib (extra `report`).

    data.py          reads a run's folder; a run may still be going, or be damaged
    predictions.py   what the model of the run says about the test images
    figures.py       the figures, as SVG (Matplotlib)
    page.py          HTML: headings, tables, figures; the style
    run_page.py      the page of one run
    replicas.py      its part about several replicas
    compare.py       the page of several runs, and the CSV file
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minidl.errors import EXPECTED, ConfigError, explained, printable, require_package, tell
from minidl.run.folder import PAGE


def require_matplotlib(what: str) -> None:
    """Raise ConfigError if Matplotlib is not installed, or cannot be imported. what: what needs it."""
    require_package(what, "Matplotlib", "report")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{what} needs Matplotlib, which cannot be imported ({error}): install it again: "
                          "pip install --force-reinstall matplotlib") from None  # fmt: skip


def at_end(folder: str | Path | None, given: Mapping[str, Any], model: str = "") -> None:
    """Write the page of a run that has just ended, and print its path. An error is one line: the run is over.

    folder: None if this process has led no run. given: the options of the command line. model: the FILE.py:FUNCTION
    that the command line has named, or "". With --no-report, or MINIDL_REPORT=0 in the environment, do nothing.
    """
    if folder is None or given.get("no_report") or os.environ.get("MINIDL_REPORT") == "0":
        return
    try:
        require_matplotlib("it")
        from minidl.report.run_page import write_page  # slow: Matplotlib

        line = f"report: {write_page(Path(folder), model)}"
    except EXPECTED as error:
        line = f"minidl: no {PAGE}: {explained(error, 'python -m minidl.report writes it')}"
    except Exception as error:
        line = f"minidl: no {PAGE}: {type(error).__name__}: {error}: a fault of minidl; the run is complete"
    if not given.get("quiet"):
        tell(printable(" ".join(line.split())))
