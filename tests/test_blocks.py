"""Block sizes follow from the size of the second-level cache, and the bits of the results do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl import resources
from minidl.engine import environment
from minidl.engine.jit import L2
from minidl.errors import ConfigError
from minidl.kernels.matmul.blocks import KC, PRODUCT_MR, block_strips, most_strips

DIGESTS = """
import hashlib
import numpy as np
from minidl import ops
from minidl.engine.jit import L2
from minidl.engine.tensor import Tensor

def show(*arrays):
    print(*(hashlib.sha256(array.tobytes()).hexdigest() for array in arrays))

rng = np.random.default_rng(0)
normal = lambda *shape: rng.standard_normal(shape, np.float32)
print(L2)
for forward, x, weight in ((ops.linear, normal(700, 900), normal(900, 600)),
                           (lambda x, w: ops.conv2d(x, w, padding=1), normal(3, 23, 23, 96), normal(3, 3, 96, 64))):
    x, weight = Tensor(x, requires_grad=True), Tensor(weight, requires_grad=True)
    y = forward(x, weight)
    ops.sum(y * y).backward()
    show(y.data, x.grad, weight.grad)
"""


def digests(folder: Path, kibibytes: int) -> list[str]:
    """Return the size of the cache in bytes, and digests of y, dx and dweight of a linear layer and a convolution."""
    variables = {**os.environ, "MINIDL_L2": str(kibibytes), "XDG_CACHE_HOME": str(folder), "MINIDL_THREADS": "2"}
    found = subprocess.run([sys.executable, "-c", DIGESTS], env=variables, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


@pytest.mark.slow  # compiles the kernels for each size
def test_the_bits_do_not_depend_on_the_cache(tmp_path: Path) -> None:
    small, large = digests(tmp_path, 256), digests(tmp_path, 2048)
    assert (small[0], large[0]) == (str(256 << 10), str(2048 << 10))
    assert small[1:] == large[1:]
    assert len(set(" ".join(small[1:]).split())) == 6  # each is another array


@pytest.mark.parametrize(
    ("variable", "reported", "expected"),
    [("", {1: 32 << 10, 2: 1 << 20}, 1 << 20), ("", {}, 1 << 20), ("512", {2: 1 << 20}, 1 << 19),
     ("", {2: 16 << 20}, 1 << 21), ("1", {}, 1 << 18)],
)  # fmt: skip
def test_the_size_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, variable: str, reported: dict[int, int], expected: int
) -> None:
    monkeypatch.setenv("MINIDL_L2", variable)
    monkeypatch.setattr(environment, "caches", lambda: reported)
    assert environment.second_level_cache() == expected


def test_a_bad_size_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIDL_L2", "1M")
    with pytest.raises(ConfigError, match="MINIDL_L2 is '1M': expected a whole number of 1 or more"):
        environment.second_level_cache()


def test_sizes_are_those_that_linux_reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number, (level, kind, size) in enumerate([(1, "Data", "48K"), (1, "Instruction", "32K"), (2, "Unified", "2M")]):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{value}\n")
    monkeypatch.setattr(resources, "CACHES", tmp_path)
    assert resources.caches() == {1: 48 << 10, 2: 2 << 20}


@pytest.mark.parametrize("kc", [1, 256, 1024])
def test_a_block_of_a_fills_five_eighths_of_the_cache(kc: int) -> None:
    assert most_strips(kc) * PRODUCT_MR * kc <= L2 * 5 // 8 // 4 < (most_strips(kc) + 1) * PRODUCT_MR * kc


@given(strips=st.integers(1, 10_000), kc=st.integers(1, KC))
def test_blocks_are_equally_high(strips: int, kc: int) -> None:
    block = block_strips(strips, kc)
    blocks = (strips + block - 1) // block
    assert block <= most_strips(kc) and blocks == (strips + most_strips(kc) - 1) // most_strips(kc)
    assert strips > block * (blocks - 1) and blocks * block - strips < blocks
