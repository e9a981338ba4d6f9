"""Progress on standard error during a run: a progress bar in a terminal, and one line per epoch."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import Any

PATIENCE = 1.5  # seconds after which a message explains why the first step takes so long


class Display:
    """The progress display of a run.

    quiet: print nothing. steps: number of steps in an epoch. epochs: number of epochs in the run.
    """

    def __init__(self, quiet: bool, steps: int, epochs: int) -> None:
        self.quiet, self.steps, self.epochs = quiet, steps, epochs
        self.terminal = sys.stderr.isatty()
        self.bar: Any = None
        self.timer = threading.Timer(PATIENCE, self.say, ["compiling kernels (on the first run only) ..."])
        self.timer.daemon = True
        self.timer.start()

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.quiet:
            return
        with suppress(OSError):  # the terminal may be gone
            if self.bar is not None:
                self.bar.clear()
            print(line, file=sys.stderr, flush=True)

    def compiling(self, ready: int, total: int) -> None:
        """Show how many of a step's kernels are compiled."""
        if self.quiet or not self.terminal:
            return  # the timer's message is sufficient
        self.timer.cancel()
        with suppress(OSError):
            print(f"\rcompiling kernels (on the first run only) {ready}/{total} ", end="", file=sys.stderr, flush=True)
            if ready == total:
                print("\r\033[K", end="", file=sys.stderr, flush=True)

    def step(self, entry: dict[str, Any], batch: int, loss: float, accuracy: float) -> None:
        """Advance the bar: `batch` steps of the epoch are done; loss and accuracy are means over them."""
        self.timer.cancel()
        if self.quiet or not self.terminal:
            return
        if self.bar is None:
            from tqdm import tqdm

            self.bar = tqdm(total=self.steps, initial=batch - 1, desc=f"epoch {entry['epoch']}", leave=False,
                            unit="step", dynamic_ncols=True, bar_format="{desc} {percentage:3.0f}%|{bar}| {postfix}",
                            mininterval=0.1)  # fmt: skip
        speed = f"{entry['images_per_second']:,.0f} images/s"
        with suppress(OSError):
            self.bar.set_postfix_str(f"loss {loss:.4f}, accuracy {accuracy:.2%}, {speed}", refresh=False)
            self.bar.update()

    def epoch(self, entry: dict[str, Any]) -> None:
        """Replace the bar of a finished epoch with a line."""
        self.close()
        self.say(epoch_line(entry, f"/{self.epochs}"))

    def close(self) -> None:
        """Close the bar, so that other lines can be printed."""
        self.timer.cancel()
        if self.bar is not None:
            with suppress(OSError):
                self.bar.close()
            self.bar = None


def epoch_line(entry: dict[str, Any], of: str = "") -> str:
    """Format the results of an epoch. of: "/30" if the run has 30 epochs."""
    line = f"epoch {entry['epoch']:>3}{of}  loss {entry['loss']:.4f}  accuracy {entry['accuracy']:.2%}"
    if "validation_loss" in entry:
        line += f"  validation {entry['validation_loss']:.4f}  {entry['validation_accuracy']:.2%}"
    return f"{line}  lr {entry['lr']:.2g}  {entry['images_per_second']:,.0f} images/s"
