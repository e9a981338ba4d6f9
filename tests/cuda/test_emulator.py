"""The emulator finds each kind of mistake that it claims to find, and computes what PTX defines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulator import Counts, Emulator, KernelError, Unsupported, arithmetic, ptx, wavefronts
from numba import float32, int32
from numpy import ndarray

from minidl.engine.cuda import Kernel, cuda, kernel, launch, launch_with
from minidl.engine.cuda_memory import commit, copy, copy_16, copy_if, get, load4, put, store4, wait_all, wait_but_one
from minidl.engine.device import aligned

N = 64  # threads of a block
TWICE = 2 * N


def run(function: Any, *arguments: Any, blocks: int = 1, threads: int = N, **options: Any) -> Emulator:
    emulator = Emulator(**options)
    with launch_with(emulator):
        launch(kernel(threads)(function), blocks, *arguments)
    return emulator


def numbers(size: int = N) -> ndarray:
    found = aligned(size, np.float32)
    found[:] = np.arange(size)
    return found


# -- correct kernels --------------------------------------------------------------------------------------------------


def reverse(x: ndarray, out: ndarray) -> None:
    s = cuda.shared.array(N, float32)
    i = int32(cuda.threadIdx.x)
    put(s, i, get(x, i))
    cuda.syncthreads()
    put(out, i, get(s, N - 1 - i))


def test_shared_memory_and_a_barrier() -> None:
    out = np.zeros(N, np.float32)
    run(reverse, numbers(), out)
    np.testing.assert_array_equal(out, numbers()[::-1])


def test_branches_and_loops_that_differ_between_threads() -> None:
    def collatz(out: ndarray) -> None:
        i = int32(cuda.threadIdx.x)
        n, steps = i + 1, 0
        while n != 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            steps += 1
        out[i] = steps

    def expected(n: int) -> int:
        return 0 if n == 1 else 1 + expected(n // 2 if n % 2 == 0 else 3 * n + 1)

    out = np.zeros(N, np.int32)
    run(collatz, out)
    np.testing.assert_array_equal(out, [expected(n + 1) for n in range(N)])


@pytest.mark.parametrize("newest_first", [False, True])
def test_copies_arrive_when_they_are_waited_for(newest_first: bool) -> None:
    def two_groups(x: ndarray, out: ndarray) -> None:
        s = cuda.shared.array(TWICE, float32, 16)
        i = int32(cuda.threadIdx.x)
        copy(s, i, x, i)
        commit()
        copy_if(s, N + i, x, N + i, i % 2 == 0)
        commit()
        wait_but_one()
        first = get(s, N + i) if newest_first else get(s, i)
        wait_all()
        out[i] = first + get(s, N + i)

    x, out = numbers(2 * N), np.zeros(N, np.float32)
    if newest_first:
        with pytest.raises(KernelError, match="before a copy to it is waited for"):
            run(two_groups, x, out)
    else:
        run(two_groups, x, out)
        np.testing.assert_array_equal(out, x[:N] + np.where(np.arange(N) % 2, 0, x[N:]))


def test_shuffles() -> None:
    def total(x: ndarray, out: ndarray) -> None:
        i = int32(cuda.threadIdx.x)
        v = x[i]
        distance = 16
        while distance > 0:
            v += cuda.shfl_xor_sync(0xFFFFFFFF, v, distance)
            distance //= 2
        out[i] = v + cuda.shfl_down_sync(0xFFFFFFFF, x[i], 1)

    out, x = np.zeros(N, np.float32), numbers()
    run(total, x, out)
    following = np.where(np.arange(N) % 32 == 31, x, x + 1)
    np.testing.assert_array_equal(out, np.repeat(x.reshape(2, 32).sum(1), 32) + following)


def test_a_ballot() -> None:
    def large(x: ndarray, out: ndarray) -> None:
        i = int32(cuda.threadIdx.x)
        out[i] = cuda.popc(cuda.ballot_sync(0xFFFFFFFF, x[i] >= 40) & ((1 << (i % 32)) - 1))  # before this thread

    out, x = np.zeros(N, np.float32), numbers()
    run(large, x, out)
    np.testing.assert_array_equal(out, [sum(x[i - i % 32 : i] >= 40) for i in range(N)])


def test_functions_are_called() -> None:
    def powers(x: ndarray, out: ndarray) -> None:  # NVIDIA's power of float64 numbers is a function
        i = int32(cuda.threadIdx.x)
        v = get(x, i)
        if i % 3 == 0:
            v = v**1.5
        put(out, i, v + v**-0.3)

    x, out = np.linspace(0.1, 9, N), np.zeros(N)
    run(powers, x, out)
    v = np.where(np.arange(N) % 3 == 0, x**1.5, x)
    np.testing.assert_allclose(out, v + v**-0.3, rtol=1e-14)


# -- mistakes ---------------------------------------------------------------------------------------------------------


def no_barrier(x: ndarray, out: ndarray) -> None:
    s = cuda.shared.array(N, float32)
    i = int32(cuda.threadIdx.x)
    put(s, i, get(x, i))
    put(out, i, get(s, N - 1 - i))


def write_after_read(x: ndarray, out: ndarray) -> None:
    s = cuda.shared.array(N, float32)
    i = int32(cuda.threadIdx.x)
    put(s, i, get(x, i))
    cuda.syncthreads()
    put(out, i, get(s, N - 1 - i))
    put(s, i, float32(0))


def same_element(x: ndarray, out: ndarray) -> None:
    s = cuda.shared.array(N, float32)
    put(s, int32(cuda.threadIdx.x) // 2, x[0])
    out[0] = x[0]


def never_written(x: ndarray, out: ndarray) -> None:
    s = cuda.shared.array(N, float32)
    i = int32(cuda.threadIdx.x)
    if i < N - 1:
        put(s, i, x[i])
    out[i] = get(s, i)


def barrier_of_some(x: ndarray, out: ndarray) -> None:
    i = int32(cuda.threadIdx.x)
    if x[i] > 10:
        cuda.syncthreads()
        out[i] = x[i]


def different_barriers(x: ndarray, out: ndarray) -> None:
    i = int32(cuda.threadIdx.x)
    if x[i] > 10:
        cuda.syncthreads()
        out[i] = x[i]
    else:
        cuda.syncthreads()
        out[i] = -x[i]


def too_far(x: ndarray, out: ndarray) -> None:
    i = int32(cuda.threadIdx.x)
    put(out, i, get(x, i + 1))


def shared_too_far(x: ndarray, out: ndarray) -> None:
    s = cuda.shared.array(N, float32)
    i = int32(cuda.threadIdx.x)
    put(s, i + 1, get(x, i))
    out[i] = x[i]


def not_a_multiple_of_16(x: ndarray, out: ndarray) -> None:
    i = int32(cuda.threadIdx.x)
    if i < 4:
        store4(out, 4 * i, load4(x, 4 * i + 1))


def input_is_written(x: ndarray, out: ndarray) -> None:
    i = int32(cuda.threadIdx.x)
    out[i] = x[i]
    put(x, i, float32(0))


def all_write_one(x: ndarray, out: ndarray) -> None:
    put(out, 0, get(x, int32(cuda.threadIdx.x)))


def no_wait(x: ndarray, out: ndarray) -> None:
    s = cuda.shared.array(N, float32, 16)
    i = int32(cuda.threadIdx.x)
    copy(s, i, x, i)
    commit()
    cuda.syncthreads()
    put(out, i, get(s, i))


def wait_without_barrier(x: ndarray, out: ndarray) -> None:
    s = cuda.shared.array(N, float32, 16)
    i = int32(cuda.threadIdx.x)
    copy(s, i, x, i)
    commit()
    wait_all()
    put(out, i, get(s, N - 1 - i))


def no_wait_at_the_end(x: ndarray, out: ndarray) -> None:
    s = cuda.shared.array(N, float32, 16)
    i = int32(cuda.threadIdx.x)
    copy(s, i, x, i)
    commit()
    put(out, i, get(x, i))


def copy_of_16_bytes_from_an_odd_address(x: ndarray, out: ndarray) -> None:
    s = cuda.shared.array(N, float32, 16)
    i = int32(cuda.threadIdx.x)
    if i < 4:
        copy_16(s, 4 * i, x, 4 * i + 1)
    commit()
    wait_all()
    put(out, i, get(x, i))


def shuffle_of_some(x: ndarray, out: ndarray) -> None:
    i = int32(cuda.threadIdx.x)
    if x[i] > 10:
        out[i] = cuda.shfl_xor_sync(0xFFFFFFFF, x[i], 1)


def vote_of_some(x: ndarray, out: ndarray) -> None:
    i = int32(cuda.threadIdx.x)
    if x[i] > 10:
        out[i] = cuda.ballot_sync(0xFFFFFFFF, x[i] > 20)


MISTAKES = {
    no_barrier: "read after another thread's write",
    write_after_read: "written after another thread's read",
    same_element: "written by two threads at once",
    never_written: "read before it is written",
    barrier_of_some: "a barrier that some threads",
    different_barriers: "a barrier that some threads",
    too_far: "argument 0: 4 bytes beyond its end",
    shared_too_far: "shared memory: address",
    not_a_multiple_of_16: "not a multiple of 16",
    input_is_written: "argument 0 is written, but it is an input",
    all_write_one: "written by two threads at once",
    no_wait: "before a copy to it is waited for",
    wait_without_barrier: "read after another thread's write",
    no_wait_at_the_end: "ends before its copies are waited for",
    copy_of_16_bytes_from_an_odd_address: "not a multiple of 16",
    shuffle_of_some: "a part of a warp",
    vote_of_some: "a vote by a part of a warp",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_a_mistake_is_found(mistake: Any) -> None:
    x = numbers()
    x.flags.writeable = False
    with pytest.raises(KernelError, match=MISTAKES[mistake]):
        run(mistake, x, np.zeros(N, np.float32))


def of_another_block(x: ndarray) -> None:
    i = int32(cuda.blockIdx.x) * N + int32(cuda.threadIdx.x)
    put(x, i, get(x, (i + N) % x.size) + float32(1))


def same_element_from_two_blocks(x: ndarray) -> None:
    put(x, int32(cuda.threadIdx.x), float32(cuda.blockIdx.x))


@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
@pytest.mark.parametrize("mistake", [of_another_block, same_element_from_two_blocks], ids=lambda f: f.__name__)
def test_a_race_between_blocks_is_found(mistake: Any, order: str) -> None:
    with pytest.raises(KernelError, match=r"another block|two blocks"):
        run(mistake, numbers(300 * N), blocks=300, order=order)


def test_a_block_may_read_what_it_has_written_before_a_barrier() -> None:
    def twice(x: ndarray) -> None:
        i = int32(cuda.threadIdx.x)
        put(x, i, get(x, i) + float32(1))
        cuda.syncthreads()
        total = get(x, i) + get(x, (i + 1) % N)
        cuda.syncthreads()
        put(x, i, total)

    x = numbers()
    run(twice, x)
    np.testing.assert_array_equal(x, numbers() + 1 + np.roll(numbers() + 1, -1))


def test_local_memory_is_refused() -> None:
    def indexed(x: ndarray, n: int, out: ndarray) -> None:
        a = cuda.local.array(64, float32)
        for j in range(n):
            a[j] = x[j]
        out[0] = a[n // 2]

    with pytest.raises(Unsupported, match="local memory"):
        run(indexed, numbers(), 10, np.zeros(1, np.float32), threads=32)


# -- arithmetic and counts --------------------------------------------------------------------------------------------


def test_fma_is_rounded_once() -> None:
    a = np.float32(1 + 2**-12)
    assert arithmetic.fused(a, a, np.float32(-1), "rn") == np.float32(2**-11 + 2**-24)
    assert a * a - np.float32(1) != np.float32(2**-11 + 2**-24)
    third = [float(arithmetic.round_to_float32(np.float64(1) / 3, mode)) for mode in ("rm", "rn", "rp")]
    assert third[0] < 1 / 3 < third[2] == third[1]


@pytest.mark.parametrize("how", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_comparisons_with_nan(how: str) -> None:
    a, b = np.float32([1, 1, 2, np.nan, 1]), np.float32([1, 2, 1, 1, np.nan])
    plain = arithmetic.compare(how, a, b)
    np.testing.assert_array_equal(arithmetic.compare(how + "u", a, b), [*plain[:3], True, True])
    assert not plain[3:].any()


def test_integers() -> None:
    a, b = np.int32([-7, 7, -7, 7]), np.int32([2, -2, -2, 2])
    np.testing.assert_array_equal(arithmetic.divide(a, b), [-3, -3, 3, 3])
    np.testing.assert_array_equal(arithmetic.remainder(a, b), [-1, 1, -1, 1])
    np.testing.assert_array_equal(arithmetic.shift(True, np.uint32([1, 3]), np.uint32([40, 31])), [0, 2**31])
    np.testing.assert_array_equal(arithmetic.shift(False, np.int32([-8, -8]), np.uint32([40, 2])), [-1, -2])
    assert arithmetic.extract_bits(np.int32(0b11010), np.uint32(1), np.uint32(4)) == -3
    assert arithmetic.insert_bits(np.uint32(5), np.uint32(0xFF), np.uint32(4), np.uint32(4)) == 0x5F
    assert arithmetic.leading_zeros(np.uint32([1, 0, 2**31])).tolist() == [31, 32, 0]
    big = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 50)
    expected = [int(x) * int(y) >> 64 for x, y in zip(big, big[::-1])]
    np.testing.assert_array_equal(arithmetic.multiply_high(big, big[::-1].copy()), expected)
    convert = arithmetic.convert(np.float32([-1.5, 1e10, np.nan]), np.int32, ["rzi"])
    np.testing.assert_array_equal(convert, [-1, 2**31 - 1, 0])


@pytest.mark.parametrize(
    ("words", "width", "expected"),
    [
        (range(32), 1, 1),
        ([0] * 32, 1, 1),
        (range(0, 64, 2), 1, 2),
        (range(0, 1024, 32), 1, 32),
        (range(0, 64, 2), 2, 2),
        (range(0, 128, 4), 4, 4),
        ([0] * 32, 4, 2),  # two halves
        ([i // 8 * 4 for i in range(32)], 4, 2),
    ],
)
def test_wavefronts(words: Any, width: int, expected: int) -> None:
    assert wavefronts(np.array(list(words)), width) == expected


def test_sectors_are_counted() -> None:
    def strided(x: ndarray, out: ndarray, step: int) -> None:
        i = int32(cuda.threadIdx.x)
        put(out, i, get(x, i * step))

    for step, sectors in ((1, 8), (2, 16), (8, 64)):
        counts = run(strided, numbers(8 * N), numbers(), step, counting=True).counts
        assert isinstance(counts, Counts)
        assert counts.global_bytes() == 32 * (sectors + 8)


def test_an_unknown_instruction_is_named() -> None:
    with pytest.raises(Unsupported, match="PTX line 3: what is this"):
        ptx.parse(".visible .entry k()\n{\nwhat is this\n}")
    assert isinstance(kernel(32)(no_wait), Kernel)
