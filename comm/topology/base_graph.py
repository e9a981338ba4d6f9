"""Base-(k+1) graphs: the exact average after few rounds for ANY number of replicas, with at most k partners per round.

Takezawa, Sato, Bao, Niwa, Yamada: Beyond Exponential Graph (NeurIPS 2023, arXiv 2305.11420).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from minidl.comm.topology.graphs import Round, Row

Moves = dict[int, Row]  # the rows of one round, without those of replicas that keep their weights


def base_graph(size: int, base: int) -> list[Round]:
    """Build the Base-(k+1) graph, base = k + 1 (algorithm 3 of the paper).

    There are two ways, and the function takes the shorter sequence. The direct way is `_simple_base_graph`. The other
    one needs size = p q with p a product of factors up to base. First p teams of q replicas find their averages in
    parallel. Then the replicas at the same place of each team average, in few rounds because p has small factors.
    """
    everybody = list(range(size))
    direct = _simple_base_graph(everybody, base)
    q = size
    for factor in range(2, base + 1):
        while q % factor == 0:
            q //= factor
    teams = [everybody[start : start + q] for start in range(0, size, q)]
    within = _beside([_simple_base_graph(team, base) for team in teams])
    across = _beside([_hyper_hypercube([team[place] for team in teams], base) for place in range(q)])
    shortest = min(direct, within + across, key=len) or [{}]  # a single replica: one round without moves
    return [[moves.get(i) or {i: 1.0} for i in everybody] for moves in shortest]


def _simple_base_graph(members: Sequence[int], base: int) -> list[Moves]:
    """Build the Simple Base-(k+1) graph (algorithm 2): write the number of members in digits of `base`.

    1. Digit a of base^power gives a part of a blocks with base^power members each. All parts find their averages, in
       parallel.
    2. The largest part averages with the rest: each member of the rest exchanges with one member of every block. The
       weight is such that every block, and the rest as a whole, then has exactly the average of all. (The rest is
       smaller than a block, as the digits of a number are.) The members of each part of the rest still hold equal
       weights, so the rest repeats step 2 by itself.
    3. Meanwhile each block of the large part averages among its base^power members, which takes `power` rounds.
    """
    parts: list[list[Sequence[int]]] = []  # parts[l]: its blocks
    rest, block = list(members), 1
    while block * base <= len(rest):
        block *= base
    while rest:
        count = len(rest) // block
        if count:
            parts.append([rest[n * block : (n + 1) * block] for n in range(count)])
        rest, block = rest[count * block :], block // base
    rounds = _beside([_hyper_hypercube([i for block in part for i in block], base) for part in parts])
    start = len(rounds)
    rest = list(members)
    for step, part in enumerate(parts[:-1]):
        total, count = len(rest), len(part)
        rest = rest[count * len(part[0]) :]
        weight = len(part[0]) / total
        meeting: Moves = {}
        for place, i in enumerate(rest):
            partners = [block[place] for block in part]
            meeting[i] = dict(sorted({i: 1 - count * weight, **dict.fromkeys(partners, weight)}.items()))
            meeting |= {j: dict(sorted({i: weight, j: 1 - weight}.items())) for j in partners}
        later = [meeting, *_beside([_hyper_hypercube(block, base) for block in part])]
        rounds = _beside([rounds, [{}] * (start + step) + later])
    return rounds


def _hyper_hypercube(members: Sequence[int], base: int) -> list[Moves]:
    """Build the hyper-hypercube (algorithm 1): number the members with one digit per factor of their count.

    In each round, the members that differ only in that round's digit average.
    """
    rounds, stride = [], 1
    for factor in _factors(len(members), base) or ():
        moves: Moves = {}
        for first in range(len(members)):
            if first // stride % factor == 0:
                group = members[first : first + stride * factor : stride]
                moves |= dict.fromkeys(group, dict.fromkeys(sorted(group), 1 / factor))
        rounds.append(moves)
        stride *= factor
    return rounds


@cache
def _factors(n: int, largest: int) -> tuple[int, ...] | None:
    """Return the fewest factors from 2 to `largest` whose product is n, or None if there are none."""
    if n == 1:
        return ()
    found = [(*rest, f) for f in range(2, min(n, largest) + 1) if n % f == 0
             if (rest := _factors(n // f, largest)) is not None]  # fmt: skip
    return min(found, key=len, default=None)


def _beside(sequences: Sequence[list[Moves]]) -> list[Moves]:
    """Combine sequences over disjoint members into one that runs them in parallel."""
    length = max(map(len, sequences), default=0)
    rounds: list[Moves] = [{} for _ in range(length)]
    for sequence in sequences:
        for moves, added in zip(rounds, sequence):
            moves |= added
    return rounds
