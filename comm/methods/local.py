"""Independent replicas, the baseline for all other methods. With one replica this is plain SGD.

    x_i <- x_i - eta * g_i(x_i)
"""

from __future__ import annotations

from minidl.comm.methods.base import Method

OPTIONS: dict[str, dict[str, object]] = {}  # replicas exchange nothing


class Local(Method):
    synchronous = False

    def exchange(self) -> None:
        """Replicas exchange nothing."""
