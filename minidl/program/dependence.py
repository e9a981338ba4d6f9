"""Dependences between the calls of a recorded step: which calls may be moved past which others.

Two calls depend on each other if one of them writes memory that the other reads or writes. Dependent calls must keep
their order, or results would change. Two batch norms with the same running statistics are an example.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator

from minidl.program.record import Call, Memory, Place

# The first array that a kernel writes. The kernel may write all arrays from this argument on: results, running
# statistics and scratch. It only reads those before. (tests/test_dependence.py compares this table with the kernels.)
FIRST_WRITTEN = {
    f"{op}.{kernel}": argument
    for op, kernels in {
        "activation": {
            "y": "relu leaky_relu gelu silu tanh sigmoid",
            "dx": "relu_backward leaky_relu_backward gelu_backward silu_backward tanh_backward sigmoid_backward",
        },
        "conv": {"scratch": "forward backward_input backward_weight"},
        "dropout": {"y": "dropout"},
        "elementwise": {
            "out": "absolute accumulate add affine copy divide exp fill log maximum multiply power sqrt subtract",
            "dx": "absolute_backward power_backward",
            "da": "maximum_backward",
        },
        "matmul": {"scratch": "nn nt tn"},
        "movement": {"target": "copy", "out": "take", "dx": "take_backward"},
        "norm": {
            "y": "affine",
            "partial": "affine_backward batch_norm_backward layer_norm_backward",
            "running_mean": "batch_norm",
            "scale": "fold",
            "dweight": "fold_backward",
            "mean": "layer_norm",
        },
        "pool": {"y": "max_pool average_pool", "dx": "max_pool_backward average_pool_backward"},
        "reduce": {"partial": "sum", "out": "maximum", "dx": "maximum_backward"},
        "softmax": {
            "y": "softmax log_softmax",
            "dx": "softmax_backward log_softmax_backward",
            "probabilities": "cross_entropy",
            "dlogits": "cross_entropy_backward",
            "count": "correct",
        },
    }.items()
    for argument, names in kernels.items()
    for kernel in names.split()
}


def accesses(call: Call) -> Iterator[tuple[Place, bool]]:
    """Yield each array of a call, and whether the call may write it. A kernel that is not listed may write all."""
    first = FIRST_WRITTEN.get(call.name)
    written = first is None
    for name, place in call.places:
        written = written or name == first
        if place.like.size and place.memory.name != "constant":
            yield place, written


class Calls:
    """The calls of a step, in order, with an index of the calls that use each piece of memory.

    A call may be replaced or removed. The other calls keep their positions.
    """

    def __init__(self, calls: Iterable[Call]) -> None:
        self._calls: list[Call | None] = list(calls)
        self._positions: dict[Call, int] = {}
        self._users: dict[Memory, list[int]] = defaultdict(list)  # the positions of calls that use it, ascending
        self._writers: dict[Memory, list[int]] = defaultdict(list)  # those of calls that may write it
        for i, call in enumerate(self._calls):
            assert call
            self._enter(i, call)

    def __iter__(self) -> Iterator[Call]:
        """Iterate over the calls, in order. Calls that are replaced meanwhile come in their new form."""
        return (call for call in self._calls if call)

    def users(self, memory: Memory) -> list[Call]:
        """Return the calls that use this memory."""
        return [self._at(i) for i in self._users[memory]]

    def first(self, memory: Memory) -> Call:
        """Return the first call that uses this memory."""
        return self._at(self._users[memory][0])

    def last(self, memory: Memory) -> Call:
        """Return the last call that uses this memory."""
        return self._at(self._users[memory][-1])

    def replace(self, call: Call, new: Call | None) -> None:
        """Make another call at the position of this one; None: make none."""
        i = self._positions.pop(call)
        for place, _ in accesses(call):
            for index in (self._users[place.memory], self._writers[place.memory]):
                at = bisect_left(index, i)
                if index[at : at + 1] == [i]:
                    del index[at]
        self._calls[i] = new
        if new:
            self._enter(i, new)

    def depends(self, call: Call, until: Call, besides: Memory) -> bool:
        """Return whether any later call, up to and including `until`, depends on the call by other memory than this."""
        return any(
            self._touched(place, self._positions[call] + 1, self._positions[until] + 1, written)
            for place, written in accesses(call)
            if place.memory is not besides
        )

    def unchanged(self, places: Iterable[Place], since: Call, until: Call) -> bool:
        """Return whether no call after `since` and before `until` writes these arrays."""
        first, end = self._positions[since] + 1, self._positions[until]
        return not any(self._touched(place, first, end, by_reading=False) for place in places)

    def unused(self, place: Place, since: Call, until: Call) -> bool:
        """Return whether no call from `since` on and before `until` uses an array."""
        return not self._touched(place, self._positions[since], self._positions[until], by_reading=True)

    def _touched(self, place: Place, first: int, end: int, by_reading: bool) -> bool:
        """Return whether a call at a position in [first, end) writes bytes of an array; or reads them, if asked for."""
        index = (self._users if by_reading else self._writers)[place.memory]
        return any(
            (written or by_reading) and other.overlaps(place)
            for i in index[bisect_left(index, first) : bisect_left(index, end)]
            for other, written in accesses(self._at(i))
        )

    def _at(self, i: int) -> Call:
        call = self._calls[i]
        assert call
        return call

    def _enter(self, i: int, call: Call) -> None:
        """Add a call to the index."""
        self._positions[call] = i
        for place, written in accesses(call):
            for index in (self._users, self._writers) if written else (self._users,):
                positions = index[place.memory]
                if not positions or positions[-1] < i:
                    positions.append(i)
                elif i not in positions[bisect_left(positions, i) :][:1]:
                    insort(positions, i)
