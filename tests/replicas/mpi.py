"""The program of a rank in the tests of MPI: mpiexec -n 4 python tests/replicas/mpi.py SCENARIO ARGUMENTS...

A scenario is a function of the fabric. Its return value is written as JSON to the file $RESULTS/<rank>.
If the environment variable NODES is 2, the $RANKS ranks act as if they were on two nodes. GROUPING="0,1,0" names the
node of each rank.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from minidl.comm.fabric.base import CHUNK, Aborted, BufferSpec, Channel, Column, Fabric, Header, Message, State
from minidl.comm.transport import progress_engine
from minidl.comm.transport.mpi import MpiTransport
from minidl.errors import MinidlError
from minidl.run.config import Config
from minidl.training.job import find_job

sys.path.append(str(Path(__file__).parents[1]))
from replicas import slots as written
from replicas.again import again  # noqa: F401 (a scenario)
from replicas.deaths import deaths  # noqa: F401 (a scenario)
from replicas.freezes import freezes  # noqa: F401 (a scenario)
from replicas.receivers import receivers  # noqa: F401 (a scenario)
from replicas.serving import mutual  # noqa: F401 (a scenario)


def several(fabric: Fabric, *names: str) -> dict[str, Any]:
    """Run several scenarios in one job, because MPI starts only once in a process, and a start takes a second."""
    fabric.join(BufferSpec(nbytes=80_000, mail=3, publish=True), "layout")
    results: dict[str, Any] = {"nodes": fabric.nodes, "beside": fabric.transport.beside}
    for name in names:
        word, *arguments = name.split(":")
        results[word] = globals()[word](fabric, *arguments)
        fabric.barrier()
    results["sent"] = list(fabric.stats.sent_bytes)
    return results


def allreduce(fabric: Fabric) -> dict[str, Any]:
    """Sum random vectors, one per rank. Return {"TYPE ELEMENTS": hash of the sum}, and the first sum as "values".

    `allreduce_start` computes the first sum, `allreduce` the others.
    """
    sums = {}
    for kind, size in (("float32", 5), ("float32", 1000), ("float64", CHUNK // 8 + 3), ("float32", 0)):
        own = np.random.default_rng(fabric.rank).standard_normal(size).astype(kind)
        if sums:
            fabric.allreduce(own)
        else:
            pending = fabric.allreduce_start(own)
            pending.wait()
        sums[f"{kind} {size}"] = hashlib.sha256(own.tobytes()).hexdigest()
        if size == 5:
            sums["values"] = own.tolist()
    return sums


def sums(fabric: Fabric, *sizes: str) -> dict[str, Any]:
    """Sum a vector of each size. Return the hash of each sum, and the bytes that each sum sends to each rank."""
    fabric.join(BufferSpec(), "layout")
    found: dict[str, Any] = {"sums": [], "sent": []}
    for size in map(int, sizes):
        vector = np.random.default_rng(fabric.rank).standard_normal(size).astype(np.float32)
        before = list(fabric.stats.sent_bytes)
        fabric.allreduce(vector)
        found["sums"].append(hashlib.sha256(vector.tobytes()).hexdigest())
        found["sent"].append([after - then for after, then in zip(fabric.stats.sent_bytes, before)])
    return found


def drain(fabric: Fabric) -> float:
    """Repeatedly push half of this rank's mass to a random peer. The sum of all masses is conserved."""
    random = np.random.default_rng(fabric.rank)
    mass = np.ones(1)
    for _ in range(200):
        peer = int(random.integers(fabric.size))
        if peer != fabric.rank and fabric.send(peer, mass / 2):
            mass /= 2
        for message in fabric.poll():
            mass += message.vector
        fabric.idle(10)
    fabric.drain(lambda message: np.add(mass, message.vector, out=mass))
    return float(mass[0])


def newest(fabric: Fabric) -> list[int]:
    """Publish 50 versions. Read the peers' versions, which must increase, until the last one of each peer is read."""
    last = [0] * fabric.size
    last[fabric.rank] = 50
    for version in range(1, 51):
        fabric.wait(lambda: publish(fabric, version) or None, (), "memory")  # noqa: B023
        look(fabric, last)
    fabric.wait(lambda: look(fabric, last) or None, (), "the last versions of the others")
    return last


def fresh(fabric: Fabric) -> list[int]:
    """Read a state of rank 0, and its state after 200 more versions: the second one must be the last version."""
    seen = []
    for last in (1, 201):
        if fabric.rank == 0:
            for version in range(last - 200 if last > 200 else 1, last + 1):
                fabric.wait(lambda: publish(fabric, 1000 + version) or None, (), "memory")  # noqa: B023
        fabric.barrier()
        if fabric.rank:
            fabric.wait(lambda: version_of(fabric, seen) or None, (), "a state of rank 0")
        fabric.barrier()
    return seen


