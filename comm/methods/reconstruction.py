"""Compressed visits to a center that one rank serves: both sides send codes of differences.

    replica i      q = Q(x_i - h_i),   h_i <- h_i + q    ── q ──>    the center:   h_i <- h_i + q
                   k_i <- k_i + r                        <── r ──    r = Q(c - k_i),   k_i <- k_i + r
                   x_i <- x_i - eta * g_i - eta * rho * (x_i - k_i)                c <- c + eta * rho * (h_i - c)

h_i is what the center knows of x_i, and k_i is what replica i knows of c. Both sides keep both, with equal bits. What a
code loses remains in x_i - h_i or c - k_i, and is a part of the next difference. So nothing is lost if nothing moves:
then h_i = x_i and k_i = c, and the equations are those without codes.

Each side moves towards what it knows of the other, and never beyond it. So a rho that is stable without codes stays
stable on one parabola if the codes move single elements. With codes of pulls d_i it would not: x_i would give its pull
away while c has not received it, and P replicas together would push c too far.

The center keeps two vectors for each replica, a replica two for itself. Before its first visit to a home of the center
(succession.py), a replica sends both of them whole: when a run begins or is resumed, when it joins, and after a death.
"""

from __future__ import annotations

import numpy as np

from minidl.comm.codecs import Codec
from minidl.comm.fabric.base import Fabric, Header, Message
from minidl.comm.methods.compression import DifferenceCodes
from minidl.comm.methods.succession import Home
from minidl.comm.replica import Replica

NOTHING = np.zeros(0, np.float32)  # the reply to a vector that is sent whole


class Reconstructions(DifferenceCodes):
    """The state of a rank. pair (2, n): h_i and k_i. knows: the home of the center that knows both.

    code, reply: of the last visit. of: at the home, the pairs of the replicas that have visited it, by rank. replied:
    there, the last reply.
    """

    def __init__(self, replica: Replica, fabric: Fabric, codec: Codec) -> None:
        super().__init__(replica, fabric, codec)
        self.pair = np.stack([replica.theta, replica.theta])
        self.code, self.reply, self.replied = (self.empty_code() for _ in range(3))
        self.of: dict[int, np.ndarray] = {}
        self.knows: Home | None = None

    # -- at a replica --------------------------------------------------------------------------------------

    def introduce(self, home: Home, exactly: bool) -> None:
        """Tell a home h_i and k_i if it does not know them. Raises PeerLost. exactly: h_i becomes x_i before."""
        if self.knows != home:
            if exactly:
                self.pair[0] = self.replica.theta
            for row in range(2):
                self.fabric.call(home.rank, (self.pair[row],), NOTHING, Header(start=row * self.pair.shape[1]))
            self.knows = home

    def request(self) -> np.ndarray:
        """Return the code of x_i. The sum of h_i and this code is the new h_i."""
        return self.encode_difference(self.replica.theta, self.pair[0], self.code, self.replica.steps)

    def receive(self, center: np.ndarray) -> None:
        """k_i <- k_i + r, with the r in `reply`. center <- k_i"""
        self.add_code(self.reply, 1.0, self.pair[1])
        self.replica.copy(self.pair[1], center)

    # -- at the center -------------------------------------------------------------------------------------

    def read(self, visit: Message) -> np.ndarray:
        """h_i <- h_i + q. Returns h_i, what the center knows of x_i now."""
        known = self.of[visit.sender][0]
        self.add_code(visit.vector, 1.0, known)
        return known

    def note(self, message: Message) -> bool:
        """Note h_i or k_i, if the message is one of them. Returns whether it is."""
        if message.vector.dtype == np.uint8:
            return False
        pair = self.of.setdefault(message.sender, np.zeros_like(self.pair))
        pair[message.header.start // pair.shape[1]] = message.vector
        return True

    def encode_center(self, center: np.ndarray, replica: int, key: int) -> np.ndarray:
        """Return the code of c for a replica. The sum of its k_i and this code is the new k_i."""
        return self.encode_difference(center, self.of[replica][1], self.replied, key)

    def restart(self, center: np.ndarray) -> None:
        self.pair[:] = self.replica.theta, center

    def vectors(self) -> dict[str, np.ndarray]:
        return {"known": self.pair[0], "heard": self.pair[1]}
