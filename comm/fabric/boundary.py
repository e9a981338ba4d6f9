"""Between two steps of a synchronous method: all replicas stop, or pause, after the same step.

All must stop after the same step, because none can finish a step without its neighbours. But they notice the request to
stop in different steps. A replica that notices it writes 1 + s into the status table (Column.STOP), where s is the
number of the step that it began last. Before its next step, it waits until no entry is 0. All stop after step number
max(s). In the same way they agree on a pause for a newcomer (comm/transport/pausing.py).
"""

from __future__ import annotations

from collections.abc import Callable

from minidl.comm.transport import pausing
from minidl.comm.transport.base import Transport


def stops(transport: Transport, steps: int, agreed_stop: Callable[[], float | None]) -> bool:
    """Return whether this replica stops after these completed steps. Raises Pause if all pause now.

    agreed_stop: returns the last step, or None if it is not agreed yet.
    While it waits for one agreement, others may ask for the other one. It takes part in both, so none waits for it.
    """
    pause: float | None = None
    stop: float | None = None
    while True:
        pausing.consider(transport)
        if pause is None and pausing.wanted(transport):
            pause = transport.wait(lambda: pausing.agreed(transport), (), "the agreement on a step for a newcomer")
        elif stop is None and transport.stopping():
            transport.consider_stopping()
            stop = transport.wait(agreed_stop, (), "the agreement on the last step")
        else:
            break
    if pause is not None and steps >= pause:
        raise pausing.Pause
    return stop is not None and steps >= stop
