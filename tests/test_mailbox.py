"""Mailboxes: messages arrive once, in order and complete. Readers see complete vectors; publishing never waits."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl.comm import atomic, memory
from minidl.comm.fabric.base import ANY, BufferSpec, Channel, Header, Message, State
from minidl.comm.transport import mailbox
from minidl.comm.transport.mailbox import SLOTS, Mailbox, Plan
from minidl.engine.device import Device
from minidl.errors import ConfigError, MinidlError

NEEDS = BufferSpec(elements=8, mail=2, publish=True)


def boxes(size: int, buffers: BufferSpec = NEEDS, servers: tuple[int, ...] = ()) -> list[Mailbox]:
    """Return the mailboxes of `size` ranks. All use the same memory."""
    plan = Plan(size, buffers, servers)
    data = Device("cpu").empty((plan.total,), np.uint8)
    data[:] = 0
    states = np.zeros(size)
    return [Mailbox(data, plan, rank, states) for rank in range(size)]


def vector(value: float, size: int = 8, dtype: type = np.float32) -> np.ndarray:
    return np.full(size, value, dtype)


# -- messages --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 3), st.data())
def test_messages_arrive_once_in_order_and_unchanged(size: int, mail: int, data: st.DataObject) -> None:
    ranks = boxes(size, BufferSpec(elements=8, mail=mail))
    sent: dict[tuple[int, int], list[float]] = {}  # values in flight, by (sender, receiver)
    held: list[tuple[int, Message, float]] = []
    for number in range(data.draw(st.integers(1, 60))):
        rank = data.draw(st.integers(0, size - 1))
        action = data.draw(st.sampled_from(["post", "take", "release"]))
        if action == "post":
            peers = data.draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True))
            busy = [peer for peer in peers if (rank, peer) in sent]
            dtype, length = data.draw(st.sampled_from([(np.float32, 8), (np.float32, 3), (np.float64, 4)]))
            obstacle = ranks[rank].post(Channel.MAIL, peers, (vector(number, length, dtype),), Header(start=length))
            if busy:
                assert obstacle == busy[0]
            if obstacle is None:
                for peer in peers:
                    sent[rank, peer] = [number]
            elif obstacle == rank and not busy:  # all slots are in use, each by another message
                assert len({sent[edge][0] for edge in sent if edge[0] == rank}) == mail
        elif action == "take":
            message = ranks[rank].take(Channel.MAIL)
            waiting = [edge for edge in sent if edge[1] == rank and not any(
                message.sender == edge[0] for receiver, message, _ in held if receiver == rank)]  # fmt: skip
            assert (message is not None) == bool(waiting)
            if message is not None:
                held.append((rank, message, sent[message.sender, rank][0]))
        elif held:
            receiver, message, value = held.pop(data.draw(st.integers(0, len(held) - 1)))
            assert (message.vector == value).all() and message.vector.size == message.header.start
            message.release()
            del sent[message.sender, receiver]
    for _, message, value in held:  # a held message is never overwritten
        assert (message.vector == value).all()


def test_note_arrives_unchanged() -> None:
    a, b = boxes(2)
    header = Header(start=3, weight=0.25, clock=1e9, round=7, marker=True)
    a.post(Channel.MAIL, (1,), (vector(1, 2), vector(2, 3)), header)
    message = b.take(Channel.MAIL, 0)
    assert message is not None and message.header == header and message.sender == 0
    assert message.vector.tolist() == [1, 1, 2, 2, 2]


def test_no_sender_starves() -> None:
    ranks = boxes(4)
    order = []
    for _ in range(6):
        for rank in (1, 2, 3):
            ranks[rank].post(Channel.MAIL, (0,), (vector(rank),), Header())
        with ranks[0].take(Channel.MAIL, ANY) as message:  # type: ignore[union-attr]
            order.append(message.sender)
    assert order == [1, 2, 3, 1, 2, 3]


def test_empty_messages_need_no_slot() -> None:
    a, _, c = boxes(3, BufferSpec(elements=8, mail=1))
    assert a.post(Channel.MAIL, (1,), (vector(1),), Header()) is None
    assert a.post(Channel.MAIL, (2,), (vector(1),), Header()) == 0  # no free slot
    assert a.post(Channel.MAIL, (2,), (vector(1, 0),), Header(marker=True)) is None
    message = c.take(Channel.MAIL)
    assert message is not None and message.header.marker and message.vector.size == 0


def test_a_second_release_has_no_effect() -> None:
    a, b = boxes(2)
    a.post(Channel.MAIL, (1,), (vector(1),), Header())
    first = b.take(Channel.MAIL)
    assert first is not None
    first.release()
    a.post(Channel.MAIL, (1,), (vector(2),), Header())
    first.release()
    second = b.take(Channel.MAIL)
    assert second is not None and second.vector[0] == 2


def test_dead_ranks_hold_no_slots_and_their_messages_are_received() -> None:
    a, b, c = boxes(3, BufferSpec(elements=8, mail=1, publish=True))
    a.post(Channel.MAIL, (1,), (vector(1),), Header())
    b.post(Channel.MAIL, (2,), (vector(5),), Header())
    for value in range(SLOTS):  # b holds the slot of the first vector
        a.publish((vector(value),), Header())
        if value == 0:
            assert isinstance(b.latest(0), Message)
    a.states[1] = State.DEAD
    assert a.post(Channel.MAIL, (2,), (vector(2),), Header()) is None
    assert a.post(Channel.MAIL, (1,), (vector(2),), Header()) == 1
    for box in (a, c):
        for value in range(2 * SLOTS):
            assert box.publish((vector(value),), Header())
    message = c.take(Channel.MAIL, 1)
    assert message is not None and message.vector[0] == 5


def test_message_longer_than_requested() -> None:
    a, _ = boxes(2)
    with pytest.raises(MinidlError, match="a message of 68 bytes, but the method requested slots of 64 bytes"):
        a.post(Channel.MAIL, (1,), (vector(0, 17),), Header())


def test_replicas_call_and_servers_answer() -> None:
    ranks = boxes(3, BufferSpec(elements=4, call=True), servers=(2,))
    for rank in (0, 1):
        assert ranks[rank].post(Channel.CALL, (2,), (vector(rank, 4),), Header()) is None
    for _ in range(2):
        with ranks[2].take(Channel.CALL) as message:  # type: ignore[union-attr]
            assert ranks[2].post(Channel.ANSWER, (message.sender,), (message.vector,), Header()) is None
    for rank in (0, 1):
        answer = ranks[rank].take(Channel.ANSWER, 2)
        assert answer is not None and answer.vector[0] == rank


# -- published vectors -----------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["publish", "look 1", "look 2", "release 1", "release 2"]), max_size=60))
def test_readers_get_the_newest_complete_vector(actions: list[str]) -> None:
    ranks = boxes(3)
    shown = 0
    seen, held = {1: 0, 2: 0}, dict[int, tuple[Message, int]]()
    for number, action in enumerate(actions, 1):
        word, _, reader = action.partition(" ")
        if word == "publish":
            slots = {message.vector.ctypes.data for message, value in held.values() if value != shown}
            published = ranks[0].publish((vector(number),), Header(clock=number))
            assert published == (len(slots) < SLOTS - 1 or not shown)
            shown = number if published else shown
        elif word == "look" and int(reader) not in held:
            message = ranks[int(reader)].latest(0)
            assert (message is None) == (seen[int(reader)] == shown)
            if isinstance(message, Message):
                assert message.header.clock == shown
                held[int(reader)] = message, shown
                seen[int(reader)] = shown
        elif word == "release" and int(reader) in held:
            held.pop(int(reader))[0].release()
        for message, value in held.values():
            assert (message.vector == value).all()


def test_a_reader_holds_one_published_vector_of_a_peer_at_a_time() -> None:
    a, b = boxes(2)
    a.publish((vector(1),), Header())
    message = b.latest(0)
    a.publish((vector(2),), Header())
    with pytest.raises(AssertionError, match="not released"):
        b.latest(0)
    assert isinstance(message, Message) and message.vector[0] == 1


# -- long vectors, real memory, other processors ---------------------------------------------------------------------


def test_vectors_longer_than_the_cache() -> None:
    size = mailbox.CACHE // 4 + 1000
    a, b = boxes(2, BufferSpec(elements=size, mail=1))
    source = np.arange(size, dtype=np.float32)
    a.post(Channel.MAIL, (1,), (source,), Header())
    message = b.take(Channel.MAIL)
    assert message is not None and np.array_equal(message.vector, source)


def test_another_process_opens_a_segment_through_proc() -> None:
    segment = memory.Segment.create(mailbox.pages(5000))
    other = memory.Segment.open(f"/proc/{os.getpid()}/fd/{segment.fd}")
    segment.map(8192)[4097] = 7
    assert other.map(8192)[4097] == 7
    segment.close()
    other.close()
    with pytest.raises(ConfigError, match="cannot open"):
        memory.Segment.open(f"/proc/{os.getpid()}/fd/9999")


def test_memory_limits_are_reported() -> None:
    with pytest.raises(ConfigError, match=r"MiB are needed and [0-9,.]+ MiB are free"):
        memory.Segment.create(1 << 50)
    code = ("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
            "from minidl.comm.memory import Segment; Segment.create(1 << 21)")  # fmt: skip
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ConfigError: shared memory: 2.0 MiB are needed" in result.stderr


def test_constants_equal_those_of_the_fabric() -> None:
    assert (memory.JOINING, memory.PAUSED, memory.DEAD) == (State.JOINING, State.PAUSED, State.DEAD)
    assert atomic.DEAD == State.DEAD


def test_arm_gets_ordered_loads_and_stores() -> None:
    """Compiled for aarch64, the functions contain its instructions for ordered memory access: ldar and stlr."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    words, rows = numba.types.int64[::1], numba.types.int64[:, ::1]
    number, states = numba.types.int64, numba.types.float64[:]
    machine = llvm.Target.from_triple("aarch64-linux-gnu").create_target_machine(codemodel="small", features="-rcpc")
    cases = [
        (atomic.deliver, (rows, number, words, number), {"stlr"}),
        (atomic.take, (rows, number, number, number), {"ldar", "stlr"}),
        (atomic.find_slot, (rows, states, number, words, number, number), {"ldar"}),
        (atomic.give_back, (rows, number, number, number), {"ldar", "stlr"}),
        (atomic.announce, (rows, number, number, number, number), {"stlr"}),
        (atomic.pin, (rows, rows, number, number, number, number, number), {"ldar", "stlr"}),
        (atomic.find_unpinned, (rows, rows, states, number, number), {"ldar"}),
    ]
    for function, signature, expected in cases:
        kernel = numba.njit(no_cfunc_wrapper=True)(function.py_func)
        kernel.compile(signature)
        code = kernel.inspect_llvm(signature)
        code = re.sub("target triple = .*", f'target triple = "{machine.triple}"', code)
        code = re.sub("target datalayout = .*", f'target datalayout = "{machine.target_data}"', code)
        # Numba's reference counting uses x86 intrinsics: a declaration is enough here.
        code = re.sub(r"(?ms)^define [^@]*@(NRT_\w+)\((\w+)[^{]*\{$.*?^\}$", r"declare void @\1(\2)", code)
        assembly = machine.emit_assembly(llvm.parse_assembly(code))
        assert all(f"\t{word}\t" in assembly for word in expected), function
