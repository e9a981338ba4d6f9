"""Guard: run the Python code of a step for a recording, and leave no trace of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from minidl.engine.arena import Arena
from minidl.engine.parameter import Parameter
from minidl.program import checks
from minidl.program.fingerprint import Fingerprint
from minidl.program.record import Recorded, Unrecordable

T = TypeVar("T")


def observed(
    record: Callable[[], T],
    fingerprint: Fingerprint,
    mode: Callable[[], object],
    parameters: Sequence[Parameter],
    arenas: Sequence[Arena],
) -> T:
    """Return record(), which runs the code of a step, and undo what the code changes.

    fingerprint: the settings now. mode: returns the modes of layers and the flags of parameters. During `record`, the
    values of the arenas' vectors cannot be read.

    Raises Unrecordable if the code changes anything, draws random numbers from a generator, or raises an exception.
    """
    flags, before = [parameter.requires_grad for parameter in parameters], mode()
    try:
        with _settings_kept(fingerprint), _vectors_hidden(arenas):
            result = record()
            if mode() != before:
                raise Unrecordable("training or requires_grad changes from step to step")
            return result
    except Unrecordable:
        raise
    except Exception as error:  # perhaps only because arrays have no values: the tape will show
        reason = str(error).partition("\n")[0]
        raise Unrecordable(f"its code fails during a recording: {type(error).__name__}: {reason}") from error
    finally:
        for parameter, flag in zip(parameters, flags, strict=True):
            parameter.requires_grad = flag


@contextmanager
def _settings_kept(fingerprint: Fingerprint) -> Iterator[None]:
    """Raise Unrecordable if the `with` block changes a setting or draws random numbers. Undo what it changed."""
    before = [*fingerprint.watched, *map(checks.renewed, fingerprint.modules)]
    with checks.other_random_states(fingerprint.generators) as drawn:
        try:
            yield
            if drawn():
                raise Unrecordable(f"it draws random numbers from {drawn()}, not by minidl's dropout")
            changed = checks.first_change(before)
            if changed and not fingerprint.equals(Fingerprint(fingerprint.roots, fingerprint)):
                raise Unrecordable(f"{changed} changes from step to step")  # not only to an equal value
        finally:
            checks.restore(before)


@contextmanager
def _vectors_hidden(arenas: Sequence[Arena]) -> Iterator[None]:
    vectors = [(arena, arena.theta, arena.grad) for arena in arenas]
    for arena, theta, grad in vectors:
        arena.theta, arena.grad = theta.view(Recorded), grad.view(Recorded)
    try:
        yield
    finally:
        for arena, theta, grad in vectors:
            arena.theta, arena.grad = theta, grad
