"""Words of shared memory that processes read and write without a lock.

Compilers and CPUs reorder plain loads and stores. These functions guarantee which writes of other processes a process
sees:

    store_release, load_acquire     a process that loads a value also sees all writes that preceded the value's store
    store_ordered, load_ordered     in addition, all processes see these accesses in the same order

To send a vector, one process writes it and calls store_release; another calls load_acquire and reads the vector.
All words are int64. The functions for messages and published states are in the same file, because Numba's cache of
compiled code detects changes of a function's file, but not of imported files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy import ndarray

from minidl.engine.jit import jit, parallel_jit, prange
from minidl.kernels.elementwise.stream import chunk, chunks, fence, get, put

DEAD = 5  # State.DEAD of transport/messages.py
HELD = 1 << 32  # more than any number of slots


def _address(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    words = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(words.data, [arguments[1]])


def _load(order: str) -> Callable[..., Any]:
    def load(typing: Any, words: Any, i: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = _address(context, builder, signature, arguments)
            return builder.load_atomic(place, order, 8, typ=ir.IntType(64))

        return types.int64(words, types.intp), generate

    return load


def _store(order: str) -> Callable[..., Any]:
    def store(typing: Any, words: Any, i: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.store_atomic(arguments[2], _address(context, builder, signature, arguments), order, 8)
            return context.get_dummy_value()

        return types.void(words, types.intp, types.int64), generate

    return store


load_acquire = intrinsic(_load("acquire"))
store_release = intrinsic(_store("release"))
load_ordered = intrinsic(_load("seq_cst"))
store_ordered = intrinsic(_store("seq_cst"))


# -- messages. cells[receiver, sender] tells what happens to the sender's slot k:
#
#    -HELD - (k + 1)    the sender writes a message          k + 1       the message waits for the receiver
#    0                  no message                           -(k + 1)    the receiver reads the message


@jit
def reserve(cells: ndarray, states: ndarray, sender: int, peers: ndarray, first: int, last: int) -> int:
    """Reserve a free slot from `first` to `last - 1` for a message to these peers, and return it.

    Returns -1 - sender if no slot is free. Returns -1 - peer for a peer that is dead, that has not released the
    sender's previous message, or for which the sender already writes a message.
    """
    for peer in peers:
        if load_acquire(cells[peer], sender) != 0 or states[peer] == DEAD:
            return -1 - peer
    for slot in range(first, last):
        free = True
        for receiver in range(cells.shape[0]):
            cell = load_acquire(cells[receiver], sender)
            if cell == -HELD - (slot + 1) or (abs(cell) == slot + 1 and states[receiver] != DEAD):
                free = False
                break
        if free:
            for peer in peers:
                store_release(cells[peer], sender, -HELD - (slot + 1))
            return slot
    return -1 - sender


@jit
def deliver(cells: ndarray, sender: int, peers: ndarray, cell: int) -> None:
    """Set the cells of these peers. cell: slot + 1 to send the complete message in a slot, 0 to cancel it."""
    for peer in peers:
        store_release(cells[peer], sender, cell)


@jit
def take(cells: ndarray, receiver: int, first: int, count: int) -> int:
    """Take the first message found among `count` senders: ranks `first`, `first + 1`, ... modulo the number of ranks.

    Returns sender * 2^32 + slot, or -1 if there is no message.
    """
    row, ranks = cells[receiver], cells.shape[0]
    for i in range(count):
        sender = (first + i) % ranks
        cell = load_acquire(row, sender)
        if cell > 0:
            store_release(row, sender, -cell)
            return (sender << 32) + cell - 1
    return -1


@jit
def give_back(cells: ndarray, receiver: int, sender: int, slot: int) -> None:
    """Release a message. A second call does nothing."""
    if load_acquire(cells[receiver], sender) == -1 - slot:
        store_release(cells[receiver], sender, 0)


# -- published states: newest[writer, 0] = version * slots + slot; pins[writer, reader] = slot + 1, or 0


@jit
def find_unpinned(newest: ndarray, pins: ndarray, states: ndarray, writer: int, slots: int) -> int:
    """Return a slot that is not the newest and that no live reader has pinned, or -1 if there is none."""
    last = load_ordered(newest[writer], 0)
    for slot in range(slots):
        free = last == 0 or slot != last % slots
        for reader in range(pins.shape[0]):
            if load_ordered(pins[writer], reader) == slot + 1 and states[reader] != DEAD:
                free = False
        if free:
            return slot
    return -1


@jit
def announce(newest: ndarray, writer: int, word: int) -> None:
    """Make a slot the newest. word: version * slots + slot."""
    store_ordered(newest[writer], 0, word)


@jit
def pin(newest: ndarray, pins: ndarray, writer: int, reader: int, seen: int, slots: int, tries: int) -> int:
    """Pin the newest slot and return newest[writer, 0].

    Returns 0 if newest[writer, 0] equals `seen`, -1 if it changed during every attempt, -2 if this reader already pins
    a slot of this writer.
    The pin is a hazard pointer (Michael 2004). Before the writer overwrites a slot, it makes another slot the newest,
    then searches for pins. If the slot was still the newest after `pin` had set a pin, the writer finds this pin.
    """
    if load_ordered(pins[writer], reader) != 0:
        return -2
    for _ in range(tries):
        last = load_ordered(newest[writer], 0)
        if last == seen:
            break
        store_ordered(pins[writer], reader, last % slots + 1)
        if load_ordered(newest[writer], 0) == last:
            return last
    else:
        store_release(pins[writer], reader, 0)
        return -1
    store_release(pins[writer], reader, 0)
    return 0


@jit
def unpin(pins: ndarray, writer: int, reader: int) -> None:
    store_release(pins[writer], reader, 0)


# -- data --------------------------------------------------------------------------------------------------------------


@parallel_jit
def copy_past(source: ndarray, out: ndarray) -> None:
    """Set out = source. The stores bypass the caches, and all processes see them before any later store."""
    for k in prange(chunks(out)):
        _copy_past(chunk(source, k, chunks(out)), chunk(out, k, chunks(out)))


@jit
def _copy_past(source: ndarray, out: ndarray) -> None:
    for i in range(out.size):
        put(out, i, get(source, i), True)
    fence()
