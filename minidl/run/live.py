"""A live curve in a notebook: loss and accuracy, drawn while a model trains. Needs Matplotlib (extra `report`)."""

from __future__ import annotations

import io
from time import monotonic
from typing import Any

from minidl.errors import ConfigError, require_package
from minidl.run.display import epoch_line, in_notebook

SHARE = 0.05  # of the time may be spent on drawing
MOST_POINTS = 300  # of the steps; of more, neighbours are averaged
SIZE = (8.0, 2.6)  # inches


class LiveCurve:
    """The curve of one training. call: the function that draws, for messages.

    Raises ConfigError outside a notebook, or if Matplotlib is missing.
    """

    def __init__(self, call: str) -> None:
        if not in_notebook():
            raise ConfigError(f"{call}: live=True draws in a notebook, and this is none: leave it out")
        require_package(f"{call}: live=True", "Matplotlib", "report")
        self.steps: list[tuple[float, float]] = []  # (epochs, loss)
        self.epochs: list[dict[str, Any]] = []
        self._together = 1  # steps that a point is the mean of
        self._open: list[tuple[float, float]] = []  # steps that are not yet a point
        self._handle: Any = None
        self._next = 0.0  # when to draw again

    def step(self, epochs: float, loss: float) -> None:
        """Add a step, and draw if it is time. epochs: trained so far, with the fraction of the present one."""
        self._open.append((epochs, loss))
        if len(self._open) >= self._together:
            self.steps.append((epochs, sum(loss for _, loss in self._open) / len(self._open)))
            self._open.clear()
        if len(self.steps) > MOST_POINTS:
            self.steps = [(after, (one + other) / 2) for (_, one), (after, other)
                          in zip(self.steps[::2], self.steps[1::2])]  # fmt: skip
            self._together *= 2
        if monotonic() >= self._next:
            self.draw()

    def epoch(self, entry: dict[str, Any]) -> None:
        """Add the entry of an epoch, and draw if it is time."""
        self.epochs.append(entry)
        if monotonic() >= self._next:
            self.draw()

    def draw(self) -> None:
        """Draw all points. A first call makes a new picture, later calls replace it."""
        from IPython.display import display

        began = monotonic()
        picture = {"image/svg+xml": self.svg(), "text/plain": epoch_line(self.epochs[-1]) if self.epochs else ""}
        if self._handle is None:
            self._handle = display(picture, raw=True, display_id=True)
        else:
            self._handle.update(picture, raw=True)
        now = monotonic()
        self._next = now + (now - began) / SHARE

    def svg(self) -> str:
        """Return the picture: the loss on the left, the accuracy on the right."""
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        figure = Figure(SIZE, layout="constrained")
        loss, accuracy = figure.subplots(1, 2)
        if self.steps:
            loss.plot(*zip(*self.steps), color="0.75", linewidth=1, label="steps")
        at = [entry["epoch"] for entry in self.epochs]
        for axes, name, factor in ((loss, "loss", 1), (accuracy, "accuracy", 100)):
            for key, words in ((name, "training"), (f"validation_{name}", "validation")):
                values = [factor * entry[key] for entry in self.epochs if key in entry]
                if values:
                    axes.plot(at, values, marker="o", markersize=3, label=words)
            axes.set(xlabel="epochs", ylabel=name if factor == 1 else f"{name} in %")
            axes.grid(alpha=0.4)
            if axes.lines:
                axes.legend()
        if self.epochs:
            figure.suptitle(epoch_line(self.epochs[-1]), fontsize=9)
        stream = io.StringIO()
        FigureCanvasSVG(figure).print_svg(stream)
        return stream.getvalue()
