"""Dropout: how many elements are kept. The seed and the offset determine which elements these are."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl import ops
from minidl.engine.tensor import Tensor
from minidl.errors import ConfigError
from minidl.kernels.dropout.reference import mix32

N = 100_003


def kept(n: int, p: float, seed: int = 0, offset: int = 0, device: str = "cpu") -> np.ndarray:
    return ops.dropout(Tensor(np.ones(n), device=device), p, seed, offset).numpy() != 0


def within_chance(count: int, n: int, probability: float) -> bool:
    """Return whether count is within 5 standard deviations of its mean: false for 1 of 1.7 million random counts."""
    return abs(count - n * probability) < 5 * math.sqrt(n * probability * (1 - probability))


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, -3, 2**62])
def test_how_many_are_kept(p: float, seed: int) -> None:
    assert within_chance(kept(N, p, seed).sum(), N, 1 - p)


def test_neighbours_and_seeds_are_independent() -> None:
    first, second = kept(N, 0.3, seed=0), kept(N, 0.3, seed=1)
    for step in (1, 2, 64):
        assert within_chance((first[step:] & first[:-step]).sum(), N - step, 0.49)
    assert within_chance((first & second).sum(), N, 0.49)


def test_kept_elements_are_scaled() -> None:
    x = np.random.default_rng(0).standard_normal((33, 7))
    y = ops.dropout(Tensor(x), 0.2, 3, 5).numpy()
    np.testing.assert_allclose(y, np.where(y != 0, x / 0.8, 0), rtol=1e-15)
    assert 0 < np.count_nonzero(y) < y.size


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_backward_drops_the_same_elements(dtype: str) -> None:
    x = Tensor(np.ones((65, 33), dtype), requires_grad=True)
    y = ops.dropout(x, 0.4, 11, 7)
    y.backward(np.full(y.shape, 3, dtype))
    np.testing.assert_array_equal(x.grad, 3 * y.numpy())


def test_p_0_is_the_identity_and_1_is_refused() -> None:
    x = Tensor(np.ones(5))
    assert ops.dropout(x, 0.0, 0, 0) is x
    for p in (1.0, -0.1, 2, float("nan")):
        with pytest.raises(ConfigError, match="expected 0 <= p < 1"):
            ops.dropout(x, p, 0, 0)


def test_seed_and_offset_decide_which_elements_are_kept() -> None:
    np.testing.assert_array_equal(kept(N, 0.5, 3, 4), kept(N, 0.5, 3, 4))
    for other in (kept(N, 0.5, 3, 5), kept(N, 0.5, 4, 4)):
        assert within_chance((kept(N, 0.5, 3, 4) == other).sum(), N, 0.5)


@given(st.integers(0, 2**62), st.integers(0, 40_000), st.integers(-(2**63), 2**63 - 1))
def test_an_offset_shifts_the_sequence(offset: int, shift: int, seed: int) -> None:
    np.testing.assert_array_equal(
        kept(40_000, 0.3, seed, offset)[shift:], kept(40_000 - shift, 0.3, seed, offset + shift)
    )


@given(st.integers(0, 2**62), st.integers(-(2**63), 2**63 - 1), st.floats(0.001, 0.999))
def test_the_plain_loops_keep_the_same_elements(offset: int, seed: int, p: float) -> None:
    np.testing.assert_array_equal(kept(33, p, seed, offset), kept(33, p, seed, offset, "reference"))


@pytest.mark.parametrize("key", [0, 1, 0x9E3779B9])
@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_every_byte_of_the_random_words_is_uniform(shift: int, key: int) -> None:
    """For consecutive counters, chi-square (255 degrees of freedom) is within 5 standard deviations of its mean."""
    n = 1 << 18
    words = mix32(np.arange(n, dtype=np.uint64), key)  # type: ignore[arg-type]
    counts = np.bincount((words >> np.uint64(shift)) & np.uint64(255), minlength=256)
    chi_square = ((counts - n / 256) ** 2).sum() / (n / 256)
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)
