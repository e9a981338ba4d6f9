"""Pictures as SVG text, for docs/figures.py: shapes, and plots with axes. Coordinates are rounded to one decimal."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

INK, GREY, PALE, WHITE = "#1d2b3a", "#5b6b7c", "#e6ebf2", "white"
BLUE, RED, GREEN, GOLD = "#4a6fa5", "#c0572b", "#3f8f63", "#b98a1d"
COLOURS = (BLUE, RED, GREEN, GOLD, "#7b5ea7", "#4aa3a5", "#a54a78", INK)


def text(x: float, y: float, words: str, size: int = 12, colour: str = INK, anchor: str = "start", **more: Any) -> str:
    return _tag("text", escape(words), x=x, y=y, font_size=size, fill=colour, text_anchor=anchor, **more)


def rectangle(x: float, y: float, width: float, height: float, fill: str, **more: Any) -> str:
    return _tag("rect", x=x, y=y, width=width, height=height, fill=fill, **more)


def circle(x: float, y: float, radius: float, fill: str, **more: Any) -> str:
    return _tag("circle", cx=x, cy=y, r=radius, fill=fill, **more)


def line(points: Sequence[tuple[float, float]], colour: str = INK, width: float = 1.5, **more: Any) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return _tag("polyline", points=places, fill="none", stroke=colour, stroke_width=width, **more)


def arrow(points: Sequence[tuple[float, float]], colour: str = INK, width: float = 1.5) -> str:
    """Return a line whose last point has an arrowhead."""
    (x, y), (to_x, to_y) = points[-2:]
    length = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
    along, across = (to_x - x) / length, (to_y - y) / length
    back, side = (to_x - 8 * along, to_y - 8 * across), (-3.5 * across, 3.5 * along)
    corners = [(to_x, to_y), (back[0] + side[0], back[1] + side[1]), (back[0] - side[0], back[1] - side[1])]
    head = _tag("polygon", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in corners), fill=colour)
    return line([*points[:-1], back], colour, width) + head


class Plot(NamedTuple):
    """A plot in a rectangle of the page. x and y are the limits of its axes."""

    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the place of a point on the page."""
        along, up = (x - self.x[0]) / (self.x[1] - self.x[0]), (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + along * self.width, self.top + (1 - up) * self.height

    def axes(self, title: str, below: str, x_label: str, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> str:
        """Draw both axes with ticks, a title, and a line of text below the title."""
        bottom, middle = self.top + self.height, self.left + self.width / 2
        parts = [text(self.left, self.top - 28, title, 13, font_weight=600)]
        parts += [text(self.left, self.top - 12, below, 11, GREY)]
        parts += [line([(self.left, self.top), (self.left, bottom), (self.left + self.width, bottom)], GREY, 1)]
        for tick in x_ticks:
            x, _ = self.at(tick, self.y[0])
            parts += [line([(x, bottom), (x, bottom + 4)], GREY, 1)]
            parts += [text(x, bottom + 17, f"{tick:g}", 11, GREY, "middle")]
        for tick in y_ticks:
            _, y = self.at(self.x[0], tick)
            parts += [line([(self.left - 4, y), (self.left, y)], GREY, 1)]
            parts += [text(self.left - 7, y + 4, f"{tick:g}", 11, GREY, "end")]
        return "".join([*parts, text(middle, bottom + 34, x_label, 11, GREY, "middle")])

    def curve(self, values: Sequence[float], colour: str, width: float = 1.5, **more: Any) -> str:
        """Draw a line through the points (0, values[0]), (1, values[1]), ..."""
        return line([self.at(x, y) for x, y in enumerate(values)], colour, width, stroke_linejoin="round", **more)

    def level(self, y: float, colour: str = INK) -> str:
        """Draw a dashed horizontal line."""
        return line([self.at(self.x[0], y), self.at(self.x[1], y)], colour, 1, stroke_dasharray="5 4")


def page(width: int, height: int, title: str, *parts: str) -> str:
    """Return a picture. title: a description of the picture for screen readers."""
    shape = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {shape} font-family="Helvetica, Arial, sans-serif">'
    title = f"<title>{escape(title)}</title>"
    return "\n".join([head, title, rectangle(0, 0, width, height, WHITE), *parts, "</svg>", ""])


def _tag(name: str, content: str = "", **attributes: Any) -> str:
    words = ""
    for key, value in attributes.items():
        shown = f"{value:.1f}" if isinstance(value, float) else value
        words += f' {key.replace("_", "-")}="{shown}"'
    return f"<{name}{words}>{content}</{name}>\n" if content else f"<{name}{words}/>\n"
