"""Fetch a published file: from several mirrors in turn, resumed where it broke off, checked before it is used."""

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
TIMEOUT = 20  # seconds without a byte
ATTEMPTS = 5  # at one mirror, as long as each brings the file further


class Published(NamedTuple):
    """A file as its authors published it: its size in bytes and its MD5 tell a broken copy from a good one."""

    name: str
    size: int
    md5: str


def download(file: Published, mirrors: Sequence[str], folder: Path) -> Path:
    """`folder / file.name`; when it is not there, fetched from the first of `mirrors` (URLs that end in "/") that can.

    Bytes are collected in `.part` beside it, which the next attempt, mirror or run continues; the name appears only
    when size and checksum are right. Call it within `filling(folder)`. Raises DataError that says what each mirror did.
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
        f"could not download {file.name}: {'; '.join(failures)}. Get the set elsewhere and pass --data-dir FOLDER "
        "that holds its files (a .tar.gz unpacked), or set MINIDL_DATA"
    )


@contextmanager
def filling(folder: Path) -> Iterator[None]:
    """While one process writes files into `folder` (made if need be), the others that want to wait here."""
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
    """This mirror will not do; the next one may."""


def _fetch(url: str, file: Published, part: Path) -> None:
    """Complete and check `part`, or raise _MirrorFailed."""
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
        _fetch(url, file, part)  # the wrong bytes may be those that were there before: once more from the start


def _append(url: str, file: Published, part: Path) -> None:
    """Ask for what is missing in `part` and write what comes."""
    # Here, not above: they are slow to import, and a run on data that is there needs none of them.
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
        # An HTTPError says "404" itself, a plain URLError only wraps what happened.
        raise _MirrorFailed(error.reason if type(error) is URLError else error) from error
    with response:
        if response.status == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise _MirrorFailed("sent another part of the file than was asked for")
        if response.status != 206:
            have = 0  # a server without ranges sends the whole file
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
