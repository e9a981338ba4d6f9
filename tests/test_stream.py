"""`chunked` and `streamed`: each element is computed once, for sizes around the boundaries of chunks and strips."""

from __future__ import annotations

import numpy as np
import pytest

import minidl.engine.jit  # noqa: F401  (configures Numba before the kernels are compiled)
from minidl.engine.device import aligned
from minidl.kernels.activation import cpu as activation
from minidl.kernels.dropout import cpu as dropout
from minidl.kernels.elementwise import cpu as elementwise
from minidl.kernels.elementwise.ladder import past_the_caches
from minidl.kernels.elementwise.stream import CACHE, CHUNK, IN_CACHE, SERIAL, STRIP
from minidl.kernels.mix import cpu as mix
from minidl.kernels.optim import cpu as optim

LONG = IN_CACHE * CHUNK  # up to this number of elements, there is no prefetch
SIZES = [1, STRIP - 1, SERIAL, SERIAL + 1, LONG, LONG + 1, LONG + STRIP, LONG + 5 * STRIP + 3, 2 * LONG - 1]
BEYOND = 64  # elements after the output, which must stay as they are


def vectors(size: int, dtype: type, shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return an input, and memory for the output and BEYOND more elements, `shift` elements after a cache line."""
    x = np.random.default_rng(size).standard_normal(size).astype(dtype)
    memory = aligned(size + BEYOND + shift, dtype)[shift:]
    memory[:] = 7
    return x, memory


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", SIZES)
def test_every_element_is_computed_once(size: int, dtype: type) -> None:
    x, memory = vectors(size, dtype)
    out = memory[:size]
    elementwise.add(x, x, out)
    np.testing.assert_array_equal(out, x + x)
    mix.axpy(2.0, x, out)  # reads its output
    np.testing.assert_array_equal(out, x + x + 2 * x)
    elementwise.accumulate(x, out)
    np.testing.assert_array_equal(out, x + x + 2 * x + x)
    assert (memory[size:] == 7).all()


@pytest.mark.parametrize("kernel", [elementwise.affine, past_the_caches])
@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("size", [CACHE // 4 - 1, CACHE // 4, CACHE // 4 + 3 * STRIP + 5])
def test_outputs_that_bypass_the_caches(size: int, shift: int, kernel: object) -> None:
    x, memory = vectors(size, np.float32, shift)
    kernel(x, 0.5, 0.0, memory[:size])  # type: ignore[operator]
    np.testing.assert_array_equal(memory[:size], x / 2)
    assert (memory[size:] == 7).all()


@pytest.mark.parametrize("name", ["relu", "gelu", "silu", "tanh", "sigmoid"])
def test_bits_do_not_depend_on_the_length(name: str) -> None:
    x, memory = vectors(LONG + STRIP + 1, np.float32)
    kernel = getattr(activation, name)
    kernel(x, memory[: x.size])
    short = np.empty_like(x)
    for begin in range(0, x.size, SERIAL):
        kernel(x[begin : begin + SERIAL], short[begin : begin + SERIAL])
    np.testing.assert_array_equal(memory[: x.size], short)
    in_place = x.copy()
    kernel(in_place, in_place)
    np.testing.assert_array_equal(in_place, short)


def test_dropout_draws_the_same_numbers_in_all_chunks() -> None:
    x, memory = vectors(LONG + STRIP + 1, np.float32)
    dropout.dropout(x, 0.3, 5, 7, memory[: x.size])
    tail = np.empty(x.size - LONG + 9, np.float32)
    dropout.dropout(x[LONG - 9 :], 0.3, 5, 7 + LONG - 9, tail)
    np.testing.assert_array_equal(memory[LONG - 9 : x.size], tail)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 63, 64, 65])
def test_an_update_has_each_chunk_once(chunks: int) -> None:
    """The first half of the parts are the even chunks of a vector that may stay in the caches."""
    found = [optim._number(k, chunks) for k in range(chunks)]
    assert sorted(found) == list(range(chunks))
    assert chunks > IN_CACHE or all(number % 2 == 0 for number in found[: (chunks + 1) // 2])
