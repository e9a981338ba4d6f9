"""The work of a replica: which batches it trains on, and how far the run is.

    Divided   synchronous methods, `local`, and skewed shards: equal parts of each epoch, in advance
    Claimed   other methods: a replica that is ready claims the next batch, so a fast replica trains on more of them

A run's work is a number of batches that all replicas train together. The position in a run is measured in steps of a
replica, on average over the replicas: batches of all replicas / number of replicas. Learning rates depend on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from signal import SIGTERM
from typing import Any

from minidl.comm import claims
from minidl.comm.claims import OVER, WAIT, Claims, piece_of
from minidl.comm.fabric.base import Fabric
from minidl.data.loader import Batch
from minidl.data.sampler import Sampler
from minidl.run.config import Config
from minidl.run.progress import Progress
from minidl.run.signals import Stopped


class Work(ABC):
    """The work of a run, as one of its replicas sees it.

    planned: the steps of a replica in the whole run, on average. epochs: their number, counting one that --steps
    interrupts. batches: batches of all replicas in an epoch. own_batches: at most so many batches of an epoch are this
    replica's. left_out: images that no replica gets in an epoch.
    """

    sampler: Sampler
    planned: int
    epochs: int
    batches: int
    own_batches: int
    left_out = 0
    seconds = 0.0  # that the gradient of the present step took
    looks_ahead = False  # whether `following` will be called

    @abstractmethod
    def epoch(self, at: Progress) -> Iterator[Batch]:
        """Iterate over this replica's remaining batches of the current epoch. Call `settle` after each step."""

    def following(self) -> Batch | None:
        """Return the batch that probably follows the present one, or None if it is not known."""
        return None

    @abstractmethod
    def settle(self, at: Progress, images: int, correct: int, loss_sum: float) -> bool:
        """Note that the step of the present batch has ended, and count it in `at`.

        Returns False if it does not count, because another replica trains this batch.
        """

    @abstractmethod
    def position(self, at: Progress) -> float:
        """Return the position in the schedule of the present batch."""

    def weight(self, at: Progress, images: int) -> float:
        """Return how much the gradient of the present batch counts with --weighting share; 1 on average."""
        return 1.0

    def shares(self) -> tuple[float, ...]:
        """Return the share of each replica in the images; () if all are equal."""
        return ()

    def first_batches(self) -> list[Batch]:
        """Return a batch of each size for which the step is recorded before the first step."""
        return [self.sampler.first()]

    def runs_from(self, epoch: int) -> list[list[int]]:
        """Return how the steps of an epoch are divided, if they are divided unequally (data/shared.py)."""
        return []

    def own_numbers(self) -> list[float]:
        """Return what the checkpoint of this replica must contain besides `state`, which is that of all."""
        return []

    @abstractmethod
    def samples(self, at: Progress) -> int:
        """Return how many samples of the run all replicas have trained, or begun, up to this replica's position."""

    @abstractmethod
    def estimate(self, at: Progress, steps: int) -> None:
        """Set the progress of a rank that does not train. steps: made by a replica, on average."""

    @abstractmethod
    def within(self, at: Progress) -> tuple[int, int]:
        """Return (batches done, batches) of the current epoch."""

    @abstractmethod
    def finished(self, at: Progress) -> bool:
        """Return whether a replica with this progress has nothing left to do."""

    def end_epoch(self, at: Progress) -> None:
        """Move the position to the end of the current epoch."""

    def give_back(self) -> None:
        """Give back the batches that this replica has claimed and not trained. Called when it stops training."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must contain, in addition to the progress, to continue the work (resume.py)."""

    @property
    def repeated(self) -> int:
        """The number of batches that a dead replica had begun, and that were handed out again."""
        return 0


