"""The command line `python -m minidl.topology ring 8`: which replica reads from which, as a table and a picture."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from minidl.errors import ConfigError, printable
from minidl.resources import MOST_RANKS
from minidl.run.config import ONE_OR_MORE, SEED
from minidl.run.help import Command, run_plain
from minidl.run.options import Limits, option, options, parse, plain_number, unmet

DESCRIPTION = "Print and draw a topology: which replica reads from which in each round, and how fast all agree."
EXAMPLES = """
NAME: ring, torus, torus:RxC, complete, star, hypercube, exponential,
one-peer-exponential, base-K, matching, uniform, hierarchical, file:PATH (an edge
list, or NetworkX's node-link .json or .graphml). REPLICAS: how many.

examples:
  python -m minidl.topology ring 8
  python -m minidl.topology base-2 6 --out base.svg
  python -m minidl.topology hierarchical 8 --nodes 2
  python -m minidl.topology file:cluster.txt
"""
FORMATS = (".png", ".svg", ".pdf")
MOST_ROWS = 16  # printed per round; also the maximum number of ranks in a list
MOST_ROUNDS = 24  # printed
RANDOM_ROUNDS = 3  # printed if every round is random

PICTURE = Limits("ending in " + ", ".join(FORMATS), lambda p: not p or Path(p).suffix.lower() in FORMATS)


@dataclass(frozen=True)
class Options:
    out: str = option(
        "", "the file of the picture, .png, .svg or .pdf (default: NAME-REPLICAS.png)", group="options", limits=PICTURE
    )
    nodes: int = option(
        2, "machines among which hierarchical divides the replicas", group="options", limits=ONE_OR_MORE,
        used_with={"NAME": ("hierarchical",)},
    )  # fmt: skip
    seed: int = option(0, "seed of the random rounds of matching and uniform", group="options", limits=SEED,
                       used_with={"NAME": ("matching", "uniform")})


COMMAND = Command("python -m minidl.topology NAME REPLICAS [options]", Options, DESCRIPTION, EXAMPLES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, 2 for an error, 130 if interrupted."""
    return run_plain(COMMAND, _run, argv, "use fewer replicas")


def _arguments(argv: list[str]) -> tuple[str, int, dict[str, Any]]:
    """Return NAME, REPLICAS (0 if a graph file determines it) and the options. Raises ConfigError if one is wrong."""
    words: list[str] = []
    while argv and not re.match("-+[a-z]", argv[0]):
        words.append(argv.pop(0))
    given = parse(Options, argv)
    if len(words) == 1 and words[0].startswith("file:"):
        words.append("0")
    if len(words) != 2:
        raise ConfigError("expected a topology and a number of replicas, such as python -m minidl.topology ring 8")
    for name in given:
        entry = options(Options)[name]
        if reason := unmet(entry, {"NAME": words[0]}, entry.used_with):
            raise ConfigError(reason)
    try:
        return words[0], int(plain_number(words[1], int)), given
    except ValueError:
        raise ConfigError(f"expected a number of replicas, such as 8, got {words[1]!r}") from None


def _run(words: list[str]) -> None:
    name, size, given = _arguments(words)
    chosen = Options(**given)
    from minidl.comm.topology import build  # slow: imports NumPy
    from minidl.comm.topology.picture import MOST_REPLICAS, draw

    nodes = [rank * chosen.nodes // size for rank in range(min(size, MOST_RANKS))] if name == "hierarchical" else []
    topology = build(name, size, seed=chosen.seed, nodes=nodes)
    lines = list(table(topology))
    path = chosen.out or _file_name(name, topology.size)
    if topology.size > MOST_REPLICAS:
        lines.append(f"no picture: {topology.size} replicas are too many to draw, at most {MOST_REPLICAS}")
    else:
        try:
            draw(topology, path)
            lines.append(f"picture            {printable(path)}")
        except ImportError:
            lines.append("no picture: it needs Matplotlib, pip install 'minidl[report]'")
        except OSError as error:
            raise ConfigError(f"cannot write the picture {path}: {error.strerror}: give another --out") from None
    print("\n".join(lines))


def _file_name(name: str, size: int) -> str:
    word = Path(name.removeprefix("file:")).stem if name.startswith("file:") else name
    return re.sub("[^A-Za-z0-9._-]+", "-", word).strip("-.") + f"-{size}.png"


# The table.


def table(topology: Any) -> Iterator[str]:
    """Yield the lines of the table of a `Topology`."""
    rounds = min(topology.period or RANDOM_ROUNDS, MOST_ROUNDS)
    most = 0
    yield f"{topology.name}, {topology.size} replica" + "s" * (topology.size != 1)
    for round in range(rounds):
        read, sent = topology.live(round).reads(), topology.live(round).readers()
        most = max(most, read.max())
        yield ""
        yield (f"round {round}: {read.sum():,} messages of one vector; one replica sends at most {sent.max()}, "
               f"receives at most {read.max()}")  # fmt: skip
        rows = _same_rows(topology, round)
        for ranks, row in rows[:MOST_ROWS]:
            yield f"  {_ranks(ranks):>5} <- {_sum(row)}" if row else f"  {_ranks(ranks)} unchanged"
        if len(rows) > MOST_ROWS:
            yield f"  ... and {len(rows) - MOST_ROWS} more rows"
    yield ""
    if topology.period > rounds:
        yield f"... and {topology.period - rounds} more rounds"
    for round in range(rounds, topology.period):
        most = max(most, topology.live(round).reads().max())
    one = topology.period == 1 and topology.symmetric  # each replica reads from its partners in every round
    partners = most if one else max(len(topology.neighbours(rank)) for rank in topology.alive)
    yield "period             " + (f"{topology.period} round" + "s" * (topology.period > 1) if topology.period
                                   else "none: each round is random")  # fmt: skip
    yield f"degree             {most} in a round, {partners} in all"
    yield "exact average      " + (f"after {topology.exact_after} round" + "s" * (topology.exact_after > 1)
                                   if topology.exact_after else "never")  # fmt: skip
    yield "average is kept    " + ("always: columns sum to 1" if topology.doubly else "no: columns do not sum to 1")
    yield f"spectral gap       {topology.spectral_gap():.4g}"
    closer = topology.rounds_to_shrink(1000)
    yield "1000 times closer  " + (
        f"after {closer:,} round" + "s" * (closer != 1) if closer or topology.size == 1 else "not reached"
    )


def _same_rows(topology: Any, round: int) -> list[tuple[list[int], dict[int, float]]]:
    """Return (ranks, row) for each distinct row of weights. The last row, {}, has the ranks that read from no other."""
    found: dict[tuple[Any, ...], tuple[list[int], dict[int, float]]] = {}
    idle: list[int] = []
    for rank in topology.alive:
        row = topology.weights(rank, round)
        if len(row) == 1:
            idle.append(rank)
        else:
            found.setdefault((id(row),) if len(row) > 64 else tuple(row.items()), ([], row))[0].append(rank)
    return [*found.values(), *([(idle, {})] if idle else [])]


def _sum(row: dict[int, float]) -> str:
    """Format a row as a sum, such as "2/3 of 0 + 1/6 of 1, 2"."""
    shares: dict[str, list[int]] = {}
    for source, weight in row.items():
        if weight:
            shares.setdefault(_weight(weight), []).append(source)
    return " + ".join(f"{weight} of {_ranks(sources)}" for weight, sources in shares.items())


def _ranks(ranks: list[int]) -> str:
    """Format ranks, such as "0, 1, 7". If there are many, give the first ones and the total number."""
    return ", ".join(map(str, ranks[:MOST_ROWS])) + (f", ... ({len(ranks)} in all)" if len(ranks) > MOST_ROWS else "")


def _weight(weight: float) -> str:
    """Format a weight as a fraction, such as 1/3, if a denominator below 100 is exact; else as a decimal."""
    fraction = Fraction(weight).limit_denominator(99)
    return str(fraction) if abs(float(fraction) - weight) < 1e-12 else f"{weight:.4f}"


if __name__ == "__main__":
    sys.exit(main())
