"""Handle Ctrl-C, SIGTERM and a closed terminal: finish the step, save, report how to resume."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType, TracebackType

from minidl.errors import printable

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Stopped(BaseException):
    """Raised when the user has requested that the program end.

    code: the exit code that a shell expects, 128 + the signal number. message: what is saved, and how to continue.
    """

    def __init__(self, signum: int, message: str = "stopped") -> None:
        super().__init__(signal.Signals(signum).name)
        self.code = 128 + signum
        self.message = message

    def report(self) -> None:
        """Print the message to standard error."""
        with suppress(OSError):  # the terminal may be gone
            print(f"minidl: {printable(self.message)}", file=sys.stderr, flush=True)


class Signals:
    """Within `with Signals() as signals`, a signal raises `Stopped`:

    immediately          before `defer` is called, while there is nothing to save
    in the next `check`  after `defer` is called: between two steps, when the state of a run is complete

    message: the message of a `Stopped` that is raised before `defer` is called.
    A second signal ends the process immediately. Earlier checkpoints remain on the disk.
    """

    def __init__(self) -> None:
        self.deferred = self.quiet = False
        self.message = "stopped; there was nothing to save yet"
        self.received: int | None = None
        self._previous: dict[int, object] = {}

    def defer(self, quiet: bool = False) -> None:
        """From now on, raise `Stopped` only in `check`. Unless `quiet`, a signal prints that the run will stop."""
        self.deferred, self.quiet = True, quiet

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
            raise Stopped(signum, self.message)
        if not self.quiet:
            _tell("stopping after this step; a second signal stops at once")


def _tell(message: str) -> None:
    """Write directly to standard error: a handler may interrupt a `print`, whose buffer must not be entered again."""
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f"\nminidl: {message}\n".encode())
