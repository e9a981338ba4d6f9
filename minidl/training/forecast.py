"""The memory of a run of several replicas, the memory and the time of a simulation, predicted before they begin."""

from __future__ import annotations

from minidl import optim, resources
from minidl.comm.fabric.base import BufferSpec, Fabric
from minidl.comm.transport.mailbox import Plan
from minidl.errors import ConfigError

VECTORS = 4  # vectors of a replica, each with one value per parameter: weights, gradient, at most two of the optimizer
OBJECTS = 60_000  # bytes of a replica's Python objects
PER_PAIR = 40  # bytes of statistics for each pair of ranks
INDEX = 8  # bytes for each training image, in the shuffled order of a replica
SPEED = 10e9  # FLOP/s that a core reaches in a step of a small model
STEP = 1e-3  # seconds of a step besides its arithmetic


def require_memory(ranks: int, parameters: int, images: int) -> None:
    """Raise ConfigError if the memory for all ranks exceeds the free memory."""
    needed = ranks * (VECTORS * 4 * parameters + OBJECTS + INDEX * images + PER_PAIR * ranks)
    free = resources.available()
    if needed > free:
        raise ConfigError(f"{ranks:,} ranks with {parameters:,} parameters each need about "
                          f"{resources.size(needed)} of memory, and {resources.size(free)} are free: "
                          "use fewer --ranks or a smaller model")  # fmt: skip


def require_room(fabric: Fabric, parameters: int, optimizer: str, buffers: BufferSpec, parts: int = 1) -> None:
    """Raise ConfigError if this machine has too little memory for its replicas' vectors and messages.

    The first rank of each machine checks this, when the model is built and before `fabric.join`. Each replica still
    needs its gradient and the optimizer's vectors, and each of several parts (--parts) its weights and gradient. What a
    step needs besides depends on the layers and is not counted.
    """
    here = [rank for rank in range(fabric.began) if fabric.nodes[rank] == fabric.nodes[fabric.rank]]
    if fabric.size == 1 or fabric.rank != here[0]:
        return
    messages = Plan(fabric.size, buffers, fabric.servers, here).used
    vectors = 1 + len(getattr(optim.OPTIMIZERS[optimizer], "state_names", ())) + (2 * parts if parts > 1 else 0)
    needed = 4 * parameters * vectors * len(here) + messages
    free = resources.available()
    if needed > free:
        raise ConfigError(f"{len(here)} replicas with {parameters:,} parameters each need about "
                          f"{resources.size(needed)} of memory, {resources.size(messages)} of it for messages, and "
                          f"{resources.size(free)} are free: use fewer --workers or a smaller model")  # fmt: skip


def duration(ranks: int, steps: int, flops: float) -> str:
    """Return the predicted real time as text; "" for less than a minute. flops: FLOPs of a step of one rank."""
    minutes = ranks * steps * (flops / (SPEED * resources.cores()) + STEP) / 60
    if minutes < 1:
        return ""
    return f", about {minutes:.0f} real minutes" if minutes < 120 else f", about {minutes / 60:,.0f} real hours"
