"""Progress on standard error during a run: progress bars in a terminal, and lines that stay."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from time import monotonic
from typing import Any, NamedTuple

from minidl.errors import printable

INTERVAL = 0.1  # seconds between two updates of the bars


class Position(NamedTuple):
    """What the bars show. run: the trained fraction of the run. batches: of the epoch, (done, all)."""

    run: float
    epoch: int
    epochs: int
    batches: tuple[int, int]


class Display:
    """The progress display of a run. quiet: print nothing.

    In a terminal, and in a notebook with ipywidgets, bars show the progress; the lines that stay are above them:

        run    23% |██▎       | epoch 4/15, 00:12 left, 57,095 images/s
        epoch  45% |████▌     | 20/45, loss 0.1824
        replicas 0: 28,100  1: 28,995 images/s
    """

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.terminal = quiet, sys.stderr.isatty()
        self.shows_bars = not quiet and (self.terminal or _has_widgets())
        self._bars: dict[str, Any] = {}
        self._updated = 0.0  # when the bars were last updated
        self._missing = 0  # number of kernels in the present compilation
        self._began = 0.0  # when the present compilation began

    def say(self, line: str) -> None:
        """Print a line, above the bars if there are any."""
        if self.quiet:
            return
        with suppress(OSError):  # the terminal may be gone
            self._clear()
            print(printable(line), file=sys.stderr, flush=True)

    def _clear(self) -> None:
        """Remove the bars from the screen until their next update."""
        for bar in self._bars.values():
            bar.clear()

    def compiling(self, ready: int, total: int) -> None:
        """Report that kernels are compiled. Print nothing if the cache contains all of them.

        A compilation calls this several times. ready: the number of kernels that are ready; at first, those in the
        cache; at last, `total`.
        """
        if ready < total and not self._missing:
            self._missing, self._began = total - ready, monotonic()
            if not self.terminal:
                self.say(f"compiling {count(self._missing, 'kernel')} that the cache does not contain ...")
        if not self._missing:
            return
        seconds = f"{monotonic() - self._began:.0f} s"
        if ready < total:
            done = ready - (total - self._missing)
            self._show(f"compiling {count(self._missing, 'kernel')}: {done} done after {seconds}")
        else:
            self._show("")
            self.say(f"compiled {count(self._missing, 'kernel')} in {seconds}")
            self._missing = 0

    def _show(self, line: str) -> None:
        """In a terminal, replace the present line."""
        if self.terminal and not self.quiet:
            with suppress(OSError):
                self._clear()
                print(f"\r\033[K{line[: columns()]}", end="", file=sys.stderr, flush=True)

    def due(self) -> bool:
        """Return whether to call `show` now: INTERVAL seconds after the last update, where there are bars."""
        return self.shows_bars and monotonic() - self._updated >= INTERVAL

    def show(self, at: Position, of_run: str, of_epoch: str, speeds: Mapping[int, float] | None = None) -> None:
        """Show the bars. of_run, of_epoch: facts behind them. speeds: of several replicas by rank, in images/s."""
        self._updated = monotonic()
        done, total = at.batches
        with suppress(OSError):
            self._update("run", at.run, 1.0, f"epoch {at.epoch}/{at.epochs}, {{remaining}} left, {of_run}")
            self._update("epoch", done, total, f"{done}/{total}, {of_epoch}")
            if speeds:
                self._update("replicas", 0, 0, _speeds(speeds, columns() - len("replicas ") - 1))

    def _update(self, name: str, done: float, total: float, words: str) -> None:
        format = f"{name:<5} {{percentage:3.0f}}% |{{bar}}| {words}" if total else f"{name} {words}"
        if name not in self._bars:
            self._bars[name] = _bars()(
                total=total or None, initial=done, leave=False, mininterval=0, miniters=0, position=len(self._bars),
                file=sys.stderr, bar_format=format, **({"ncols": columns(), "nrows": 24} if self.terminal else {}),
            )  # fmt: skip
            return
        bar = self._bars[name]
        bar.bar_format = format
        if done < bar.n or total != (bar.total or 0):  # the next epoch
            bar.reset(total or None)
            bar.initial = done
        if self.terminal:
            bar.ncols = columns()
        bar.n = done
        bar.refresh()

    def close(self) -> None:
        """Remove the bars, so that other lines can be printed."""
        with suppress(OSError):
            for bar in reversed(self._bars.values()):
                bar.close()
        self._bars.clear()


def in_notebook() -> bool:
    """Return whether this process executes the cells of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and "IPKernelApp" in shell.config


def _has_widgets() -> bool:
    return in_notebook() and find_spec("ipywidgets") is not None


def _bars() -> Any:
    """Return the class of bars for a terminal or for a notebook."""
    if in_notebook():
        from tqdm.auto import tqdm
    else:
        from tqdm import tqdm
    return tqdm


def columns() -> int:
    """Return the number of columns of the terminal that may be used, 79 if it is unknown.

    The last column stays free, because some terminals begin a new line after it.
    """
    try:
        return (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1
    except OSError:
        return 79


def _speeds(speeds: Mapping[int, float], room: int) -> str:
    """Return the speeds of replicas by rank, and of as many as fit into `room` characters."""
    each = [f"{rank}: {value:,.0f}" if value else f"{rank}: -" for rank, value in speeds.items()]
    for shown in range(len(each), 0, -1):
        more = f"  and {len(each) - shown} more" if shown < len(each) else ""
        line = "  ".join(each[:shown]) + more + " images/s"
        if len(line) <= room:
            return line
    return f"{len(each)}"


def legend(replicas: int) -> str:
    """Return a line that explains the numbers in the lines of epochs."""
    if replicas == 1:
        return "loss, accuracy: means over the epoch's training images while the weights change; lr: learning rate"
    return (f"loss, accuracy: on training images, means of the {replicas} replicas' latest epochs (in a bar: of one "
            "replica); lr: learning rate")  # fmt: skip


def epoch_line(entry: dict[str, Any], of: str = "") -> str:
    """Format the results of an epoch. of: "/30" if the run has 30 epochs."""
    line = f"epoch {entry['epoch']:>3}{of}  loss {entry['loss']:.4f}  accuracy {entry['accuracy']:.2%}"
    if "validation_loss" in entry:
        line += f"  validation {entry['validation_loss']:.4f}  {entry['validation_accuracy']:.2%}"
    return f"{line}  lr {entry['lr']:.2g}  {speed(entry['images_per_second'])}"


def speed(images_per_second: float) -> str:
    """Format a speed. 0: not known yet; the first step is not timed, because it also loads or compiles kernels."""
    return f"{images_per_second:,.0f} images/s" if images_per_second else "- images/s"


def count(number: int, word: str) -> str:
    """Return "1 step", "2 steps"."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def left_out(result: dict[str, Any]) -> str:
    """Return what --adaptive has left out, for the end of a line of results; "" if it has left out nothing."""
    exchanges, size = result.get("exchanges_suppressed", 0), result.get("bytes_suppressed", 0) / 1e6
    return f"; {count(exchanges, 'exchange')} left out, {size:,.1f} MB" if exchanges else ""
