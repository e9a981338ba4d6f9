"""Checkpoints: folders that are complete or absent, and contain everything needed to resume a run.

    checkpoints/step-00000480/
        model.safetensors   the weights under PyTorch's names, in PyTorch's layouts; metadata: model and data set
        state.safetensors   the optimizer's flat vectors; metadata: progress, random state, options and layout
        sha256sums.txt      checksums of both files: nothing else detects a flipped byte in a weight

A checkpoint is written to a temporary folder next to the final one, synced to disk and renamed. If the process is
killed or the power fails at any moment, the previous checkpoint still exists.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minidl import resources
from minidl.errors import CheckpointError
from minidl.reading import Stored, Unreadable, blaming, content, json_value, opened, safetensors_header
from minidl.run.array_writer import TYPES, ArrayWriter, Layout, layouts, write_arrays
from minidl.run.checkpoint_state import VALID
from minidl.run.progress import BEST
from minidl.schema import (
    Mismatch,
    named,
)

FORMAT = "minidl checkpoint 1"
MODEL, STATE, SUMS = "model.safetensors", "state.safetensors", "sha256sums.txt"
UNKNOWN_TO_NUMPY = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3", "F8_E5M2": "float8_e5m2"}


Arrays = dict[str, np.ndarray]


@dataclass
class Checkpoint:
    """The contents of a checkpoint.

    weights: the model's state_dict. vectors: the optimizer's flat vectors; those of a loaded checkpoint are read from
    the file when they are used (StoredArrays). state: JSON values. about: the metadata of model.safetensors, which says
    what the weights are for.
    """

    weights: Arrays
    vectors: Mapping[str, np.ndarray]
    state: dict[str, Any]
    about: dict[str, str] = field(default_factory=dict)


# A folder of checkpoints.


def folder_of(checkpoints: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return checkpoints / f"step-{step:08d}"


def steps(checkpoints: Path) -> list[int]:
    """Return the steps that have a checkpoint, in increasing order."""
    if not checkpoints.is_dir():
        return []
    names = (re.fullmatch("step-([0-9]{8}|[1-9][0-9]{8,15})", each.name) for each in checkpoints.iterdir()
             if each.is_dir())  # fmt: skip
    return sorted(int(name[1]) for name in names if name)


def last(checkpoints: Path) -> Path | None:
    """Return the folder of the newest checkpoint, or None if there is no checkpoint."""
    made = steps(checkpoints)
    return folder_of(checkpoints, made[-1]) if made else None


def save(checkpoints: Path, step: int, checkpoint: Checkpoint) -> None:
    """Write a checkpoint completely or not at all. Raises CheckpointError if writing fails."""
    with writing(checkpoints, step) as folder:
        write_weights(folder, checkpoint.weights, checkpoint.about)
        vectors, metadata = checkpoint.vectors, state_metadata(checkpoint.state)
        with ArrayWriter(folder / STATE, layouts_of(vectors), metadata) as file:
            for name in vectors:
                file.write(name, vectors[name])
            file.finish(metadata)


def write_weights(folder: Path, weights: Arrays, about: Mapping[str, str]) -> None:
    """Write model.safetensors into a checkpoint's folder."""
    write_arrays(folder / MODEL, weights, {"format": "pt", **about})  # other programs require this format


