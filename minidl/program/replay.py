"""The program: one training step, recorded once and replayed without Python.

    gradient = Gradient(model, lambda logits, y: ops.cross_entropy(logits, y))
    loss, correct = gradient(x, y)        # arena.grad is dL/dtheta of this batch
    optimizer.step()

The first call for a batch of some shape runs the model's Python once, with a device that only takes notes
(record.py). What was noted is made shorter (fuse.py), given memory (plan.py), and becomes a table of machine
addresses (call.py). Every further call walks the table: no graph is built, no array is made, nothing was compiled
for this model, and every bit is what the tape would have computed.

    calls       kernels with their arguments, in order
    regions     memory that each run is given: the workspace, theta, grad, the batch ...; an array is a region's number
                and an offset, so one program serves a thousand replicas, each with vectors of its own

A batch of another size has a program of its own, recorded in a millisecond or two when it is met first.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from minidl.engine import random
from minidl.engine.device import Device, address, aligned
from minidl.engine.tensor import Tensor
from minidl.errors import ShapeError
from minidl.nn.module import Module, evaluating, structure, watched
from minidl.ops.conv import uses_winograd
from minidl.program import call as machine
from minidl.program.fuse import fuse
from minidl.program.plan import plan, share_buffers, write_gradients_in_place
from minidl.program.precompile import Kernel, Progress, compile_all
from minidl.program.record import Buffer, Drawn, Recorder, Unrecordable

Loss = Callable[[Tensor, np.ndarray], Tensor]
WORKSPACE = "workspace"


class Program:
    """A table of calls over regions of memory.

    recorder: what was recorded, with its regions; results: name -> an array of the recording that is wanted afterwards;
    progress: called with (kernels ready, all kernels) while those that are not in the cache are compiled; also: others
    that will soon be wanted, compiled along with them.
    """

    def __init__(
        self,
        recorder: Recorder,
        results: Mapping[str, np.ndarray],
        progress: Progress = lambda ready, total: None,
        also: Sequence[Kernel] = (),
    ) -> None:
        places = {name: recorder.place(array) for name, array in results.items()}
        if any(place.buffer.name for place in places.values()):
            raise Unrecordable("a result is empty, or no result of minidl's operations")
        wanted = {place.buffer for place in places.values()}
        calls = fuse(recorder.recording.calls, wanted)
        calls = share_buffers(write_gradients_in_place(calls, wanted), wanted)
        offsets, self.workspace_size = plan(calls, wanted)
        self.calls = [f"{call.op}.{call.kernel}" for call in calls]
        self.shapes = [" ".join(str(place.like.shape) for _, place in call.places()) for call in calls]
        self.drawn = recorder.recording.drawn
        self.results = {name: (offsets[place.buffer] + place.offset, place.like) for name, place in places.items()}
        self.written = _last_writes(calls)

        blocks: list[int] = []
        table: list[tuple[int, int]] = []  # (entry, where the block begins)
        relocations: dict[str, list[tuple[int, int]]] = {}  # region -> (slot, offset in bytes)
        self._counters: dict[str, list[tuple[int, int]]] = {"seed": [], "offset": []}  # (slot, distance)
        self._constants: list[Buffer] = []
        arguments = [[getattr(value, "like", value) for value in call.arguments.values()] for call in calls]
        kernels = [
            Kernel(recorder.name, call.op, call.kernel, tuple(map(machine.numba_type, values)))
            for call, values in zip(calls, arguments, strict=True)
        ]
        compile_all([*kernels, *also], progress)
        for call, kernel, values in zip(calls, kernels, arguments, strict=True):
            table.append((machine.entry_address(kernel.signature), len(blocks)))
            blocks.append(machine.kernel_address(call.function, kernel.signature))
            for argument, value in zip(call.arguments.values(), values, strict=True):
                at = len(blocks)
                blocks.extend(machine.slots(value))
                if isinstance(argument, Drawn):
                    self._counters[argument.kind].append((at, int(argument)))
                elif isinstance(value, np.ndarray):
                    name, offset = argument.buffer.name or WORKSPACE, argument.offset
                    if name == "constant":
                        self._constants.append(argument.buffer)
                        blocks[at + machine.DATA] = argument.buffer.address + offset
                        continue
                    if name == WORKSPACE:
                        offset += offsets[argument.buffer]
                    relocations.setdefault(name, []).append((at + machine.DATA, offset))
        self._blocks = np.array(blocks, np.int64)
        first = address(self._blocks)
        self.table = np.array([(entry, first + at * machine.SLOT) for entry, at in table], np.int64).reshape(-1, 2)
        self._relocations = {name: np.array(pairs, np.int64).T for name, pairs in relocations.items()}
        self._bases: dict[str, int] = {}

    def run(self, bases: Mapping[str, int], first: int = 0, last: int | None = None) -> None:
        """Make the calls first, ..., last - 1 (all, unless given), with each region at the address in `bases`."""
        for name, base in bases.items():
            if self._bases.get(name) != base and name in self._relocations:
                slots, offsets = self._relocations[name]
                self._blocks[slots] = offsets + base
            self._bases[name] = base
        if self.drawn and first == 0:
            state = random.random_state()
            for kind, slots in self._counters.items():
                for slot, distance in slots:
                    self._blocks[slot] = state["seed"] if kind == "seed" else state["offset"] + distance
            random.draw(self.drawn)
        machine.run(self.table, first, len(self.table) if last is None else last)

    def final(self, region: str, start: int, stop: int) -> int:
        """After how many calls the bytes [start, stop) of a region are not written any more: where to cut."""
        return max((i + 1 for name, a, b, i in self.written if name == region and a < stop and start < b), default=0)


def _last_writes(calls: list[Any]) -> list[tuple[str, int, int, int]]:
    """(region, first byte, one past the last, index of the last call that touches it) for arrays in named regions."""
    found: dict[tuple[str, int, int], int] = {}
    for i, call in enumerate(calls):
        for _, place in call.places():
            if place.buffer.name:
                found[place.buffer.name, place.offset, place.offset + place.like.nbytes] = i
    return [(*key, i) for key, i in found.items()]


def correct_answers(logits: Tensor, labels: np.ndarray) -> int:
    """For how many rows of logits (B, classes) the largest is that of the label."""
    return int((logits.numpy().argmax(axis=1) == labels).sum())


class Workspace:
    """Memory for programs that never run at the same time; it grows to the largest."""

    def __init__(self) -> None:
        self.memory = aligned(0, np.uint8)

    def reserve(self, size: int) -> None:
        if size > self.memory.size:
            self.memory = aligned(size, np.uint8)

    def view(self, offset: int, like: np.ndarray) -> np.ndarray:
        return self.memory[offset : offset + like.nbytes].view(like.dtype).reshape(like.shape)


class Replayed:
    """What `Gradient` and `Prediction` share: a model, and a program for each shape of batch.

    workspace: memory to share with others that never run at the same time. progress, also: see `Program`.
    """

    def __init__(
        self,
        model: Module,
        workspace: Workspace | None = None,
        progress: Progress = lambda ready, total: None,
        also: Sequence[Kernel] = (),
    ) -> None:
        self.model, self.progress, self.also = model, progress, also
        self.workspace = workspace or Workspace()
        self.programs: dict[Any, Program] = {}
        self.elsewhere: dict[str, np.ndarray] = {}
        self.forget()

    def forget(self) -> None:
        """Record anew at the next call: for when settings of layers were changed, such as dropout's p."""
        self.programs.clear()
        self.not_recorded = ""  # why
        self.structure = structure()
        self.modules = [module for _, module in self.model.named_modules()]
        self.parameters = list(self.model.parameters())
        self.arena = self.model.arena
        self.home = self.memory()
        tensors = [*self.parameters, *(buffer for _, buffer in self.model.named_buffers())]
        self.arrays = [(tensor, tensor._data) for tensor in tensors]

    def lie_in(self, **vectors: np.ndarray | None) -> None:
        """Run in these vectors, of the arena's layout, in place of the model's own: theta, grad, statistics.

        For one of many replicas with one model between them (comm/replica.py); nothing else of the model is looked at.
        """
        self.elsewhere = {name: vector for name, vector in vectors.items() if vector is not None}

    def memory(self) -> dict[str, np.ndarray]:
        """What the model's arrays lie in: the arena's vectors, or arrays of their own."""
        named = dict(self.model.named_parameters())
        if self.arena is None or not self.arena.holds(named):
            tensors = [*named.items(), *self.model.named_buffers()]
            return {f"parameter {name}": tensor._data for name, tensor in tensors}
        found = {"theta": self.arena.theta, "grad": self.arena.grad}
        return found if self.model.statistics is None else found | {"statistics": self.model.statistics.theta}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "programs": {}}  # a copy's programs would point into this one's memory

    def record(self, batch: dict[str, np.ndarray]) -> tuple[Recorder, dict[str, np.ndarray]]:
        """(what notes the step for a batch, its results)"""
        raise NotImplementedError

    def program(self, batch: dict[str, np.ndarray]) -> Program | None:
        """For a batch of this shape; recorded when it is met first. None where there can be none."""
        moved = any([tensor._data is not array for tensor, array in self.arrays])
        if moved or self.structure != structure() or self.model.arena is not self.arena:
            self.forget()
        if self.not_recorded or watched():
            return None
        flags = tuple([module.training for module in self.modules] + [p.requires_grad for p in self.parameters])
        key = flags, uses_winograd(), *((array.shape, array.dtype.str) for array in batch.values())
        program = self.programs.get(key)
        if program is None:
            try:
                (first, results), (second, _) = self.record(batch), self.record(batch)
                if first.digest() != second.digest():
                    raise Unrecordable("it does not do the same each time")
                program = self.programs[key] = Program(first, results, self.progress, self.also)
            except Unrecordable as error:
                self.not_recorded = str(error)
                warnings.warn(f"this model runs without a recorded program, slower: {error}", stacklevel=4)
                return None
            self.workspace.reserve(program.workspace_size)
        return program

    def bases(self, batch: dict[str, np.ndarray]) -> dict[str, int]:
        """Where a program finds its regions."""
        vectors = {WORKSPACE: self.workspace.memory, **self.home, **self.elsewhere, **batch}
        return {name: address(array) for name, array in vectors.items()}

    def results(self, program: Program) -> dict[str, np.ndarray]:
        """What a program that has run was for: good until the next run of any."""
        return {name: self.workspace.view(*place) for name, place in program.results.items()}

    def recorder(self, batch: dict[str, np.ndarray]) -> tuple[Recorder, dict[str, np.ndarray]]:
        """A recorder that knows the model's memory, and the batch as ops should see it."""
        recorder = Recorder(self.parameters[0].device if self.parameters else Device("cpu"))
        for name, vector in self.home.items():
            recorder.region(name, vector)
        return recorder, {name: recorder.region(name, array) for name, array in batch.items()}