class Divided(Work):
    """Each replica has an equal part of every epoch."""

    def __init__(self, sampler: Sampler, config: Config, members: tuple[int, ...]) -> None:
        """members: the ranks of the replicas; member i has part i of the images."""
        self.sampler, self.members = sampler, members
        self.planned = config.steps or config.epochs * len(sampler)
        self.epochs = -(-self.planned // len(sampler))
        self.own_batches, self.left_out = len(sampler), sampler.left_out
        self.batches = sampler.replicas * len(sampler)
        self._following: Batch | None = None

    def epoch(self, at: Progress) -> Iterator[Batch]:
        batches = self.sampler.epoch(at.epoch, start=at.batch)
        following = next(batches, None)
        while following is not None and at.step != self.planned + at.shift:
            batch, following = following, next(batches, None) if self.looks_ahead else None
            self._following = following
            yield batch
            following = following if self.looks_ahead else next(batches, None)

    def following(self) -> Batch | None:
        return self._following

    def settle(self, at: Progress, images: int, correct: int, loss_sum: float) -> bool:
        at.step += 1
        at.count(1, images, correct, loss_sum)
        return True

    def position(self, at: Progress) -> float:
        return at.step - at.shift

    def weight(self, at: Progress, images: int) -> float:
        sampler = self.sampler
        return sampler.replicas * sampler.shares[sampler.place] if sampler.shares else 1.0

    def shares(self) -> tuple[float, ...]:
        return self.sampler.shares

    def samples(self, at: Progress) -> int:
        sampler = self.sampler
        part = sampler.images if at.batch == len(sampler) else min(at.batch * sampler.batch_size, sampler.images)
        return sampler.replicas * (at.epoch * sampler.images + part)

    def estimate(self, at: Progress, steps: int) -> None:
        at.step = steps
        at.epoch, at.batch = divmod(at.step - at.shift, len(self.sampler))

    def within(self, at: Progress) -> tuple[int, int]:
        left = self.planned + at.shift - at.step  # the last epoch may be shorter
        return at.batch, min(len(self.sampler), at.batch + left)

    def state(self) -> dict[str, Any]:
        epoch, parts = self.sampler.interrupted
        interrupted = {"epoch": epoch, "parts": parts} if parts else {}
        some_died = self.members != tuple(range(len(self.members)))
        return {"replicas": self.sampler.replicas, **interrupted, **({"members": [*self.members]} if some_died else {})}

    def finished(self, at: Progress) -> bool:
        return at.step >= self.planned + at.shift and at.batch == 0


class Request:
    """A request for a piece. ticket: the answer; None: it has not arrived. batch: if a thread prepares the piece."""

    ticket: int | None = None
    batch: Future[Batch] | None = None


class Claimed(Work):
    """Replicas claim the pieces of the run (Sampler.piece), each its next ones while it trains the present one.

    total: pieces of the run. first, left: after a resume, all pieces before `first` are settled except those in `left`.

    An epoch ends for a replica when it begins a piece of a later epoch, or when all pieces are settled. So a slow
    replica may make no step in an epoch. At the end of the run, a replica that finds no piece waits until the others
    have settled theirs: if one of them dies, its piece is handed out again.
    """

    def __init__(self, sampler: Sampler, config: Config, fabric: Fabric, check: Callable[[], None]) -> None:
        self.sampler, self.fabric, self.check = sampler, fabric, check
        self.claims: Claims = fabric.claims
        self.batches = self.own_batches = sampler.pieces
        self.pool: ThreadPoolExecutor | None = None  # prepares pieces while an epoch goes on
        self.requests: deque[Request] = deque()  # for the next pieces, in order
        self.asked = 0.0  # when the last request was made
        self.piece, self.present = 0, OVER  # the present piece, and its ticket
        # The tickets of settled pieces, and what was counted. When one drops out, its refusal would have arrived:
        # the piece that is settled now was requested after it.
        self.settled: deque[tuple[int, int, int, float]] = deque(maxlen=1 + self.claims.ahead)
        self.continue_from(config.steps * sampler.replicas or config.epochs * sampler.pieces)

    def continue_from(self, total: int, first: int = 0, left: tuple[int, ...] = ()) -> None:
        """Set the work: see the class. Call this before the first claim, with the same values on all ranks."""
        self.total, self.first, self.left = total, first, left
        self.reached = first  # the largest number of pieces handed out that this replica knows of
        self.planned = self.steps(total)
        self.epochs = -(-total // self.batches)

    def epoch(self, at: Progress) -> Iterator[Batch]:
        pool = ThreadPoolExecutor(1, thread_name_prefix="minidl-prefetch") if self.sampler.prefetch else None
        self.pool = pool
        try:
            while (ticket := self._upcoming()) >= 0:
                piece = self._piece(ticket)
                if piece // self.batches > at.epoch:
                    return
                ready = self.requests.popleft().batch
                batch = ready.result() if ready else self.sampler.piece(piece)
                held = self.claims.begin(ticket)  # False: the piece was revoked
                if held:
                    self.piece, self.present = piece, ticket
                    self.reached = max(self.reached, piece + 1)
                self._claim_ahead()
                if held:
                    yield batch
        finally:
            if self.pool is pool:
                self.pool = None
            if pool:
                pool.shutdown()  # after the pieces that it prepares: the next epoch trains them

    def following(self) -> Batch | None:
        """Return the next piece, which a thread prepares. It may still be revoked."""
        batch = self.requests[0].batch if self.requests else None
        return None if batch is None else batch.result()

    def settle(self, at: Progress, images: int, correct: int, loss_sum: float) -> bool:
        at.step = max(at.step, at.shift + self.steps(self.piece + 1))
        self._take_back(at)
        if not self.claims.settle(self.present):
            return False
        at.count(1, images, correct, loss_sum)
        self.settled.append((self.present, images, correct, loss_sum))
        return True

    def position(self, at: Progress) -> float:
        return self.piece / self.sampler.replicas

    def weight(self, at: Progress, images: int) -> float:
        return images / self.sampler.batch_size

    def samples(self, at: Progress) -> int:
        epoch, batch = divmod(self.total if self.finished(at) else self.reached, self.batches)
        images = len(self.sampler.data.y_train)
        return epoch * images + min(batch * self.sampler.batch_size, images)

    def estimate(self, at: Progress, steps: int) -> None:
        state = self.state()
        begun, left = state.get("first", 0), len(state.get("left", ()))  # while pieces are left, the run goes on
        at.step, at.epoch, at.batch = at.shift + self.steps(begun), (begun - left) // self.batches, 0

    def within(self, at: Progress) -> tuple[int, int]:
        return self.piece % self.batches + 1, min(self.batches, self.total - self.piece // self.batches * self.batches)

    def finished(self, at: Progress) -> bool:
        return at.epoch >= self.epochs and at.batch == 0

    def end_epoch(self, at: Progress) -> None:
        at.step = max(at.step, at.shift + self.steps(min(self.total, (at.epoch + 1) * self.batches)))
        self._take_back(at)
        self.settled.clear()

    def give_back(self) -> None:
        self.claims.give_back()
        self.requests.clear()

    def state(self) -> dict[str, Any]:
        replicas = {"replicas": self.sampler.replicas}
        if self.fabric.survivors() and self.fabric.leader != self.fabric.rank:
            return replicas  # only the leader's checkpoint needs the rest, which this rank may have to ask for
        state = self.claims.state()
        if state is None:  # the ledger is lost: the pieces that others have begun count as trained
            return {**replicas, "total": self.total, "first": self.reached, "left": []}
        handed_out, unsettled = state
        left = sorted([*self.left[handed_out:], *(self._piece(number << claims.FIELD) for number in unsettled)])
        first = self.first + max(0, handed_out - len(self.left))
        return {**replicas, "total": self.total, "first": first, "left": left}

    @property
    def repeated(self) -> int:
        return self.claims.repeated

    # -- claims ------------------------------------------------------------------------------------------

    def steps(self, pieces: int) -> int:
        """Return the steps of a replica, on average, in which the replicas train this many pieces."""
        return -(-pieces // self.sampler.replicas)

    def _piece(self, ticket: int) -> int:
        """Return the piece that a ticket stands for: first those in `left`, then the others."""
        number = piece_of(ticket)
        return self.left[number] if number < len(self.left) else self.first + number - len(self.left)

    def _take_back(self, at: Progress) -> None:
        """Take back the counts of the current epoch's pieces whose settlements were refused meanwhile."""
        for ticket in self.claims.refused():
            for counted in [one for one in self.settled if one[0] == ticket]:
                self.settled.remove(counted)
                _, images, correct, loss_sum = counted
                at.count(-1, -images, -correct, -loss_sum)

    def _claim_ahead(self) -> None:
        """Claim the next pieces. Near the end of the run claim only one, so that the others do not wait for it."""
        near = self.total - self.reached <= claims.DEPTH * self.sampler.replicas
        while len(self.requests) < (1 if near else self.claims.ahead):
            self._request()

    def _request(self) -> None:
        request = Request()
        self.requests.append(request)
        self.asked = self.fabric.now()
        self.claims.request(self.total - self.first + len(self.left), partial(self._answer, request))

    def _answer(self, request: Request, ticket: int) -> None:
        """Handle the answer to a request: let a thread prepare the piece. May run in another thread."""
        pool = self.pool
        if ticket >= 0 and pool is not None:
            with suppress(RuntimeError):  # the epoch has just ended
                request.batch = pool.submit(self.sampler.piece, self._piece(ticket))
        request.ticket = ticket

    def _upcoming(self) -> int:
        """Return the ticket of the next piece, or OVER. Waits for it, at the end of the run without the clock."""
        if not self.requests:
            self._claim_ahead()
        ticket = self.fabric.wait(lambda: self.requests[0].ticket, (), "the next piece of work")
        return self._idle() if ticket == WAIT else ticket

    def _idle(self) -> int:
        """Wait until a piece is free, or all pieces are settled. Raises Stopped if the replicas are asked to stop."""
        stats = self.fabric.stats

        def free() -> int | None:
            self.check()
            if self.fabric.stopping():
                raise Stopped(SIGTERM)
            self.fabric.look()  # the pieces of a replica that is suspected now become free
            while self.requests and self.requests[0].ticket == WAIT:
                self.requests.popleft()
            if not self.requests and self.fabric.now() - self.asked >= self.claims.patience:
                self._request()
            ticket = self.requests[0].ticket if self.requests else WAIT
            return None if ticket == WAIT else ticket

        stats.stop()
        try:
            return self.fabric.wait(free, (), "the last pieces of work")
        finally:
            stats.start()