def state_metadata(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of state.safetensors."""
    return {"format": FORMAT, "state": json.dumps(state)}


@contextmanager
def writing(checkpoints: Path, step: int) -> Iterator[Path]:
    """Yield a temporary folder. At the end of the `with` block, it becomes the checkpoint of this step.

    The block writes MODEL and STATE into the folder. If it raises an exception, the earlier checkpoint remains. Raises
    CheckpointError for an OSError of the block.
    """
    final = folder_of(checkpoints, step)
    beside, replaced = final.with_name(f".new-{final.name}"), final.with_name(f".old-{final.name}")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        yield beside
        _write_sums(beside)
        if final.exists():
            final.rename(replaced)
        beside.rename(final)
        _sync(checkpoints)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        good = last(checkpoints)
        kept = f"the last good one is {good}" if good else "there is no earlier one"
        hint = "free disk space and use --resume" if error.errno == errno.ENOSPC else "fix this and use --resume"
        raise CheckpointError(f"cannot write checkpoint {final}: {error.strerror}; {kept}; {hint}") from None
    except Exception:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def prune(checkpoints: Path, keep: int, best: int) -> None:
    """Delete all checkpoints except the newest `keep` and the one of step `best` (-1: there is no best step)."""
    for step in steps(checkpoints)[:-keep]:
        if step != best:
            folder = folder_of(checkpoints, step)
            # Rename first: a partly deleted folder must not look like a checkpoint.
            hidden = folder.rename(folder.with_name(f".new-{folder.name}"))
            shutil.rmtree(hidden, ignore_errors=True)


def clean_up(checkpoints: Path) -> None:
    """Remove the temporary folders of a killed process. The caller must hold the run's lock."""
    for old in checkpoints.glob(".old-step-*"):
        final = old.with_name(old.name.removeprefix(".old-"))
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(final)  # killed between the two renames of `save`
    for new in checkpoints.glob(".new-step-*"):
        shutil.rmtree(new, ignore_errors=True)


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint. Raises CheckpointError if it is damaged, incomplete, not valid or in another format."""
    model, vectors = verify(folder)
    state = _state_of(folder, vectors)
    about = {name: text for name, text in model.metadata.items() if name != "format"}
    with _part_of(folder, STATE):
        return Checkpoint(model.values(), StoredArrays.of(vectors), state, about)


def load_step(checkpoints: Path, step: int) -> Checkpoint:
    """Read the checkpoint of a step, to continue from it.

    Raises CheckpointError as `load` does, and if the folder contains the state of another step than its name says.
    """
    folder = folder_of(checkpoints, step)
    found = load(folder)
    if (saved := found.state["progress"]["step"]) != step:
        raise CheckpointError(f"checkpoint {folder} is damaged: it contains the state of step {saved}")
    return found


def best(folder: Path) -> dict[str, Any]:
    """Return the best step that a checkpoint names (-1: none), and its scores: see `BEST`. Raises as `load`."""
    progress = _state_of(folder, verify(folder)[1])["progress"]
    return {name: progress[name] for name in BEST}


def verify(folder: Path) -> tuple[ArrayFile, ArrayFile]:
    """Compare the files of a checkpoint with their checksums; return model.safetensors and state.safetensors.

    The headers are read first. They state the sizes of the files, so a file of another size is refused before it is
    hashed.
    Raises CheckpointError if a file is missing or damaged.
    """
    with _part_of(folder, SUMS):
        sums = content(folder / SUMS, limit=1000)
    files = []
    for name in (MODEL, STATE):
        with _part_of(folder, name):
            files.append(_header(folder / name, most=_capacity(folder) if name == STATE else None))
    found = ""
    for name in (MODEL, STATE):
        with _part_of(folder, name):
            found += f"{_sha256(folder / name)}  {name}\n"
    if sums != found.encode():
        raise CheckpointError(f"checkpoint {folder} is damaged: {SUMS} does not match its files")
    return files[0], files[1]


@contextmanager
def _part_of(folder: Path, name: str) -> Iterator[None]:
    """Convert errors in reading a file of a checkpoint into CheckpointError."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {folder} is incomplete: {name} does not exist") from None
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {name}: {error.strerror}") from None
    except (Unreadable, Mismatch) as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {name}: {error}") from None


def _state_of(folder: Path, file: ArrayFile) -> dict[str, Any]:
    """Return the state in the metadata of a checkpoint's state.safetensors. Raises CheckpointError if it is invalid."""
    if file.metadata.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: expected a {FORMAT!r}, found {file.metadata.get('format', '')[:40]!r}")
    with blaming(f"{folder} has a state that is damaged, or from another version of minidl", CheckpointError):
        state = json_value(file.metadata.get("state", ""))
        VALID(state)
    return dict(state)


# Files.


class ArrayFile(NamedTuple):
    """A safetensors file of which only the header has been read: its arrays by name, and its metadata."""

    path: Path
    arrays: dict[str, Stored]
    metadata: dict[str, str]

    def values(self) -> Arrays:
        """Read the arrays. Raises CheckpointError if the file has become shorter, or is missing now."""
        with blaming(str(self.path), CheckpointError), opened(self.path) as file:
            return {name: _array(file, name, stored) for name, stored in self.arrays.items()}


