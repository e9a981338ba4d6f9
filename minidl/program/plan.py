"""Where the arrays of a recorded step lie: lifetimes become offsets into one workspace.

An array lives from the first call that touches it to the last. Two that never live at the same time may lie in the same
place, so a step needs as much memory as its fullest moment, not as all its arrays together. The placing is the usual
greedy one: the largest array first, each at the lowest offset where it meets nobody alive at the same time
(Pisarchyk and Lee 2020, "Efficient Memory Management for Deep Neural Net Inference").
"""

from __future__ import annotations

from minidl.engine.device import ALIGNMENT
from minidl.program.fuse import users
from minidl.program.record import Buffer, Call, Place

# Kernels that may write an output over an input: element i of it is read before element i is written, never after.
IN_PLACE = {
    ("activation", "relu_backward"): ("dy", "dx"),
    ("dropout", "dropout"): ("x", "y"),
    ("elementwise", "add"): ("a", "out"),
    ("elementwise", "affine"): ("x", "out"),
    ("activation", "relu"): ("x", "y"),
    ("norm", "affine"): ("x", "y"),
    ("norm", "batch_norm_backward"): ("dy", "dx"),
}


def write_gradients_in_place(calls: list[Call], wanted: set[Buffer]) -> list[Call]:
    """Where a step ends a gradient by copying it into the arena, let its kernel write it there in the first place."""
    using = users(calls)
    for copy in [call for call in calls if (call.op, call.kernel) == ("elementwise", "copy")]:
        source, target = copy.arguments["x"], copy.arguments["out"]
        if source.is_inner(wanted) and target.buffer.name and using[source.buffer][-1] is copy:
            calls = [_moved(call, source.buffer, target) for call in calls if call is not copy]
            using = users(calls)
    return calls


def _moved(call: Call, buffer: Buffer, target: Place) -> Call:
    """The call with a buffer's arrays where `target` is instead."""
    changed = {
        name: place._replace(buffer=target.buffer, offset=target.offset + place.offset)
        for name, place in call.places()
        if place.buffer is buffer
    }
    return call.replaced(**changed) if changed else call


def share_buffers(calls: list[Call], wanted: set[Buffer]) -> list[Call]:
    """Let kernels that can work in place do so, where nobody needs the input afterwards."""
    for i in range(len(calls)):
        names = IN_PLACE.get((calls[i].op, calls[i].kernel))
        if not names:
            continue
        source, target = (calls[i].arguments[name] for name in names)
        using = users(calls)
        if (
            source.is_inner(wanted)
            and target.is_inner(wanted)
            and source.like.nbytes == target.like.nbytes
            and using[source.buffer][-1] is calls[i]
            and using[target.buffer][0] is calls[i]
        ):
            calls = [_moved(call, target.buffer, source._replace(offset=0)) for call in calls]
    return calls


def plan(calls: list[Call], wanted: set[Buffer]) -> tuple[dict[Buffer, int], int]:
    """(the offset of every buffer of the step's own, the size of the workspace), in bytes."""
    first: dict[Buffer, int] = {}
    last: dict[Buffer, int] = {}
    for i, call in enumerate(calls):
        for _, place in call.places():
            first.setdefault(place.buffer, i)
            last[place.buffer] = len(calls) if place.buffer in wanted else i
    own = sorted((buffer for buffer in first if not buffer.name), key=lambda b: (-b.array.nbytes, first[b]))
    offsets: dict[Buffer, int] = {}
    size = 0
    for buffer in own:
        alive = [other for other in offsets if first[other] <= last[buffer] and first[buffer] <= last[other]]
        start = 0
        for other in sorted(alive, key=offsets.__getitem__):
            if start + buffer.array.nbytes <= offsets[other]:
                break
            start = max(start, _aligned(offsets[other] + other.array.nbytes))
        offsets[buffer] = start
        size = max(size, start + buffer.array.nbytes)
    return offsets, _aligned(size)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
