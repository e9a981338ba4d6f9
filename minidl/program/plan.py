"""Memory planning: place the temporary arrays of a recorded step in one workspace, according to their lifetimes.

An array lives from the first call that uses it to the last. Arrays whose lifetimes do not overlap can share memory, so
a step needs far less memory than all arrays together. The placement is the usual greedy one: largest array first, each
at the lowest offset at which it overlaps no array that lives at the same time (Pisarchyk and Lee 2020, "Efficient
Memory Management for Deep Neural Net Inference").
"""

from __future__ import annotations

from minidl.engine.device import ALIGNMENT
from minidl.program.fuse import users
from minidl.program.record import Call, Memory, Place

# Kernels that may write an output over an input: they read element i of the input for the last time before they write
# element i of the output.
IN_PLACE = {
    "activation.relu": ("x", "y"),
    "activation.relu_backward": ("dy", "dx"),
    "dropout.dropout": ("x", "y"),
    "elementwise.add": ("a", "out"),
    "elementwise.affine": ("x", "out"),
    "norm.affine": ("x", "y"),
    "norm.batch_norm_backward": ("dy", "dx"),
}


def write_gradients_directly(calls: list[Call], outputs: set[Memory]) -> list[Call]:
    """Remove copies of gradients into the arena (the vector of all gradients): the kernels write gradients there."""
    using = users(calls)
    for copy in [call for call in calls if call.name == "elementwise.copy"]:
        source, target = copy.arguments["x"], copy.arguments["out"]
        if source.is_temporary(outputs) and target.memory.name and using[source.memory][-1] is copy:
            calls = [_moved(call, source.memory, target) for call in calls if call is not copy]
            using = users(calls)
    return calls


def _moved(call: Call, memory: Memory, target: Place) -> Call:
    """Return the call, with its arrays in this memory moved to `target`."""
    changed = {
        name: place._replace(memory=target.memory, offset=target.offset + place.offset)
        for name, place in call.places()
        if place.memory is memory
    }
    return call.replaced(**changed) if changed else call


def work_in_place(calls: list[Call], outputs: set[Memory]) -> list[Call]:
    """Let kernels write their output over their input, if they can and no later call uses the input."""
    for i in range(len(calls)):
        names = IN_PLACE.get(calls[i].name)
        if not names:
            continue
        source, target = (calls[i].arguments[name] for name in names)
        using = users(calls)
        if (
            source.is_temporary(outputs)
            and target.is_temporary(outputs)
            and source.like.nbytes == target.like.nbytes
            and using[source.memory][-1] is calls[i]
            and using[target.memory][0] is calls[i]
        ):
            calls = [_moved(call, target.memory, source._replace(offset=0)) for call in calls]
    return calls


def plan(calls: list[Call], outputs: set[Memory]) -> tuple[dict[Memory, int], int]:
    """Return the offset in the workspace of each temporary (memory without a name), and the workspace's size; in bytes.

    outputs: the memory of the step's results, which live until the end.
    """
    first: dict[Memory, int] = {}
    last: dict[Memory, int] = {}
    for i, call in enumerate(calls):
        for _, place in call.places():
            first.setdefault(place.memory, i)
            last[place.memory] = len(calls) if place.memory in outputs else i
    offsets: dict[Memory, int] = {}
    size = 0
    for memory in sorted((m for m in first if not m.name), key=lambda m: (-m.array.nbytes, first[m])):
        alive = [other for other in offsets if first[other] <= last[memory] and first[memory] <= last[other]]
        start = 0
        for other in sorted(alive, key=offsets.__getitem__):
            if start + memory.array.nbytes <= offsets[other]:
                break
            start = max(start, _aligned(offsets[other] + other.array.nbytes))
        offsets[memory] = start
        size = max(size, start + memory.array.nbytes)
    return offsets, _aligned(size)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
