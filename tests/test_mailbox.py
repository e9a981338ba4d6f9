"""Mailboxes: messages arrive once, in order and complete. Readers see complete vectors; publishing never waits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl.comm import atomic, memory
from minidl.comm.fabric.base import ANY, BufferSpec, Channel, Header, Message, State
from minidl.comm.memory import pages
from minidl.comm.transport.mailbox import SLOTS, Mailbox, Plan
from minidl.comm.transport.messages import CACHE, DTYPES, Slot, Trust
from minidl.engine.device import Device
from minidl.errors import ConfigError

NEEDS = BufferSpec(nbytes=32, mail=2, publish=True)


def boxes(size: int, buffers: BufferSpec = NEEDS, servers: tuple[int, ...] = ()) -> list[Mailbox]:
    """Return the mailboxes of `size` ranks. All use the same memory."""
    plan = Plan(size, buffers, servers)
    data = Device("cpu").empty((plan.total,), np.uint8)
    data[:] = 0
    states, trust = np.zeros(size), np.zeros(size, np.int64)
    return [Mailbox(data, plan, rank, states, trust=trust) for rank in range(size)]


def vector(value: float, size: int = 8, dtype: type = np.float32) -> np.ndarray:
    return np.full(size, value, dtype)


def post(box: Mailbox, channel: Channel, peers: Sequence[int], header: Header, *parts: np.ndarray) -> int | None:
    """Send a copy of the parts. Returns None, or the rank for which `reserve` fails."""
    slot = box.reserve(channel, peers, sum(part.nbytes for part in parts))
    if isinstance(slot, int):
        return slot
    slot.send(parts, header)
    return None


def publish(box: Mailbox, vector: np.ndarray, header: Header = Header()) -> bool:  # noqa: B008 (immutable)
    slot = box.reserve_state(vector.nbytes)
    return slot is not None and slot.send((vector,), header)


# -- messages --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 3), st.data())
def test_messages_arrive_once_in_order_and_unchanged(size: int, mail: int, data: st.DataObject) -> None:
    """Also if receivers freeze. Then each slot that a frozen one holds is replaced by a spare slot."""
    ranks = boxes(size, BufferSpec(nbytes=32, mail=mail))
    writing: list[tuple[int, tuple[int, ...], Slot, int]] = []  # (sender, receivers, slot, value)
    edges: dict[tuple[int, int], int] = {}  # (sender, receiver) -> value of the message, from `reserve` to `release`
    sent: set[tuple[int, int]] = set()
    held: list[tuple[int, Message, int]] = []
    for number in range(data.draw(st.integers(1, 60))):
        rank = data.draw(st.integers(0, size - 1))
        action = data.draw(st.sampled_from(["reserve", "commit", "cancel", "take", "release", "freeze or wake"]))
        if action == "freeze or wake":
            ranks[0].trust[rank] = Trust.SUSPECTED - ranks[0].trust[rank]
        elif action == "reserve":
            peers = data.draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True))
            busy = [peer for peer in peers if (rank, peer) in edges]
            slot = ranks[rank].reserve(Channel.MAIL, peers, 32)
            if isinstance(slot, int) and not busy:  # all slots are in use, each by another message
                own = {receiver: value for (sender, receiver), value in edges.items() if sender == rank}
                assert slot == rank
                assert len({*own.values()}) >= mail + min(sum(ranks[0].trust[[*own]]), size - 1)
            elif isinstance(slot, int):
                assert slot == busy[0]
            else:
                assert not busy
                slot.bytes[:] = number
                writing.append((rank, tuple(peers), slot, number))
                edges.update({(rank, peer): number for peer in peers})
        elif action in ("commit", "cancel") and writing:
            sender, receivers, slot, value = writing.pop(data.draw(st.integers(0, len(writing) - 1)))
            assert (slot.bytes == value).all()  # no other message was written into the same memory
            if action == "cancel":
                slot.cancel()
                for peer in receivers:
                    del edges[sender, peer]
            else:
                dtype = data.draw(st.sampled_from(DTYPES))
                nbytes = data.draw(st.sampled_from([0, 8, 32]))
                slot.commit(Header(start=nbytes, round=DTYPES.index(dtype)), nbytes, dtype)
                sent.update((sender, peer) for peer in receivers)
        elif action == "take":
            message = ranks[rank].take(Channel.MAIL)
            assert (message is not None) == any(receiver == rank for _, receiver in sent)
            if message is not None:
                sent.remove((message.sender, rank))
                held.append((rank, message, edges[message.sender, rank]))
        elif action == "release" and held:
            receiver, message, value = held.pop(data.draw(st.integers(0, len(held) - 1)))
            check(message, value)
            message.release()
            del edges[message.sender, receiver]
    for _, message, value in held:  # a held message is never overwritten
        check(message, value)


def check(message: Message, value: int) -> None:
    assert (message.vector.nbytes, message.vector.dtype) == (message.header.start, DTYPES[message.header.round])
    assert message.vector.tobytes() == bytes([value]) * message.header.start


def test_headers_arrive_unchanged() -> None:
    a, b = boxes(2)
    header = Header(start=3, weight=0.25, clock=1e9, round=7, marker=True)
    post(a, Channel.MAIL, (1,), header, vector(1, 2), vector(2, 3))
    message = b.take(Channel.MAIL, 0)
    assert message is not None and message.header == header and message.sender == 0
    assert message.vector.tolist() == [1, 1, 2, 2, 2]


def test_no_sender_starves() -> None:
    ranks = boxes(4)
    order = []
    for _ in range(6):
        for rank in (1, 2, 3):
            post(ranks[rank], Channel.MAIL, (0,), Header(), vector(rank))
        with ranks[0].take(Channel.MAIL, ANY) as message:  # type: ignore[union-attr]
            order.append(message.sender)
    assert order == [1, 2, 3, 1, 2, 3]


def test_empty_messages_need_no_slot() -> None:
    a, _, c = boxes(3, BufferSpec(nbytes=32, mail=1))
    assert post(a, Channel.MAIL, (1,), Header(), vector(1)) is None
    assert post(a, Channel.MAIL, (2,), Header(), vector(1)) == 0  # no free slot
    assert post(a, Channel.MAIL, (2,), Header(marker=True), vector(1, 0)) is None
    message = c.take(Channel.MAIL)
    assert message is not None and message.header.marker and message.vector.size == 0


def test_a_second_release_has_no_effect() -> None:
    a, b = boxes(2)
    post(a, Channel.MAIL, (1,), Header(), vector(1))
    first = b.take(Channel.MAIL)
    assert first is not None
    first.release()
    post(a, Channel.MAIL, (1,), Header(), vector(2))
    first.release()
    second = b.take(Channel.MAIL)
    assert second is not None and second.vector[0] == 2


def test_dead_ranks_hold_no_slots_and_their_messages_are_received() -> None:
    a, b, c = boxes(3, BufferSpec(nbytes=32, mail=1, publish=True))
    post(a, Channel.MAIL, (1,), Header(), vector(1))
    post(b, Channel.MAIL, (2,), Header(), vector(5))
    for value in range(SLOTS):  # b holds the slot of the first vector
        publish(a, vector(value), Header())
        if value == 0:
            assert isinstance(b.latest(0), Message)
    a.states[1] = State.DEAD
    assert post(a, Channel.MAIL, (2,), Header(), vector(2)) is None
    assert post(a, Channel.MAIL, (1,), Header(), vector(2)) == 1
    for box in (a, c):
        for value in range(2 * SLOTS):
            assert publish(box, vector(value), Header())
    message = c.take(Channel.MAIL, 1)
    assert message is not None and message.vector[0] == 5


def test_a_spare_slot_is_allocated_when_it_is_used_first() -> None:
    a, b, *_ = boxes(4, BufferSpec(nbytes=32, mail=1))
    allocated: list[tuple[int, int]] = []
    a.allocate = lambda start, stop: bool(allocated.append((start, stop)))
    a.trust[1] = Trust.SUSPECTED
    assert post(a, Channel.MAIL, (1,), Header(), vector(1)) is None
    assert post(a, Channel.MAIL, (2,), Header(), vector(2)) == 0, "memory is short"
    a.allocate = lambda start, stop: not allocated.append((start, stop))
    for value in (3, 4):
        assert post(a, Channel.MAIL, (2,), Header(), vector(value)) is None
        with boxed(b, 2) as message:
            assert (message.vector == value).all()
    [(start, stop), again] = allocated
    assert again == (start, stop) and a.plan.used <= start < stop <= a.plan.total
    with boxed(b, 1) as message:
        assert (message.vector == 1).all()


def boxed(box: Mailbox, rank: int) -> Message:
    """Return the next message for a rank, whose mailbox is in the same memory as `box`."""
    message = Mailbox(box.memory, box.plan, rank, box.states).take(Channel.MAIL)
    assert message is not None
    return message


def test_messages_longer_than_requested() -> None:
    a, _ = boxes(2)
    with pytest.raises(ConfigError, match="MAIL: a message of 33 bytes, but the method requested slots of 32 bytes"):
        a.reserve(Channel.MAIL, (1,), 33)
    with pytest.raises(ConfigError, match="CALL: a message of 1 bytes, but the method requested no slots"):
        a.reserve(Channel.CALL, (1,), 1)
    with pytest.raises(ConfigError, match="published state: a message of 33 bytes"):
        a.reserve_state(33)


def test_a_slot_of_a_dead_receiver_stays_reserved() -> None:
    """The memory of a message that is still being written is not given to another message."""
    a, _, _ = boxes(3, BufferSpec(nbytes=32, mail=1))
    slot = a.reserve(Channel.MAIL, (1,), 32)
    a.states[1] = State.DEAD
    assert a.reserve(Channel.MAIL, (2,), 32) == 0
    assert isinstance(slot, Slot)
    slot.commit()
    assert isinstance(a.reserve(Channel.MAIL, (2,), 32), Slot)


def test_an_abandoned_slot_can_be_reserved_again_at_once() -> None:
    a, b = boxes(2, BufferSpec(nbytes=32, mail=1, publish=True))
    for _ in range(10):
        slot, state = a.reserve(Channel.MAIL, (1,), 32), a.reserve_state(32)
        assert isinstance(slot, Slot) and state is not None
        assert a.reserve(Channel.MAIL, (1,), 32) == 1 and a.reserve_state(32) is None
        with slot, state:
            pass
    assert b.take(Channel.MAIL) is None and b.latest(0) is None


def test_replicas_call_and_servers_answer() -> None:
    ranks = boxes(3, BufferSpec(nbytes=16, call=True), servers=(2,))
    for rank in (0, 1):
        assert post(ranks[rank], Channel.CALL, (2,), Header(), vector(rank, 4)) is None
    for _ in range(2):
        with ranks[2].take(Channel.CALL) as message:  # type: ignore[union-attr]
            assert post(ranks[2], Channel.ANSWER, (message.sender,), Header(), message.vector) is None
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
            published = publish(ranks[0], vector(number), Header(clock=number))
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
    publish(a, vector(1), Header())
    message = b.latest(0)
    publish(a, vector(2), Header())
    with pytest.raises(AssertionError, match="not released"):
        b.latest(0)
    assert isinstance(message, Message) and message.vector[0] == 1


# -- long vectors, real memory, other processors ---------------------------------------------------------------------


def test_vectors_longer_than_the_cache() -> None:
    size = CACHE // 4 + 1000
    a, b = boxes(2, BufferSpec(nbytes=4 * size, mail=1))
    source = np.arange(size, dtype=np.float32)
    post(a, Channel.MAIL, (1,), Header(), source)
    message = b.take(Channel.MAIL)
    assert message is not None and np.array_equal(message.vector, source)


def test_another_process_opens_a_segment_through_proc() -> None:
    segment = memory.Segment.create(pages(5000))
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
        (atomic.reserve, (rows, states, number, words, number, number), {"ldar", "stlr"}),
        (atomic.give_back, (rows, number, number, number), {"ldar", "stlr"}),
        (atomic.announce, (rows, number, number), {"stlr"}),
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
