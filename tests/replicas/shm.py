"""The program of a rank in the tests of shared memory: python tests/replicas/shm.py SCENARIO ARGUMENTS...

A scenario is a function of the fabric. Its return value is printed with the rank, as one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from minidl.comm.fabric.base import CHUNK, Aborted, BufferSpec, Channel, Column, Fabric, Header, PeerLost, State
from minidl.comm.stats import Stats
from minidl.comm.transport.shm import ShmTransport
from minidl.errors import MinidlError

sys.path.append(str(Path(__file__).parents[1]))
from replicas import slots as written
from replicas.receivers import receivers  # noqa: F401 (a scenario)
from replicas.serving import mutual  # noqa: F401 (a scenario)


def say(**words: Any) -> None:
    """Print a line of JSON in a single write, because other ranks write to the same pipe."""
    os.write(1, json.dumps(words).encode() + b"\n")


def join(fabric: Fabric, layout: str = "layout", **buffers: Any) -> None:
    fabric.join(BufferSpec(**buffers), layout)
    fabric.set_status(Column.STATE, State.TRAINING)


def vector(rank: int, size: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(size).astype(dtype)


def digest(values: np.ndarray) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()


SUMS = ((0, np.float32), (5, np.float32), (CHUNK, np.float32), (3 * CHUNK // 8 + 7, np.float64))


def several(fabric: Fabric) -> dict[str, Any]:
    """Run the scenarios in which no rank fails."""
    join(fabric, nbytes=4000, mail=3, shared=(("theta", 100),))
    return {what.__name__: what(fabric) for what in (allreduce, exchange, drain, shared)}


def allreduce(fabric: Fabric) -> list[str]:
    sums = []
    for size, dtype in SUMS:
        own, beside = vector(fabric.rank, size, dtype), vector(fabric.rank, size, dtype)
        fabric.allreduce(own)
        fabric.allreduce_start(beside).wait()
        assert (own == beside).all()
        sums.append(digest(own))
    first = vector(fabric.rank, 10)
    fabric.broadcast(first)
    return [*sums, digest(first)]


def exchange(fabric: Fabric) -> int:
    """Exchange vectors with both neighbours in a ring, 200 times."""
    sides = sorted({(fabric.rank - 1) % fabric.size, (fabric.rank + 1) % fabric.size} - {fabric.rank})
    own, rounds = np.zeros(1000, np.float32), 200
    for round in range(rounds):
        own[:] = fabric.rank + 1000 * round
        senders = []
        for message in fabric.exchange(sides, sides, own, header=Header(round=round))():
            assert message.header.round == round
            assert message.vector.min() == message.vector.max() == message.sender + 1000 * round
            senders.append(message.sender)
        assert senders == sides
    return rounds


def drain(fabric: Fabric) -> list[float]:
    """Repeatedly send half of each of two masses to a random peer. The sum of a mass over all ranks does not change."""
    random = np.random.default_rng(fabric.rank)
    mass = np.array([1, fabric.rank], np.float64)
    for _ in range(300):
        peer = int(random.integers(fabric.size))
        if peer != fabric.rank and fabric.send(peer, mass[:1] / 2, mass[1:] / 2):
            mass /= 2
        for message in fabric.poll():
            mass += message.vector
    fabric.drain(lambda message: np.add(mass, message.vector, out=mass))
    assert fabric.take(Channel.MAIL) is None
    return mass.tolist()


def shared(fabric: Fabric) -> float:
    fabric.shared("theta")[fabric.rank] = 1 + fabric.rank
    fabric.barrier()
    return float(fabric.shared("theta").sum())


def slots(fabric: Fabric, rounds: str, seed: str) -> int:
    join(fabric, nbytes=written.LONGEST, mail=2, publish=True)
    return written.slots(fabric, rounds, seed)


def gather(fabric: Fabric, victim: str) -> list[Any]:
    """One rank is killed before it calls `gather`."""
    join(fabric)
    if fabric.rank == int(victim):
        os.kill(os.getpid(), 9)
    try:
        return [[rank, float(values[0])] for rank, values in fabric.gather(np.full(CHUNK // 2, float(fabric.rank)))]
    except PeerLost as error:
        return [str(error)]


def serve(fabric: Fabric) -> list[float]:
    """The last rank is a server: it sums the vectors that the others send."""
    fabric.assign(range(fabric.size - 1))
    join(fabric, nbytes=16, call=True)
    total = np.zeros(4, np.float32)
    if fabric.rank == fabric.size - 1:

        def add(message: Any) -> Any:
            total[:] += message.vector
            return (total,), Header(clock=message.header.clock + 1)

        fabric.serve(add)
        return total.tolist()
    for i in range(100):
        header = fabric.call(fabric.size - 1, (np.full(4, 1, np.float32),), total, Header(clock=i))
        assert header.clock == i + 1
    fabric.set_status(Column.STATE, State.FINISHED)
    return []


def steps(fabric: Fabric, kind: str, last: str = "1000000", sleep: str = "0") -> int:
    """Make at most `last` steps; a signal stops the run earlier. After its third step a rank prints a line and sleeps.

    kind: "alone": ranks may make different numbers of steps. "together": all ranks make the same number of steps.
    "ring": in addition, each rank waits for its neighbours in every step. The steps of higher ranks take longer.
    """
    join(fabric, nbytes=4, mail=2)
    fabric.fail_fast = kind != "alone"
    sides = [rank % fabric.size for rank in (fabric.rank - 1, fabric.rank + 1)] if kind == "ring" else []
    made = 0
    while made < int(last) and fabric.begin_step(made, fabric.fail_fast):
        time.sleep(0.01 * (1 + fabric.rank))
        for _ in fabric.exchange(sides, sides, np.zeros(1, np.float32))():
            pass
        made += 1
        if made == 3:
            say(rank=fabric.rank, pid=os.getpid())
            time.sleep(float(sleep))
    return made


def fail(fabric: Fabric) -> None:
    """Rank 1 fails. The others wait for an event that never happens."""
    join(fabric)
    if fabric.rank == 1:
        raise MinidlError("a deliberate failure")
    fabric.wait(lambda: None, (), "nothing")


def stuck(fabric: Fabric) -> None:
    """Rank 1 fails. The others sleep and do not notice it."""
    join(fabric)
    if fabric.rank == 1:
        raise MinidlError("a deliberate failure")
    time.sleep(1000)


def hang(fabric: Fabric) -> None:
    """Rank 1 hangs. Rank 0 waits for rank 1, and rank 2 waits for rank 0."""
    join(fabric)
    fabric.set_status(Column.STEP, 7)
    fabric.transport.stall = 0.1
    if fabric.rank == 1:
        time.sleep(1000)
    fabric.barrier()


def unequal(fabric: Fabric) -> None:
    join(fabric, layout=f"layout {fabric.rank == 1}")


def greedy(fabric: Fabric) -> None:
    join(fabric, nbytes=1 << 46, mail=2)


def stress(fabric: Fabric, exchanges: str, elements: str) -> dict[str, int]:
    """Publish, send and read vectors. All elements of a vector are equal, so a torn vector is detected.

    The header contains the length and the value of the elements, so another vector's header is detected, too.
    """
    size = int(elements)
    join(fabric, nbytes=4 * size, mail=2, publish=True)
    random = np.random.default_rng(fabric.rank)
    buffer = np.empty(size, np.float32)
    seen = torn = sent = step = 0
    while fabric.status[:, Column.SPEED].min() < int(exchanges):
        step += 1
        fabric.set_status(Column.SPEED, seen)
        length = int(random.integers(size // 2, size + 1))
        own = buffer[:length]
        own[:] = step % 65536
        header = Header(start=length, clock=step % 65536)
        fabric.publish((own,), header)
        for peer in range(fabric.size):
            if peer != fabric.rank:
                sent += fabric.send(peer, own, header=header)
                message = fabric.latest(peer)
                if message is not None:
                    with message:
                        torn += is_torn(message)
                    seen += 1
        for message in fabric.poll():
            torn += is_torn(message)
            seen += 1
    fabric.drain(lambda message: None)
    return {"seen": seen, "torn": torn, "sent": sent}


def is_torn(message: Any) -> bool:
    first, last = float(message.vector.min()), float(message.vector.max())
    return not first == last == message.header.clock or message.vector.size != message.header.start


def main() -> int:
    stats = Stats()
    fabric = Fabric(ShmTransport.from_environment(stats, stall=60))
    try:
        result = globals()[sys.argv[1]](fabric, *sys.argv[2:])
        fabric.set_status(Column.STATE, State.FINISHED)
    except Aborted:
        return 2
    except MinidlError as error:
        print(f"minidl: error: replica {fabric.rank}: {error}", file=sys.stderr, flush=True)
        return 2
    say(rank=fabric.rank, result=result)
    stopped = fabric.stopping()
    fabric.close()
    return 143 if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
