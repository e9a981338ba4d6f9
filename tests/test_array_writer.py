"""Files of arrays that are written array by array: their bytes, arrays that are left out, and reading them again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from minidl.run import checkpoint as files
from minidl.run.array_writer import ArrayWriter, layouts

ARRAYS = {
    "0/theta": np.arange(300_000, dtype=np.float32),
    "0/communication": np.arange(5.0),
    "1/theta": np.arange(300_000, dtype=np.float32) + 0.5,
    "1/communication": np.arange(5.0) + 1,
    "a scalar": np.array(3),
    "empty": np.zeros((0, 3), np.float32),
    "transposed": np.arange(6, dtype=np.uint8).reshape(2, 3).T,
    "yes": np.array([True, False]),
}


def write(path: Path, order: list[str], discarded: set[str] | None = None, spare: int = 0, **metadata: str) -> None:
    with ArrayWriter(path, layouts(ARRAYS), {}, spare) as file:
        for name in order:
            file.write(name, ARRAYS[name])
        for name in discarded or ():
            file.discard(name)
        file.finish(metadata)


@given(st.permutations(list(ARRAYS)), st.integers(0, len(ARRAYS)), st.integers(0, len(ARRAYS)))
def test_arrays_in_any_order_and_left_out(
    tmp_path_factory: pytest.TempPathFactory, order: list[str], unwritten: int, discarded: int
) -> None:
    path = tmp_path_factory.mktemp("arrays") / "a"
    kept = order[unwritten:]
    write(path, kept, set(kept[:discarded]), spare=100, text="x" * 60)
    kept = kept[discarded:]
    theirs, ours = load_file(path), files.header(path)
    assert set(theirs) == set(ours.arrays) == set(kept) and ours.metadata == {"text": "x" * 60}
    stored = files.StoredArrays.of(ours)
    assert stored.layouts() == {name: layouts(ARRAYS)[name] for name in stored}
    path.unlink()
    for name in kept:
        for found in (theirs[name], stored[name]):
            assert found.dtype == ARRAYS[name].dtype and found.shape == ARRAYS[name].shape
            assert np.array_equal(found, ARRAYS[name])


def test_metadata_that_have_grown_too_much_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="spare"):
        write(tmp_path / "a", list(ARRAYS), spare=20, text="x" * 60)


def test_a_stored_array_of_a_file_that_became_shorter(tmp_path: Path) -> None:
    write(tmp_path / "a", list(ARRAYS))
    stored = files.StoredArrays.of(files.header(tmp_path / "a"))
    with open(tmp_path / "a", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(files.CheckpointError, match="1/theta ends too early"):
        stored["1/theta"]
