"""The norms of a vector's movement: accurate for any size, and without memory as long as the vector."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minidl.engine.jit  # noqa: F401  (configures Numba before the kernels are compiled)
from minidl.comm.fabric.base import Fabric
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.comm.vectors import VectorArithmetic
from minidl.errors import MinidlError
from minidl.kernels.drift import cpu

BOUND = 17 * 2.0**-24  # kernels/drift/README.md: half the relative error of a sum of squares
ARITHMETIC = VectorArithmetic()
ARITHMETIC.fabric = Fabric(LoopbackTransport())


def norms(x: np.ndarray, before: np.ndarray, blocks: list[tuple[int, int]]) -> np.ndarray:
    """Return what the kernel computes, in float64 with NumPy: (B, 3)."""
    a, b = x.astype(np.float64), before.astype(np.float64)
    parts = [slice(*block) for block in blocks]
    return np.array([[np.linalg.norm(v[part]) for v in (a - b, b, a)] for part in parts]).reshape(-1, 3)


def vectors(size: int, moved: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    before, step = np.random.default_rng(seed).standard_normal((2, size), np.float32)
    return before + np.float32(moved) * step, before


@pytest.mark.parametrize("moved", [1e-6, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize("size", [0, 1, 15, 511, 512, 513, 4_099, 32_768, 33_333, 100_003])
def test_each_norm_is_accurate(size: int, moved: float) -> None:
    """Also the norm of a small movement, relative to itself."""
    x, before = vectors(size, moved)
    found = ARITHMETIC.norms_of_change(x, before, [(0, size)])
    np.testing.assert_allclose(found, norms(x, before, [(0, size)]), rtol=BOUND)


def test_the_error_of_equal_numbers_is_bounded() -> None:
    """Here all roundings of a column have the same direction, more often than those of random numbers."""
    for number in np.random.default_rng(1).random(20):
        x, before = np.full(40_000, number, np.float32), np.full(40_000, -number / 3, np.float32)
        found = ARITHMETIC.norms_of_change(x, before, [(0, x.size)])
        np.testing.assert_allclose(found, norms(x, before, [(0, x.size)]), rtol=BOUND)


@given(st.integers(0, 3_000), st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 3_000)), max_size=4))
def test_any_blocks(size: int, cuts: list[tuple[int, int]]) -> None:
    """Blocks may overlap, and may be empty."""
    blocks = [(min(*cut, size), min(max(cut), size)) for cut in cuts]
    x, before = vectors(size, 0.1)
    np.testing.assert_allclose(
        ARITHMETIC.norms_of_change(x, before, blocks), norms(x, before, blocks), rtol=BOUND, atol=1e-30
    )


def test_a_block_has_the_same_bits_whatever_the_others_are() -> None:
    x, before = vectors(50_000, 0.1)
    alone = ARITHMETIC.norms_of_change(x, before, [(100, 40_000)])
    among = ARITHMETIC.norms_of_change(x, before, [(0, 100), (100, 40_000), (40_000, 50_000)])
    assert alone[0].tobytes() == among[1].tobytes()


def test_no_temporary_as_long_as_the_vectors() -> None:
    x, before = vectors(500_000, 0.1)
    ARITHMETIC.drift(x, before)
    tracemalloc.start()
    ARITHMETIC.drift(x, before)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < x.nbytes / 10
    assert 8 * cpu.drift_partial(1) < x.nbytes / 10


def test_numbers_that_are_not_finite_are_seen() -> None:
    x, before = vectors(1_000, 0.1)
    x[777] = np.nan
    assert np.isnan(ARITHMETIC.drift(x, before))
    x[777] = np.inf
    assert ARITHMETIC.drift(x, before) == np.inf


def test_vectors_of_different_lengths_are_refused() -> None:
    with pytest.raises(MinidlError, match="vectors of 3 and 4 elements"):
        ARITHMETIC.drift(np.ones(3, np.float32), np.ones(4, np.float32))
