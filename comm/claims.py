"""The ledger of a run whose work is claimed: which piece (a batch) is trained by which replica.

All replicas share a table of int64 words. Pieces are numbered 0, 1, 2, ... over the whole run.

    HEAD        the number of pieces handed out, and the slot of the last one
    REPEATED    the number of pieces that were begun, not settled, and handed out again
    slots       DEPTH for each rank. A slot names a piece, and the rank that holds it

    claim       a FREE piece, or one of a dead rank, if there is any: the slot gets this rank. Else a new piece:
                HEAD, n -> n + 1, and the slot of this rank named there gets piece n
    begin       the rank trains the piece now: if it dies, the piece counts as repeated
    settle      the slot gets SETTLED. Refused if the rank does not hold the piece any more
    give_back   the rank's pieces become FREE, and do not count as repeated
    revoke      the same for a suspected rank. Pieces that it had begun count as repeated

Each change is one compare-and-swap, so a process may be killed between any two instructions, and no process waits for
another. A process that was killed between the two changes of a new claim leaves a slot that HEAD names, and which lacks
its piece. The next process that claims completes it. The piece in a slot only grows, so a process that was suspended
cannot complete an old claim a second time.

The same functions serve all transports. Processes of one node call them on shared memory. Under MPI, ranks of other
nodes send their requests to a rank of the node with the table, whose progress engine calls them (remote_claims.py). In
a simulation the table is an ordinary array.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy import ndarray

from minidl.comm.atomic import DEAD, load_ordered
from minidl.engine.jit import jit

DEPTH = 4  # slots of a rank, at least 1 + Claims.ahead. Others may still train pieces in them that it gave back
HEAD, REPEATED, FIRST = 0, 8, 16  # words of the table; HEAD and REPEATED have separate cache lines
FIELD = 24  # a word of a slot is (piece + 1) << FIELD | BEGUN or 0 | holder; HEAD is pieces << FIELD | slot
BEGUN = 1 << 20
HOLDER = BEGUN - 1  # mask
FREE, SETTLED = 0, HOLDER  # values of a holder; the others are 1 + a rank
WAIT, OVER = -1, -2  # instead of a ticket: no piece is free now; all pieces are settled


def words(ranks: int) -> int:
    """Return the length of the table for this number of ranks."""
    return FIRST + DEPTH * ranks


@intrinsic
def compare_and_swap(typing: Any, table: Any, i: Any, old: Any, new: Any) -> Any:
    """If table[i] equals `old`, replace it by `new`. Returns whether it was replaced."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        place = builder.gep(array.data, [arguments[1]])
        pointer = builder.bitcast(place, ir.IntType(64).as_pointer())
        return builder.extract_value(builder.cmpxchg(pointer, arguments[2], arguments[3], "seq_cst", "seq_cst"), 1)

    return types.boolean(table, types.intp, types.int64, types.int64), generate


@jit
def claim(table: ndarray, states: ndarray, rank: int, total: int) -> int:
    """Claim a piece of `total` for a rank. Returns a ticket (piece << FIELD | slot), WAIT or OVER.

    states (ranks,): the State of each rank.
    """
    while True:
        head = load_ordered(table, HEAD)
        complete(table, head)
        unsettled, own = False, -1
        for slot in range(FIRST, len(table)):
            word = load_ordered(table, slot)
            holder = word & HOLDER
            if word == 0 or holder == SETTLED:
                if own < 0 and (slot - FIRST) // DEPTH == rank:
                    own = slot
                continue
            unsettled = True
            if holder == FREE or states[holder - 1] == DEAD:
                piece = word >> FIELD
                if compare_and_swap(table, slot, word, piece << FIELD | rank + 1):
                    if word & BEGUN:
                        count(table)
                    return ((piece - 1) << FIELD) | slot
        done = head >> FIELD
        if done >= total:
            return WAIT if unsettled else OVER
        if own < 0:
            return WAIT  # other ranks still train the pieces in this rank's slots
        if compare_and_swap(table, HEAD, head, (done + 1) << FIELD | own):
            complete(table, (done + 1) << FIELD | own)
            return (done << FIELD) | own


