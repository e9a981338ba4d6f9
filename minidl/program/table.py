"""The compiled program: a recorded step as a table of machine addresses.

    calls       kernels with their arguments, in order
    regions     memory that each run provides: the workspace (memory for temporaries), theta (the weights), grad, the
                batch ...

For each array the program stores a region and an offset, so one program can serve many replicas with separate vectors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from minidl.engine import random, team
from minidl.engine.device import address
from minidl.program.call import DATA, SLOT, array_slots, entry_addresses, kernel_address, run_bound
from minidl.program.call import run as run_calls
from minidl.program.call import slots as slots_of
from minidl.program.conv_norm import merge_norms
from minidl.program.dependence import Calls
from minidl.program.fuse import fuse
from minidl.program.hidden import Drawn, Unrecordable
from minidl.program.packed import PackedWeights
from minidl.program.plan import plan, remove_unread, work_in_place, write_gradients_directly
from minidl.program.precompile import Kernel, OnProgress, compile_all, silent
from minidl.program.record import Call, Memory, Place, Recorder

SHORT = 0.001  # seconds; a run that takes less is short (engine/team.py)
WORKSPACE = "workspace"

_addresses: dict[tuple[Any, ...], tuple[int, int]] = {}  # kernel, kinds of arguments -> addresses of kernel and entry


class Operand(NamedTuple):
    """An array of a call. offset: in bytes, from the beginning of its region."""

    region: str
    offset: int
    shape: tuple[int, ...]
    nbytes: int


class Program:
    """A table of calls on regions of memory. calls: their names; arguments: of each call, {name: number or Operand}.

    recorder: the recorded step, with its regions.
    results: name -> an array of the recording whose values are needed after a run.
    progress: called with (kernels ready, all kernels) while kernels that are not in the cache are compiled.
    also: other kernels to compile at the same time.
    packed: where convolutions keep their packed weights; None: they pack them in each run.

    Raises Unrecordable if a result is empty, not contiguous, or not computed by the step.
    """

    def __init__(
        self,
        recorder: Recorder,
        results: Mapping[str, np.ndarray],
        progress: OnProgress = silent,
        also: Sequence[Any] = (),
        packed: PackedWeights | None = None,
    ) -> None:
        places = _place_results(recorder, results)
        outputs = {place.memory for place in places.values()}
        step = Calls(recorder.calls)
        fuse(step, outputs)
        if recorder.name == "cpu" and recorder.gpu is None:
            merge_norms(step, outputs)
        remove_unread(step, outputs)
        write_gradients_directly(step, outputs)
        if packed is not None:
            packed.add_to(step)
        calls = work_in_place(step, outputs)
        offsets, self.workspace_size = plan(calls, outputs)
        self._build(recorder, calls, offsets, progress, also)
        self.calls = [call.name for call in calls]
        self.arguments = [{name: _described(a, offsets) for name, a in call.arguments.items()} for call in calls]
        self.results = {name: (offsets[place.memory] + place.offset, _like(place)) for name, place in places.items()}
        self._last_uses = _last_uses(calls)
        self._drawn = recorder.drawn
        self._bases: dict[str, int] = {}
        self._short = False  # whether a run of all calls was short

    def _build(
        self, recorder: Recorder, calls: Sequence[Call], offsets: Mapping[Memory, int], progress: OnProgress,
        also: Sequence[Any],
    ) -> None:  # fmt: skip
        """Make the table: compile the kernels, and lay out their arguments. offsets: of temporaries."""
        addresses = _compiled(recorder.name, calls, progress, also)
        starts = self._lay_out(calls, [kernel for kernel, _ in addresses], offsets)
        blocks = address(self._blocks) + SLOT * np.array(starts, np.int64)
        self.table = np.stack([np.array([entry for _, entry in addresses], np.int64), blocks], axis=1)

    def warm(self) -> None:
        """Compile or load the code that makes the calls."""
        run_bound(self.table, 0, 0, team.cores(), False)

    def _lay_out(self, calls: Sequence[Call], kernels: Sequence[int], offsets: Mapping[Memory, int]) -> list[int]:
        """Build the argument blocks of all calls in one array; return the slot at which each block begins.

        kernels: the address of each call's kernel.
        Also store which slots each run fills in: relocations (arrays in regions) and counters (random numbers).
        """
        slots: list[int] = []
        starts: list[int] = []
        relocations: dict[str, list[tuple[int, int]]] = defaultdict(list)  # region -> (slot, offset in bytes)
        self._counters: dict[str, list[tuple[int, int]]] = {"seed": [], "offset": []}  # (slot, offset to add)
        self._constants: dict[Memory, int] = {}  # constant -> its address; keeps the constants alive
        for call, kernel in zip(calls, kernels, strict=True):
            starts.append(len(slots))
            slots.append(kernel)
            for argument in call.arguments.values():
                at = len(slots)
                if type(argument) is not Place:
                    slots += slots_of(_number(argument))
                    if type(argument) is Drawn:
                        self._counters[argument.kind].append((at, argument.value))
                else:
                    memory, offset, like = argument
                    slots += array_slots(like.shape, like.itemsize)
                    if memory.name == "constant":
                        if memory not in self._constants:
                            self._constants[memory] = address(memory.array)
                        slots[at + DATA] = self._constants[memory] + offset
                    else:
                        offset += 0 if memory.name else offsets[memory]
                        relocations[memory.name or WORKSPACE].append((at + DATA, offset))
        self._blocks = np.array(slots, np.int64)
        self._relocations = {name: np.array(pairs, np.int64).T for name, pairs in relocations.items()}
        return starts

    def run(self, bases: Mapping[str, int], first: int = 0, last: int | None = None) -> None:
        """Run calls `first` to `last` - 1 (default: all), with each region at the address in `bases`."""
        if bases != self._bases:
            self.bind(bases)
        if first == 0 and self._drawn:
            self.draw()
        last, cores = len(self.table) if last is None else last, team.cores()
        if self._short and run_bound(self.table, first, last, cores, True):
            return
        began = perf_counter()
        if not run_bound(self.table, first, last, cores, False):
            team.renew()
            if not run_bound(self.table, first, last, cores, False):  # the cores change all the time
                run_calls(self.table, first, last)
        self._short = first == 0 and last == len(self.table) and perf_counter() - began < SHORT

    def bind(self, bases: Mapping[str, int]) -> None:
        """Let the next run find each region at the address in `bases`."""
        for name, base in bases.items():
            if self._bases.get(name) != base and name in self._relocations:
                slots, offsets = self._relocations[name]
                self._blocks[slots] = offsets + base
            self._bases[name] = base

    def draw(self) -> None:
        """Draw the random numbers of the next run."""
        if self._drawn:
            seed, start = random.draw(self._drawn)
            for kind, counters in self._counters.items():
                for slot, offset in counters:
                    self._blocks[slot] = seed if kind == "seed" else start + offset

    def twin(self) -> Program:
        """Return a program with the same calls, which another thread may run at the same time on other regions."""
        twin = copy(self)
        twin._blocks, twin._bases = self._blocks.copy(), {}
        twin.table = self.table + np.array([0, address(twin._blocks) - address(self._blocks)])
        return twin

    def final(self, region: str, start: int, stop: int) -> int:
        """Return after how many calls the bytes [start, stop) of a region are final: no later call uses them."""
        return max((i + 1 for name, a, b, i in self._last_uses if name == region and a < stop and start < b), default=0)


def _place_results(recorder: Recorder, results: Mapping[str, np.ndarray]) -> dict[str, Place]:
    places = {name: recorder.place(array) for name, array in results.items()}
    if any(place.memory.name for place in places.values()):
        raise Unrecordable("a result is empty, or not computed by minidl's operations")
    return places


def _compiled(
    device: str, calls: Sequence[Call], progress: OnProgress, also: Sequence[Kernel]
) -> list[tuple[int, int]]:
    """Return the addresses of each call's kernel and entry. Compile the kernels that are missing, and those in `also`.

    progress: called with (kernels ready, all kernels).
    """
    keys = [(_function(call), *[_kind(argument) for argument in call.arguments.values()]) for call in calls]
    by_key = dict(zip(keys, calls, strict=True))
    missing = {key: _kernel(device, call) for key, call in by_key.items() if key not in _addresses}
    compile_all([*missing.values(), *also], progress)
    entries = entry_addresses([kernel.signature for kernel in missing.values()])
    for (key, kernel), entry in zip(missing.items(), entries, strict=True):
        _addresses[key] = kernel_address(kernel.function, kernel.signature), entry
    return [_addresses[key] for key in keys]


def _kind(argument: Any) -> Any:
    """Return a key that determines the Numba type of an argument. Numba's types themselves are slow to compare."""
    if type(argument) is Place:
        return argument.like.dtype, argument.like.ndim
    return tuple(map(type, argument)) if isinstance(argument, tuple) else type(argument)


