"""The scripts on docs/own_models.md run, and print what the page shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_mpi import environment

PAGE = (Path(__file__).parent.parent / "docs" / "own_models.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("number", range(3))
def test_examples(number: int, tmp_path: Path) -> None:
    assert len(SCRIPTS) == 3
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[number], encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "minidl.launch", "--workers", "2", str(script)], capture_output=True,
                          text=True, timeout=100, env=environment())  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    if number == 0:
        assert [line.split()[:2] for line in lines[:2]] == [["epoch", "1"], ["epoch", "2"]]
        assert lines[2].startswith("average of 2 replicas: ")
    elif number == 1:
        (line,) = lines
        assert line.startswith("2 replicas: ") and int(line.split()[-1].rstrip("%")) > 50
    else:
        assert done.stdout == re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)[0]
