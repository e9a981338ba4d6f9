"""Claims of ranks on other nodes than the ledger: requests and replies are messages, and their receiver may die."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_claims import claim, ledgers

from minidl.comm import remote_claims
from minidl.comm.claims import OVER, WAIT, Ledger, piece_of
from minidl.comm.remote_claims import RemoteClaims, serve
from minidl.comm.transport.messages import PeerLost

T = TypeVar("T")


def never(*arguments: Any) -> None:
    raise AssertionError("nobody waits here")


def test_claims_of_another_node() -> None:
    [ledger, _], generations = ledgers(2), np.zeros(2, np.int64)
    sent: list[np.ndarray] = []
    def wait(ready: Callable[[], T], peers: Sequence[int], what: str) -> T:
        deliver()
        return ready()

    remote = RemoteClaims(sent.append, wait)
    answers: list[int] = []
    def deliver() -> None:
        while sent:
            reply = serve(ledger, generations, 1, sent.pop(0))
            if reply is not None:
                remote.reply(reply)

    remote.request(2, answers.append)
    assert not answers, "the answer comes later"
    deliver()
    assert piece_of(answers[0]) == 0
    remote.begin(answers[0])
    remote.request(2, answers.append)
    remote.settle(answers[0])
    remote.give_back()
    deliver()
    assert len(answers) == 1, "the answer to a request before `give_back` is ignored"
    assert ledger.state() == remote.state() == (2, [1])


def connected() -> tuple[Ledger, RemoteClaims, list[np.ndarray]]:
    """Return a ledger, the claims of rank 1 on another node, and the replies that are on their way to it."""
    [ledger, _], generations = ledgers(2), np.zeros(2, np.int64)
    replies: list[np.ndarray] = []

    def send(request: np.ndarray) -> None:
        reply = serve(ledger, generations, 1, request)
        if reply is not None:
            replies.append(reply)

    return ledger, RemoteClaims(send, never), replies


def test_several_claims_of_another_node_are_on_their_way() -> None:
    _, remote, replies = connected()
    answers: list[tuple[str, int]] = []
    for name in "abc":
        remote.request(2, lambda ticket, name=name: answers.append((name, ticket)))
    for reply in replies:
        remote.reply(reply)
    assert [(name, max(piece_of(ticket), WAIT)) for name, ticket in answers] == [("a", 0), ("b", 1), ("c", WAIT)]


def test_a_refused_settlement_of_another_node_is_reported_before_the_answer_to_the_next_claim() -> None:
    ledger, remote, replies = connected()
    tickets: list[int] = []
    for _ in range(2):
        remote.request(9, tickets.append)
        remote.reply(replies.pop())
    late, good = tickets
    remote.begin(late)
    ledger.revoke(1)
    assert piece_of(claim(ledger, 9)) == 0 and ledger.repeated == 1
    assert remote.settle(late), "this rank does not wait for the refusal"
    remote.request(9, tickets.append)
    assert len(replies) == 2 and remote.refused() == []
    remote.reply(replies.pop(0))
    assert remote.refused() == [late] and remote.refused() == [] and len(tickets) == 2
    remote.reply(replies.pop(0))
    assert len(tickets) == 3 and piece_of(tickets[2]) == piece_of(good) == 1
    assert remote.settle(tickets[2]) and not replies, "a settlement that is not refused has no reply"


class Replica:
    """A replica on another node than the ledger.

    links: for each of its keepers so far, the requests and the replies that are under way.
    """

    def __init__(self, rank: int, total: int) -> None:
        self.rank, self.total = rank, total
        self.links: list[tuple[deque[np.ndarray], deque[np.ndarray]]] = [(deque(), deque())]
        self.claims = RemoteClaims(lambda request: self.links[-1][0].append(request), never)
        self.answers: deque[list[int]] = deque()
        self.settled: Counter[int] = Counter()
        self.over = False

    def step(self) -> None:
        """Train a piece, if the answer to the oldest claim is here. Claim ahead."""
        if self.answers and self.answers[0]:
            [ticket] = self.answers.popleft()
            if ticket >= 0:
                assert self.claims.begin(ticket) and self.claims.settle(ticket)
                self.settled[piece_of(ticket)] += 1
            self.over |= ticket == OVER
        while len(self.answers) < self.claims.ahead:
            self.answers.append([])
            self.claims.request(self.total, self.answers[-1].append)
        for ticket in self.claims.refused():
            self.settled[piece_of(ticket)] -= 1

    def deliver(self, ledger: Ledger, generations: np.ndarray, keeper: int) -> None:
        """Deliver the first reply and the first request that are under way between this replica and a keeper."""
        requests, replies = self.links[keeper]
        if replies:
            self.claims.reply(replies.popleft())
        if requests and (reply := serve(ledger, generations, self.rank, requests.popleft())) is not None:
            replies.append(reply)


STEPS = st.tuples(st.sampled_from(["train", "present", "former", "keeper dies", "keeper freezes", "stop"]),
                  st.integers(0, 1))  # fmt: skip


@given(st.integers(0, 15), st.lists(STEPS, max_size=80))
def test_each_piece_is_settled_once_however_often_the_keeper_changes(total: int, steps: list[tuple[str, int]]) -> None:
    """A dead keeper has carried out the requests that reached it. All messages that are under way then are lost.

    A frozen one wakes later: former keepers receive and send what was under way when they were replaced.
    """
    ledger, generations = ledgers(2)[0], np.zeros(2, np.int64)
    replicas = [Replica(rank, total) for rank in range(2)]

    def act(what: str, replica: Replica) -> None:
        if what == "train":
            replica.step()
        elif what == "present":
            replica.deliver(ledger, generations, -1)
        elif what == "former":
            for keeper in range(len(replica.links) - 1):
                replica.deliver(ledger, generations, keeper)
        elif what == "stop":
            replica.claims.give_back()
            replica.answers.clear()
        else:
            for each in replicas:
                if what == "keeper dies":
                    each.links.clear()
                each.links.append((deque(), deque()))
                each.claims.renew(9, kept=True)
                assert all(len(request) <= 9 for request in each.links[-1][0]), "they must arrive in order: see TINY"

    for what, rank in steps:
        act(what, replicas[rank])
    for _ in range(20 * total + 40):
        for replica in replicas:
            for what in ("train", "former", *["present"] * 8):
                act(what, replica)
    assert all(replica.over for replica in replicas)
    assert ledger.state() == (total, [])
    assert replicas[0].settled + replicas[1].settled == Counter(range(total))
    assert ledger.repeated == 0, "no piece was begun in vain"


def test_late_replies_of_a_keeper_that_was_frozen_are_ignored() -> None:
    [ledger, _], generations = ledgers(2), np.zeros(2, np.int64)
    replica = Replica(1, 9)
    replica.step()
    replica.deliver(ledger, generations, 0)  # the reply is under way
    replica.links.append((deque(), deque()))
    replica.claims.renew(0, kept=True)
    replica.deliver(ledger, generations, 1)  # frees the piece, of which the replica does not know
    assert piece_of(claim(ledger, 9)) == 0
    replica.deliver(ledger, generations, 0)
    assert not replica.answers[0]


def test_a_claim_is_undone_if_the_keeper_was_suspended_while_it_carried_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    [ledger, _], generations = ledgers(2), np.zeros(2, np.int64)
    replica = Replica(1, 9)
    replica.step()

    def suspended(*arguments: Any) -> int:
        ticket = claim_now(*arguments)
        generations[1] = 1  # another keeper has served a request of the next generation
        return ticket

    claim_now = remote_claims.claim
    monkeypatch.setattr(remote_claims, "claim", suspended)
    assert serve(ledger, generations, 1, replica.links[0][0].popleft()) is None
    assert piece_of(claim(ledger, 9)) == 0 and ledger.repeated == 0, "the piece is free"


def test_a_lost_ledger_ends_the_claims_of_the_others() -> None:
    replica = Replica(1, 9)
    replica.step()
    serve(ledgers(2)[0], np.zeros(2, np.int64), 1, replica.links[0][0].popleft())
    replica.claims.renew(0, kept=False)
    assert list(replica.answers) == [[WAIT]] * 3
    with pytest.raises(PeerLost, match="replica 0 died while others waited for the ledger of the work"):
        replica.step()
    assert replica.claims.settle(0) and replica.claims.state() is None
    replica.claims.give_back()
