"""Replay: one training step, recorded once and then run without Python.

    gradient = Gradient(model, lambda logits, y: ops.cross_entropy(logits, y))
    loss, correct = gradient(x, y)        # arena.grad is dL/dtheta of this batch
    optimizer.step()

The first call for a batch of some shape runs the model's Python code twice, on a device that only records (record.py).
The second recording detects calls that vary. The recorded calls are merged (fuse.py), get memory (plan.py), and become
a program: a table of machine addresses (table.py, call.py). Later calls of `gradient` run the table: they build no
graph and allocate no array. Nothing is compiled specifically for the model. The results are bit-identical to those of
the tape, the graph of functions that the engine builds otherwise.

Each shape of batch needs a separate program, which is recorded in a few milliseconds.

A program is never silently out of date. Before each run, `Fingerprint` compares what the code of the model and the
loss reads: attributes, containers, closures, defaults, globals (fingerprint.py states the limits). After a change, the
step is recorded again. While a setting changes at every step, the tape computes the steps.

A step cannot be recorded if its code reads values of tensors, parameters or labels, draws random numbers other than
dropout's, or changes settings that the next step reads. Such a step runs on the tape, with one warning per reason.
Recordings run with other random states than the training (the second also with other images), and leave no trace.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from minidl.engine.autograd import grad_enabled
from minidl.engine.concurrency import check_fork
from minidl.engine.device import Device, address, forbid_recording
from minidl.engine.tensor import Tensor
from minidl.errors import MinidlError, ShapeError
from minidl.nn.modes import evaluating, mode_changes, watchers
from minidl.nn.module import Module
from minidl.ops.conv import uses_winograd
from minidl.program.call import run as run_calls
from minidl.program.fingerprint import Fingerprint
from minidl.program.guard import active, observed
from minidl.program.hidden import Labels, Unrecordable
from minidl.program.precompile import Kernel, OnProgress
from minidl.program.record import Recorder, paused_collector
from minidl.program.table import WORKSPACE, Program
from minidl.program.workspace import Workspace

Loss = Callable[[Tensor, np.ndarray], Tensor]
PROGRAMS = 64  # the most that an instance keeps; the least recently used one is discarded first
NESTED = "it calls a Gradient or a Prediction"
PATIENCE = 3  # the most recordings in a row that follow a change of settings; after the next change, the tape is used


def correct_answers(logits: Tensor, labels: np.ndarray) -> int:
    """Return the number of rows of logits (..., classes) whose largest element is at the index in labels (...).

    Raises ShapeError unless there is one label for each row.
    """
    _check_rows(logits, labels)
    return int((logits.numpy().argmax(axis=-1).reshape(-1) == labels.reshape(-1)).sum())


def _check_rows(logits: Tensor, labels: np.ndarray) -> None:
    if not logits.ndim or math.prod(logits.shape[:-1]) != labels.size:
        raise ShapeError(f"Gradient: logits {logits.shape} and labels {labels.shape}; expected one label for each row: "
                         f"{logits.shape[:-1]}")  # fmt: skip


def silent(ready: int, total: int) -> None:
    """Report no progress."""


class Replayed:
    """The base class of `Gradient` and `Prediction`: a model, and a program for each shape of batch.

    workspace: memory to share with other instances; they then run one at a time. progress, also: see `Program`.

    A copy (copy, deepcopy, pickle) records its own programs. It does not copy `progress` and `also`.
    """

    def __init__(
        self,
        model: Module,
        workspace: Workspace | None = None,
        progress: OnProgress = silent,
        also: Sequence[Kernel] = (),
    ) -> None:
        self.model, self.progress, self.also = model, progress, also
        self.workspace = workspace or Workspace()
        self.programs: dict[Hashable, Program] = {}
        self.refused: dict[Hashable, str] = {}  # shape of batch -> the reason why the step cannot be recorded
        self.warned: set[str] = set()  # reasons
        self.unsettled = 0  # the number of calls in a row that found a changed setting
        self.changed = ""  # the latest such setting
        self.bound: dict[str, np.ndarray] = {}  # vectors that replace the model's
        self.forget()

    def forget(self) -> None:
        """Discard all programs, so that the next call records again."""
        self.programs.clear()
        self.refused.clear()
        self.not_recorded = ""  # the reason why the latest step was not recorded
        self.fingerprint: Fingerprint | None = None
        self.modules = [module for _, module in self.model.named_modules()]
        self.parameters = list(self.model.parameters())
        self.arena = self.model.arena
        self.vectors = self._own_vectors()
        tensors = [*self.parameters, *(buffer for _, buffer in self.model.named_buffers())]
        self.arrays = [(tensor, tensor._data) for tensor in tensors]
        for name, vector in self.bound.items():
            if name not in self.vectors or vector.size != self.vectors[name].size:
                raise MinidlError(f"{name}: the model's layers have changed, and vectors of the old layout are in use; "
                                  "bind vectors of the new one")  # fmt: skip

    def bind(self, **vectors: np.ndarray | None) -> None:
        """Run on other vectors than the model's, in the same layout: theta (the weights), grad, statistics.

        Used if several replicas share one model (comm/replica.py). Vectors that are not given remain the model's.
        """
        self.bound = {name: vector for name, vector in vectors.items() if vector is not None}

    def _own_vectors(self) -> dict[str, np.ndarray]:
        """Return the memory of the model's arrays: the arena's vectors, or one array for each parameter and buffer."""
        named = dict(self.model.named_parameters())
        if self.arena is None or not self.arena.holds(named):
            tensors = [*named.items(), *self.model.named_buffers()]
            return {f"parameter {name}": tensor._data for name, tensor in tensors}
        arrays = {"theta": self.arena.theta, "grad": self.arena.grad}
        if self.model.statistics is not None:
            arrays["statistics"] = self.model.statistics.theta
        return arrays

    def __getstate__(self) -> dict[str, Any]:
        derived = ("modules", "parameters", "arena", "vectors", "arrays", "fingerprint")  # `forget` computes them
        state = {name: value for name, value in vars(self).items() if name not in derived}
        # A program contains addresses of the original.
        return {**state, "progress": silent, "also": (), "programs": {}, "refused": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.forget()

    def record(self, recorder: Recorder, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the step's code with a recorder for a batch of its regions; return the results."""
        raise NotImplementedError

    def roots(self) -> tuple[Any, ...]:
        """Return the objects whose code runs in a step."""
        return (self.model,)

    def mode(self) -> tuple[Hashable, ...]:
        """Return settings that select one of several programs."""
        return uses_winograd(), bytes(map(bool, [parameter.requires_grad for parameter in self.parameters]))

    def program(self, batch: dict[str, np.ndarray]) -> Program | None:
        """Return the program for this shape of batch. Record it at its first use.

        Return None if the step cannot be recorded (`not_recorded` is the reason), if the batch is empty, or while a
        watcher must see the forward passes (`watched`).
        """
        check_fork()
        fingerprint = self._renewed()
        self.not_recorded = fingerprint.refusal
        if self.not_recorded or watchers() or not batch["x"].size:
            return None
        key = self.mode(), *((array.shape, array.dtype.str) for array in batch.values())
        program = self.programs.pop(key, None)
        if program is not None:
            self.programs[key] = program  # the last one used is the last in the dict
        elif key not in self.refused:
            if self.unsettled > PATIENCE:
                self.not_recorded = f"{self.changed} changes from step to step"
                return None
            try:
                program = self.programs[key] = self._recorded(fingerprint, batch)
                self.workspace.reserve(program.workspace_size)
            except Unrecordable as error:
                self.refused[key] = str(error)
            for store in (self.programs, self.refused):
                if len(store) > PROGRAMS:
                    del store[next(iter(store))]
        self.not_recorded = self.refused.get(key, "")
        return program

    def _renewed(self) -> Fingerprint:
        """Return the fingerprint of the present settings. If it differs from the last one, forget the programs."""
        before, roots = self.fingerprint, self.roots()
        moved = any([tensor._data is not array for tensor, array in self.arrays])
        if before is None or moved or self.model.arena is not self.arena:
            self.forget()
            self.fingerprint = Fingerprint(roots)
            return self.fingerprint
        if before.unchanged(roots):
            self.unsettled = 0
            return before
        found = Fingerprint(roots, before)
        if found.equals(before):
            self.unsettled = 0
        else:
            self.unsettled += 1
            self.changed = before.first_change() or "the loss"
            self.forget()
        self.fingerprint = found
        return found

    @paused_collector()
    def _recorded(self, fingerprint: Fingerprint, batch: dict[str, np.ndarray]) -> Program:
        """Record the step twice, compare, and compile. Raises Unrecordable."""
        first, results = self._observed(fingerprint, batch)
        second, _ = self._observed(fingerprint, {**batch, "x": 1 - batch["x"]})
        if first.digest() != second.digest():
            raise Unrecordable("its calls differ from one recording to the next")
        return Program(first, results, self.progress, self.also)

    def _observed(
        self, fingerprint: Fingerprint, batch: dict[str, np.ndarray]
    ) -> tuple[Recorder, dict[str, np.ndarray]]:
        recorder, regions = self.recorder(batch)
        record = functools.partial(self.record, recorder, regions)
        return recorder, observed(record, recorder, fingerprint, self.parameters)

    def warn(self, stacklevel: int) -> None:
        """Warn, once for each reason, that a step ran on the tape because it cannot be recorded."""
        if self.not_recorded and self.not_recorded not in self.warned:
            self.warned.add(self.not_recorded)
            warnings.warn(
                f"this model runs without a recorded program, which is slower: {self.not_recorded}",
                stacklevel=stacklevel + 1,
            )

    def bases(self, batch: dict[str, np.ndarray]) -> dict[str, int]:
        """Return the address of each region for a run."""
        vectors = {WORKSPACE: self.workspace.memory, **self.vectors, **self.bound, **batch}
        return {name: address(array) for name, array in vectors.items()}

    def results(self, program: Program) -> dict[str, np.ndarray]:
        """Return the results of a program that has run: views, valid until the next run in this workspace."""
        return {name: self.workspace.view(*place) for name, place in program.results.items()}

    def recorder(self, batch: dict[str, np.ndarray]) -> tuple[Recorder, dict[str, np.ndarray]]:
        """Return a recorder with the model's memory and the batch as regions, and the batch to pass to ops."""
        recorder = Recorder(self.parameters[0].device if self.parameters else Device("cpu"))
        for name, vector in self.vectors.items():
            recorder.region(name, vector)
        return recorder, {name: recorder.region(name, array) for name, array in batch.items()}


