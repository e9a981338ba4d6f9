"""Memory planning: place the temporary arrays of a recorded step in one workspace, according to their lifetimes.

An array lives from the first call that uses it to the last. Arrays whose lifetimes do not overlap can share memory, so
a step needs far less memory than all arrays together. The placement is the usual greedy one: largest array first, each
at the lowest offset at which it overlaps no array that lives at the same time (Pisarchyk and Lee 2020, "Efficient
Memory Management for Deep Neural Net Inference").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from minidl.engine.device import ALIGNMENT
from minidl.program.dependence import Calls, accesses
from minidl.program.record import Call, Memory, Place

# Kernels that may write an output over an input: they read element i of the input for the last time before they write
# element i of the output.
IN_PLACE = {
    "activation.relu": ("x", "y"),
    "activation.relu_backward": ("dy", "dx"),
    "conv_norm.batch_norm_backward": ("dy", "dx"),
    "dropout.dropout": ("x", "y"),
    "elementwise.add": ("a", "out"),
    "elementwise.affine": ("x", "out"),
    "group_norm.group_norm": ("x", "y"),
    "group_norm.group_norm_backward": ("dy", "dx"),
    "norm.affine": ("x", "y"),
    "norm.batch_norm_backward": ("dy", "dx"),
}


def remove_unread(calls: Calls, outputs: set[Memory]) -> None:
    """Remove calls that only write temporaries which no other call reads.

    An example is the copy of batch norm's running statistics for the backward pass, in a prediction.
    """
    for call in [*calls][::-1]:  # the last first: then its inputs may be unread, too
        written = [place for place, writes in accesses(call) if writes]
        if all(place.is_temporary(outputs) and calls.users(place.memory) == [call] for place in written):
            calls.replace(call, None)


def write_gradients_directly(calls: Calls, outputs: set[Memory]) -> None:
    """Remove copies of gradients into the arena (the vector of all gradients): kernels then write there directly."""
    for copy in calls:
        if copy.name != "elementwise.copy":
            continue
        source, target = copy.arguments["x"], copy.arguments["out"]
        if not source.is_temporary(outputs) or not target.memory.name or source.like.dtype != target.like.dtype:
            continue
        *others, last = calls.users(source.memory)
        if others and last is copy and calls.unused(target, since=others[0], until=copy):
            calls.replace(copy, None)
            for call in others:
                calls.replace(call, _moved(call, {source.memory: target}))


def work_in_place(calls: Calls, outputs: set[Memory]) -> list[Call]:
    """Let kernels write their output over their input, if they can and no later call uses the input.

    Return the calls with these changes.
    """
    homes: dict[Memory, Place] = {}  # memory of an output -> the input to write it over
    for call in calls:
        if call.name not in IN_PLACE:
            continue
        source, target = (call.arguments[name] for name in IN_PLACE[call.name])
        if (
            source.is_temporary(outputs)
            and target.is_temporary(outputs)
            and source.like.nbytes == target.like.nbytes
            and calls.last(source.memory) is call
            and calls.first(target.memory) is call
            and calls.count(call, source.memory) == calls.count(call, target.memory) == 1
        ):
            homes[target.memory] = homes.get(source.memory, source)
    return [_moved(call, homes) for call in calls]


def _moved(call: Call, homes: Mapping[Memory, Place]) -> Call:
    """Return the call with its arrays moved. homes: memory -> the place to which the arrays in this memory move."""
    moved = {
        name: Place(homes[memory].memory, homes[memory].offset + offset, like)
        for name, (memory, offset, like) in call.places
        if memory in homes
    }
    return call.replaced(**moved) if moved else call


def plan(calls: Iterable[Call], outputs: set[Memory]) -> tuple[dict[Memory, int], int]:
    """Return the offset of each temporary (memory without a name) in the workspace, and the workspace's size, in bytes.

    outputs: the memory of the step's results, which live until the end.
    """
    first: dict[Memory, int] = {}
    last: dict[Memory, int] = {}
    for i, call in enumerate(calls):
        for _, place in call.places:
            if not place.memory.name:
                first.setdefault(place.memory, i)
                last[place.memory] = i
    end = max(last.values(), default=0)
    order = sorted(first, key=lambda memory: (-memory.nbytes, first[memory]))
    lives = [(first[m], end if m in outputs else last[m], _aligned(m.nbytes)) for m in order]
    offsets, size = _offsets(np.array(lives, np.int64).reshape(-1, 3))
    return dict(zip(order, offsets.tolist(), strict=True)), size


def _offsets(lives: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the offset of each buffer, and the size of the workspace. lives (n, 3): first call, last call, size.

    The time is quadratic, but 10,000 buffers take about 1 s. (Compiling this function would take 2 s.)
    """
    count = len(lives)
    offsets, size = np.zeros(count, np.int64), 0
    placed = np.zeros((count, 4), np.int64)  # by offset, ascending: first call, last call, offset, end
    for k, (first, last, length) in enumerate(lives):
        before = placed[:k]
        together = before[(before[:, 0] <= last) & (first <= before[:, 1])]
        starts = np.maximum.accumulate([0, *together[:, 3]])  # where a buffer may begin: below or above each of these
        fits = starts[:-1] + length <= together[:, 2]
        offsets[k] = start = starts[fits.argmax()] if fits.any() else starts[-1]
        size = max(size, start + length)
        i = np.searchsorted(before[:, 2], start, side="right")
        placed[i + 1 : k + 1] = placed[i:k]
        placed[i] = first, last, start, start + length
    return offsets, int(size)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
