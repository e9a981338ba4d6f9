"""Find data files, and read them safely even if they are damaged."""

from __future__ import annotations

import gzip
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from minidl.errors import DataError, MinidlError

SUFFIXES = ("", ".gz", ".xz")
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
BLOCK = 1 << 20
SUBFOLDERS = {"mnist": ["mnist"], "fashion-mnist": ["fashion-mnist"], "cifar10": ["cifar10", "cifar-10-batches-bin"]}


def cache_folder() -> Path:
    """Return the folder for downloads: $XDG_CACHE_HOME/minidl/data or ~/.cache/minidl/data."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minidl" / "data"


def search(name: str, groups: Sequence[Sequence[str]], data_dir: str | Path | None) -> dict[str, Path] | None:
    """Return the files of a named set from the first folder that contains it, or None if no folder does.

    groups: file names without .gz or .xz. A folder contains the set if it has at least one file of every group.
    Searches `data_dir`, $MINIDL_DATA and the cache; in each, first a subfolder with the set's name, then the folder.
    Raises DataError if `data_dir` does not exist, or if a folder given by the user contains only a part of the set: a
    download would hide that mistake.
    """
    if data_dir and not Path(data_dir).is_dir():
        raise DataError(f"data folder {data_dir} does not exist: give an existing folder")
    others = {folder for other, folders in SUBFOLDERS.items() if other != name for folder in folders}
    roots = [Path(root) for root in (data_dir, os.environ.get("MINIDL_DATA"), cache_folder()) if root]
    for root in roots:
        for folder in [*(root / subfolder for subfolder in SUBFOLDERS[name]), root]:
            if folder.resolve().name in others:
                continue  # mnist and fashion-mnist have the same file names
            found = {stem: path for group in groups for stem in group if (path := _find(folder, stem))}
            missing = [group[0] for group in groups if not any(stem in found for stem in group)]
            if not missing:
                return found
            if found and root != cache_folder():
                raise DataError(
                    f"{folder} contains {next(iter(found.values())).name} but not {', '.join(missing)} "
                    f"(raw, .gz or .xz): add the missing part of {name}"
                )
    return None


def _find(folder: Path, stem: str) -> Path | None:
    candidates = (folder / (stem + suffix) for suffix in SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Convert the standard library's errors about a damaged file into a DataError that names the file."""
    try:
        yield
    except MinidlError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist") from error
    except (EOFError, ValueError, RuntimeError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError) as e:
        raise DataError(f"{path} is damaged or cut short ({' '.join(str(e).split())}): get the file again") from e
    except OSError as error:
        hint = ": get the file again" if isinstance(error, gzip.BadGzipFile) else ""
        raise DataError(f"cannot read {path}: {error.strerror or error}{hint}") from error


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a raw, .gz or .xz file as a stream of its contents. Raises DataError if the file is damaged."""
    with reading(path), OPENERS.get(path.suffix, open)(path, "rb") as stream:
        yield stream


def read_at_most(stream: IO[bytes], limit: int) -> bytearray:
    """Read up to `limit` bytes. Allocates as data arrives, so a header that claims terabytes allocates nothing."""
    data = bytearray()
    while len(data) < limit and (block := stream.read(min(BLOCK, limit - len(data)))):
        data += block
    return data
