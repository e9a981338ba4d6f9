"""Execute docs/tutorial.ipynb, and write it back with its outputs. Needs the extra `test`.

    python docs/execute.py
"""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def execute(path: Path) -> nbformat.NotebookNode:
    """Return a notebook with new outputs, and without anything that changes from one execution to the next."""
    notebook = nbformat.read(path, as_version=4)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    os.environ.pop("MPLBACKEND", None)  # the kernel's own backend shows pictures in the notebook
    options = {"timeout": 600, "record_timing": False, "coalesce_streams": True}
    NotebookClient(notebook, resources={"metadata": {"path": str(path.parent)}}, **options).execute()
    notebook.metadata.pop("language_info", None)  # the version of Python
    for cell in notebook.cells:
        cell.metadata.clear()
    return notebook


if __name__ == "__main__":
    tutorial = HERE / "tutorial.ipynb"
    nbformat.write(execute(tutorial), tutorial)
