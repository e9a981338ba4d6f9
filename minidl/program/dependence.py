"""Dependences between the calls of a recorded step: which calls may be moved past which others.

Two calls depend on each other if one of them writes memory that the other reads or writes. Dependent calls must keep
their order, or results would change. Two batch norms with the same running statistics are an example.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from minidl.program.record import Call, Memory, Place

# Kernel -> the first of its arguments that it may write. It may also write the arrays after this argument (results,
# running statistics, scratch), but only reads the arrays before it. tests/test_dependence.py checks this.
FIRST_WRITTEN = {
    f"{op}.{kernel}": argument
    for op, kernels in {
        "activation": {
            "y": "relu leaky_relu gelu silu tanh sigmoid",
            "dx": "relu_backward leaky_relu_backward gelu_backward silu_backward tanh_backward sigmoid_backward",
        },
        "conv": {"packed": "forward", "scratch": "backward_input backward_weight"},
        "conv_norm": {
            "packed": "forward",
            "scratch": "backward_input backward_weight",
            "running_mean": "batch_norm",
            "dx": "batch_norm_backward",
        },
        "dropout": {"y": "dropout"},
        "elementwise": {
            "out": "absolute accumulate add add_broadcast affine copy divide divide_broadcast exp fill log maximum "
            "multiply multiply_broadcast power sqrt subtract subtract_broadcast",
            "dx": "absolute_backward power_backward",
            "da": "maximum_backward",
        },
        "group_norm": {"mean": "group_norm", "partial": "group_norm_backward"},
        "matmul": {"packed": "nn", "scratch": "batched nt tn"},
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


def accesses(call: Call) -> list[tuple[Place, bool]]:
    """Return each array of a call, and whether the call may write it. An unlisted kernel counts as writing all."""
    first = FIRST_WRITTEN.get(call.name)
    written, found = first is None, []
    for name, value in call.arguments.items():
        if name == first:
            written = True
        if type(value) is Place and value.memory.name != "constant":
            found.append((value, written))
    return found


class Calls:
    """The calls of a step, in order, with an index of the calls that use each piece of memory.

    A call may be replaced or removed. The other calls keep their positions.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls: list[Call | None] = [*calls]
        self._accesses = [accesses(call) for call in calls]
        self._positions = {call: i for i, call in enumerate(calls)}
        self._users: dict[Memory, list[int]] = defaultdict(list)  # the positions of calls that use it, ascending
        self._writers: dict[Memory, list[int]] = defaultdict(list)  # the same, for calls that may write it
        for i, found in enumerate(self._accesses):
            for place, written in found:
                for index in (self._users, self._writers) if written else (self._users,):
                    positions = index[place.memory]
                    if not positions or positions[-1] != i:
                        positions.append(i)

    def __iter__(self) -> Iterator[Call]:
        """Iterate over the calls, in order. If a later call is replaced meanwhile, the new call takes its turn."""
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

    def count(self, call: Call, memory: Memory) -> int:
        """Return how many arguments of a call are arrays in this memory."""
        return [place.memory for place, _ in self._accesses[self._positions[call]]].count(memory)

    def replace(self, call: Call, new: Call | None) -> None:
        """Replace a call by another one at the same position; None: remove it."""
        i = self._positions.pop(call)
        before, after = self._accesses[i], accesses(new) if new else []
        self._calls[i], self._accesses[i] = new, after
        if new:
            self._positions[new] = i
        _update(self._users, i, {place.memory for place, _ in before}, {place.memory for place, _ in after})
        _update(self._writers, i, *({place.memory for place, w in found if w} for found in (before, after)))

    def depends(self, call: Call, until: Call, besides: Memory) -> bool:
        """Return whether a later call, up to and including `until`, depends on `call`.

        besides: memory to ignore.
        """
        i, end = self._positions[call], self._positions[until] + 1
        for place, written in self._accesses[i]:
            if place.memory is not besides and self._touched(place, i + 1, end, by_reading=written):
                return True
        return False

    def unchanged(self, places: Iterable[Place], since: Call, until: Call) -> bool:
        """Return whether `until` is a later call than `since`, and no call in between writes these arrays."""
        first, end = self._positions[since] + 1, self._positions[until]
        return first <= end and not any([self._touched(place, first, end, by_reading=False) for place in places])

    def unused(self, place: Place, since: Call, until: Call) -> bool:
        """Return whether no call from `since` (included) to `until` (excluded) uses an array."""
        return not self._touched(place, self._positions[since], self._positions[until], by_reading=True)

    def _touched(self, place: Place, first: int, end: int, by_reading: bool) -> bool:
        """Return whether a call at a position in [first, end) writes bytes of an array; by_reading: or reads them."""
        positions = (self._users if by_reading else self._writers)[place.memory]
        if positions and positions[-1] >= first:
            for i in positions[bisect_left(positions, first) : bisect_left(positions, end)]:
                for other, written in self._accesses[i]:
                    if (written or by_reading) and other.overlaps(place):
                        return True
        return False

    def _at(self, i: int) -> Call:
        call = self._calls[i]
        assert call
        return call


def _update(index: dict[Memory, list[int]], i: int, before: set[Memory], after: set[Memory]) -> None:
    """Change the entries of the call at position i: from the memory in `before` to that in `after`."""
    for memory in before - after:
        del index[memory][bisect_left(index[memory], i)]
    for memory in after - before:
        insort(index[memory], i)
