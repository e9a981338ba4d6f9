"""Make the pictures of README.md, docs/decentralised.md and docs/elastic.md. Their numbers come from minidl's own code.

    python docs/figures.py          writes docs/*.svg

`tests/test_figures.py` computes the pictures again, and compares them with the files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from svg import BLUE, COLOURS, GREEN, GREY, INK, PALE, RED, WHITE, Plot, arrow, circle, line, page, rectangle, text  # noqa: E402

from minidl.comm.consensus import consensus_distance  # noqa: E402
from minidl.comm.methods.weighing import Half, Mass  # noqa: E402
from minidl.comm.topology import build  # noqa: E402
from minidl.comm.transport.messages import Header  # noqa: E402

HERE = Path(__file__).parent

# -- numbers -----------------------------------------------------------------------------------------------------------


def mix(name: str, rounds: int = 8) -> np.ndarray:
    """Return the values of 8 replicas before the first round and after each round, (rounds + 1, 8)."""
    graph, x = build(name, 8), np.array([1.0, 2.0, 4.0, 6.0, 8.0, 7.0, 5.0, 3.0])
    values = [x]
    for round in range(rounds):
        values.append(graph.mix(values[-1][:, None], round)[:, 0])
    return np.array(values)


def gossip(kind: type[Half], messages: int = 60, replicas: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Return the values and the masses of the replicas: two arrays (messages + 1, P). Row k: after k messages.

    In each message, a random replica sends its value to another one. The receiver mixes it into its own value.
    kind: the class of --mix half or --mix mass.
    """
    random, x = np.random.default_rng(0), np.arange(replicas, dtype=float)
    weighing = [kind(SimpleNamespace(images=0), blocks=1) for _ in range(replicas)]  # type: ignore[arg-type]
    values, masses = [x.copy()], [np.ones(replicas)]
    for _ in range(messages):
        sender, receiver = random.choice(replicas, 2, replace=False)
        share = weighing[sender].share(0)
        weighing[sender].sent(0, share)
        x[receiver] += weighing[receiver].weight(Header(weight=share), 0) * (x[sender] - x[receiver])
        values.append(x.copy())
        masses.append(np.array([each.mass[0] for each in weighing]))
    return np.array(values), np.array(masses)


def train(name: str, steps: int = 300, size: int = 16) -> np.ndarray:
    """Return the consensus distance of D-PSGD's replicas before the first step and after each, (steps + 1,).

    All replicas minimise |x - 1|^2 / 2 with noisy gradients. eta is 0.1 for the first half of the steps, then 0.02.
    """
    random, graph = np.random.default_rng(1), build(name, size)
    x, distances = np.ones((size, 200)), [0.0]
    for step in range(steps):
        eta = 0.1 if step < steps // 2 else 0.02
        gradient = (x - 1) + random.standard_normal(x.shape)
        x = graph.mix(x - eta * gradient, step)
        distances.append(consensus_distance(x))
    return np.array(distances)


def springs(replicas: int, steps: int = 3, pull: float = 0.3) -> np.ndarray:
    """Return the values of P replicas and, in the last column, of their center, (steps + 1, P + 1).

    In each step, springs pull all replicas and the center, which starts at 0. There are no gradients.
    """
    x, c = np.linspace(0.5, 1.5, replicas), 0.0
    values = [[*x, c]]
    for _ in range(steps):
        d = pull * (x - c)
        x, c = x - d, c + d.sum()
        values.append([*x, c])
    return np.array(values)


# -- pictures ----------------------------------------------------------------------------------------------------------


def replicas() -> str:
    """Draw four replicas over three steps of D-PSGD. The topology determines the arrows between them."""
    graph, steps = build("one-peer-exponential", 4), 3
    height, width, first, left = 58, 236, 76, 150

    def places(rank: int, step: int) -> tuple[float, float, float]:
        """Return three coordinates of a step: y of the replica, x where its gradient ends, x where its mixing ends."""
        return first + height * rank, left + width * step + 104, left + width * step + 196

    parts = [text(24, 30, "four replicas, one model, no center", 13, font_weight=600)]
    parts += [text(300, 30, "each has its own weights θ (theta), its own images and its own cores", 12, GREY)]
    for rank in range(4):
        y, _, end = places(rank, steps - 1)
        parts += [line([(left - 40, y), (end + 42, y)], GREY, 1), text(24, y + 4, f"replica {rank}", 12)]
        parts += [circle(left - 40, y, 15, INK), text(left - 40, y + 4, "θ", 13, WHITE, "middle")]
        parts += [circle(end + 44, y, 15, INK), text(end + 44, y + 4, "θ", 13, WHITE, "middle")]
    for step in range(steps):
        for rank in range(4):
            y, computed, mixed = places(rank, step)
            for peer in graph.targets(rank, step):
                to, _, _ = places(peer, step)
                towards = 13 if to > y else -13
                parts.append(arrow([(computed, y), (mixed, to - towards)], RED))
        for rank in range(4):
            y, computed, mixed = places(rank, step)
            parts += [rectangle(computed - 92, y - 14, 92, 28, PALE, rx=4, stroke=BLUE)]
            parts += [text(computed - 46, y + 4, "gradient, update", 10, INK, "middle")]
            parts += [circle(mixed, y, 12, WHITE, stroke=RED, stroke_width=1.5)]
            parts += [text(mixed, y + 4, "mix", 10, RED, "middle")]
    bottom = first + 4 * height - 10
    parts += [arrow([(left - 40, bottom), (left + width * steps + 6, bottom)], GREY, 1)]
    parts += [text(left + width * steps + 12, bottom + 4, "time", 12, GREY)]
    for step in range(steps):
        parts.append(text(left + width * step + 12, bottom + 20, f"step {step + 1}", 12, GREY))
    words = "a copy of θ goes to another replica, which averages it with its own; in the next step, to yet another"
    parts += [arrow([(left - 40, bottom + 42), (left - 8, bottom + 42)], RED), text(left, bottom + 46, words, 12, GREY)]
    parts += [text(left + width * steps + 30, bottom - 90, "their average", 12)]
    parts += [text(left + width * steps + 30, bottom - 74, "is the result", 12)]
    return page(980, bottom + 62, "Four replicas train one model and exchange their weights without a center", *parts)


