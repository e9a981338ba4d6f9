"""Find data files, and read them safely even if they are damaged."""

from __future__ import annotations

import errno
import lzma
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from minidl.errors import DataError, MinidlError
from minidl.reading import Unreadable, blaming
from minidl.reading import opened as open_regular

SUFFIXES = ("", ".gz", ".xz")
BLOCK = 1 << 20  # bytes read at a time
PACKED_BLOCK = 1 << 16  # compressed bytes read at a time
SMALL = 8 << 20  # bytes: any compressed file may unpack to this size
RATIO = 50  # a larger compressed file may unpack to this many times its size
XZ_MEMORY = 96 << 20  # bytes; the strongest preset of xz needs 65 MiB
DAMAGE = (EOFError, ValueError, RuntimeError, OverflowError, struct.error, zlib.error, lzma.LZMAError,
          zipfile.BadZipFile, tarfile.TarError)  # what the standard library raises for a damaged file  # fmt: skip
SUBFOLDERS = {"mnist": ["mnist"], "fashion-mnist": ["fashion-mnist"], "cifar10": ["cifar10", "cifar-10-batches-bin"]}


class Stream(Protocol):
    """A source of bytes."""

    def read(self, size: int, /) -> bytes: ...


def cache_folder() -> Path:
    """Return the folder for downloads: $XDG_CACHE_HOME/minidl/data or ~/.cache/minidl/data."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minidl" / "data"


def search(name: str, groups: Sequence[Sequence[str]], data_dir: str | Path | None) -> dict[str, Path] | None:
    """Return the files of a named set from the first folder that contains it, or None if no folder does.

    groups: file names without .gz or .xz. A folder contains the set if it has at least one file of every group.
    Searches `data_dir`, $MINIDL_DATA and the cache; in each, first subfolders with the set's name, then the folder
    itself. Raises DataError if `data_dir` does not exist, or if a folder given by the user contains only a part of the
    set: a download would hide that mistake.
    """
    if data_dir and not Path(data_dir).is_dir():
        raise DataError(f"data folder {data_dir} does not exist: give an existing folder")
    others = {folder for other, folders in SUBFOLDERS.items() if other != name for folder in folders}
    roots = [Path(root) for root in (data_dir, os.environ.get("MINIDL_DATA"), cache_folder()) if root]
    for root in roots:
        for folder in [*(root / subfolder for subfolder in SUBFOLDERS[name]), root]:
            if folder.resolve().name in others:
                continue  # the folder of another set: mnist and fashion-mnist have the same file names
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
    with blaming(str(path), DataError):
        try:
            yield
        except (MinidlError, Unreadable):
            raise
        except MemoryError as error:
            raise DataError(f"{path} needs more memory than there is") from error
        except DAMAGE as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{path} is damaged or cut short ({reason}): get the file again") from error
        except OSError as error:
            if error.errno == errno.EINVAL:  # an offset in the file is negative
                raise DataError(f"{path} is damaged: get the file again") from error
            raise


@contextmanager
def opened(path: Path) -> Iterator[Stream]:
    """Open a raw, .gz or .xz file as a stream of its contents. Raises DataError if the file is damaged."""
    with reading(path), open_regular(path) as file:
        if path.suffix == ".gz":
            yield Unpacked(path, file, zlib.decompressobj(31))
        elif path.suffix == ".xz":
            yield Unpacked(path, file, lzma.LZMADecompressor(memlimit=XZ_MEMORY))
        else:
            yield file


def unpacked_limit(file: BinaryIO) -> int:
    """Return the number of bytes that a compressed file may unpack to.

    Compression shrinks data sets by a factor of 2 to 30. A file made to fill the memory, such as one of zeros, shrinks
    by a factor of 1,000 to 7,000.
    """
    return max(SMALL, RATIO * os.fstat(file.fileno()).st_size)


def bomb(path: Path) -> DataError:
    """Return the error for a file that unpacks to more than `unpacked_limit`."""
    return DataError(f"{path} unpacks to more than {SMALL / 1e6:.0f} MB and {RATIO} times its size: if you trust it, "
                     "save it without compression")  # fmt: skip


class Unpacked:
    """A stream of the contents of a compressed file. Raises DataError if they exceed `unpacked_limit`.

    decoder: zlib's or lzma's decompressor. Python's gzip.open and lzma.open have no limits for memory or time.
    """

    def __init__(self, path: Path, file: BinaryIO, decoder: Any) -> None:
        self.path, self.file, self.decoder = path, file, decoder
        self.left = unpacked_limit(file)
        self.rest = b""  # input that zlib has not used yet

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, at least one except at the end."""
        while not self.decoder.eof:
            wants = not self.rest and getattr(self.decoder, "needs_input", True)  # lzma keeps its unused input
            block = self.file.read(PACKED_BLOCK) if wants else self.rest
            out = self.decoder.decompress(block, size)
            self.rest = getattr(self.decoder, "unconsumed_tail", b"")
            if out:
                self.left -= len(out)
                if self.left < 0:
                    raise bomb(self.path)
                return out
            if wants and not block:
                raise EOFError("it ends too early")
        if (self.decoder.unused_data + self.file.read(PACKED_BLOCK)).strip(b"\0"):
            raise DataError(f"{self.path} has more data after the end of its compressed data: unpack it first")
        return b""


def read_at_most(stream: Stream, limit: int) -> bytearray:
    """Read up to `limit` bytes. Allocates as data arrives, so a header that claims terabytes allocates nothing."""
    data = bytearray()
    while len(data) < limit and (block := stream.read(min(BLOCK, limit - len(data)))):
        data += block
    return data
