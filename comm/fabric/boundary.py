"""Between two steps of a synchronous method: all replicas stop, or pause, after the same step.

All must stop after the same step, because none can finish a step without its neighbours. But they notice the request to
stop in different steps. A replica that notices it writes 1 + s into the status table (Column.STOP), where s is the
number of the step that it began last. Before its next step, it waits until no entry is 0. All stop after step number
max(s). In the same way they agree on a pause for a newcomer (comm/transport/pausing.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidl.comm.transport import pausing

if TYPE_CHECKING:
    from minidl.comm.fabric.base import Fabric


def stops(fabric: Fabric, steps: int) -> bool:
    """Return whether this replica stops after these completed steps. Raises Pause if all pause now.

    While it waits for one agreement, others may ask for the other one. It takes part in both, so none waits for it.
    """
    transport = fabric.transport
    pause: float | None = None
    stop: float | None = None
    while True:
        pausing.consider(transport)
        if pause is None and pausing.wanted(transport):
            pause = fabric.wait(lambda: pausing.agreed(transport), (), "the agreement on a step for a newcomer")
        elif stop is None and fabric.stopping():
            transport.consider_stopping()
            stop = fabric.wait(fabric.agreed_stop, (), "the agreement on the last step")
        else:
            break
    if pause is not None and steps >= pause:
        raise pausing.Pause
    return stop is not None and steps >= stop
