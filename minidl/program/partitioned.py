"""A gradient computed in parts: each group of cores has its own copy of the weights, and its part of the batch.

    batch     | rows of part 0 | rows of part 1 | rows of part 2 | rows of part 3 |
                      |                |                |                |
    theta   ..copy....|......copy......|......copy......|......copy......|........   every part has its own thread,
                      v                v                v                v           cores and memory
    parts     run the recorded step  ...              ...              ...
                      |                |                |                |
    tree              +<---------------+                +<---------------+           means of two
                      +<---------------------------------+                           means of four
                      v
    grad      the mean over the batch

The replica keeps one vector of weights and one gradient, so methods do not see the parts. The step is recorded once for
each number of rows. Every part runs a twin of the recorded program, whose arguments point to the memory of the part.

This is how You, Buluc, Demmel (SC'17, "Scaling Deep Learning on GPU and Knights Landing Clusters") divide a Knights
Landing chip. Two parts synchronise once for each gradient, and the threads of one part for each kernel. So a chip of
many cores wastes less time with small batches, and on a NUMA machine every part reads memory of its own node.

The gradient is that of the whole batch up to rounding if the loss is a mean over the rows. The order of the sum depends
only on the number of parts. Two layers differ: batch norm uses the statistics of the rows of its part, and the running
statistics become the mean over the batch; dropout draws other masks.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import DTypeLike

from minidl.engine.concurrency import one_at_a_time
from minidl.engine.device import Device, address
from minidl.engine.jit import set_threads
from minidl.engine.tensor import Tensor
from minidl.errors import ConfigError
from minidl.nn.module import Module
from minidl.program.call import run as run_calls
from minidl.program.replay import Gradient, Loss
from minidl.program.table import WORKSPACE, Program
from minidl.program.workspace import Workspace

BEAT = 0.25  # seconds between two calls of `PartitionedGradient.waiting`

Range = tuple[str, int, int]  # elements [start, stop) of the vector with this name


class CoreGroup:
    """The cores of a part: one thread that is bound to them, and memory that this thread is the first to touch.

    Linux places a page of memory on the NUMA node of the core that first writes to it. The thread's parallel kernels
    use `threads` threads. With OpenMP, these are bound to the same cores, because a new thread inherits the cores of
    the thread that starts it.
    """

    def __init__(self, cores: Sequence[int], threads: int) -> None:
        self.thread = ThreadPoolExecutor(1, "minidl-part", _begin_thread, (cores, threads))
        self.vectors: dict[str, np.ndarray] = {}  # theta, grad, statistics
        self.workspace = Workspace(fresh)

    def reserve(self, vectors: Mapping[str, np.ndarray], workspace: int) -> None:
        """Allocate memory for such vectors, and for this number of bytes, if it is missing. Call it in `thread`."""
        for name, vector in vectors.items():
            mine = self.vectors.get(name)
            if mine is None or (mine.size, mine.dtype) != (vector.size, vector.dtype):
                self.vectors[name] = fresh(vector.size, vector.dtype)
        self.workspace.reserve(workspace)


def _begin_thread(cores: Sequence[int], threads: int) -> None:
    with suppress(OSError):  # a core is no longer available
        os.sched_setaffinity(0, cores)  # of the calling thread
    set_threads(threads)


def fresh(size: int, dtype: DTypeLike) -> np.ndarray:
    """Return a vector of `size` zeros in pages that no other thread has touched."""
    nbytes = size * np.dtype(dtype).itemsize
    pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    vector = np.frombuffer(pages, np.uint8, nbytes).view(dtype)
    vector[:] = 0
    return vector


@dataclass
class Share:
    """What one group computes of a batch: the gradient of its rows x (B, H, W, C), y (B,).

    program: None if the step is not recorded. made: the calls made so far, -1 before the first stage.
    """

    group: CoreGroup
    x: np.ndarray
    y: np.ndarray
    program: Program | None = None
    made: int = -1
    result: tuple[float, int] = (0.0, 0)

    @property
    def batch(self) -> dict[str, np.ndarray]:
        return {"x": self.x, "y": self.y}

    def view(self, name: str) -> np.ndarray:
        """Return a result of the program, which has run."""
        assert self.program is not None
        return self.group.workspace.view(*self.program.results[name])


class PartitionedGradient(Gradient):
    """A `Gradient` that several groups of cores compute together.

    cores: for each part, the cores that its threads run on. threads: of each part.
    waiting: called about every BEAT seconds while the calling thread waits for the parts.

    A step that cannot be recorded runs on the tape, one part after the other.
    Raises ConfigError if Numba's threading layer does not let several threads run kernels.
    """

    def __init__(
        self, model: Module, loss: Loss, cores: Sequence[Sequence[int]], threads: int, **options: Any
    ) -> None:  # fmt: skip
        if one_at_a_time():
            raise ConfigError(f"parts {len(cores)}: Numba's threading layer, workqueue, runs the kernels of one thread "
                              "at a time; expected OpenMP: set NUMBA_THREADING_LAYER=omp")  # fmt: skip
        self.cores, self.threads = cores, threads
        self.waiting: Callable[[], None] = lambda: None
        self._prepare_groups()
        super().__init__(model, loss, **options)

    def _prepare_groups(self) -> None:
        """Create the groups. Their threads start when they are first used."""
        self.groups = [CoreGroup(cores, self.threads) for cores in self.cores]
        self.twins: WeakKeyDictionary[Program, list[Program]] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        own = ("groups", "twins", "waiting")
        return {name: value for name, value in super().__getstate__().items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.cores, self.threads, self.waiting = state["cores"], state["threads"], lambda: None
        self._prepare_groups()
        super().__setstate__(state)

    def prepare(self, x: np.ndarray, y: np.ndarray) -> None:
        x, y = self._batch(x, y)
        for share in self._shares(x, y):
            super().prepare(share.x, share.y)
        for vector in self.vectors.values():  # compiles the kernels of the tree
            _mix_into(vector[:0], vector[:0], 0.5)
            _copy(vector[:0], vector[:0])

    def parts(self, x: np.ndarray, y: np.ndarray, cuts: Sequence[int] = ()) -> Iterator[tuple[int, int, float]]:
        """See `Gradient.parts`. "Parts" are ranges of the gradient there. Each of them is a mean over the batch."""
        x, y = self._batch(x, y)
        shares = self._shares(x, y)
        recorded = self._find_programs(shares)
        assert self.arena is not None
        size, length = self.arena.dtype.itemsize, self.arena.size
        for start, stop in list(pairwise(cuts))[::-1] if recorded else ():
            ends = [max(s.made, s.program.final("grad", start * size, stop * size)) for s in shares if s.program]
            self._stage(shares, ends, [("grad", start, stop)])
            yield start, stop, ends[0] / len(shares[0].program.table) if shares[0].program else 1.0
        if recorded:
            first, last = (cuts[0], cuts[-1]) if len(cuts) else (0, 0)
            rest: list[Range] = [("grad", 0, first), ("grad", last, length)]
            ends = [len(share.program.table) for share in shares if share.program]
        else:
            self._on_tape(shares)
            rest, ends = [("grad", 0, length)], [0] * len(shares)
        if self.model.statistics is not None:
            rest.append(("statistics", 0, self.vectors["statistics"].size))
        self._stage(shares, ends, rest)
        self._finish(shares)
        if not recorded:
            self.warn(stacklevel=3)
            yield from ((start, stop, 1.0) for start, stop in list(pairwise(cuts))[::-1])

    def _shares(self, x: np.ndarray, y: np.ndarray) -> list[Share]:
        """Divide the rows of a batch among the groups. Of a small batch, the last groups get no rows and no share."""
        return [Share(group, x[slice(*rows)], y[slice(*labels)]) for group, rows, labels
                in zip(self.groups, self._bounds(len(x)), self._bounds(len(y)), strict=True)
                if group is self.groups[0] or labels[0] < labels[1]]  # fmt: skip

    def _bounds(self, rows: int) -> list[tuple[int, int]]:
        """Return the rows (start, stop) of each group. The first ones have one row more if they differ."""
        each, more = divmod(rows, len(self.groups))
        return list(pairwise(each * part + min(part, more) for part in range(len(self.groups) + 1)))

    def _find_programs(self, shares: Sequence[Share]) -> bool:
        """Give each share a program, and draw its random numbers. Returns False if the step cannot be recorded."""
        found: dict[tuple[int, int], Program | None] = {}
        for share in shares:
            rows = len(share.x), len(share.y)  # if they differ, `program` raises an error
            if rows not in found:
                found[rows] = self.program(share.batch)
        self.latest = None  # `Gradient` would run it in the calling thread
        if not all(found.values()):
            return False
        for part, share in enumerate(shares):
            program = found[len(share.x), len(share.y)]
            assert program is not None
            if program not in self.twins:
                self.twins[program] = [program.twin() for _ in self.groups]
            share.program = self.twins[program][part]
            share.program.draw()
        return True

    def _stage(self, shares: Sequence[Share], ends: Sequence[int], ranges: Sequence[Range]) -> None:
        """Let all groups make the calls of their programs up to `ends`, and average these ranges over the tree."""
        futures: list[Future[None]] = []
        vectors = self.vectors | self.bound
        try:
            for part in reversed(range(len(shares))):  # a part waits for later parts only
                submit, later = shares[part].group.thread.submit, list(futures)
                futures.insert(0, submit(_stage_of_part, part, shares, ends[part], ranges, vectors, later))
            while not wait(futures[:1], BEAT).done:
                self.waiting()
            futures[0].result()
        except BaseException:  # also Ctrl-C: let no part compute while the next gradient begins
            wait(futures)
            raise

    def _on_tape(self, shares: Sequence[Share]) -> None:
        """Compute the parts one after the other on the tape, with the vectors of their groups."""
        before, vectors = self.bound, self.vectors | self.bound
        for share in shares:  # all of them before the first one changes the model's running statistics
            share.group.thread.submit(_begin_share, share, vectors).result()
        try:
            for share in shares:
                self.bound = share.group.vectors
                share.result = self._by_tape_if_bound(share.x, share.y)
        finally:
            self.bound = before

    def _finish(self, shares: Sequence[Share]) -> None:
        """Set `result`: the mean loss of all rows, and the number of correct predictions."""
        for share in shares:
            if share.program is not None:
                share.result = share.view("loss").item(), share.view("correct").item()
                if not math.isfinite(share.result[0]):  # if a label is invalid, this raises the error that names it
                    self.loss(Tensor(np.zeros_like(share.view("logits"))), share.y)
        assert self.arena is not None
        self.arena.cleared.clear()
        if self.model.statistics is not None:
            self.model.statistics.touch()
        rows = sum(len(share.y) for share in shares)
        self.result = sum(share.result[0] * len(share.y) for share in shares) / rows, sum(s.result[1] for s in shares)


# -- in the thread of a part -------------------------------------------------------------------------------------------


def _stage_of_part(
    part: int,
    shares: Sequence[Share],
    end: int,
    ranges: Sequence[Range],
    vectors: Mapping[str, np.ndarray],
    later: Sequence[Future[None]],
) -> None:
    """Run the program up to call `end` - 1. Then average the gradients of the part and of those below it in the tree.

    vectors: of the replica. Part 0 writes the result to them. later: the stages of the parts after this one.
    """
    share = shares[part]
    if share.program is not None:
        if share.made < 0:
            _begin_share(share, vectors)
        run_calls(share.program.table, share.made, end)
        share.made = end
    mine, step = share.group.vectors, 1
    while part % (2 * step) == 0 and part + step < len(shares):
        later[step - 1].result()
        own, other = (sum(len(s.y) for s in shares[at : at + step]) for at in (part, part + step))
        theirs = shares[part + step].group.vectors
        for name, start, stop in ranges:
            _mix_into(mine[name][start:stop], theirs[name][start:stop], other / (own + other))
        step *= 2
    if part == 0:
        for name, start, stop in ranges:
            _copy(mine[name][start:stop], vectors[name][start:stop])


def _begin_share(share: Share, vectors: Mapping[str, np.ndarray]) -> None:
    """Copy the weights and the running statistics of the replica, and bind the program to the memory of the group."""
    group = share.group
    group.reserve(vectors, share.program.workspace_size if share.program else 0)
    for name in vectors.keys() - {"grad"}:
        _copy(vectors[name], group.vectors[name])
    if share.program is not None:
        arrays = {**group.vectors, **share.batch}
        share.program.bind({WORKSPACE: group.workspace.address, **{name: address(a) for name, a in arrays.items()}})
    share.made = 0


def _mix_into(target: np.ndarray, other: np.ndarray, weight: float) -> None:
    """target <- target + weight * (other - target). This is the mean of two means, weighted by their rows."""
    Device("cpu").mix.mix(target, other, weight)


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    Device("cpu").elementwise.copy(source, target)
