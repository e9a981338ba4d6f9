"""Checkpoints are complete or absent, even if the process dies or the disk is full. Damage is detected."""

from __future__ import annotations

import errno
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl.errors import CheckpointError
from minidl.run import checkpoint as files
from minidl.run.checkpoint import Checkpoint
from minidl.run.config import Config
from minidl.run.folder import RunFolder
from minidl.run.progress import Progress
from minidl.training.output import reopen


def example(step: int = 3) -> Checkpoint:
    weights = {"conv.weight": np.arange(24.0, dtype=np.float32).reshape(2, 3, 2, 2), "count": np.array(step)}
    weights["fc.weight"] = np.arange(6.0, dtype=np.float32).reshape(3, 2).T  # not in C order
    state = {"progress": asdict(Progress(step=step)), "optimizer": {"steps": step}, "random": {"seed": 1, "offset": 2},
             "layout": "a hash", "batches": 7, "config": "lr = 0.1"}  # fmt: skip
    return Checkpoint(weights, {"velocity": np.full(40, 0.1, np.float32)}, state)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_load_returns_what_was_saved(tmp_path: Path) -> None:
    files.save(tmp_path, 3, example())
    read = files.load(tmp_path / "step-00000003")
    for name, values in example().weights.items():
        assert np.array_equal(read.weights[name], values) and read.weights[name].shape == values.shape
    assert np.array_equal(read.vectors["velocity"], example().vectors["velocity"])
    assert read.state == example().state
    assert names(tmp_path) == ["step-00000003"]


def test_metadata_of_the_weights_and_reproducible_bytes(tmp_path: Path) -> None:
    about = {"model": "lenet", "mean": "[0.1307]", "std": "[0.3081]", "classes": "10", "data": "mnist"}
    for step in (3, 4, 5, 6):
        files.save(tmp_path, step, replace(example(), about=dict(about)))
    assert files.load(tmp_path / "step-00000003").about == about
    assert files.header(tmp_path / "step-00000003" / files.MODEL).metadata == {"format": "pt", **about}
    assert len({(tmp_path / f"step-0000000{step}" / files.MODEL).read_bytes() for step in (3, 4, 5, 6)}) == 1


def test_a_type_that_numpy_lacks_is_refused(tmp_path: Path) -> None:
    header = b'{"fc.weight":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'
    header += b" " * (-len(header) % 8)
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match=r"x\.safetensors: fc\.weight holds bfloat16; expected float32"):
        files.header(tmp_path / "x.safetensors")


def test_checksums_have_the_format_of_sha256sum(tmp_path: Path) -> None:
    import hashlib

    files.save(tmp_path, 3, example())
    folder = files.folder_of(tmp_path, 3)
    for line in (folder / files.SUMS).read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


