"""Ctrl-C, SIGTERM and a terminal that closes: end the step, save, say how to go on."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """The user wants the program to end.

    code: the exit code that a shell expects, 128 + the signal. message: what became of the work.
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
        self.deferred = self.quiet = False
        self.received: int | None = None
        self._previous: dict[int, object] = {}

    def defer(self, quiet: bool = False) -> None:
        """From now on wait for `check`, and tell the user so unless `quiet`."""
        self.deferred, self.quiet = True, quiet

    def check(self) -> None:
        """Raise `Stopped` where a signal came since `defer`."""
        if self.received is not None:
            raise Stopped(self.received)

    def __enter__(self) -> Signals:
        # Python delivers signals to the main thread only; called from another one, its owner decides.
        if threading.current_thread() is threading.main_thread():
            heard = [s for s in SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]  # nohup
            self._previous = {signum: signal.signal(signum, self._handle) for signum in heard}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            _tell("stopped at once")
            os._exit(128 + signum)
        self.received = signum
        if not self.deferred:
            raise Stopped(signum)
        if not self.quiet:
            _tell("stopping after this step; a second signal stops at once")


def _tell(words: str) -> None:
    """Straight to the file: a handler may run in the middle of a print, whose buffer takes no second one."""
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f"\nminidl: {words}\n".encode())
