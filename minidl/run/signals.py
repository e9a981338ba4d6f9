"""Handle Ctrl-C, SIGTERM and a closed terminal: finish the step, save, report how to resume."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from minidl import start
from minidl.errors import printable, tell

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Stopped(BaseException):
    """Raised when the user has requested that the program end.

    code: the exit code that a shell expects, 128 + the signal number. message: what is saved, and how to continue.
    run: the folder of the run that was stopped, in the process that leads it.
    """

    def __init__(self, signum: int, message: str = "stopped") -> None:
        super().__init__(signal.Signals(signum).name)
        self.code = 128 + signum
        self.message = message
        self.run: Path | None = None

    def report(self) -> None:
        """Print the message to standard error."""
        with suppress(OSError):  # the terminal may be gone
            tell(f"minidl: {printable(self.message)}")


class Signals:
    """Within `with Signals() as signals`, a signal ends the process:

    at once                   before `prepare`, while modules are imported: `message` is printed
    by an exception           after `prepare`: `Stopped` is raised immediately, and what was written is removed
    in the next `check`       after `defer`: `Stopped` is raised between two steps, when the state of a run is complete

    message: printed, or that of a `Stopped`, before `defer` is called. quiet: print no message.
    shared: whether other ranks of a job get the same signals (mpiexec): a rank must not end before them.
    A second signal ends the process immediately. Earlier checkpoints remain on the disk.
    """

    def __init__(self) -> None:
        self.prepared = self.deferred = self.quiet = self.shared = False
        self.message = "stopped; there was nothing to save yet"
        self.received: int | None = None
        self._previous: dict[int, object] = {}
        self._unraisable = sys.unraisablehook

    def prepare(self) -> None:
        """From now on, raise `Stopped`."""
        self.prepared = True

    def defer(self, quiet: bool = False) -> None:
        """From now on, raise `Stopped` only in `check`. Unless `quiet`, a signal prints that the run will stop."""
        if not self.deferred:
            self.check()  # Python ignores an exception in some functions, such as __del__
            self.prepared = self.deferred = True
            self.quiet = quiet

    def check(self) -> None:
        """Raise `Stopped` if a signal has arrived."""
        if self.received is not None:
            raise Stopped(self.received, self.message)

    def __enter__(self) -> Signals:
        # Python allows only the main thread to set signal handlers. In another thread, keep the existing ones.
        if threading.current_thread() is threading.main_thread():
            # Under nohup SIGHUP is ignored; keep it ignored.
            handled = [s for s in SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]
            self._previous = {signum: signal.signal(signum, self._handle) for signum in handled}
            sys.unraisablehook = self._ignored
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        start.finish()
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]
        sys.unraisablehook = self._unraisable

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            _tell("stopped at once")
            os._exit(128 + signum)
        self.received = signum
        if not self.prepared:
            if not self.quiet:
                Stopped(signum, self.message).report()
            os._exit(128 + signum)
        if not self.deferred:
            raise Stopped(signum, self.message)
        if not self.quiet:
            _tell("stopping after this step; a second signal stops at once")

    def _ignored(self, unraisable: Any) -> None:
        """Print an exception that Python ignores, unless it is `Stopped`: `defer` raises it again."""
        if not isinstance(unraisable.exc_value, Stopped):
            self._unraisable(unraisable)


def _tell(message: str) -> None:
    """Write directly to standard error: a handler may interrupt a `print`, whose buffer must not be entered again."""
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f"\nminidl: {message}\n".encode())