class Gradient(Replayed):
    """Computes the gradient of a loss for one batch.

    loss: (logits, labels) -> a tensor with one element. The model should be in training mode.
    """

    def __init__(self, model: Module, loss: Loss, **options: Any) -> None:
        model.flatten()
        super().__init__(model, **options)
        self.loss = loss
        self.result = (0.0, 0)

    def __call__(self, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
        """(the loss, how many answers were right) for images x (B, H, W, C) and labels y (B,).

        arena.grad is the gradient afterwards; what was in it before is overwritten.
        """
        for _ in self.parts(x, y):
            pass
        return self.result

    def parts(self, x: np.ndarray, y: np.ndarray, cuts: Sequence[int] = ()) -> Iterator[tuple[int, int, float]]:
        """The same in pieces: yields (start, stop, done) as soon as grad[start:stop] is final.

        cuts: where the parts begin and end, rising. The backward pass goes from the last layer to the first, and so do
        the parts. done: how much of the step has been made, 0 to 1, in calls. Once all have come, `result` is what a
        call returns. Without a program everything comes at the end.
        """
        x, y = self._batch(x, y)
        parts, batch = list(pairwise(cuts))[::-1], {"x": x, "y": y}
        program = self.program(batch)
        if program is None:
            self.result = self.by_tape(x, y)
            yield from ((start, stop, 1.0) for start, stop in parts)
            return
        assert self.arena is not None
        bases, size, calls, made = self.bases(batch), self.arena.grad.itemsize, len(program.table), 0
        for start, stop in parts:
            last = max(made, program.final("grad", start * size, stop * size) if "grad" in self.home else calls)
            if last > made:
                program.run(bases, made, last)
            made = last
            yield start, stop, made / calls
        if made < calls:
            program.run(bases, made)
        results = self.results(program)
        self.arena.cleared.clear()
        if self.model.statistics is not None:
            self.model.statistics.touch()
        loss = float(results["loss"][0])
        if not math.isfinite(loss):  # perhaps of a label that there is not, which the loss refuses, and says why
            self.loss(Tensor(np.zeros_like(results["logits"])), y)
        self.result = loss, int(results["correct"][0])

    def prepare(self, x: np.ndarray, y: np.ndarray) -> None:
        """Record the step for batches of this shape, and compile what it calls, without running it."""
        x, y = self._batch(x, y)
        program = self.program({"x": x, "y": y})
        if program is not None:
            machine.run(program.table, 0, 0)  # makes no call, but is loaded

    def _batch(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if np.asarray(y).dtype.kind not in "iu":
            raise ShapeError(f"Gradient: labels hold {np.asarray(y).dtype}; expected integers")
        return np.ascontiguousarray(Tensor(x)._data), np.ascontiguousarray(y, np.int64)

    def by_tape(self, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
        """The same, by the tape."""
        self.model.flatten().zero_grad()
        logits = self.model(x)
        loss = self.loss(logits, y)
        loss.backward()
        return loss.item(), correct_answers(logits, y)

    def record(self, batch: dict[str, np.ndarray]) -> tuple[Recorder, dict[str, np.ndarray]]:
        assert self.arena is not None
        recorder, batch = self.recorder(batch)
        arena, cleared = self.arena, self.arena.cleared
        arena.cleared = set(arena.parameters.values())
        try:
            with recorder.active():
                logits = self.model(Tensor.wrap(batch["x"], recorder.device))
                loss = self.loss(logits, batch["y"])
                correct = recorder.empty((1,), np.int64)
                recorder.softmax.correct(logits._data, batch["y"], correct)
                loss.backward()
                for parameter in arena.parameters.values():
                    if parameter in arena.cleared and parameter._grad is not None:  # the loss does not depend on it
                        recorder.elementwise.fill(0.0, parameter._grad.reshape(-1))
        finally:
            arena.cleared = cleared
        return recorder, {"loss": loss._data.reshape(1), "correct": correct, "logits": logits._data}


class Prediction(Replayed):
    """Computes the model's outputs, as when it does not train."""

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """The outputs (B, classes) for images x (B, H, W, C): good until the next call."""
        x = np.ascontiguousarray(Tensor(x)._data)
        program = self.program({"x": x})
        if program is None:
            with evaluating(self.model):
                return self.model(x).numpy()
        program.run(self.bases({"x": x}))
        return self.results(program)["logits"]

    def record(self, batch: dict[str, np.ndarray]) -> tuple[Recorder, dict[str, np.ndarray]]:
        recorder, batch = self.recorder(batch)
        with recorder.active(), evaluating(self.model):
            return recorder, {"logits": self.model(Tensor.wrap(batch["x"], recorder.device))._data}
