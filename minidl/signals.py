"""Ctrl-C and SIGTERM: end the step, save, say how to go on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """The user wants the program to end.

    code: the exit code that a shell expects, 130 or 143. message: what became of the work.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.code = 128 + signum
        self.message = "stopped; there was nothing to save yet"


class Signals:
    """While a `with Signals() as signals` lasts, its signals raise `Stopped`:

    at once              before `defer`, while there is nothing to save
    in the next `check`  after it: between two steps, where the state of a run is whole

    A second signal ends the process on the spot; what was saved before is on the disk.
    """

    def __init__(self) -> None:
        self.deferred: Callable[[str], None] | None = None
        self.received: int | None = None
        self._previous: dict[int, object] = {}

    def defer(self, say: Callable[[str], None]) -> None:
        """From now on wait for `check`; `say` tells the user of it."""
        self.deferred = say

    def check(self) -> None:
        """Raise `Stopped` where a signal came since `defer`."""
        if self.received is not None:
            raise Stopped(self.received)

    def __enter__(self) -> Signals:
        # Python delivers signals to the main thread only; called from another one, its owner decides.
        if threading.current_thread() is threading.main_thread():
            self._previous = {signum: signal.signal(signum, self._handle) for signum in SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\nminidl: stopped at once\n")
            os._exit(128 + signum)
        self.received = signum
        if self.deferred is None:
            raise Stopped(signum)
        self.deferred("stopping after this step; a second signal stops at once")
