"""The claims of a rank that is on another node than the ledger (claims.py).

    rank                                                  keeper: a rank on the node of the ledger
      kind, number, value   ---------- CLAIM ---------->    serve() changes the ledger
      number, ticket        <--------- CLAIMED ---------    replies to a claim, and to a settlement that it refuses

Requests and replies arrive in order. The rank does not wait for replies: it claims several pieces ahead, because a
reply may take longer than a step.

If the keeper dies or is frozen, another rank of its node becomes the keeper (`renew`). Some requests and replies are
lost then, or late. The rank lists the pieces that it holds for the new keeper, which frees all others of this rank.
Then the rank sends again all requests that it made after the last one that was certainly carried out: a reply shows
that all requests before it were. If no rank of that node is left, the ledger is lost, and the claims of the others end
with PeerLost.

Requests and replies begin with a generation, which grows when the keeper changes. A keeper that wakes ignores requests
of earlier generations: the ranks of its node share the memory in which the newest one of each rank stands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from minidl.comm.claims import FIELD, FIRST, FREE, HOLDER, SETTLED, WAIT, Claims, Ledger, change, claim
from minidl.comm.transport.messages import PeerLost

CLAIM, BEGIN, SETTLE, SETTLE_AGAIN, GIVE_BACK, HOLD, STATE = range(7)  # kinds of requests
REFUSED = 0  # in a reply, instead of the number of a claim: a settlement was refused
GENERATIONS = 1 << 32  # of a join: those of another join differ


def serve(ledger: Ledger, newest: np.ndarray, rank: int, request: np.ndarray) -> np.ndarray | None:
    """Carry out a request of another rank: int64 (generation, kind, number, value). Returns the reply, or None.

    newest: int64 (ranks,), the newest generation of each rank. HOLD has no number; the values are the tickets of all
    pieces that the rank holds.
    """
    generation, kind, number, *values = request.tolist()
    if newest[rank] > generation:
        return None
    newest[rank] = generation
    reply = _carry_out(ledger, rank, kind, number, values)
    if newest[rank] != generation:  # this process was suspended meanwhile, and the request was sent to another keeper
        if reply and kind == CLAIM:
            change(ledger.table, reply[1], rank, FREE)
        return None
    return np.array([generation, *reply]) if reply else None


def _carry_out(ledger: Ledger, rank: int, kind: int, number: int, values: list[int]) -> list[int]:
    """Carry out a request. Returns the reply without its generation, or []."""
    other = Ledger(ledger.table, ledger.states, rank)
    if kind == CLAIM:
        return [number, claim(ledger.table, ledger.states, rank, values[0])]
    if kind == STATE:
        head, left = ledger.state() or (0, [])
        return [number, head, ledger.repeated, *left]
    if kind == BEGIN:
        other.begin(values[0])
    elif kind == GIVE_BACK:
        other.give_back()
    elif kind == HOLD:
        _free_others(ledger.table, rank, values)
    elif not other.settle(values[0]) and not (kind == SETTLE_AGAIN and _is_settled(ledger.table, values[0])):
        return [REFUSED, values[0]]
    return []


def _is_settled(table: np.ndarray, ticket: int) -> bool:
    """Return whether a piece is settled. The rank's slot may hold a later piece: then this one is, too."""
    word = int(table[ticket & ((1 << FIELD) - 1)])
    return word >> FIELD > (ticket >> FIELD) + 1 or word & HOLDER == SETTLED


def _free_others(table: np.ndarray, rank: int, tickets: list[int]) -> None:
    """Free the pieces of a rank that are not among these tickets: it does not know that it holds them."""
    Ledger(table, np.zeros(0), rank).state()  # completes a claim that was cut short
    for slot in range(FIRST, len(table)):
        word = int(table[slot])
        ticket = (word >> FIELD) - 1 << FIELD | slot
        if word & HOLDER == rank + 1 and ticket not in tickets:
            change(table, ticket, rank, FREE)