def mixing() -> str:
    """Draw the values of replicas, round by round, on three topologies."""
    reads = {"ring": "reads from 2 others per round", "exponential": "reads from 3 others per round",
             "one-peer-exponential": "reads from 1 other per round"}  # fmt: skip
    parts = []
    for number, (name, below) in enumerate(reads.items()):
        values = mix(name)
        plot = Plot(50 + 290 * number, 60, 240, 170, (0, len(values) - 1), (0.5, 8.5))
        parts += [plot.axes(name, below, "round", range(0, 9, 2), range(1, 9)), plot.level(values[0].mean())]
        parts += [plot.curve(column, colour) for column, colour in zip(values.T, COLOURS, strict=True)]
    return page(900, 282, "Mixing round by round: the values of eight replicas approach their average (dashed)", *parts)


def push_sum() -> str:
    """Draw three plots: the values of gossip without mass, the values with mass, and the masses."""
    plain, _ = gossip(Half)
    values, masses = gossip(Mass)
    steps = len(values) - 1
    parts = []
    for number, (title, below, found) in enumerate([
        ("without mass", "all agree, but not on the average", plain),
        ("with mass (push-sum)", "all agree on the average", values),
        ("the masses", "each message moves mass; the sum stays 5", masses),
    ]):  # fmt: skip
        plot = Plot(50 + 290 * number, 60, 240, 170, (0, steps), (0, 4))
        parts += [plot.axes(title, below, "messages", range(0, steps + 1, 20), range(5))]
        parts += [plot.level(values[0].mean())] if found is not masses else []
        parts += [plot.curve(column, colour) for column, colour in zip(found.T, COLOURS, strict=False)]
    return page(900, 282, "Five replicas send their values to random others; the dashed line is the average", *parts)


def consensus() -> str:
    """Draw the consensus distance during training on four topologies."""
    names = {"ring": BLUE, "torus": GREEN, "one-peer-exponential": RED, "complete": INK}
    plot = Plot(70, 60, 560, 200, (0, 300), (0, 0.12))
    below = "16 replicas; eta = 0.1 up to the dashed line, then 0.02"
    parts = [plot.axes("consensus distance while training with D-PSGD", below, "step", range(0, 301, 50),
                       [0, 0.03, 0.06, 0.09, 0.12])]  # fmt: skip
    parts.append(line([plot.at(150, 0), plot.at(150, 0.12)], INK, 1, stroke_dasharray="5 4"))
    for row, (name, colour) in enumerate(names.items()):
        parts += [plot.curve(train(name), colour), line([(655, 80 + 24 * row), (685, 80 + 24 * row)], colour, 2)]
        parts += [text(693, 84 + 24 * row, name, 12)]
    return page(900, 312, "Consensus distance over time: it depends on the topology and on eta", *parts)


def elastic() -> str:
    """Draw replicas and their center, step by step: the same rho with 2, 4 and 8 replicas."""
    words = {2: "the center follows", 4: "the center swings", 8: "the center jumps farther and farther"}
    parts = []
    for number, (replicas, below) in enumerate(words.items()):
        values = springs(replicas)
        plot = Plot(50 + 290 * number, 60, 240, 170, (0, len(values) - 1), (-2, 6))
        parts.append(plot.axes(f"{replicas} replicas", below, "step", range(len(values)), range(-2, 7, 2)))
        parts += [plot.curve(column, BLUE) for column in values.T[:-1]]
        parts.append(plot.curve(values.T[-1], RED, 2.5))
    title = "Replicas (blue) and center (red) with a = 0.3: stable with 2 and 4 replicas, but not with 8"
    return page(900, 282, title, *parts)


PICTURES: dict[str, Callable[[], str]] = {
    "replicas.svg": replicas,
    "mixing.svg": mixing,
    "push-sum.svg": push_sum,
    "consensus-distance.svg": consensus,
    "elastic.svg": elastic,
}


def main() -> None:
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
