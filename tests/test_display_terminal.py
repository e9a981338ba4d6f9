"""The progress of a run on a pseudo terminal of 60 columns, in a pipe, and in a notebook: nothing is garbled."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

COLUMNS, ROWS = 60, 24
TRAIN = ["-m", "minidl.train", "--data", "synthetic:2048x8x8x1:4", "--model", "mlp", "--batch-size", "16",
         "--no-report"]  # fmt: skip
EPOCH = re.compile(r"epoch +\d/3  loss [\d.]+  accuracy [\d.]+%  lr [\d.e-]+  [\d,-]+ images/s")


class Screen:
    """A terminal that understands what progress bars write. It fails if a line is longer than the terminal is wide.

    lines: what stays; at the end, this is what the user sees. frames: the screen after each update.
    """

    def __init__(self) -> None:
        self.lines, self.row, self.column = [""], 0, 0
        self.frames: list[list[str]] = []

    def feed(self, words: str) -> None:
        for part in re.findall(r"\x1b\[\d*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", words):
            if part == "\r":
                self.column = 0
            elif part == "\n":
                self.row, self.column = self.row + 1, 0
                while len(self.lines) <= self.row:
                    self.lines.append("")
            elif part == "\x1b[A":
                self.row = max(0, self.row - 1)
            elif part == "\x1b[K":
                self.lines[self.row] = self.lines[self.row][: self.column]
            else:
                assert not part.startswith("\x1b"), f"an unknown control sequence: {part!r}"
                old = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = old[: self.column] + part + old[self.column + len(part) :]
                self.column += len(part)
            if part in "\r\n" or part == "\x1b[A":
                self.frames.append([line.rstrip() for line in self.lines])


def in_terminal(command: list[str], columns: int = COLUMNS) -> Screen:
    """Run a command with standard error on a pseudo terminal, and return what it showed there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    screen = Screen()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, stdin=subprocess.DEVNULL) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # the terminal's other end is closed
                break
            if not piece:
                break
            written += piece
        os.close(ours)
    assert process.returncode == 0
    screen.feed(written.decode())
    return screen


@pytest.mark.parametrize("workers", ["1", "2"])
def test_two_bars_on_a_narrow_terminal(tmp_path: Path, workers: str) -> None:
    script = ("import sys; from minidl.run import display; display.INTERVAL = 0.0; from minidl import train; "
              "sys.exit(train.main(sys.argv[1:]))")  # fmt: skip
    command = [sys.executable, "-c", script, *TRAIN[2:], "--epochs", "3", "--workers", workers]
    if workers == "2":
        command = [sys.executable, *TRAIN, "--epochs", "12", "--workers", "2"]
    screen = in_terminal([*command, "--out", str(tmp_path / "run")])
    bars = [(frame[at], frame[at + 1]) for frame in screen.frames for at, line in enumerate(frame[:-1])
            if line.startswith("run ") and frame[at + 1].startswith("epoch ")]  # fmt: skip
    assert bars, "the run's bar is above the epoch's"
    run = [line for frame in screen.frames for line in frame if line.startswith("run ")]
    assert max(len(line) for line in run) < COLUMNS
    full = re.compile(r"run  +\d+% \|.*\| epoch \d+/\d+, [\d:?]+ left, [\d,-]+ images/s")
    assert any(full.fullmatch(line) for line in run), run[-1]
    if workers == "2":
        speeds = [line for frame in screen.frames for line in frame if line.startswith("replicas ")]
        assert any(re.fullmatch(r"replicas 0: [\d,-]+  1: [\d,-]+ images/s", line) for line in speeds), speeds[-1:]
    left = [line for line in screen.lines if line.strip()]
    assert not any(line.startswith(("run ", "replicas ")) or "|" in line for line in left), "the bars have gone"
    wanted = 12 if workers == "2" else 3
    assert sum(bool(re.match(r"epoch +\d+/\d+  loss ", line)) for line in left) == wanted


def test_no_bars_in_a_pipe(tmp_path: Path) -> None:
    command = [sys.executable, *TRAIN, "--epochs", "3", "--workers", "2", "--out", str(tmp_path / "run")]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "\r" not in words and "\x1b" not in words and "|" not in words
    lines = [line for line in words.splitlines() if "compil" not in line]
    assert [bool(EPOCH.fullmatch(line)) for line in lines] == [False, False, True, True, True]


NOTEBOOK = """
import minidl
from minidl import train
assert train.main(["--data", "synthetic:512x8x8x1:4", "--model", "mlp", "--batch-size", "16", "--epochs", "3",
                   "--workers", "1", "--no-report", "--out", "run"]) == 0
===
import numpy as np
x, y = np.random.default_rng(0).random((256, 4, 4, 1), np.float32), np.arange(256) % 4
model = minidl.nn.Sequential(minidl.nn.Flatten(), minidl.nn.Linear(16, 4))
history = minidl.fit(model, (x, y), epochs=5, live=True)
"""


def test_in_a_notebook(tmp_path: Path) -> None:
    """The command's bars are widgets (or there are none), and `fit(live=True)` draws one picture, again and again."""
    pytest.importorskip("ipykernel")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in NOTEBOOK.split("===")])
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    first, second = notebook.cells
    words = "".join(output.text for output in first.outputs if output.output_type == "stream")
    assert "\r" not in words and "\x1b" not in words and "%|" not in words
    assert len(re.findall(r"epoch +\d/3  loss ", words)) == 3
    pictures = [output for output in second.outputs if output.output_type == "display_data"]
    assert len(pictures) == 1 and "image/svg+xml" in pictures[0].data
    assert pictures[0].data["text/plain"].startswith("epoch   5  loss ")
    assert not any("epoch" in output.get("text", "") for output in second.outputs), "the lines are left out"