def _function(call: Call) -> Any:
    """Return the kernel of a call, or the one that it chooses for the call's arguments (`jit.choice`)."""
    choose = getattr(call.function, "choose", None)
    return choose(*_values(call)) if choose else call.function


def _kernel(device: str, call: Call) -> Kernel:
    op, name = call.name.split(".")
    return Kernel.of(device, op, name, _values(call))


def _values(call: Call) -> list[Any]:
    """Return the arguments of a call; for an array, another one of the same shape and type."""
    return [argument.like if type(argument) is Place else _number(argument) for argument in call.arguments.values()]


def _described(argument: Any, offsets: Mapping[Memory, int]) -> Any:
    """Return an argument without its memory: a number, a tuple, or the Operand that describes an array."""
    if type(argument) is not Place:
        return _number(argument)
    memory, offset, like = argument
    start = 0 if memory.name else offsets[memory]
    return Operand(memory.name or WORKSPACE, start + offset, like.shape, like.nbytes)


def _number(argument: Any) -> Any:
    return argument.value if type(argument) is Drawn else argument


def _like(place: Place) -> np.ndarray:
    """Return an array of the place's shape and type. It takes almost no memory."""
    return np.broadcast_to(np.zeros((), place.like.dtype), place.like.shape)


def _last_uses(calls: Sequence[Call]) -> list[tuple[str, int, int, int]]:
    """Return (region, first byte, end byte, index of the last call that uses them) for each array in a region."""
    found: dict[tuple[str, int, int], int] = {}
    for i, call in enumerate(calls):
        for _, place in call.places:
            if place.memory.name:
                found[place.memory.name, place.offset, place.offset + place.like.nbytes] = i
    return [(*key, i) for key, i in found.items()]
