"""Downloads from a local server with the faults of real mirrors."""

from __future__ import annotations

import hashlib
import io
import math
import os
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from minidl.data import cifar, download, load, mnist
from minidl.data.download import ATTEMPTS, Published
from minidl.errors import DataError

CONTENT = np.random.default_rng(0).bytes(300_001)
WRONG = bytes(len(CONTENT))


def published(name: str, content: bytes) -> Published:
    return Published(name, len(content), hashlib.md5(content).hexdigest())


FILE = published("file.gz", CONTENT)


class Handler(BaseHTTPRequestHandler):
    """Serve `server.files[NAME]` under /BEHAVIOUR/NAME: correctly, or with the fault that BEHAVIOUR names."""

    server: Server

    def do_GET(self) -> None:
        _, behaviour, name = self.path.split("/")
        wanted = self.headers["Range"]
        self.server.requests.append((behaviour, wanted))
        content = WRONG if behaviour == "wrong" else self.server.files[name]
        if behaviour == "missing":
            return self.send_error(404)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and behaviour != "no-range" else 0
        self.send_response(206 if start else 200)
        if start:
            shown = start - 1 if behaviour == "other-range" else start
            self.send_header("Content-Range", f"bytes {shown}-{len(content) - 1}/{len(content)}")
        body = b"<html>log in first</html>" if behaviour == "portal" else content[start:]
        if behaviour != "no-length":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        # "cut" sends at most 100,000 bytes per request. "cut-early" sends only the first 100,000 bytes of the file.
        stop = {"cut": 100_000, "cut-early": max(0, 100_000 - start)}.get(behaviour)
        self.wfile.write(body[:stop])

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {FILE.name: CONTENT}
        self.requests: list[tuple[str, str | None]] = []

    def mirror(self, behaviour: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{behaviour}/"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MINIDL_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def fetch(server: Server, folder: Path, *behaviours: str) -> Path:
    with download.filling(folder):
        return download.download(FILE, [server.mirror(behaviour) for behaviour in behaviours], folder)


@pytest.mark.parametrize(
    "behaviours",
    [
        ("good",),
        ("no-length",),
        ("missing", "good"),
        ("portal", "good"),
        ("wrong", "good"),
        ("cut-early", "good"),
        ("cut-early", "no-range"),
        ("cut-early", "wrong", "good"),
    ],
)
def test_the_first_mirror_that_delivers(server: Server, tmp_path: Path, behaviours: tuple[str, ...]) -> None:
    path = fetch(server, tmp_path / "new" / "folder", *behaviours, "never-asked")
    assert path.read_bytes() == CONTENT and path.name == "file.gz"
    assert "never-asked" not in {behaviour for behaviour, _ in server.requests}
    assert not path.with_name("file.gz.part").exists()


def test_a_broken_connection_is_resumed(server: Server, tmp_path: Path) -> None:
    assert fetch(server, tmp_path, "cut").read_bytes() == CONTENT
    ranges = [wanted for _, wanted in server.requests]
    assert ranges == [None, "bytes=100000-", "bytes=200000-", "bytes=300000-"] and len(ranges) <= ATTEMPTS


def test_a_range_that_was_not_requested_is_rejected(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.gz.part").write_bytes(CONTENT[:1234])
    assert fetch(server, tmp_path, "other-range", "good").read_bytes() == CONTENT
    assert server.requests == [("other-range", "bytes=1234-"), ("good", "bytes=1234-")]


def test_the_part_of_an_earlier_run_is_resumed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.gz.part").write_bytes(CONTENT[:1234])
    assert fetch(server, tmp_path, "good").read_bytes() == CONTENT
    assert server.requests == [("good", "bytes=1234-")]


@pytest.mark.parametrize("length", [500, len(CONTENT), len(CONTENT) + 5])
def test_a_wrong_part_of_an_earlier_run_is_discarded(server: Server, tmp_path: Path, length: int) -> None:
    (tmp_path / "file.gz.part").write_bytes(bytes(length))
    assert fetch(server, tmp_path, "good").read_bytes() == CONTENT


def test_a_complete_part_needs_no_request(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.gz.part").write_bytes(CONTENT)
    assert fetch(server, tmp_path, "good").read_bytes() == CONTENT and not server.requests


def test_when_all_mirrors_fail(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError) as info:
        mirrors = [server.mirror(b) for b in ("missing", "wrong", "portal", "cut-early")]
        download.download(FILE, [*mirrors, "http://127.0.0.1:1/"], tmp_path)
    message = str(info.value)
    for part in ("could not download file.gz", "404", "wrong checksum", "offers 25 bytes, expected 300001"):
        assert part in message
    for part in ("stopped after 100000 of 300001", "Connection refused", "--data-dir FOLDER"):
        assert part in message
    assert "\n" not in message and not (tmp_path / "file.gz").exists()


def test_a_cache_that_cannot_be_written(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot write to .*/file: .*set XDG_CACHE_HOME"):
        fetch(server, tmp_path / "file", "good")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_not_blamed_on_the_mirrors(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.gz.part").symlink_to("/dev/full")
    with pytest.raises(DataError, match="No space left on device; make room"):
        fetch(server, tmp_path, "good", "never-asked")
    assert len(server.requests) == 1


def test_mnist_is_downloaded_once(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gzip

    def idx(*shape: int) -> bytes:
        sizes = b"".join(size.to_bytes(4, "big") for size in shape)
        return gzip.compress(bytes([0, 0, 8, len(shape)]) + sizes + bytes(i % 2 for i in range(math.prod(shape))))

    contents = [idx(4, 3, 3), idx(4), idx(2, 3, 3), idx(2)]
    files = [published(file.name, content) for file, content in zip(mnist.FILES["mnist"], contents, strict=True)]
    server.files = {file.name: content for file, content in zip(files, contents, strict=True)}
    monkeypatch.setitem(mnist.FILES, "mnist", files)
    monkeypatch.setitem(mnist.MIRRORS, "mnist", [server.mirror("good")])
    half = tmp_path / "cache/minidl/data/mnist" / files[0].name  # an interrupted run has downloaded this file
    half.parent.mkdir(parents=True)
    half.write_bytes(contents[0])
    for _ in range(2):
        assert load("mnist").x_train.shape == (4, 3, 3, 1)
    assert len(server.requests) == 3


def test_cifar10_is_downloaded_once(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name in [*cifar.TRAIN, cifar.TEST]:
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = 2 * cifar.RECORD
            tar.addfile(info, io.BytesIO(bytes(cifar.RECORD) + bytes([1]) + bytes(cifar.RECORD - 1)))
    archive = published("cifar-10-binary.tar.gz", buffer.getvalue())
    server.files = {archive.name: buffer.getvalue()}
    monkeypatch.setattr(cifar, "ARCHIVE", archive)
    monkeypatch.setattr(cifar, "MIRRORS", [server.mirror("good")])
    with ThreadPoolExecutor(4) as replicas:  # four replicas that start simultaneously
        shapes = [data.x_train.shape for data in replicas.map(load, ["cifar10"] * 4)]
    assert shapes == [(10, 32, 32, 3)] * 4
    left = {path.name for path in (tmp_path / "cache/minidl/data/cifar10").iterdir()}
    assert len(server.requests) == 1 and left == {*cifar.TRAIN, cifar.TEST, ".lock"}
