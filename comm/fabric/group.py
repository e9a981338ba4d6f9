r"""Collectives: operations in which all ranks of a group take part, such as the sum of their vectors.

The ranks of a group form a tree. Within a node it is a binary tree by position in the list of the node's ranks. The
first rank of each node is its head. The heads form a second binary tree, by position in the list of nodes. So a link
between two nodes is crossed once upward and once downward. This is the tree of ranks 0 to 9 on three nodes:

     node A    0 ................ 5    node B        ___  within a node
              / \ .              / \                 ...  between nodes
             1   2  .           6   7
            / \       .
           3   4        . 8    node C                Sums move up; the one at rank 0 is
                          |                          (((own + 1) + 2) + 5) + 8.
                          9                          The result moves down.

Vectors move in chunks, so that one chunk moves up while an earlier one moves down. The size of the chunks does not
change the result.

The head of a node with two children in the tree of heads sends three vectors to other nodes. So for long vectors and
more than two nodes, the heads exchange in another way (Thakur et al. 2005). Head i adds up the i-th share of the
vectors of all heads (reduce-scatter), and sends the sum to all others (all-gather). Each of N nodes then sends
2 (N - 1) / N vectors.

The bits of a sum depend on how the ranks are grouped into nodes, because the order of the additions does. They do not
depend on the transport. For three or more nodes, they also depend on the length of the vector.

On request, a sum moves along a ring instead (Patarasu, Yuan 2009): each rank sends only to the next one, 2 (P - 1) / P
vectors. So no rank sends more than any other. Share s of the sum begins at rank s and collects the vectors of the ranks
after it; then the shares of the sum go round in the same way. Its bits depend only on the order of the ranks.

     share 0    rank 0 ── x_0 ──> rank 1 ── x_0 + x_1 ──> rank 2: x_0 + x_1 + x_2 ──> rank 0 ──> rank 1

Vectors may be sent as codes (wire.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import zip_longest
from typing import NamedTuple, TypeVar

import numpy as np

from minidl.comm.fabric.wire import EXACT, Wire
from minidl.comm.transport.base import Transport
from minidl.comm.transport.messages import CHUNK, Channel, Header, Message, PeerLost
from minidl.errors import ConfigError

SHORTEST_CHUNK, CHUNKS = 1 << 15, 8  # between nodes: bytes of the shortest chunks; chunks that a vector has at least
SHORTEST_SHARE = 1 << 14  # bytes: heads exchange shares if each has at least this length

T = TypeVar("T")
WHAT = "a collective operation"  # what a rank waits for


class Family(NamedTuple):
    """The neighbours of a rank in a tree. parent: empty for the root. depth: the number of ancestors."""

    parent: tuple[int, ...]
    children: tuple[int, ...]
    depth: int


class Tree(NamedTuple):
    """heads: the first rank of each node. inside[rank]: within the rank's node. whole[rank]: across all nodes."""

    heads: tuple[int, ...]
    inside: dict[int, Family]
    whole: dict[int, Family]


@lru_cache(maxsize=64)
def tree(ranks: tuple[int, ...], nodes: tuple[int, ...]) -> Tree:
    """Return the tree of these ranks; its root is the first one. nodes[r]: the node of rank r."""
    members: dict[int, list[int]] = {}
    for rank in ranks:
        members.setdefault(nodes[rank], []).append(rank)
    heads = [found[0] for found in members.values()]
    across = _binary(heads)
    inside = {rank: family for found in members.values() for rank, family in _binary(found).items()}
    whole = {}
    for rank, (parent, children, depth) in inside.items():
        head = across[members[nodes[rank]][0]]
        own = head if rank in across else Family((), (), 0)
        whole[rank] = Family(parent + own.parent, children + own.children, depth + head.depth)
    return Tree(tuple(heads), inside, whole)


