"""Replay: one training step, recorded once and then run without Python.

    gradient = Gradient(model, lambda logits, y: ops.cross_entropy(logits, y))
    loss, correct = gradient(x, y)        # arena.grad is dL/dtheta of this batch
    optimizer.step()

The first call for a batch of some shape runs the model's Python code twice, on a device that only records (record.py).
The second recording detects calls that vary. The recorded calls are merged (fuse.py), get memory (plan.py), and become
a program: a table of machine addresses (table.py, call.py). Later calls of `gradient` run the table: they build no
graph and allocate no array. Nothing is compiled specifically for the model. The results are bit-identical to those of
the tape. (The tape is the graph of functions that the engine builds without a program.)

Each shape of batch needs a separate recording.

A program is never silently out of date. Before each run, `Fingerprint` compares what the code of the model and the
loss reads: attributes, containers, closures, defaults, globals (fingerprint.py states the limits). After a change, the
step is recorded again. While a setting changes at every step, the tape computes the steps (replayed.py).

A step cannot be recorded if its code reads values of tensors, parameters or labels, draws random numbers other than
dropout's, or changes settings that the next step reads. Such a step runs on the tape, with one warning per reason.
Both recordings use other random states than the training does. The second one also uses other images. Neither leaves
a trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from minidl.checked import one_of
from minidl.data.views import VIEWS, averaged
from minidl.engine.autograd import grad_enabled
from minidl.engine.changes import mode_changes
from minidl.engine.device import forbid_recording
from minidl.engine.tensor import FLOATS, Tensor
from minidl.errors import ShapeError
from minidl.nn.modes import evaluating
from minidl.nn.module import Module
from minidl.program.guard import active
from minidl.program.hidden import Labels
from minidl.program.record import Recorder
from minidl.program.replayed import Replayed
from minidl.program.table import Program

Loss = Callable[[Tensor, np.ndarray], Tensor]
NESTED = "it calls a Gradient or a Prediction"


def correct_answers(logits: Tensor, labels: np.ndarray) -> int:
    """Return the number of rows of logits (..., classes) whose largest element is at the index in labels (...).

    Raises ShapeError unless there is one label for each row.
    """
    _check_rows(logits, labels)
    return int((logits.numpy().argmax(axis=-1).reshape(-1) == labels.reshape(-1)).sum())


def _contiguous_floats(x: Any) -> np.ndarray:
    """Return x as a contiguous array of floats with at least one axis. Raises ShapeError like Tensor."""
    if type(x) is np.ndarray and x.dtype in FLOATS and x.ndim and x.flags.c_contiguous:
        return x
    return np.ascontiguousarray(Tensor(x)._data)


def _check_rows(logits: Tensor, labels: np.ndarray) -> None:
    if not logits.ndim or math.prod(logits.shape[:-1]) != labels.size:
        raise ShapeError(f"Gradient: logits {logits.shape} and labels {labels.shape}; expected one label for each row: "
                         f"{logits.shape[:-1]}")  # fmt: skip


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
        self.following: Callable[[], tuple[np.ndarray, np.ndarray] | None] | None = None
        self.ahead: tuple[np.ndarray, ...] = ()  # a batch on its way to the GPU: x, y, and both as kernels need them

    def forget(self) -> None:
        self.model.flatten()  # again after a layer was replaced
        self.modes: tuple[int, Hashable] = -1, b""  # mode_changes() when the layers' modes were last read; these modes
        super().forget()

    def roots(self) -> tuple[Any, ...]:
        return self.model, self.loss

    def mode(self) -> tuple[Hashable, ...]:
        if self.modes[0] != (now := mode_changes()):
            modes = [module.training for module in self.modules]
            self.modes = now, bytes(modes) if all(type(mode) is bool for mode in modes) else repr(modes)
        return super().mode(), grad_enabled(), self.modes[1]

    def __call__(self, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
        """Return the loss and the number of correct predictions for images x (B, H, W, C) and integer labels y (B,).

        Overwrites arena.grad with the gradient. Raises ShapeError if shapes, types or labels do not fit.
        """
        with self.workspace.lock:
            batch, latest = {"x": x, "y": y}, self.latest
            if latest is not None and type(x) is type(y) is np.ndarray and latest.holds(self.roots(), batch):
                latest.program.run(latest.place(batch))
                self._set_result(latest.program, y)
            else:
                forbid_recording(NESTED)
                for _ in self.parts(x, y):
                    pass
            return self.result

    def parts(self, x: np.ndarray, y: np.ndarray, cuts: Sequence[int] = ()) -> Iterator[tuple[int, int, float]]:
        """Compute the gradient in parts: yield (start, stop, done) as soon as grad[start:stop] is final.

        cuts: the boundaries of the parts, ascending. The parts come in the order of the backward pass, from the last
        layer to the first. done: the fraction of the step's calls made so far, 0 to 1. When the iterator is exhausted,
        `result` holds what `__call__` returns. Without a program, all parts come at the end. Until the iterator is
        exhausted, no other program may run in this workspace: it would overwrite the temporaries of this step.
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
        with self.workspace.lock:
            program.run(bases, made)
            self._send_ahead()
            self._set_result(program, y)

    def _set_result(self, program: Program, y: np.ndarray) -> None:
        """Set `result`, after the program has run."""
        assert self.arena is not None
        loss, correct = self.output(program, "loss").item(), self.output(program, "correct").item()
        self.arena.cleared.clear()
        if self.model.statistics is not None:
            self.model.statistics.touch()
        if not math.isfinite(loss):  # if a label is invalid, this raises the error that names it
            self.loss(Tensor(np.zeros_like(self.output(program, "logits"))), y)
        self.result = loss, correct

    def announce(self, following: Callable[[], tuple[np.ndarray, np.ndarray] | None]) -> None:
        """Say which batch (x, y) probably follows that of the next call. It must not change.

        If the model is on a GPU, the next call copies it there, while the GPU computes.
        """
        self.following = following

    def _send_ahead(self) -> None:
        if self.batches is not None and self.following is not None and (following := self.following()) is not None:
            x, y = self._batch(*following)
            self.batches.send_ahead({"x": x, "y": y})
            self.ahead = *following, x, y
        self.following = None

    def prepare(self, x: np.ndarray, y: np.ndarray) -> None:
        """Record the step for batches of this shape and compile its kernels, without running it."""
        x, y = self._batch(x, y)
        with self.workspace.lock:
            program = self.program({"x": x, "y": y})
            if program is not None:
                program.warm()
        self.warn(stacklevel=2)

    def _batch(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if np.asarray(y).dtype.kind not in "iu":
            raise ShapeError(f"Gradient: labels hold {np.asarray(y).dtype}; expected integers")
        if self.ahead and self.ahead[0] is x and self.ahead[1] is y:
            return self.ahead[2], self.ahead[3]
        return _contiguous_floats(x), np.ascontiguousarray(y, np.int64)

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
    """A callable that computes the model's outputs in evaluation mode. Several threads may call it.

    views: of VIEWS (data/views.py): each call returns the mean of the outputs for these views of the images.
    keep_packed: whether convolutions and products keep their packed weights from call to call (packed.py). That saves
        time with few images, and takes up to 4 times as much memory as the weights. It has an effect only if the
        weights are in an arena: `model.flatten()` moves them there. After a direct write to `arena.theta`, call
        `arena.touch()`.
    """

    def __init__(self, model: Module, views: str = "none", keep_packed: bool = True, **options: Any) -> None:
        super().__init__(model, keep_packed=keep_packed, **options)
        self.views = one_of("views", views, VIEWS)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return the outputs (B, classes), a new array, for images x (B, H, W, C)."""
        return self.outputs(x) if self.views == "none" else averaged(self.outputs, self.views, x)

    def outputs(self, x: np.ndarray) -> np.ndarray:
        """Return the outputs for the images themselves."""
        with self.workspace.lock:
            batch, latest = {"x": x}, self.latest
            if latest is not None and type(x) is np.ndarray and latest.holds(self.roots(), batch):
                self._renew_packed()
                latest.program.run(latest.place(batch))
                return latest.outputs["logits"].copy()
            forbid_recording(NESTED)
            x = _contiguous_floats(x)
            program = self.program({"x": x})
            if program is not None:
                self._renew_packed()
                program.run(self.bases({"x": x}))
                return self.output(program, "logits").copy()
            with evaluating(self.model):
                found = self.model(x).numpy().copy()
        self.warn(stacklevel=2)
        return found

    def _renew_packed(self) -> None:
        if self.packed is not None:
            self.packed.renew(None if self.bound or self.arena is None else self.arena.version)

    def prepare(self, x: np.ndarray) -> None:
        """Record the step for batches of this shape and compile its kernels, without running it."""
        with self.workspace.lock:
            program = self.program({"x": _contiguous_floats(x)})
            if program is not None:
                program.warm()

    def record(self, recorder: Recorder, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        with evaluating(self.model), active(recorder, self.mode):
            return {"logits": self.model(recorder.tensor(batch["x"]))._data}