def version_of(fabric: Fabric, seen: list[int]) -> bool:
    message = fabric.latest(0)
    if message is not None:
        with message:
            seen.append(message.header.round - 1000)
    return message is not None


def fair(fabric: Fabric) -> list[int]:
    """The others send 5 messages each to the last rank, which takes 7 of them (or all) while all have one waiting.

    Returns the senders of these messages in the order in which the last rank takes them.
    """
    server, taken = fabric.size - 1, []
    if fabric.rank < server:
        for _ in range(5):
            fabric.wait(lambda: fabric.send(server, np.ones(10, np.float32)) or None, (), "the last rank")
        return []
    takes = min(7, 5 * server)
    for _ in range(takes):
        fabric.wait(lambda: all(waits(fabric, peer) for peer in range(server)) or None, (), "messages from all")
        with fabric.wait(lambda: fabric.take(Channel.MAIL), (), "a message") as message:
            taken.append(message.sender)
    for _ in range(5 * server - takes):
        fabric.wait(lambda: fabric.take(Channel.MAIL), (), "a message").release()
    return taken


def waits(fabric: Fabric, peer: int) -> bool:
    """Return whether a message of this peer has arrived here and has not been taken."""
    transport = fabric.transport
    if peer not in transport.beside:
        return peer in transport._arrived[Channel.MAIL]
    return bool(transport.mailbox.cells[Channel.MAIL][fabric.rank, peer] > 0)


def publish(fabric: Fabric, version: int) -> bool:
    """Publish a version. Return False if no slot is free, because readers hold all of them."""
    misses = fabric.stats.misses
    fabric.publish((np.full(10_000, version, np.float32),), Header(round=version))
    return fabric.stats.misses == misses


def look(fabric: Fabric, last: list[int]) -> bool:
    for peer in range(fabric.size):
        message = fabric.latest(peer) if peer != fabric.rank else None
        if message is not None:
            with message:
                assert message.vector.min() == message.vector.max() == message.header.round > last[peer]
                last[peer] = message.header.round
    return min(last) == 50


def ring(fabric: Fabric) -> int:
    """Send to the next rank and receive from the previous one. Each round receives the message of the same round."""
    right, left = (fabric.rank + 1) % fabric.size, (fabric.rank - 1) % fabric.size
    for round in range(200):
        own = np.full(20_000, 1000 * fabric.rank + round, np.float32)
        for message in fabric.exchange([left], [right], own[:5000], own[5000:], header=Header(round=round))():
            assert message.header.round == round and message.vector.size == 20_000
            assert message.vector.min() == message.vector.max() == 1000 * left + round
    return round


def stress(fabric: Fabric, steps: str) -> dict[str, int]:
    """Publish, read and send vectors whose elements are all equal. Each header holds the length and the element."""
    random = np.random.default_rng(fabric.rank)
    buffer = np.empty(20_000, np.float32)
    peers = [peer for peer in range(fabric.size) if peer != fabric.rank]
    torn = seen = step = 0
    while step < int(steps) or not seen:
        step += 1
        fabric.idle(20)
        own = buffer[: int(random.integers(10_000, 20_000))]
        own[:] = step
        header = Header(start=own.size, clock=step)
        fabric.publish((own,), header)
        for peer in peers:
            fabric.send(peer, own, header=header)
            message = fabric.latest(peer)
            if message is not None:
                with message:
                    torn += torn_apart(message)
                seen += 1
        for message in fabric.poll():
            torn += torn_apart(message)
            seen += 1
    fabric.drain(lambda message: None)
    return {"torn": torn, "seen": seen}


def torn_apart(message: Message) -> bool:
    header = message.header
    return message.vector.size != header.start or not message.vector.min() == message.vector.max() == header.clock


def slots(fabric: Fabric, rounds: str, seed: str) -> int:
    return written.slots(fabric, rounds, seed)


def gather(fabric: Fabric) -> list[Any]:
    return [[rank, float(values[-1])] for rank, values in fabric.gather(np.full(300_000, float(fabric.rank)))]


def board(fabric: Fabric) -> list[float]:
    """Write to the status table, and wait until it shows the last value of every rank."""
    for speed in range(1000):
        fabric.set_status(Column.SPEED, speed + fabric.rank)
    expected = [999.0 + rank for rank in range(fabric.size)]
    fabric.wait(lambda: list(fabric.status[:, Column.SPEED]) == expected or None, (), "the status table")
    assert all(fabric.now() - moment < 60 for moment in fabric.transport.heard)
    return expected


def idle(fabric: Fabric) -> float:
    """Return the CPU seconds of this rank while rank 0 sleeps for two seconds and the others wait."""
    fabric.barrier()
    began = time.process_time()
    if fabric.rank == 0:
        time.sleep(2)
    fabric.barrier()
    return time.process_time() - began


