"""Download a published file: try several mirrors in turn, resume a partial download, verify the result."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from minidl.errors import DataError

BLOCK = 1 << 16
TIMEOUT = 20  # seconds without data
ATTEMPTS = 5  # the maximum per mirror; after an attempt that adds no bytes, the next mirror is tried


class Published(NamedTuple):
    """A file as its authors published it. size: in bytes. md5: the checksum, in hexadecimal digits."""

    name: str
    size: int
    md5: str


def download(file: Published, mirrors: Sequence[str], folder: Path) -> Path:
    """Return `folder / file.name`. If it does not exist, download it from the first of `mirrors` that provides it.

    mirrors: URLs that end in "/".
    The bytes are written to a `.part` file in the folder. The next attempt, mirror or run continues this file. It gets
    its final name after its size and checksum are verified. Call this within `filling(folder)`. Raises DataError with
    the failure of each mirror if none provides the file.
    """
    path, part = folder / file.name, folder / f"{file.name}.part"
    if path.exists():
        return path
    failures = []
    for mirror in mirrors:
        try:
            _fetch(mirror + file.name, file, part)
            os.replace(part, path)
            return path
        except _MirrorFailed as failure:
            failures.append(f"{mirror} ({failure})")
    raise DataError(
        f"could not download {file.name}: {'; '.join(failures)}. Get the data set elsewhere, unpack it if it "
        "is a .tar.gz, and pass its folder as --data-dir FOLDER or in MINIDL_DATA"
    )


@contextmanager
def filling(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on `folder` while writing files into it. Creates the folder if it does not exist.

    Other processes wait for the lock. Raises DataError if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        reason = error.strerror or error
        raise DataError(
            f"cannot write to {folder}: {reason}; make room or set XDG_CACHE_HOME to another folder"
        ) from error


class _MirrorFailed(Exception):
    """This mirror cannot provide the file; another one may."""


def _fetch(url: str, file: Published, part: Path) -> None:
    """Complete and verify `part`, or raise _MirrorFailed."""
    resumed = _size(part) > 0
    for attempt in range(1, ATTEMPTS + 1):
        before = _size(part)
        if before >= file.size:
            break
        try:
            _append(url, file, part)
        except _MirrorFailed:
            if attempt == ATTEMPTS or _size(part) <= before:
                raise
    with part.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if digest != file.md5:
        part.unlink()
        if not resumed:
            raise _MirrorFailed(f"wrong checksum {digest}, expected {file.md5}")
        _fetch(url, file, part)  # the earlier download may be damaged: start again from the beginning


def _append(url: str, file: Published, part: Path) -> None:
    """Request the missing bytes of `part` and append them."""
    # Imported here because they are slow to import, and a run on existing data does not need them.
    from http.client import HTTPException
    from urllib.error import URLError
    from urllib.request import Request, urlopen

    from tqdm import tqdm

    have = _size(part)
    headers = {"User-Agent": "minidl", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = urlopen(Request(url, headers=headers), timeout=TIMEOUT)
    except (OSError, HTTPException) as error:
        # The message of an HTTPError contains the status, such as 404. A plain URLError only wraps the cause.
        raise _MirrorFailed(error.reason if type(error) is URLError else error) from error
    with response:
        if response.status == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise _MirrorFailed("sent a different part of the file than requested")
        if response.status != 206:
            have = 0  # the server does not support ranges: it sends the whole file
        length = response.headers.get("Content-Length", "")
        if length.isdigit() and have + int(length) != file.size:
            raise _MirrorFailed(f"offers {have + int(length)} bytes, expected {file.size}")
        bar = tqdm(desc=file.name, total=file.size, initial=have, unit="B", unit_scale=True, disable=None, leave=False)
        with bar, part.open("ab" if have else "wb") as out:
            while have < file.size:
                try:
                    block = response.read(min(BLOCK, file.size - have))
                except (OSError, HTTPException) as error:
                    raise _MirrorFailed(error) from error
                if not block:
                    raise _MirrorFailed(f"stopped after {have} of {file.size} bytes")
                out.write(block)
                have += len(block)
                bar.update(len(block))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
