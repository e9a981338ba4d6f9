"""Training and evaluation modes of modules, and watchers of forward passes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from minidl.engine.autograd import no_grad
from minidl.engine.changes import count_change
from minidl.engine.concurrency import new_lock
from minidl.engine.tensor import Tensor

Watcher = Callable[[Any, Tensor], None]


class HasModes(Protocol):
    """A Module, which this file cannot import: module.py imports this file."""

    def named_modules(self) -> Iterator[tuple[str, Any]]: ...


class _Thread(threading.local):
    """State that each thread has separately."""

    def __init__(self) -> None:
        self.watchers: list[Watcher] = []


_thread = _Thread()
_evaluations: dict[int, dict[object, bool]] = {}  # id of a module -> {`evaluating` block: mode before it}
_switching = new_lock()  # held while a mode is changed


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Within the `with` block, call watcher(module, output) after each forward pass of a module in this thread."""
    _thread.watchers.append(watcher)
    count_change()
    try:
        yield
    finally:
        _thread.watchers.remove(watcher)
        count_change()


def watchers() -> list[Watcher]:
    """Return the watchers of this thread."""
    return _thread.watchers


@contextmanager
def evaluating(model: HasModes) -> Iterator[None]:
    """Within the `with` block, keep the model in evaluation mode, and record no graph.

    Several threads may evaluate the same modules. Each module returns to its own previous mode when the last block that
    evaluates it ends.
    """
    modules, block = {id(module): module for _, module in model.named_modules()}, object()
    with _switching:
        for key, module in modules.items():
            _evaluations.setdefault(key, {})[block] = module.training
            _switch(module, False)
    try:
        with no_grad():
            yield
    finally:
        with _switching:
            for key, module in modules.items():
                _end_evaluation(key, module, block)


def _end_evaluation(key: int, module: Any, block: object) -> None:
    """Restore the mode from before the block. If a later block has not ended, that block restores this mode."""
    blocks = _evaluations[key]
    later = [*blocks][[*blocks].index(block) + 1 :]
    before = blocks.pop(block)
    if later:
        blocks[later[0]] = before  # the block that began next restores it instead
    else:
        _switch(module, before)
    if not blocks:
        del _evaluations[key]


def _switch(module: Any, mode: bool) -> None:
    # Not setattr: a recording would undo it at its end, and could overwrite a change by another thread.
    vars(module)["training"] = mode
    count_change(mode=True)