class Gradient(Replayed):
    """A callable that computes the gradient of a loss for one batch.

    The constructor flattens the model: all parameters move into one vector, theta, and all gradients into another,
    grad. Both belong to the model's arena.

    loss: (logits, labels) -> a tensor with one element. The model should be in training mode.
    """

    def __init__(self, model: Module, loss: Loss, **options: Any) -> None:
        super().__init__(model, **options)
        self.loss = loss
        self.result = (0.0, 0)

    def forget(self) -> None:
        self.model.flatten()  # as the tape does; again if a layer was replaced
        self.modes: tuple[int, Hashable] = -1, b""  # mode_changes() when `training` was last read, and what it was
        super().forget()

    def roots(self) -> tuple[Any, ...]:
        return self.model, self.loss

    def mode(self) -> tuple[Hashable, ...]:
        if self.modes[0] != (now := mode_changes()):
            modes = [module.training for module in self.modules]
            self.modes = now, bytes(modes) if all(type(mode) is bool for mode in modes) else repr(modes)
        return *super().mode(), grad_enabled(), self.modes[1]

    def __call__(self, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
        """Return the loss and the number of correct predictions for images x (B, H, W, C) and integer labels y (B,).

        Overwrites arena.grad with the gradient. Raises ShapeError if shapes, types or labels do not fit.
        """
        forbid_recording(NESTED)
        with self.workspace.lock:
            for _ in self.parts(x, y):
                pass
            return self.result

    def parts(self, x: np.ndarray, y: np.ndarray, cuts: Sequence[int] = ()) -> Iterator[tuple[int, int, float]]:
        """Compute the gradient in parts: yield (start, stop, done) as soon as grad[start:stop] is final.

        cuts: the boundaries of the parts, ascending. The parts come in the order of the backward pass, from the last
        layer to the first. done: the fraction of the step's calls made so far, 0 to 1. When the iterator is exhausted,
        `result` holds what `__call__` returns. Without a program, all parts come at the end.
        """
        x, y = self._batch(x, y)
        parts, batch = list(pairwise(cuts))[::-1], {"x": x, "y": y}
        program = self.program(batch)
        if program is None:
            self.result = self._by_tape_if_bound(x, y)
            self.warn(stacklevel=3)
            yield from ((start, stop, 1.0) for start, stop in parts)
            return
        assert self.arena is not None
        bases, size, calls, made = self.bases(batch), self.arena.dtype.itemsize, len(program.table), 0
        for start, stop in parts:
            last = max(made, program.final("grad", start * size, stop * size) if "grad" in self.vectors else calls)
            if last > made:
                with self.workspace.lock:
                    program.run(bases, made, last)
            made = last
            yield start, stop, made / calls
        if made < calls:
            with self.workspace.lock:
                program.run(bases, made)
        results = self.results(program)
        self.arena.cleared.clear()
        if self.model.statistics is not None:
            self.model.statistics.touch()
        loss = float(results["loss"][0])
        if not math.isfinite(loss):  # if a label is invalid, this raises the error that names it
            self.loss(Tensor(np.zeros_like(results["logits"])), y)
        self.result = loss, int(results["correct"][0])

    def prepare(self, x: np.ndarray, y: np.ndarray) -> None:
        """Record the step for batches of this shape and compile its kernels, without running it."""
        x, y = self._batch(x, y)
        with self.workspace.lock:
            program = self.program({"x": x, "y": y})
            if program is not None:
                run_calls(program.table, 0, 0)  # no calls: only compiles or loads `run`
        self.warn(stacklevel=2)

    def _batch(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if np.asarray(y).dtype.kind not in "iu":
            raise ShapeError(f"Gradient: labels hold {np.asarray(y).dtype}; expected integers")
        return np.ascontiguousarray(Tensor(x)._data), np.ascontiguousarray(y, np.int64)

    def by_tape(self, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
        """Do the same as `__call__`, on the tape."""
        self.model.flatten().zero_grad()
        logits = self.model(x)
        loss = self.loss(logits, y)
        loss.backward()
        return loss.item(), correct_answers(logits, y)

    def _by_tape_if_bound(self, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
        """Compute the step on the tape, with the vectors that `bind` has set."""
        for name in ("theta", "statistics"):
            if name in self.bound:
                self.vectors[name][:] = self.bound[name]
        result = self.by_tape(x, y)
        for name in ("grad", "statistics"):
            if name in self.bound:
                self.bound[name][:] = self.vectors[name]
        return result

    def record(self, recorder: Recorder, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        assert self.arena is not None
        arena, cleared = self.arena, self.arena.cleared
        arena.cleared = set(arena.parameters.values())
        try:
            with active(recorder, self.mode):
                logits = self.model(recorder.tensor(batch["x"]))
                loss = self.loss(logits, Labels(batch["y"]))  # type: ignore[arg-type]
                correct = recorder.empty((1,), np.int64)
                _check_rows(logits, batch["y"])
                rows = logits._data.reshape(-1, logits.shape[-1])
                recorder.softmax.correct(rows, batch["y"].reshape(-1), correct)
                loss.backward()
                for parameter in arena.parameters.values():
                    if parameter in arena.cleared and parameter._grad is not None:  # the loss is independent of it
                        recorder.elementwise.fill(0.0, parameter._grad.reshape(-1))
        finally:
            arena.cleared = cleared
        return {"loss": loss._data.reshape(1), "correct": correct, "logits": logits._data}


class Prediction(Replayed):
    """A callable that computes the model's outputs in evaluation mode. Several threads may call it."""

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return the outputs (B, classes), a new array, for images x (B, H, W, C)."""
        forbid_recording(NESTED)
        x = np.ascontiguousarray(Tensor(x)._data)
        with self.workspace.lock:
            program = self.program({"x": x})
            if program is not None:
                program.run(self.bases({"x": x}))
                return self.results(program)["logits"].copy()
            with evaluating(self.model):
                found = self.model(x).numpy().copy()
        self.warn(stacklevel=2)
        return found

    def record(self, recorder: Recorder, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        with evaluating(self.model), active(recorder, self.mode):
            return {"logits": self.model(recorder.tensor(batch["x"]))._data}