class RemoteClaims(Claims):
    """send: sends a request to the present keeper. wait: `Transport.wait`. generation: of the first requests."""

    ahead = 3
    patience = 1e-3

    def __init__(self, send: Callable[[np.ndarray], None], wait: Callable[..., Any], generation: int = 0) -> None:
        self._send_to_keeper, self._wait, self._generation = send, wait, generation
        self._lock = threading.Lock()  # the progress engine's thread calls `reply` and `renew`
        self._number = 0
        self._lost: PeerLost | None = None  # set if the ledger is lost
        self._answers: dict[int, Callable[..., object]] = {}  # number of a request -> what handles the reply
        self._refused: list[int] = []
        self._tickets: set[int] = set()  # of the pieces that this rank holds, or whose settlement is in `_unsure`
        self._unsure: list[tuple[int, int, int]] = []  # requests that may not be carried out yet
        self._repeated = 0

    def request(self, total: int, answer: Callable[[int], None]) -> None:
        """See `Claims`. Raises PeerLost if the ledger is lost."""
        if self._lost:
            raise self._lost
        self._ask(CLAIM, total, answer)

    def _ask(self, kind: int, value: int, answer: Callable[..., object]) -> None:
        with self._lock:
            self._number += 1
            self._answers[self._number] = answer
            self._send(kind, self._number, value)

    def _send(self, kind: int, number: int, value: int) -> None:
        if not self._lost:
            self._unsure.append((kind, number, value))
            self._send_to_keeper(np.array([self._generation, kind, number, value]))

    def begin(self, ticket: int) -> bool:
        with self._lock:
            self._send(BEGIN, 0, ticket)
        return True

    def settle(self, ticket: int) -> bool:
        with self._lock:
            self._send(SETTLE, 0, ticket)
        return True

    def refused(self) -> list[int]:
        with self._lock:
            tickets, self._refused = self._refused, []
        return tickets

    def give_back(self) -> None:
        with self._lock:
            self._answers.clear()
            self._tickets = {value for kind, _, value in self._unsure if kind in (SETTLE, SETTLE_AGAIN)}
            self._send(GIVE_BACK, 0, 0)

    def state(self) -> tuple[int, list[int]] | None:
        """See `Claims`. Waits for the reply of the keeper."""
        found: list[tuple[int, ...]] = []
        if not self._lost:
            self._ask(STATE, 0, lambda *values: found.append(values))
            self._wait(lambda: found or self._lost, (), "the state of the work")
        if self._lost:
            return None
        head, self._repeated, *left = found[0]
        return head, left

    @property
    def repeated(self) -> int:
        self.state()
        return self._repeated

    # -- called by the progress engine's thread ----------------------------------------------------------

    def reply(self, reply: np.ndarray) -> None:
        """Handle a reply."""
        generation, number, *values = reply.tolist()
        with self._lock:
            if generation != self._generation:
                return  # of a keeper that was frozen: the request was sent again
            if number == REFUSED:
                self._refused += values
                return
            self._forget_until(number)
            answer = self._answers.pop(number, None)
            if answer is None:
                return  # the pieces were given back meanwhile
            if len(values) == 1 and values[0] >= 0:
                self._tickets.add(values[0])
        answer(*values)

    def _forget_until(self, number: int) -> None:
        """Note that a request is carried out, and so are all before it."""
        at = next((at for at, (_, other, _) in enumerate(self._unsure) if other == number), -1)
        for kind, _, value in self._unsure[: at + 1]:
            if kind in (SETTLE, SETTLE_AGAIN):
                self._tickets.discard(value)
        del self._unsure[: at + 1]

    def renew(self, before: int, kept: bool) -> None:
        """Go on with another keeper, to which `send` sends from now on.

        before: the rank that was the keeper. kept: whether there is another one. Else the ledger is lost.
        """
        with self._lock:
            if kept:
                self._generation += 1
                unsure, self._unsure = self._unsure, []
                self._send_to_keeper(np.array([self._generation, HOLD, 0, *self._tickets]))
                for kind, number, value in unsure:
                    self._send(SETTLE_AGAIN if kind == SETTLE else kind, number, value)
                return
            self._lost = PeerLost(before, "the ledger of the work, which was on its node")
            answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer(WAIT)  # the replica asks again, and raises PeerLost
