"""The memory in which programs keep their temporaries and results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from minidl.engine.concurrency import kernel_lock
from minidl.engine.device import address, aligned


class Workspace:
    """Memory for programs. It grows to the size that the largest program needs.

    allocate: returns a vector of this size and type, which begins on a 64-byte boundary.

    lock: held by a thread while a program runs in this memory, and until its results are copied. A step that runs in
        parts (`Gradient.parts`) releases it after each part. In between, the caller must not run other programs.
    """

    def __init__(self, allocate: Callable[[int, DTypeLike], np.ndarray] = aligned) -> None:
        self.allocate = allocate
        self._use(allocate(0, np.uint8))
        self.lock = kernel_lock()
        self._on: dict[Any, Workspace] = {}  # GPU -> workspace there

    def on(self, gpu: Any, kind: Callable[[Any], Workspace]) -> Workspace:
        """Return the workspace in a GPU's memory that all users of this one share. kind: makes it."""
        if gpu not in self._on:
            self._on[gpu] = kind(gpu)
        return self._on[gpu]

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:
        return Workspace, ()  # a copy has new memory, because a run leaves nothing to keep

    def reserve(self, size: int) -> None:
        if size > self.memory.size:
            self._use(self.allocate(size, np.uint8))

    def _use(self, memory: np.ndarray) -> None:
        self.memory, self.address = memory, address(memory)

    def view(self, offset: int, like: np.ndarray) -> np.ndarray:
        return np.ndarray(like.shape, like.dtype, self.memory, offset)
