"""The programs of a model: when they are recorded, when they are discarded, and when the tape is used instead.

`Replayed` is the base class of `Gradient` and `Prediction` (replay.py).
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from minidl.engine.changes import latest_change
from minidl.engine.concurrency import check_fork
from minidl.engine.device import Device, address
from minidl.errors import MinidlError
from minidl.nn.modes import watchers
from minidl.nn.module import Module
from minidl.ops.conv import uses_winograd
from minidl.program.fingerprint import Fingerprint
from minidl.program.guard import observed
from minidl.program.hidden import Unrecordable
from minidl.program.latest import Latest
from minidl.program.packed import PackedWeights
from minidl.program.precompile import Kernel, OnProgress, silent
from minidl.program.record import Recorder, paused_collector
from minidl.program.table import WORKSPACE, Program
from minidl.program.workspace import Workspace

PROGRAMS = 64  # the most that an instance keeps; the least recently used one is discarded first
# A shape of batch is no longer recorded after PATIENCE failed recordings in a row. Recording pauses after more than
# PATIENCE steps in a row that changed a setting.
PATIENCE = 3
LONGEST_PAUSE = 64  # the most steps in a row whose settings are not compared
# For loops over all parameters, which run in each step: functions without Python code
_data_of, _needs_gradient = operator.attrgetter("_data"), operator.attrgetter("requires_grad")
DIFFER = "its calls differ from one recording to the next"


class Replayed:
    """The base class of `Gradient` and `Prediction`: a model, and a program for each shape of batch.

    workspace: memory to share with other instances; they then run one at a time. `progress` and `also` are
    arguments of `Program`.

    keep_packed: whether convolutions and products keep their packed weights (packed.py).

    A copy (copy, deepcopy, pickle) records its own programs, and has neither `progress` nor `also`.
    """

    def __init__(
        self,
        model: Module,
        workspace: Workspace | None = None,
        progress: OnProgress = silent,
        also: Sequence[Kernel] = (),
        keep_packed: bool = False,
    ) -> None:
        self.model, self.progress, self.also, self.keep_packed = model, progress, also, keep_packed
        self.given_workspace = workspace or Workspace()
        self.programs: dict[Hashable, Program] = {}
        self.refused: dict[Hashable, tuple[str, int]] = {}  # shape of batch -> (first reason, failed recordings)
        self.warned: set[str] = set()  # the reasons of earlier warnings
        self.unsettled = 0  # the number of comparisons in a row that found a changed setting
        self.changed = ""  # the name of the setting that changed last, for messages
        self.pause = 0  # how many of the next steps run on the tape, without a comparison of the settings
        self.bound: dict[str, np.ndarray] = {}  # the vectors that `bind` has set
        self.forget()

    def forget(self) -> None:
        """Discard all programs, so that the next call records again."""
        self.programs.clear()
        self.refused.clear()
        self.latest: Latest | None = None
        self.not_recorded = ""  # the reason why the latest step was not recorded
        self.fingerprint: Fingerprint | None = None
        self.modules = [module for _, module in self.model.named_modules()]
        self.parameters = list(self.model.parameters())
        self.arena = self.model.arena
        self.vectors = self._own_vectors()
        self.addresses = self._addresses()
        self.given_gpu = None if self.arena is None else self.arena.gpu
        self.gpu = self.given_gpu if "theta" in self.vectors else None
        # In an arena no array can be replaced, and on a GPU reading one would copy it.
        buffers = [buffer for _, buffer in self.model.named_buffers()]
        self.tensors = [*self.parameters, *buffers] if self.gpu is None else []
        self.arrays = [tensor._data for tensor in self.tensors]
        self.workspace, self.batches = self.given_workspace, None
        self.packed = PackedWeights() if self.keep_packed and self.gpu is None else None
        if self.gpu is not None:
            from minidl.program.cuda_workspace import Batches, WorkspaceOnGpu

            self.workspace, self.batches = self.given_workspace.on(self.gpu, WorkspaceOnGpu), Batches(self.gpu)
        for name, vector in self.bound.items():
            if name not in self.vectors or vector.size != self.vectors[name].size:
                raise MinidlError(f"{name}: the model's layers have changed, and vectors of the old layout are in use; "
                                  "bind vectors of the new one")  # fmt: skip

    def bind(self, **vectors: np.ndarray | None) -> None:
        """Run on other vectors than the model's, in the same layout: theta (the weights), grad, statistics.

        Used if several replicas share one model (comm/replica.py). Vectors that are not given remain the model's.
        """
        self.bound = {name: vector for name, vector in vectors.items() if vector is not None}
        self.addresses, self.latest = self._addresses(), None

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

    def _addresses(self) -> dict[str, int]:
        return {name: address(vector) for name, vector in (self.vectors | self.bound).items()}

    def __getstate__(self) -> dict[str, Any]:
        # `forget` computes these.
        derived = ("modules", "parameters", "arena", "vectors", "addresses", "tensors", "arrays", "fingerprint", "gpu",
                   "given_gpu", "workspace", "batches", "packed", "latest")  # fmt: skip
        state = {name: value for name, value in vars(self).items() if name not in derived}
        # A program contains memory addresses of the original.
        return {**state, "progress": silent, "also": (), "programs": {}, "refused": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.forget()

    def record(self, recorder: Recorder, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the step's code while `recorder` is active; return the results. batch: as `self.recorder` returns it."""
        raise NotImplementedError

    def roots(self) -> tuple[Any, ...]:
        """Return the objects whose code runs in a step."""
        return (self.model,)

    def mode(self) -> tuple[Hashable, ...]:
        """Return settings that select one of several programs."""
        return uses_winograd(), tuple(map(_needs_gradient, self.parameters))

    def program(self, batch: dict[str, np.ndarray]) -> Program | None:
        """Return the program for this shape of batch. Record it at its first use. If nothing has changed since the
        latest call, this is the latest program (latest.py).

        Return None if the step cannot be recorded (`not_recorded` is the reason), if the batch is empty, or while a
        watcher must see the forward passes (`nn.watching`). A recording may fail by chance, for example if another
        thread draws random numbers. So the next steps try again, until PATIENCE recordings in a row have failed. But if
        the two recordings of a step differ, no step of this shape tries again: it depends on something unknown.
        """
        if (latest := self.latest) is not None and latest.holds(self.roots(), batch):
            return latest.program
        check_fork()
        change, self.latest = latest_change(), None
        fingerprint = self._renewed()
        self.not_recorded = fingerprint.refusal
        if self.not_recorded or watchers() or not batch["x"].size:
            return None
        if self.unsettled > PATIENCE:
            self.not_recorded = f"{self.changed} changes from step to step"
            return None
        key = self.mode(), *[(array.shape, array.dtype) for array in batch.values()]
        program = self.programs.pop(key, None)
        if program is not None:
            self.programs[key] = program  # the last one used is the last in the dict
            if not self.unsettled and self.gpu is None:
                self.latest = Latest(program, change, self.roots(), fingerprint.watched, self.workspace,
                                     self.addresses, batch)  # fmt: skip
            return program
        self.not_recorded, failures = self.refused.get(key, ("", 0))
        if failures < PATIENCE:
            try:
                program = self.programs[key] = self._recorded(fingerprint, batch)
                self.workspace.reserve(program.workspace_size)
                if self.batches is not None:
                    self.batches.reserve(batch)
                self.refused.pop(key, None)
                self.not_recorded = ""
            except Unrecordable as error:
                # Keep the first reason: later errors may be mere consequences of it.
                self.not_recorded = self.not_recorded or str(error)
                self.refused[key] = self.not_recorded, PATIENCE if str(error) == DIFFER else failures + 1
            for store in (self.programs, self.refused):
                if len(store) > PROGRAMS:
                    del store[next(iter(store))]
        return program

    def _renewed(self) -> Fingerprint:
        """Return the fingerprint of the present settings. If it differs from the last one, forget the programs.

        While a setting changes at every step, compare only after pauses of 2, 4, 8 ... steps. During a pause, the tape
        computes the steps, because it always uses the present settings.
        """
        before, roots = self.fingerprint, self.roots()
        moved = not all(map(operator.is_, map(_data_of, self.tensors), self.arrays))
        arena = self.model.arena
        elsewhere = arena is not self.arena or (arena is not None and arena.gpu is not self.given_gpu)
        if before is None or moved or elsewhere:
            self.forget()
            self.fingerprint = Fingerprint(roots)
            return self.fingerprint
        if self.pause and not self.bound:  # no pause for bound vectors: `forget` must check at once that they fit
            self.pause -= 1
            if not self.pause:  # the next step's settings are compared with this one's
                self.forget()
                self.fingerprint = Fingerprint(roots, before)
            return before
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
            if self.unsettled > PATIENCE:
                self.pause = min(2 ** (self.unsettled - PATIENCE), LONGEST_PAUSE)
        self.fingerprint = found
        return found

    @paused_collector()
    def _recorded(self, fingerprint: Fingerprint, batch: dict[str, np.ndarray]) -> Program:
        """Record the step twice, compare, and compile. Raises Unrecordable."""
        first, results = self._observed(fingerprint, batch)
        second, _ = self._observed(fingerprint, {**batch, "x": 1 - batch["x"]})
        if first.digest() != second.digest():
            raise Unrecordable(DIFFER)
        kind = Program
        if self.gpu is not None:
            from minidl.program.cuda_table import ProgramOnGpu

            kind = ProgramOnGpu
        return kind(first, results, self.progress, self.also, self.packed)

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
        """Return the address of each region for a run. On a GPU, copy what is not there yet."""
        if self.batches is not None:
            return self._addresses_on_gpu() | self.batches.send(batch)
        if self.latest is not None:
            return self.latest.place(batch)
        found = {WORKSPACE: self.workspace.address, **self.addresses}
        for name, array in batch.items():
            found[name] = address(array)
        return found

    def _addresses_on_gpu(self) -> dict[str, int]:
        arena, statistics = self.arena, self.model.statistics
        assert arena is not None
        found = {WORKSPACE: self.workspace.address}
        found |= {name: address(arena.array(name)) for name in ("theta", "grad")}
        if statistics is not None:
            found["statistics"] = address(statistics.array("theta"))
        return found

    def output(self, program: Program, name: str) -> np.ndarray:
        """Return a result of a program that has run: a view, valid until the next run in this workspace."""
        if self.latest is not None and self.latest.program is program:
            return self.latest.outputs[name]
        return self.workspace.view(*program.results[name])

    def recorder(self, batch: dict[str, np.ndarray]) -> tuple[Recorder, dict[str, np.ndarray]]:
        """Return a recorder whose regions are the model's memory and the batch, and the batch to pass to ops."""
        recorder = Recorder(self.parameters[0].device if self.parameters else Device("cpu"), self.gpu)
        for name, vector in (self.vectors if self.gpu is None else self._own_vectors()).items():
            recorder.region(name, vector)  # on a GPU, `_own_vectors` copies the values that the code may read
        return recorder, {name: recorder.region(name, array) for name, array in batch.items()}
