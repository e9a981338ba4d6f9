"""Functions with which the ranks of a script exchange arrays: in one's own loops, or without any model."""

from __future__ import annotations

from functools import cache
from itertools import count

import numpy as np
from numpy.typing import ArrayLike

from minidl.checked import shown, whole
from minidl.comm.topology import Topology, build
from minidl.errors import ConfigError
from minidl.training.agreement import agree
from minidl.training.job import find_job
from minidl.training.world import world

_rounds = count()  # of neighbor_average: the calls of all ranks have the same numbers


def rank() -> int:
    """Return the number of this process among those that run the script: 0, 1, ..., size() - 1.

    `python -m minidl.launch --workers 4 script.py` or `mpiexec -n 4 python script.py` starts such processes. A script
    that is started without them is rank 0 of 1.
    """
    return _place()[0]


def size() -> int:
    """Return the number of processes that run the script, from 1."""
    return _place()[1]


def _place() -> tuple[int, int]:
    """Return (rank, size). Under mpiexec, start MPI: only then does mpiexec notice it when a rank fails."""
    job = find_job()
    if job is None or job.launched:
        return (job.rank, job.size) if job else (0, 1)
    return world().rank, world().size


def allreduce(array: ArrayLike) -> np.ndarray:
    """Return the sum of the arrays of all ranks: on each rank a new array with the same bits.

    array: float32 or float64, of any shape, equal on all ranks. All ranks must call this function, in the same order
    as the other functions of this kind. It waits for all of them. Ranks that have died are left out.

        mean_loss = minidl.allreduce(loss) / minidl.size()

    The result has the shape and type of `array`, which does not change; a plain number counts as float64 (). Raises
    ConfigError, on all ranks, if the ranks give arrays of different shapes or types.
    """
    vector, shape = _vector("allreduce", array)
    with world().collective("allreduce") as fabric:
        agree(fabric, "allreduce", {"array": _kind(vector, shape)})
        fabric.allreduce(vector)
    return vector.reshape(shape)


def broadcast(array: ArrayLike, root: int = 0) -> np.ndarray:
    """Return the array of the rank `root`: on each rank a new array with the same bits.

    array: float32 or float64, of any shape. Its shape and type are equal on all ranks; its values count only on the
    rank `root`. All ranks must call this function.

        start = minidl.broadcast(np.random.rand(3))

    `array` does not change; a plain number counts as float64 (). Raises ConfigError if there is no rank `root`, or if
    the ranks give different roots, or arrays of different shapes or types.
    """
    vector, shape = _vector("broadcast", array)
    here = world()
    if whole("broadcast", "root", root) >= here.size:
        raise ConfigError(f"broadcast: root {root}: expected a rank from 0 to {here.size - 1}")
    with here.collective("broadcast") as fabric:
        agree(fabric, "broadcast", {"array": _kind(vector, shape), "root": root})
        if here.size > 1:
            fabric.group(fabric.replicas).broadcast(vector, root)
    return vector.reshape(shape)


def neighbor_average(array: ArrayLike, topology: str = "one-peer-exponential", *, seed: int = 0) -> np.ndarray:
    """Return the weighted average of this rank's array and its neighbours' arrays: row i of W(t) @ x, on rank i.

    array: float32 or float64, of any shape, equal on all ranks. topology: a name as for --topology, such as ring or
    complete. W(t) is its mixing matrix; call number t uses round t, where all calls of the process count. seed: of the
    random topologies. All ranks must call this function.

        for _ in range(100):
            x = minidl.neighbor_average(x - 0.1 * gradient(x), topology="ring")    # decentralised gradient descent

    The result is a new array of the same shape and type. Sums are made in the order of the ranks. Raises ConfigError
    for an unknown topology, or if the ranks give different topologies, or arrays of different shapes or types.
    """
    vector, shape = _vector("neighbor_average", array)
    round = next(_rounds)
    facts = {"array": _kind(vector, shape), "topology": topology, "seed": seed, "number of calls": round}
    with world().collective("neighbor_average") as fabric:
        agree(fabric, "neighbor_average", facts)
        members = fabric.replicas
        graph = _topology(topology, len(members), seed, tuple([fabric.nodes[member] for member in members]))
        place = members.index(fabric.rank)
        targets = [members[j] for j in graph.targets(place, round)]
        weights = {members[j]: weight for j, weight in graph.weights(place, round).items()}
        return fabric.group(members).mix(vector, targets, weights).reshape(shape)


@cache
def _topology(name: str, size: int, seed: int, nodes: tuple[int, ...]) -> Topology:
    return build(name, size, seed, nodes)


def _vector(call: str, array: ArrayLike) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return a copy of an array as a vector (n,), and its shape. Raises ConfigError for other types than floats."""
    try:
        found = np.asarray(array)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{call}: {shown(array)} is no array: {error}") from None
    if found.dtype not in (np.float32, np.float64):
        advice = "array.astype(numpy.float64) makes one" if found.dtype.kind in "biuf" else "give an array of numbers"
        raise ConfigError(f"{call}: the array is {found.dtype} {found.shape}; expected float32 or float64: {advice}")
    return np.array(found, found.dtype.newbyteorder("="), order="C").reshape(-1), found.shape


def _kind(vector: np.ndarray, shape: tuple[int, ...]) -> str:
    return f"{vector.dtype} {shape}"
