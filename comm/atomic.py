"""Words of shared memory that processes read and write without a lock.

Compilers and CPUs move plain loads and stores about; ARM's do so in ways that x86's do not. What one process may see
of another's writes is only sure through these:

    store_release(words, i, value)     whoever sees this value sees all that was written before it
    load_acquire(words, i)             what is read after it is at least as new
    store_ordered, load_ordered        besides, all processes see them in one order, among themselves

A store of one process and a load of another then hand over a whole vector: data, store_release ... load_acquire, data.
All words are int64. Functions of mailboxes that need these stand here, too: Numba keeps compiled code until the file
that it comes from changes, and does not look at what that imports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy import ndarray

from minidl.engine.jit import jit, parallel_jit, prange
from minidl.kernels.elementwise.stream import chunk, chunks, finish, get, put

DEAD = 5  # base.State.DEAD


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


# -- letters: cells[receiver, sender] is 0, or k + 1 for a letter in the sender's slot k, or -(k + 1) while it is read


@jit
def find_slot(cells: ndarray, states: ndarray, sender: int, peers: ndarray, first: int, last: int) -> int:
    """A slot of first, ..., last - 1 that is free, where all peers have taken the letter before.

    -1 - peer: that one has not, or is dead; -1 - sender: no slot is free.
    """
    for peer in peers:
        if load_acquire(cells[peer], sender) != 0 or states[peer] == DEAD:
            return -1 - peer
    for slot in range(first, last):
        free = True
        for receiver in range(cells.shape[0]):
            if abs(load_acquire(cells[receiver], sender)) == slot + 1 and states[receiver] != DEAD:
                free = False
                break
        if free:
            return slot
    return -1 - sender


@jit
def deliver(cells: ndarray, sender: int, peers: ndarray, slot: int) -> None:
    """Say that a letter for these peers lies in the slot, whole."""
    for peer in peers:
        store_release(cells[peer], sender, slot + 1)


@jit
def take(cells: ndarray, receiver: int, first: int, count: int) -> int:
    """Open the first letter of the senders first, ..., first + count - 1 (modulo their number).

    Returns sender * 2^32 + slot; -1: there is none.
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
    """The letter was read. A second time it does nothing."""
    if load_acquire(cells[receiver], sender) == -1 - slot:
        store_release(cells[receiver], sender, 0)


# -- what is published: newest[writer, 0] = version * slots + slot; pins[writer, reader] = slot + 1, or 0


@jit
def find_unpinned(newest: ndarray, pins: ndarray, states: ndarray, writer: int, slots: int) -> int:
    """A slot that is not the newest, and that no reader holds; -1: there is none."""
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
def announce(newest: ndarray, writer: int, version: int, slots: int, slot: int) -> None:
    """This slot is the newest."""
    store_ordered(newest[writer], 0, version * slots + slot)


@jit
def pin(newest: ndarray, pins: ndarray, writer: int, reader: int, seen: int, slots: int, tries: int) -> int:
    """Hold the newest slot: newest[writer, 0]. 0: that is `seen`; -1: it changed at each try; -2: one is held.

    A hazard pointer (Michael 2004): who pins a slot and then still finds it the newest has pinned it before the writer
    looks for one to write to, since that finds another newest first.
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
    """out = source, past the caches, and whole for all before anything that is stored next."""
    for k in prange(chunks(out)):
        _copy_past(chunk(source, k, chunks(out)), chunk(out, k, chunks(out)))


@jit
def _copy_past(source: ndarray, out: ndarray) -> None:
    for i in range(out.size):
        put(out, i, get(source, i), True)
    finish(True)
