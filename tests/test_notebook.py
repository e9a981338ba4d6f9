"""The notebook in docs/ runs from top to bottom, reaches its accuracy, and is committed with its outputs."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
TUTORIAL = Path(__file__).parent.parent / "docs" / "tutorial.ipynb"


def shape(cell: Any) -> list[str]:
    """Return the outputs of a cell: text without its numbers, and the kinds of other outputs."""
    shapes = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            shapes.append(re.sub(r"[-+]?[\d.,]+(e[-+]\d+)?%?", "#", output.text))
        else:
            shapes.append(" ".join(sorted(output.data)))
    return shapes


@pytest.mark.slow  # .ci/run runs it in a step of its own
def test_tutorial_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TUTORIAL.parents[1]))
    monkeypatch.setenv("MPLBACKEND", "agg")  # `execute` removes it
    spec = spec_from_file_location("execute", TUTORIAL.with_name("execute.py"))
    assert spec and spec.loader
    spec.loader.exec_module(module := module_from_spec(spec))
    committed, notebook = nbformat.read(TUTORIAL, as_version=4), module.execute(TUTORIAL)
    assert TUTORIAL.stat().st_size < 200_000
    for kept, made in zip(committed.cells, notebook.cells, strict=True):
        varies = "of {len(answers)} wrong" in kept.source  # this output depends on the processor's rounding
        assert shape(kept)[varies:] == shape(made)[varies:], "run `python docs/execute.py`"
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
    accuracies = [float(word.split()[0]) for word in printed.split("test accuracy ")[1:2]]
    accuracies += [float(word) for word in re.findall(r"of the average (\S+)", printed)]
    assert len(accuracies) == 4 and min(accuracies) > 0.95
    assert "True" in printed  # the result of gradcheck
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