def _binary(ranks: Sequence[int]) -> dict[int, Family]:
    """Return the binary tree in which the rank at position i has children at positions 2i + 1 and 2i + 2."""
    return {
        rank: Family(
            (ranks[(at - 1) // 2],) if at else (), tuple(ranks[2 * at + 1 : 2 * at + 3]), (at + 1).bit_length() - 1
        )
        for at, rank in enumerate(ranks)
    }  # fmt: skip


class Group:
    """A group of ranks that compute together: `ranks`, which contain this rank, in the same order on all of them.

    All ranks of the group must call the same operations in the same order. If a rank is in several groups, it may use
    one at a time. If any rank of the group dies, those that wait in an operation other than `gather` raise PeerLost.
    Afterwards only `gather` is possible: chunks of the interrupted operation may be on their way.
    Raises ConfigError if `ranks` are not ranks of this job, or lack this one.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self.transport, self.ranks = transport, tuple(ranks)
        if transport.rank not in self.ranks or len(set(self.ranks)) < len(self.ranks):
            raise ConfigError(f"group {list(self.ranks)}: expected different ranks, among them this rank, "
                              f"{transport.rank}")  # fmt: skip
        if not set(self.ranks) <= set(range(transport.size)):
            raise ConfigError(f"group {list(self.ranks)}: expected ranks from 0 to {transport.size - 1}")
        self.tree = tree(self.ranks, transport.nodes)
        self._lost: int | None = None  # a dead rank, whose death has interrupted an operation

    # -- sums ----------------------------------------------------------------------------------------------

    def reduce(self, vector: np.ndarray, wire: Wire = EXACT, own: np.ndarray | None = None) -> None:
        """At the group's first rank: vector = the sum of the vectors of all ranks (float32 or float64).

        The vectors of the other ranks are overwritten. own: what this rank adds instead of `vector`; it stays as it is.
        """
        family = self.tree.whole[self.transport.rank]
        for part, summand in self._summands(vector, own):
            self._up(part, summand, family, wire)

    def allreduce(
        self, vector: np.ndarray, wire: Wire = EXACT, ring: bool = False, own: np.ndarray | None = None
    ) -> None:
        """vector = the sum of the vectors of all ranks (float32 or float64), with the same bits on all ranks.

        own: what this rank adds instead of `vector`; it stays as it is.
        """
        if len(self.ranks) == 1:
            if own is not None:
                vector[...] = own
            return
        if ring:
            self._go_round(vector, vector if own is None else own, wire)
            return
        summands, heads, rank = self._summands(vector, own), self.tree.heads, self.transport.rank
        parts = [part for part, _ in summands]
        if len(heads) > 2 and vector.nbytes >= SHORTEST_SHARE * len(heads):
            inside = self.tree.inside[rank]
            for part, summand in summands:
                self._up(part, summand, inside, wire)
            if rank in heads:
                self._exchange_shares(vector, wire)
            for part in parts:  # as they are: another code of the complete sum would stand for another vector
                self._down(part, inside, EXACT)
            return
        family = self.tree.whole[rank]
        # Before a rank waits for the sum of chunk c, it has sent the chunks up to c + 2 * depth to its parent. The way
        # to the root and back has 2 * depth edges, and each edge holds one message. With more chunks in flight, ranks
        # could wait for each other forever.
        ahead = 2 * family.depth
        for at in range(len(parts) + ahead):
            if at < len(parts):
                self._up(*summands[at], family, wire)
            if at >= ahead:
                self._down(parts[at - ahead], family, wire)

    def _up(self, part: np.ndarray, summand: np.ndarray, family: Family, wire: Wire) -> None:
        for child in family.children:
            with self._receive(child) as message:
                self._add(wire, message.vector, part, summand)
                summand = part
        if family.parent:
            self._send(family.parent, self._sent(wire, summand, part))
        elif summand is not part:
            part[...] = summand

    def _down(self, part: np.ndarray, family: Family, wire: Wire) -> None:
        if not family.parent:
            self._send(family.children, self._sent(wire, part, part))
        for parent in family.parent:
            with self._receive(parent) as message:
                data = self._copy(wire, message.vector, part)
            self._send(family.children, data)

    def _exchange_shares(self, vector: np.ndarray, wire: Wire) -> None:
        """At the heads: vector = the sum of the vectors of all heads, by reduce-scatter and all-gather.

        In round k, head i sends to head i + k and receives from head i - k. So the heads never wait for each other in
        a circle: a head that has made the fewest rounds finds its edges free, and its messages arrived.
        """
        heads = self.tree.heads
        at, count = heads.index(self.transport.rank), len(heads)
        others = [(at + k) % count for k in range(1, count)]
        shares = [chunks(share, CHUNK) for share in np.array_split(vector, count)]
        own = shares[at]
        rounds = range(max(map(len, shares)))
        for turn in rounds:
            for to, source in zip(others, reversed(others)):
                for part in shares[to][turn : turn + 1]:
                    self._send((heads[to],), self._sent(wire, part, part))
                for part in own[turn : turn + 1]:
                    with self._receive(heads[source]) as message:
                        self._add(wire, message.vector, part, part)
        for turn in rounds:
            for part in own[turn : turn + 1]:
                self._send([heads[to] for to in others], self._sent(wire, part, part))
            for source in reversed(others):
                for part in shares[source][turn : turn + 1]:
                    with self._receive(heads[source]) as message:
                        self._copy(wire, message.vector, part)

    def _go_round(self, vector: np.ndarray, summand: np.ndarray, wire: Wire) -> None:
        """vector = the sum of the summands of all ranks, along a ring. summand: `vector`, or another one.

        In each step, a rank sends the parts of one share to the next rank, and receives those of another one from the
        rank before it, one after the other. A rank that has made the fewest steps finds its edge free, and its message
        arrived. So the ranks never wait for each other in a circle.
        """
        at, count = self.ranks.index(self.transport.rank), len(self.ranks)
        shares, summands = ([chunks(share, CHUNK) for share in np.array_split(one, count)] for one in (vector, summand))

        def step(sent: Iterator[np.ndarray], take: Callable[..., T], *into: list[np.ndarray]) -> list[T]:
            """Send parts, and take(what was received, *parts) for each that arrives. parts: the next of each list."""
            found = []
            for data, *parts in zip_longest(sent, *into):
                if data is not None:
                    self._send((self.ranks[(at + 1) % count],), data)
                if parts[0] is not None:
                    with self._receive(self.ranks[at - 1]) as message:
                        found.append(take(message.vector, *parts))
            return found

        sent = summands[at]
        for turn in range(count - 1):
            before, here = (at - turn) % count, (at - turn - 1) % count
            data = map(partial(self._sent, wire), sent, shares[before])
            step(data, partial(self._add, wire), shares[here], summands[here])
            sent = shares[here]
        codes = [self._sent(wire, part, part) for part in sent]
        for turn in range(count - 1):
            codes = step(iter(codes), partial(self._copy, wire), shares[(at - turn) % count])

    # -- copies --------------------------------------------------------------------------------------------

    def broadcast(self, vector: np.ndarray, root: int, wire: Wire = EXACT) -> None:
        """vector = the vector of rank `root`, on all ranks."""
        if root not in self.ranks:
            raise ConfigError(f"broadcast: got root {root}; expected a rank of the group {list(self.ranks)}")
        order = (root, *[rank for rank in self.ranks if rank != root])  # root is the root of this order's tree
        family = tree(order, self.transport.nodes).whole[self.transport.rank]
        for part in self._parts(vector):
            self._down(part, family, wire)

    def barrier(self) -> None:
        """Wait until all ranks have called this function."""
        self.allreduce(np.zeros(1))

    def gather(self, vector: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Collect the vectors of all live ranks: at the first of them, yield (rank, vector) in order.

        Every rank must iterate over the result; only the first live one gets values. A yielded vector is valid until
        the next one. All vectors must have the same length. Raises PeerLost if the first one dies, or, with
        `fail_fast`, if any replica dies. In this last case some chunks may remain unread. The header of each chunk
        holds round = int(fail_fast), so a later gather without `fail_fast` discards these chunks.
        """
        transport = self.transport
        first = next(filter(transport.alive, self.ranks), self.ranks[0])
        header = Header(round=int(transport.fail_fast))
        if transport.rank != first:
            for part in chunks(vector, CHUNK):
                sent = lambda: transport.post(Channel.GATHER, (first,), (part,), header) or None  # noqa: B023, E731
                transport.wait(sent, (first,), WHAT)
            return
        alive = [rank for rank in self.ranks if transport.alive(rank)]
        yield transport.rank, vector
        received = np.empty_like(vector)
        for peer in alive[1:]:
            try:
                self._collect(peer, received, header)
            except PeerLost:
                if transport.fail_fast:
                    raise
                continue
            yield peer, received

    def mix(self, vector: np.ndarray, targets: Sequence[int], weights: Mapping[int, float]) -> np.ndarray:
        """Send a vector (n,) to the targets; return the sum of weights[r] * the vector of rank r, in this order.

        weights: of the ranks that have this rank among their targets, and of this rank.
        """
        result = np.zeros_like(vector)
        for own, out in zip(chunks(vector, CHUNK), chunks(result, CHUNK), strict=True):
            self._send(targets, own)
            for rank, weight in weights.items():
                factor = np.asarray(weight, own.dtype)
                if rank == self.transport.rank:
                    out += factor * own
                else:
                    with self._receive(rank) as message:
                        out += factor * message.vector
                        self.transport.elapse("sum", out.size)
        return result

    # -- messages of collectives ---------------------------------------------------------------------------

    def _parts(self, vector: np.ndarray) -> list[np.ndarray]:
        """Return the chunks of a vector. Between nodes they are short, so that both directions of a link are used."""
        if len(self.tree.heads) == 1:
            return chunks(vector, CHUNK)
        return chunks(vector, min(max(-(-vector.nbytes // CHUNKS), SHORTEST_CHUNK), CHUNK))

    def _summands(self, vector: np.ndarray, own: np.ndarray | None) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the chunks of a vector, each with what this rank adds to a sum: the chunk itself, or that of `own`."""
        parts = self._parts(vector)
        return list(zip(parts, parts if own is None else self._parts(own), strict=True))

    def _add(self, wire: Wire, received: np.ndarray, part: np.ndarray, summand: np.ndarray) -> None:
        """part <- summand + what was received"""
        wire.add(received, part, summand)
        self.transport.elapse("sum", part.size)

    def _sent(self, wire: Wire, summand: np.ndarray, part: np.ndarray) -> np.ndarray:
        """Return what this rank sends for a summand."""
        data = wire.sent(summand, part)
        self.transport.elapse("sum", part.size, wire.sending)
        return data

    def _copy(self, wire: Wire, received: np.ndarray, part: np.ndarray) -> np.ndarray:
        """part <- what was received. Returns what this rank sends on."""
        data = wire.copy(received, part)
        self.transport.elapse("sum", part.size, wire.copying)
        return data

    def _send(self, peers: Sequence[int], part: np.ndarray) -> None:
        if peers:
            self._wait(lambda: self.transport.post(Channel.TREE, peers, (part,), Header()) or None, peers)

    def _receive(self, peer: int) -> Message:
        return self._wait(lambda: self.transport.take(Channel.TREE, peer), (peer,))

    def _wait(self, ready: Callable[[], T | None], peers: Sequence[int]) -> T:
        """Wait until ready() returns a value. Raises PeerLost if any rank of the group dies.

        If one rank ended the operation because a neighbour has died, its other neighbours would wait forever. All later
        operations of the group fail: they would take chunks of an interrupted one for their own.
        """
        if self._lost is not None:
            raise PeerLost(self._lost, WHAT)

        def ready_or_lost() -> T | None:
            result = ready()
            if result is not None:
                return result
            lost = self.transport.lost(self.ranks)
            result = ready()  # after the look for deaths: all messages of a dead rank have arrived by now
            if result is None and lost is not None:
                raise PeerLost(lost, WHAT)
            return result

        try:
            return self.transport.wait(ready_or_lost, peers, WHAT)
        except PeerLost as lost:
            self._lost = lost.peer
            raise

    def _collect(self, peer: int, vector: np.ndarray, header: Header) -> None:
        """Receive the vector that a peer sends in `gather`."""

        def expected() -> Message | None:
            message = self.transport.take(Channel.GATHER, peer)
            if message is None or message.header.round == header.round:
                return message
            message.release()
            return None

        for part in chunks(vector, CHUNK):
            with self.transport.wait(expected, (peer,), WHAT) as message:
                part[...] = message.vector


def chunks(vector: np.ndarray, size: int) -> list[np.ndarray]:
    """Return the parts of a vector, each of at most `size` bytes. Raises ConfigError for a wrong type or shape."""
    if vector.ndim != 1 or not vector.flags.c_contiguous or vector.dtype not in (np.float32, np.float64):
        raise ConfigError(f"fabric: got {vector.dtype} {vector.shape}; expected contiguous float32 or float64 (n,)")
    step = size // vector.itemsize
    return [vector[i : i + step] for i in range(0, vector.size, step)]