def stop(fabric: Fabric) -> int:
    """One rank receives a signal during a step. All ranks stop after the same number of steps."""
    for made in range(1000):
        if made == 3 and fabric.rank == fabric.size - 1:
            fabric.stop_wanted = True
        if not fabric.begin_step(made, synchronous=True):
            return made
        time.sleep(0.002 * (1 + fabric.rank))  # rank 0, too: else it makes all steps before the signal
    raise AssertionError("no rank stopped")


def serve(fabric: Fabric) -> list[float]:
    """The last rank is a server: it sums the vectors that the others send."""
    fabric.assign(range(fabric.size - 1))
    fabric.join(BufferSpec(nbytes=16, call=True), "layout")
    total = np.zeros(4, np.float32)

    def add(message: Message) -> tuple[list[np.ndarray], Header]:
        np.add(total, message.vector, out=total)
        return [total], Header(clock=message.header.clock + 1)

    if fabric.rank == fabric.size - 1:
        fabric.serve(add)
    else:
        for i in range(100):
            assert fabric.call(fabric.size - 1, [np.ones(4, np.float32)], total, Header(clock=i)).clock == i + 1
        fabric.set_status(Column.STATE, State.FINISHED)
    return [float(number) for number in total]


def beside_own(fabric: Fabric) -> list[int]:
    """The script's messages on COMM_WORLD, with the tags of minidl's messages, and minidl's do not mix."""
    from mpi4py import MPI

    fabric.join(BufferSpec(nbytes=4000, mail=1), "layout")
    world, taken = MPI.COMM_WORLD, []
    left, right = (fabric.rank - 1) % fabric.size, (fabric.rank + 1) % fabric.size
    for round in range(20):
        request = world.Isend(np.array([fabric.rank, round]), right, tag=int(Channel.MAIL))
        for message in fabric.exchange([left], [right], np.full(1000, round, np.float32), header=Header(round=round))():
            assert message.vector.min() == message.vector.max() == round == message.header.round
        own = np.zeros(2, int)
        world.Recv(own, MPI.ANY_SOURCE, MPI.ANY_TAG)
        assert own.tolist() == [left, round]
        request.Wait()
        taken.append(int(own[1]))
    return taken


def late(fabric: Fabric) -> int:
    """The other ranks return while their messages to rank 0 are in flight."""
    fabric.join(BufferSpec(), "layout")
    if fabric.rank == 0:
        time.sleep(0.5)
    return len(list(fabric.gather(np.zeros(CHUNK // 8))))


def unequal(fabric: Fabric) -> None:
    fabric.join(BufferSpec(), "that" if fabric.rank == 1 else "this")


def fail(fabric: Fabric, how: str) -> None:
    """Rank 1 ends in the way that `how` names. The others wait for it."""
    fabric.join(BufferSpec(), "layout")
    if fabric.rank == 1:
        if how == "error":
            raise MinidlError("a deliberate failure")
        if how == "exception":
            raise ZeroDivisionError("on purpose")
        if how == "exit":
            sys.exit(0)
        os.kill(os.getpid(), 9)
    fabric.barrier()


def early(fabric: Fabric) -> None:
    """All ranks raise the same error before they join."""
    raise MinidlError("no such file")


def main() -> int:
    faulthandler.dump_traceback_later(280, exit=True)  # a rank that hangs prints its stack and exits
    job = find_job()
    assert job is not None
    nodes = os.environ.get("NODES")
    if nodes:
        os.environ["MINIDL_NODE"] = str(job.rank * int(nodes) // int(os.environ["RANKS"]))
    if grouping := os.environ.get("GROUPING"):
        os.environ["MINIDL_NODE"] = grouping.split(",")[job.rank]
    progress_engine.LARGEST = int(os.environ.get("LARGEST", progress_engine.LARGEST))
    name, *arguments = sys.argv[1:]
    if name == "beside_own":
        from mpi4py import MPI  # starts MPI

        assert MPI.Is_initialized()
    try:
        fabric = job.join(Config(method="allreduce", reduce="fast" if name == "fast" else "tree",
                                 stall=1 if name == "freezes" else 60))  # fmt: skip
        assert isinstance(fabric.transport, MpiTransport)
        result = globals()["several" if name == "fast" else name](fabric, *arguments)
        fabric.set_status(Column.STATE, State.FINISHED)
    except Aborted:
        return 2
    except MinidlError as error:
        return job.fail(str(error))
    fabric.close()
    file = Path(os.environ["RESULTS"]) / str(fabric.rank)
    if not file.exists():  # else the scenario has written it, because the job may end at any moment
        file.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