@jit
def complete(table: ndarray, head: int) -> None:
    """Write the last piece that was handed out into its slot, unless the slot contains it or a later piece."""
    pieces, slot = head >> FIELD, head & ((1 << FIELD) - 1)
    if pieces:
        word = load_ordered(table, slot)
        if word >> FIELD < pieces:  # a slot contains piece + 1
            compare_and_swap(table, slot, word, pieces << FIELD | (slot - FIRST) // DEPTH + 1)


@jit
def change(table: ndarray, ticket: int, rank: int, holder: int) -> bool:
    """Write a new holder for a piece. Returns False if the rank does not hold the piece any more."""
    piece, slot = (ticket >> FIELD) + 1, ticket & ((1 << FIELD) - 1)
    word = load_ordered(table, slot)
    if word >> FIELD != piece or word & HOLDER != rank + 1:
        return False
    return compare_and_swap(table, slot, word, piece << FIELD | holder)


@jit
def release(table: ndarray, rank: int, repeated: bool) -> None:
    """Take all pieces from a rank. repeated: count those that it had begun."""
    complete(table, load_ordered(table, HEAD))
    for slot in range(FIRST, len(table)):
        word = load_ordered(table, slot)
        if (
            word & HOLDER == rank + 1
            and compare_and_swap(table, slot, word, word >> FIELD << FIELD | FREE)
            and repeated
            and word & BEGUN
        ):
            count(table)


@jit
def swap(words: ndarray, i: int, old: int, new: int) -> bool:
    """If words[i] equals `old`, replace it by `new`. Returns whether it was replaced."""
    return compare_and_swap(words, i, old, new)


@jit
def count(table: ndarray) -> None:
    """Count a repeated piece."""
    while True:
        before = load_ordered(table, REPEATED)
        if compare_and_swap(table, REPEATED, before, before + 1):
            return


def piece_of(ticket: int) -> int:
    """Return the number of the claimed piece."""
    return ticket >> FIELD


class Claims(ABC):
    """The claims of one rank.

    ahead: how many pieces to claim beyond the present one. patience: seconds after which to ask again, if the answer to
    a request was WAIT.
    """

    ahead = 1
    patience = 0.0

    @abstractmethod
    def request(self, total: int, answer: Callable[[int], None]) -> None:
        """Claim one of `total` pieces. `answer` is called with a ticket, WAIT or OVER; perhaps in another thread.

        Requests are answered in their order.
        """

    @abstractmethod
    def begin(self, ticket: int) -> bool:
        """Note that this rank trains the piece now. Returns False if the rank does not hold the piece any more."""

    @abstractmethod
    def settle(self, ticket: int) -> bool:
        """Note that this rank has trained the piece. Returns False if the rank does not hold the piece any more."""

    def refused(self) -> list[int]:
        """Return the tickets of settlements that were refused after `settle` had returned True, each of them once.

        A refusal arrives before the answer to the next request.
        """
        return []

    @abstractmethod
    def give_back(self) -> None:
        """Give back all pieces of this rank that are not settled."""

    def revoke(self, rank: int) -> None:
        """Take the pieces of a suspected rank. Its late settlements are refused. Only ranks with the table do this."""

    def state(self) -> tuple[int, list[int]] | None:
        """Return the number of pieces handed out, and those of them that are not settled. None: unknown here."""
        return None

    @property
    def repeated(self) -> int:
        """The number of pieces that were begun, not settled, and handed out again."""
        return 0


class Ledger(Claims):
    """The claims of a rank that has the table in its memory. table: int64 (words(ranks),). states: float64 (ranks,)."""

    def __init__(self, table: np.ndarray, states: np.ndarray, rank: int) -> None:
        self.table, self.states, self.rank = table, states, rank

    def request(self, total: int, answer: Callable[[int], None]) -> None:
        answer(claim(self.table, self.states, self.rank, total))

    def begin(self, ticket: int) -> bool:
        return bool(change(self.table, ticket, self.rank, BEGUN | self.rank + 1))

    def settle(self, ticket: int) -> bool:
        return bool(change(self.table, ticket, self.rank, SETTLED))

    def give_back(self) -> None:
        release(self.table, self.rank, False)

    def revoke(self, rank: int) -> None:
        release(self.table, rank, True)

    def state(self) -> tuple[int, list[int]] | None:
        head = int(self.table[HEAD])
        complete(self.table, head)
        slots = self.table[FIRST:].copy()
        pieces = (slots >> FIELD) - 1
        left = pieces[(slots != 0) & (slots & HOLDER != SETTLED) & (pieces < head >> FIELD)]
        return head >> FIELD, sorted(left.tolist())

    @property
    def repeated(self) -> int:
        return int(self.table[REPEATED])


def prepare(ranks: int) -> None:
    """Compile the functions of this file for a job of `ranks` ranks, so that no step compiles them."""
    states = np.zeros((ranks, 2))[:, 0]  # a column, as of the status table: other code than for a contiguous array
    one = Ledger(np.zeros(words(ranks), np.int64), states, 0)
    tickets: list[int] = []
    one.request(1, tickets.append)
    one.begin(tickets[0])
    one.give_back()
    swap(one.table, 0, 0, 0)
