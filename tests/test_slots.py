"""Slots: what is written into them arrives bit for bit; mistakes are reported; the limits are checked at import.

tests/replicas/slots.py checks the content of messages. test_shm.py and test_mpi.py run it with real processes.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicas.slots import LONGEST, content, slots
from sim_helper import NEEDS, simulate

from minidl.comm import memory
from minidl.comm.cluster import uniform
from minidl.comm.fabric.base import BufferSpec, Channel, Column, Fabric, Header, Slot
from minidl.comm.transport import messages
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.comm.transport.messages import CODES, DTYPES, MAX_CHANNELS, check_limits
from minidl.errors import ConfigError, MinidlError


def slot(nbytes: int = 24) -> tuple[Slot, list[tuple[int, int, Header]], list[bool]]:
    """Return a slot, a list of what it delivers, and a list with one entry for each call of abandon."""
    delivered: list[tuple[int, int, Header]] = []
    abandoned: list[bool] = []
    made = Slot(np.zeros(nbytes, np.uint8), lambda *message: delivered.append(message), lambda: abandoned.append(True))
    return made, delivered, abandoned


@settings(max_examples=30)
@given(st.integers(0, 1 << 30), st.integers(2, 4), st.booleans())
def test_slots_of_all_types_arrive_bit_for_bit_in_a_simulation(seed: int, ranks: int, one_node: bool) -> None:
    assert NEEDS.nbytes == LONGEST
    cluster = uniform(ranks, per_node=ranks if one_node else 1, alpha=1e-3, beta=1e-6)
    results = simulate(lambda fabric: slots(fabric, "6", str(seed)), ranks, cluster).results
    assert all(arrived >= 6 * min(ranks - 1, 2) for arrived in results.values())


def test_the_random_contents_have_all_types_and_lengths() -> None:
    drawn = [content(seed) for seed in range(300)]
    assert {vector.dtype for vector in drawn} == set(DTYPES)
    assert {0, LONGEST} <= {vector.nbytes for vector in drawn}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_type_of_a_message(dtype: np.dtype) -> None:
    made, delivered, _ = slot()
    assert made.array(dtype).dtype == dtype
    made.commit(Header(round=3), 16)
    assert delivered == [(16, CODES[dtype], Header(round=3))]
    made, delivered, _ = slot()
    made.array(np.float64)
    made.commit(dtype=dtype)
    assert delivered == [(24, CODES[dtype], Header())]


def test_parts_of_one_type_are_written_one_behind_the_other() -> None:
    made, delivered, _ = slot()
    made.send([np.array([1, 2], np.int16), np.zeros(0, np.int16), np.arange(10, dtype=np.int16)[::1]], Header())
    assert made.bytes.view(np.int16).tolist() == [1, 2, *range(10)] and len(delivered) == 1


@pytest.mark.parametrize("nbytes, dtype, words", [
    (25, np.uint8, "a message of 25 bytes of uint8: expected a multiple of 1, at most the 24 bytes of the slot"),
    (6, np.float32, "a message of 6 bytes of float32: expected a multiple of 4"),
    (-8, np.float64, "a message of -8 bytes"),
    (16, np.complex64, "a message of complex64: expected one of float32, float64, uint8"),
    (16, ">f4", "a message of >f4: expected one of"),
])  # fmt: skip
def test_what_a_slot_cannot_send(nbytes: int, dtype: type, words: str) -> None:
    made, delivered, abandoned = slot()
    with pytest.raises(MinidlError, match=words), made:
        made.commit(nbytes=nbytes, dtype=dtype)
    assert not delivered and abandoned == [True]


def test_a_slot_is_committed_or_cancelled_once() -> None:
    made, delivered, abandoned = slot()
    with made:
        made.commit()
    made.cancel()
    assert len(delivered) == 1 and not abandoned
    with pytest.raises(MinidlError, match="already committed or cancelled: reserve another one"):
        made.commit()
    made, delivered, abandoned = slot()
    made.cancel()
    made.cancel()
    with pytest.raises(MinidlError, match="already committed or cancelled"):
        made.commit()
    assert not delivered and abandoned == [True]


def test_parts_of_different_types() -> None:
    made, delivered, abandoned = slot()
    with pytest.raises(MinidlError, match="parts of float32, float64: expected one type"):
        made.send([np.zeros(2, np.float32), np.zeros(2)], Header())
    assert not delivered and abandoned == [True]


def test_parts_that_do_not_fit_leave_no_reserved_slot() -> None:
    made, delivered, abandoned = slot()
    with pytest.raises(ValueError, match="broadcast"):
        made.send([np.zeros(7, np.float32)], Header())
    assert not delivered and abandoned == [True]


def test_a_single_rank_has_no_peers() -> None:
    transport = LoopbackTransport()
    assert transport.reserve_state(8) is None and transport.reserve(Channel.MAIL, (0,), 8) is None
    assert not transport.publish([np.zeros(1)], Header()) and transport.post(Channel.MAIL, (), [np.zeros(1)], Header())


def test_a_simulated_slot_that_is_cancelled_lets_a_waiting_thread_continue() -> None:
    """A concurrent operation of the same rank waits for the slot."""

    def work(fabric: Fabric) -> float:
        if fabric.rank:
            with fabric.wait(lambda: fabric.take(Channel.MAIL), (0,)) as message:
                return float(message.vector[0])
        held = fabric.reserve(Channel.MAIL, (1,), 8)
        assert held is not None
        other = fabric.start(lambda: fabric.wait(lambda: fabric.send(1, np.full(1, 7.0)) or None, (1,)))
        fabric.elapse("mix", 1000)
        held.cancel()
        other.wait()
        return 0.0

    assert simulate(work).results[1] == 7


def test_simulations_and_mailboxes_refuse_the_same_messages() -> None:
    """test_mailbox.py tests the same messages with mailboxes."""

    def work(fabric: Fabric) -> None:
        fabric.reserve(Channel.MAIL, (1,), 4001)

    with pytest.raises(ConfigError, match="MAIL: a message of 4001 bytes, but the method requested slots of 4000 byte"):
        simulate({0: work, 1: lambda fabric: None})

    def serve(fabric: Fabric) -> None:
        fabric.reserve(Channel.ANSWER, (1,), 8)

    with pytest.raises(ConfigError, match="ANSWER: a message of 8 bytes, but the method requested no slots"):
        simulate({0: serve, 1: lambda fabric: None})


# -- limits ----------------------------------------------------------------------------------------------------------


def test_too_many_columns_or_channels_are_an_error_of_one_line_at_import() -> None:
    check_limits(list(range(memory.COLUMNS)), list(Channel))
    with pytest.raises(ImportError, match="column 21 of the status table: expected at most column 19") as error:
        check_limits(list(IntEnum("Wide", [f"C{i}" for i in range(22)], start=0)), list(Channel))
    assert "\n" not in str(error.value)
    with pytest.raises(ImportError, match="channel 8: expected at most channel 7"):
        check_limits(list(Column), list(range(MAX_CHANNELS + 1)))
    with pytest.raises(ImportError, match=r"expected slots for each of them"):
        check_limits(list(Column), [*Channel, 5])


def test_the_import_checks_the_limits() -> None:
    source = Path(messages.__file__).read_text()
    exec(compile(source, "messages.py", "exec"), {"__name__": messages.__name__})
    with pytest.raises(ImportError, match="column 25 of the status table"):
        exec(compile(source.replace("LOSS = ", "LOSS = 20 + "), "messages.py", "exec"), {"__name__": messages.__name__})


def test_the_words_of_a_row_do_not_overlap() -> None:
    others = [memory.CLAIMS, memory.TRUST, memory.HEARD, memory.LAYOUT]
    words = [*range(memory.STATE, memory.STATE + memory.COLUMNS), *others]
    assert sorted(words) == list(range(memory.ROW))


def test_slots_of_all_channels() -> None:
    for server in (False, True):
        slots = BufferSpec(4, 1, call=True, serving=(5,)).slots(0, 6, server)
        assert list(slots) == list(Channel)
        assert (slots[Channel.CALL][0], slots[Channel.ANSWER][0]) == ((0, 6) if server else (1, 0))
    assert BufferSpec(4, 1, call=True, serving=(5,)).slots(5, 6, server=False)[Channel.ANSWER] == (6, 4)
