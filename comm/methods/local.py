"""Independent replicas, the baseline for all other methods. With one replica this is plain SGD.

    x_i <- x_i - eta * g_i(x_i)
"""

from __future__ import annotations

from minidl.comm.methods.base import Method
from minidl.run.config import Config

OPTIONS: dict[str, dict[str, object]] = {}  # replicas exchange nothing


class Local(Method):
    synchronous = False

    @classmethod
    def claims(cls, config: Config) -> bool:
        """Return False: the replicas are independent, so each trains on its part."""
        return False

    def exchange(self) -> None:
        """Replicas exchange nothing."""
