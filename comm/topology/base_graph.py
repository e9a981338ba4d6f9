"""Base-(k+1) graphs: the exact average after few rounds for ANY number of replicas, with at most k partners per round.

Takezawa, Sato, Bao, Niwa, Yamada: Beyond Exponential Graph (NeurIPS 2023, arXiv 2305.11420).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from minidl.comm.topology.graphs import Round, Row

Moves = dict[int, Row]  # the rows of one round; a replica without a row keeps its weights


def base_graph(size: int, base: int) -> list[Round]:
    """Build the Base-(k+1) graph, base = k + 1 (algorithm 3 of the paper).

    Returns the shorter of two sequences. The first is `_simple_base_graph` of all replicas. The second splits them into
    p teams of q replicas, where size = p * q and q has no divisor from 2 to base. First each team averages, all teams
    in parallel. Then, for each n < q, the n-th replicas of all teams average. This takes few rounds, because no prime
    factor of p is larger than base.
    """
    ranks = list(range(size))
    direct = _simple_base_graph(ranks, base)
    q = size
    for factor in range(2, base + 1):
        while q % factor == 0:
            q //= factor
    teams = [ranks[start : start + q] for start in range(0, size, q)]
    within = _beside([_simple_base_graph(team, base) for team in teams])
    across = _beside([_hyper_hypercube([team[place] for team in teams], base) for place in range(q)])
    shortest = min(direct, within + across, key=len) or [{}]  # a single replica: one round without moves
    return [[moves.get(i) or {i: 1.0} for i in ranks] for moves in shortest]


def _simple_base_graph(members: Sequence[int], base: int) -> list[Moves]:
    """Build the Simple Base-(k+1) graph (algorithm 2) from the digits of the number of members, written in `base`.

    A digit d > 0 at position n defines a PART, which consists of d BLOCKS with base^n members each. In base 3, 14 is
    112: the parts are one block of 9 members, one block of 3 members, and two blocks of 1 member.

    1. Each part averages, all parts in parallel. Then the members of a part hold equal vectors.
    2. All parts except the largest form the REST. The rest is smaller than a block of the largest part. In one
       round each member of the rest exchanges with one member of every block of the largest part. The weight of each
       exchange is (size of a block) / (size of the largest part + size of the rest). This weight makes the mean of
       every block and the mean of the rest equal to the mean of all members.
    3. Then each block of the largest part averages. At the same time the rest repeats step 2 for its own largest part,
       and so on. At the end all members hold the mean of all members.
    """
    parts: list[list[Sequence[int]]] = []  # the blocks of each part, the largest part first
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
    """Build the hyper-hypercube (algorithm 1), in which the members average.

    len(members) must be a product of factors from 2 to `base`. Each member's index is written with one digit per factor
    (a mixed radix). In the round of a digit, members whose indices differ only in this digit average.
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
    """Merge sequences of rounds so that they run in parallel. In each round they must concern different members."""
    length = max(map(len, sequences), default=0)
    rounds: list[Moves] = [{} for _ in range(length)]
    for sequence in sequences:
        for moves, added in zip(rounds, sequence):
            moves |= added
    return rounds
