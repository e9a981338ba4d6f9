"""Planted bugs: each breaks the product in a way that scenarios must find. bench/scenarios.py uses them, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from minidl.comm.claims import Ledger
from minidl.comm.fabric.base import Fabric, PeerLost
from minidl.comm.methods.gossip import Gossip
from minidl.run import checkpoint as files
from minidl.training import newcomer, shutdown
from minidl.training.playing import Violation, play
from minidl.training.work import Claimed


def mass_lost_on_a_refused_send() -> Any:
    """A sender subtracts the mass of a message that was not sent."""

    def push(self: Gossip, peer: int, block: int) -> bool:
        share = self.weighing.share(block)
        if not share:
            return False
        self.weighing.sent(block, share)
        return self.fabric.send(peer, *self.momentum.parts(*self.blocks[block]), header=self.header(block, share))

    return patch.object(Gossip, "push", push)


def wait_for_the_dead_in_drain() -> Any:
    """A replica that dies during `drain` is waited for."""
    drain = Fabric._drain_with_markers

    def waiting(self: Fabric, handle: Any) -> None:
        before = self.survivors()
        with patch.object(self, "survivors", lambda: before):
            drain(self, handle)

    return patch.object(Fabric, "_drain_with_markers", waiting)


def claim_lost_on_resume() -> Any:
    """A checkpoint lacks the first of the pieces that are left."""
    state = Claimed.state

    def forgetful(self: Claimed) -> dict[str, Any]:
        found = state(self)
        return found | {"left": found["left"][1:]} if "left" in found else found

    return patch.object(Claimed, "state", forgetful)


def late_settlement_accepted() -> Any:
    """A replica counts a piece that it does not hold any more."""
    settle = Ledger.settle
    return patch.object(Ledger, "settle", lambda self, ticket: settle(self, ticket) or True)


def pieces_of_a_suspect_kept() -> Any:
    """The pieces of a frozen replica are not handed out again."""
    return patch.object(Ledger, "revoke", lambda self, rank: None)


def checkpoint_not_renamed() -> Any:
    """A checkpoint is written in its final folder, so a kill leaves half of one."""

    @contextmanager
    def writing(checkpoints: Path, step: int) -> Iterator[Path]:
        folder = files.folder_of(checkpoints, step)
        folder.mkdir(exist_ok=True)
        yield folder
        files._write_sums(folder)

    return patch.object(files, "writing", writing)


def death_of_the_leader_at_the_end() -> Any:
    """The next leader does not repeat the shutdown."""

    class NoOne(PeerLost):
        pass

    return patch.object(shutdown, "PeerLost", NoOne)


def choice_without_the_seed() -> Any:
    """The choice of a peer does not depend on the seed, so a replay has other bits."""
    begin = Gossip.begin
    return patch.object(Gossip, "begin", lambda self, chance: begin(self, np.random.default_rng()))


def mass_kept_by_the_leader() -> Any:
    """The leader keeps the mass that it has given to a newcomer."""
    return patch.object(Gossip, "accepted", lambda self, vectors: None)


def newcomer_waited_for() -> Any:
    """The leader waits for a newcomer that is frozen."""
    return patch.object(newcomer, "PATIENCE", 1e9)


BUGS: dict[str, Callable[[], Any]] = {
    bug.__name__: bug
    for bug in (
        mass_lost_on_a_refused_send, wait_for_the_dead_in_drain, claim_lost_on_resume, late_settlement_accepted,
        pieces_of_a_suspect_kept, checkpoint_not_renamed, death_of_the_leader_at_the_end, choice_without_the_seed,
        mass_kept_by_the_leader, newcomer_waited_for,
    )
}  # fmt: skip


def first_seed(name: str, seeds: int) -> tuple[int | None, str]:
    """Return the first seed below `seeds` with which a planted bug is found, and the message."""
    with BUGS[name]():
        for seed in range(seeds):
            try:
                play(seed)
            except Violation as violation:
                return seed, str(violation)
    return None, ""