@given(st.data())
def test_any_flipped_bit_is_detected(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("flip")
    files.save(folder, 3, example())
    file = folder / "step-00000003" / data.draw(st.sampled_from([files.MODEL, files.STATE, files.SUMS]))
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        files.load(folder / "step-00000003")


@given(st.data())
def test_any_truncation_is_detected(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("cut")
    files.save(folder, 3, example())
    file = folder / "step-00000003" / files.MODEL
    content = file.read_bytes()
    file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(CheckpointError, match="damaged"):
        files.load(folder / "step-00000003")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        files.header(file)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_read_or_raise_one_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.mktemp("bytes") / "x.safetensors"
    file.write_bytes(content)
    try:
        arrays = files.header(file).values()
    except CheckpointError as error:
        assert "\n" not in str(error)
    else:
        assert arrays == {}, "up to 200 random bytes contain no array"


def test_header_that_claims_more_than_the_file_holds(tmp_path: Path) -> None:
    import json

    claims = {"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    header = json.dumps(claims).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        files.header(file)


@pytest.mark.parametrize("missing", [files.MODEL, files.STATE, files.SUMS])
def test_missing_file(tmp_path: Path, missing: str) -> None:
    files.save(tmp_path, 3, example())
    (tmp_path / "step-00000003" / missing).unlink()
    with pytest.raises(CheckpointError, match=f"incomplete.*{missing}"):
        files.load(tmp_path / "step-00000003")


def test_prune_keeps_the_last_checkpoints_and_the_best(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        files.save(tmp_path, step, example(step))
        files.prune(tmp_path, keep=2, best=20)
    assert files.steps(tmp_path) == [20, 40, 50]
    files.prune(tmp_path, keep=1, best=-1)
    assert names(tmp_path) == ["step-00000050"]
    assert files.last(tmp_path) == tmp_path / "step-00000050"


def test_no_checkpoints(tmp_path: Path) -> None:
    assert files.steps(tmp_path / "none") == [] and files.last(tmp_path / "none") is None


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    files.save(tmp_path, 3, example(3))
    again = example(3)
    again.state["batches"] = 1
    files.save(tmp_path, 3, again)
    assert files.load(tmp_path / "step-00000003").state["batches"] == 1
    assert names(tmp_path) == ["step-00000003"]


def full_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Simulate a disk that becomes full. after: the number of calls of fsync that succeed; all later calls fail."""
    calls = iter(range(10**6))
    real = os.fsync

    def fsync(handle: int) -> None:
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_full_disk_keeps_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    files.save(tmp_path, 3, example(3))
    with monkeypatch.context() as patch:
        full_disk(patch, after)
        with pytest.raises(CheckpointError, match=r"No space left on device; the last good one is .*step-00000003"):
            files.save(tmp_path, 6, example(6))
    assert names(tmp_path) == ["step-00000003"]
    assert files.load(tmp_path / "step-00000003").state["progress"]["step"] == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_full_disk_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.open

    def opened(path: Any, *arguments: Any, **named: Any) -> Any:
        return real("/dev/full" if str(path).endswith(files.STATE) else path, *arguments, **named)

    monkeypatch.setattr(builtins, "open", opened)
    with pytest.raises(CheckpointError, match="No space left on device; there is no earlier one"):
        files.save(tmp_path, 6, example(6))


CALLS = 13  # calls in one save at which the process may die


@pytest.mark.parametrize("killed_at", range(1, CALLS + 2))
def test_killed_at_any_moment_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int) -> None:
    """If the process dies at one of these calls, `clean_up` leaves one checkpoint of the step: the old or the new."""

    class Killed(BaseException):
        pass

    calls = iter(range(1, 10**6))

    def dying(real: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if next(calls) == killed_at:
                raise Killed
            return real(*arguments, **named)

        return call

    old, new = example(3), example(3)
    old.state["batches"], new.state["batches"] = 2, 1
    files.save(tmp_path, 3, old)
    with monkeypatch.context() as patch:
        for owner, name in [(os, "fsync"), (os, "close"), (Path, "rename"), (Path, "mkdir"), (files.shutil, "rmtree")]:
            patch.setattr(owner, name, dying(getattr(owner, name)))
        try:
            files.save(tmp_path, 3, new)
            survived = True
        except Killed:
            survived = False
    assert survived == (killed_at > CALLS)
    files.clean_up(tmp_path)
    assert names(tmp_path) == ["step-00000003"]
    assert files.load(tmp_path / "step-00000003").state["batches"] in ([1] if survived else [2, 1])


def test_what_killed_processes_left_is_removed_when_a_run_is_resumed(tmp_path: Path) -> None:
    with RunFolder.create(Config(out=str(tmp_path / "run"))) as run:
        part = run.checkpoints / "parts" / "2"
        left = [run.checkpoints / ".new-step-00000003", part / ".new-step-00000002", part / ".old-step-00000001"]
        for folder in (*left, part / "step-00000001"):
            folder.mkdir(parents=True)
        (run.folder / ".summary.json.new").touch()
    with reopen(tmp_path / "run"):
        assert not any(folder.exists() for folder in left) and (part / "step-00000001").exists()
        assert sorted(path.name for path in run.folder.iterdir()) == ["checkpoints", "config.toml"]
