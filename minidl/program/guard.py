"""Guard: run the Python code of a step for a recording, and leave no trace of it.

Recordings of all threads run one at a time, because they change and restore the states of random generators that the
threads share. Other threads may use the model meanwhile. They should not change its settings: the recording would take
this for a change that the step makes, and undo it. If they draw from `np.random` or `random` during a recording, they
may draw the same numbers again later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from minidl.engine.concurrency import new_lock
from minidl.engine.parameter import Parameter
from minidl.program import checks
from minidl.program.fingerprint import Fingerprint, is_engines
from minidl.program.hidden import Unrecordable
from minidl.program.record import Recorder

T = TypeVar("T")

_one_at_a_time = new_lock()


def observed(
    record: Callable[[], T],
    recorder: Recorder,
    fingerprint: Fingerprint,
    parameters: Sequence[Parameter],
) -> T:
    """Return record(), which runs the code of a step with a recorder, and undo what the code changes.

    fingerprint: the present settings.

    Raises Unrecordable if the code changes anything, keeps a tensor of the step, draws random numbers from a generator,
    reads values, or raises an exception.
    """
    with _one_at_a_time:
        flags = [parameter.requires_grad for parameter in parameters]
        try:
            with _settings_kept(fingerprint, recorder):
                result = record()
                if recorder.refused:  # the code caught the exception
                    raise Unrecordable(recorder.refused)
                return result
        except Unrecordable:
            raise
        except Exception as error:
            if recorder.refused:  # the code raised another exception instead
                raise Unrecordable(recorder.refused) from error
            reason = str(error).partition("\n")[0]  # unless recording is the cause, the tape fails as well
            raise Unrecordable(f"its code fails during a recording: {type(error).__name__}: {reason}") from error
        finally:
            for parameter, flag in zip(parameters, flags, strict=True):
                parameter.requires_grad = flag


@contextmanager
def active(recorder: Recorder, mode: Callable[[], object]) -> Iterator[None]:
    """Record the `with` block. Raise Unrecordable if it changes mode(): the modes of layers and the flags of parameters
    that select a program."""
    before = mode()
    with recorder.active():
        yield
        if mode() != before:
            recorder.refuse("training or requires_grad changes from step to step")


@contextmanager
def _settings_kept(fingerprint: Fingerprint, recorder: Recorder) -> Iterator[None]:
    """Raise Unrecordable if the `with` block changes a setting, draws random numbers, or leaves a tensor of the step
    alive. Undo what it changed."""
    settings, modules = fingerprint.watched, [*map(checks.renewed, fingerprint.modules)]
    caches = [value for value in fingerprint._kept if isinstance(value, functools._lru_cache_wrapper)]
    misses = [cache.cache_info().misses for cache in caches]
    with checks.other_random_states(fingerprint.generators) as drawn:
        try:
            yield
            if drawn():
                raise Unrecordable(f"it draws random numbers from {drawn()}, not by minidl's dropout")
            changed = checks.first_change([*settings, *modules])
            # A new object with an equal value is no change.
            if changed and not fingerprint.equals(Fingerprint(fingerprint.roots, fingerprint)):
                raise Unrecordable(f"{changed} changes from step to step")
            if recorder.kept():
                raise Unrecordable("it keeps tensors of a step, perhaps in a cache such as functools.lru_cache")
        finally:
            checks.restore(settings)
            checks.restore(modules, but=is_engines)  # other threads may change modes (evaluate) and arenas (flatten)
            for cache, before in zip(caches, misses, strict=True):
                if cache.cache_info().misses != before:
                    cache.cache_clear()  # its new values may be tensors of the recording
            recorder.invalidate()