class StoredArrays(Mapping[str, np.ndarray]):
    """Arrays in open files. Each use of an array reads it from its file. The files may be deleted meanwhile."""

    def __init__(self, places: Mapping[str, tuple[_OpenFile, Stored]]) -> None:
        self._places = dict(places)

    @classmethod
    def of(cls, file: ArrayFile) -> StoredArrays:
        """Open a file whose header has been read."""
        handle = _OpenFile(file.path)
        return cls({name: (handle, stored) for name, stored in file.arrays.items()})

    def __getitem__(self, name: str) -> np.ndarray:
        """Read an array. Raises CheckpointError if the file has become shorter, or if memory is short."""
        handle, stored = self._places[name]
        with blaming(str(handle.path), CheckpointError):
            _require_memory(stored.stop - stored.start)
            return _array(handle.file, name, stored)

    def __contains__(self, name: object) -> bool:  # the inherited function would read the array
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __or__(self, others: StoredArrays) -> StoredArrays:
        """Return the arrays of both; those of `others` replace arrays of the same name."""
        return StoredArrays(self._places | others._places)

    def layouts(self) -> dict[str, Layout]:
        return {name: Layout(np.dtype(TYPES[stored.kind]), stored.shape) for name, (_, stored) in self._places.items()}


class _OpenFile:
    """A file that is closed when nothing refers to it any more."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, opened(path)
        weakref.finalize(self, self.file.close)


def layouts_of(arrays: Mapping[str, np.ndarray]) -> dict[str, Layout]:
    """Return the layouts of arrays, without reading those that are stored in a file."""
    return arrays.layouts() if isinstance(arrays, StoredArrays) else layouts(arrays)


def header(path: Path) -> ArrayFile:
    """Read the header of a safetensors file.

    Its offsets are compared with the file's size. Raises CheckpointError if the file is missing, unreadable, damaged,
    larger than the free memory or contains a data type that NumPy does not support.
    """
    with blaming(str(path), CheckpointError):
        return _header(path)


def _header(path: Path, most: int | None = None) -> ArrayFile:
    """most: the largest total size of the arrays in bytes; by default, the free memory."""
    with opened(path) as file:
        try:
            arrays, metadata = safetensors_header(file)
        except (Unreadable, Mismatch) as error:
            raise Unreadable(f"it is damaged, or not a safetensors file: {error}") from None
    needed = sum(stored.stop - stored.start for stored in arrays.values())
    if most is None:
        _require_memory(needed)
    elif needed > most:
        raise Unreadable(f"it holds {resources.size(needed)}, and its disk {resources.size(most)}")
    for name, stored in arrays.items():
        if stored.kind in UNKNOWN_TO_NUMPY:
            raise Unreadable(f"{named(name)} holds {UNKNOWN_TO_NUMPY[stored.kind]}; expected float32: "
                             "convert the file in the program that made it")  # fmt: skip
    return ArrayFile(path, arrays, metadata)


def _require_memory(needed: int) -> None:
    free = resources.available()
    if needed > free:  # a sparse file may be larger than the disk
        raise Unreadable(f"it holds {resources.size(needed)}, and {resources.size(free)} of memory are free")


def _capacity(folder: Path) -> int:
    """Return the size of the disk on which a folder is, in bytes. A sparse file may claim more."""
    disk = os.statvfs(folder)
    return disk.f_blocks * disk.f_frsize


def require_finite(arrays: Mapping[str, np.ndarray]) -> None:
    """Raise CheckpointError if a value is NaN, or is infinite as float32."""
    for name, values in arrays.items():
        with np.errstate(over="ignore"):
            if values.dtype.kind == "f" and not np.isfinite(values.astype(np.float32, copy=False)).all():
                raise CheckpointError(f"{named(name)} holds values that are not finite")


def _array(file: BufferedReader, name: str, stored: Stored) -> np.ndarray:
    """Read an array from an open safetensors file."""
    array = np.empty(stored.shape, TYPES[stored.kind])
    file.seek(stored.start)
    if file.readinto(array.reshape(-1).view(np.uint8).data) != stored.stop - stored.start:
        raise Unreadable(f"{named(name)} ends too early")  # the file has become shorter
    return array


def _write_sums(folder: Path) -> None:
    """Write the checksums of MODEL and STATE, and sync the folder to disk."""
    with open(folder / SUMS, "w") as file:
        file.writelines(f"{_sha256(folder / name)}  {name}\n" for name in (MODEL, STATE))
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)


def _sha256(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    """Sync a folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
