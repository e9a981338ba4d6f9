"""The scripts on docs/own_models.md run, and print what the page shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from test_mpi import environment

PAGE = (Path(__file__).parent.parent / "docs" / "own_models.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_examples(tmp_path: Path) -> None:
    """One job executes the three scripts, one after the other."""
    assert len(SCRIPTS) == 3
    script = tmp_path / "script.py"
    script.write_text("".join(SCRIPTS), encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "minidl.launch", "--workers", "2", str(script)], capture_output=True,
                          text=True, timeout=300, env=environment())  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["epoch", "1"], ["epoch", "2"]]
    assert lines[2].startswith("average of 2 replicas: ")
    assert lines[3].startswith("2 replicas: ") and int(lines[3].split()[-1].rstrip("%")) > 50
    assert lines[4:] == re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)[0].splitlines()
