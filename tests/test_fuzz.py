"""Hostile and damaged files: each parser raises only minidl's errors, in one line, and allocates little memory.

bench/fuzz_parsers.py lists the parsers; `python -m bench.fuzz` reads more inputs, and measures time and memory.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.fuzz_parsers import PARSERS, attempt
from minidl import reading
from minidl.comm import cluster
from minidl.comm.topology import build
from minidl.data import load
from minidl.data.idx import read_idx
from minidl.data.npz import read_npz
from minidl.errors import CheckpointError, ConfigError, DataError, MinidlError, report
from minidl.run import checkpoint as files
from minidl.run.folder import RunFolder, read_options, result_of
from minidl.schema import Mismatch, count_or_number, maybe, number, record, several, text, whole

INPUTS = 500  # of each kind of file


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, for values that are too large for their type
@pytest.mark.filterwarnings("ignore:Duplicate name")  # of zipfile, which writes some of the inputs
def test_a_parser_raises_only_minidls_errors(name: str, tmp_path: Path) -> None:
    case = PARSERS[name](tmp_path)
    for seed in range(INPUTS):
        error = attempt(case, seed, name)
        assert error is None, f"python -m bench.fuzz --repeat {name!r} {seed}: {error!r}"


# Small files that claim to hold much data, or unpack to much.

LIMITED = """
import resource, sys
from pathlib import Path
import numpy as np
import minidl.data.idx, minidl.data.npz, minidl.run.trained
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
idle, (kind, path) = peak(), sys.argv[1:]
read = {"idx": lambda p: minidl.data.idx.read_idx(p, 3), "npz": minidl.data.load, "model": minidl.load}[kind]
try:
    read(Path(path))
except minidl.MinidlError as error:
    print((peak() - idle) // 1024, error)
"""


def refused(kind: str, path: Path, root: Path) -> str:
    """Read a file in another process, and return the error message. Check that reading takes at most 200 MB."""
    done = subprocess.run([sys.executable, "-c", LIMITED, kind, str(path)], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    megabytes, _, message = done.stdout.partition(" ")
    assert int(megabytes) <= 200 and message.count("\n") == 1
    return message


def safetensors(path: Path, header: dict[str, Any] | str, data: bytes = b"") -> Path:
    content = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + data)
    return path


ABOUT = {"model": "lenet", "input_shape": "[28, 28, 1]", "classes": "10", "mean": "[0.5]", "std": "[1.0]"}


def test_a_small_file_that_claims_a_million_classes(tmp_path: Path, root: Path) -> None:
    path = safetensors(tmp_path / "a.safetensors", {"__metadata__": ABOUT | {"model": "mlp", "classes": "1000000"}})
    message = refused("model", path, root)
    assert "holds 0 values, too few for mlp with images (28, 28, 1) and 1000000 classes" in message


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_a_small_file_of_images_that_unpacks_to_much(tmp_path: Path, root: Path, suffix: str) -> None:
    path = tmp_path / f"images{suffix}"
    content = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in (1, 1 << 14, 1 << 14)) + bytes(1 << 28)
    path.write_bytes(gzip.compress(content, 1) if suffix == ".gz" else lzma.compress(content, preset=0))
    assert "unpacks to more than" in refused("idx", path, root)


def test_a_small_npz_file_that_unpacks_to_much(tmp_path: Path, root: Path) -> None:
    y = np.arange(250) % 2
    np.savez_compressed(tmp_path / "a.npz", x_train=np.zeros((250, 1000, 1000), np.uint8), y_train=y,
                        x_test=np.zeros((2, 1000, 1000), np.uint8), y_test=y[:2])  # fmt: skip
    assert "unpacks to more than" in refused("npz", tmp_path / "a.npz", root)


def test_a_large_file_without_compression_is_read(tmp_path: Path) -> None:
    y = np.arange(20) % 2
    np.savez(tmp_path / "a.npz", x_train=np.zeros((20, 1000, 1000), np.uint8), y_train=y,
             x_test=np.zeros((2, 1000, 1000), np.uint8), y_test=y[:2])  # fmt: skip
    assert read_npz(tmp_path / "a.npz").x_train.shape == (20, 1000, 1000, 1)


def test_an_xz_file_that_needs_much_memory_for_its_dictionary(tmp_path: Path) -> None:
    content = bytes([0, 0, 8, 1, 0, 0, 0, 4, 1, 2, 3, 4])
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
    (tmp_path / "a.xz").write_bytes(lzma.compress(content, filters=filters))
    with pytest.raises(DataError, match="Memory usage limit exceeded"):
        read_idx(tmp_path / "a.xz", 1)


def test_a_zip_directory_with_many_members(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for number_ in range(20_000):
            archive.writestr(f"{number_}.npy", b"")
    with pytest.raises(DataError, match="directory has over 1,048,576 bytes"):
        load(tmp_path / "a.npz")


# Only regular files are read.


def readers(path: Path) -> dict[str, Any]:
    return {
        "config": lambda: read_options(path),
        "cluster": lambda: cluster.load(path),
        "graph": lambda: build(f"file:{path}", 3),
        "graph.json": lambda: build(f"file:{path}.json", 3),
        "npz": lambda: load(f"{path}.npz"),
        "idx": lambda: read_idx(path, 3),
        "weights": lambda: files.header(path).values(),
    }


@pytest.mark.parametrize("name", readers(Path()))
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_pipe_a_device_or_a_folder_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    for path in (tmp_path / "file", tmp_path / "file.json", tmp_path / "file.npz"):
        {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda p: os.symlink("/dev/zero", p)}[kind](path)
    with pytest.raises(MinidlError, match=f"it is a {kind}; expected a regular file"):
        readers(tmp_path / "file")[name]()


def test_a_pipe_in_place_of_metrics_or_summary(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    os.mkfifo(tmp_path / "summary.json")
    assert result_of(tmp_path) is None
    with RunFolder(tmp_path) as run, pytest.raises(MinidlError, match="it is a pipe"):
        run.rewind(1, 1)


# JSON and TOML.


@pytest.mark.parametrize(("content", "words"), [
    ("[" * 100_000, "nested deeper"),
    ("[" * 40 + "]" * 40, "nested deeper than 32 levels"),
    ('{"a": 1, "a": 2}', "key 'a' occurs twice"),
    ("[NaN]", "contains NaN"),
    ("[1e999]", "contains inf"),
    ("9" * 5000, "a number of 5,000 digits"),
    ("[" + "0," * 600_000 + "0]", "about 600,001 values"),
    ('"\\ud800"', "expected Unicode"),
    ("{", "not JSON"),
    (" " * (9 << 20), "characters of JSON"),
])  # fmt: skip
def test_json_values_are_checked(content: str, words: str) -> None:
    with pytest.raises(reading.Unreadable, match=words):
        reading.json_value(content)


@pytest.mark.parametrize(("content", "words"), [
    ("a = " + "[" * 100_000, "nested deeper"),
    ("a" + ".a" * 30_000 + " = 1", "line 1 has 30,000 dots"),
    ("a = " + "9" * 5000, "too many digits"),
    ("a = 0x" + "f" * 5000, "a number of 20,000 bits"),
    ("x" * 300_000, "300,000 characters of TOML"),
    ("a = 1\na = 2", "not readable as TOML"),
    ('a = "\\u0000"', "null characters"),
])  # fmt: skip
def test_toml_tables_are_checked(content: str, words: str) -> None:
    with pytest.raises(reading.Unreadable, match=words):
        reading.toml_table(content)


def test_a_description_names_what_does_not_fit() -> None:
    kind = record({"a": whole(), "b": several(number(0, 1), 2), "c": maybe(text("[xy]", "x or y"))},
                  optional={"d": count_or_number()})  # fmt: skip
    good = {"a": 1, "b": [0.5, 1], "c": None}
    for value in (good, good | {"c": "x", "d": -1.5}):
        kind(value)
    for change, words in [
        ({"a": True}, "a is True; expected a whole number of 0 or more"),
        ({"a": -1}, "a is -1"),
        ({"a": 2**60}, "a is 1152921504606846976"),
        ({"b": [0.5]}, "b is a list of 1; expected a list of 2 or more values"),
        ({"b": [0.5, float("nan")]}, r"b\[1\] is nan; expected a finite number from 0 to 1"),
        ({"c": "z"}, "c is 'z'; expected x or y"),
        ({"c": {}}, "c is a table of 0; expected x or y"),
        ({"d": -1}, "d is -1; expected a whole number of 0 or more"),
        ({"d": float("inf")}, "d is inf; expected a finite number"),
        ({"e": 1}, "unknown key 'e'; expected a, b, c, d"),
    ]:
        with pytest.raises(Mismatch, match=words):
            kind(good | change)
    with pytest.raises(Mismatch, match="there is no 'b'"):
        kind({"a": 1, "c": None})


def test_a_message_that_quotes_a_large_file_is_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    report("x" * 100_000)
    assert len(capsys.readouterr().err) < 2100
    report("a name\x1b[2J with\ncontrol characters")
    assert capsys.readouterr().err == "minidl: error: a name\\x1b[2J with control characters\n"


# Headers of arrays.


@pytest.mark.parametrize("array", [
    np.zeros((3, 4), np.float32), np.asfortranarray(np.zeros((2, 3, 4), ">f8")), np.array(3), np.zeros((0, 5), np.int8),
])  # fmt: skip
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_npy_headers_of_numpy_are_read(array: np.ndarray, version: tuple[int, int]) -> None:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version)
    stream.seek(0)
    header = reading.npy_header(stream)
    assert np.dtype(header.descr) == array.dtype and header.shape == array.shape
    assert header.fortran == np.isfortran(array)


@pytest.mark.parametrize("header", [
    "(" * 1000,  # NumPy's reader raises MemoryError or SyntaxError,
    "'''",  # TokenError,
    "{'descr': 1, 'fortran_order': False, 'shape': (1,)}",  # TypeError
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': 1}",
    "{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'more': True}",
    "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} + 1",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 30 + ",)}",
    " " * 10_000,
    "",
])  # fmt: skip
def test_npy_headers_that_are_not_plain_are_refused(header: str) -> None:
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    with pytest.raises(reading.Unreadable, match="does not describe an array of plain numbers"):
        reading.npy_header(io.BytesIO(content))


@pytest.mark.parametrize(("header", "words"), [
    ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "its arrays take 8 bytes, and the file has 4"),
    ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "expected 4 bytes from 0"),
    ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, r"a.shape\[0\] is -1"),
    ({"a": {"dtype": "X", "shape": [1], "data_offsets": [0, 4]}}, "unknown type 'X'"),
    ({"a": {"dtype": "F32", "shape": [0, 2**50], "data_offsets": [0, 0]}}, "the others are too long"),
    ({"a": {"dtype": "F32", "shape": [1] * 40, "data_offsets": [0, 4]}}, "40 axes"),
    ({"a": {"dtype": "F32", "shape": [1]}}, "a has no 'data_offsets'"),
    ({"a": 3}, "a is 3; expected a table"),
    ({"a\nb\x1b": 3}, r"'a\\nb\\x1b' is 3; expected a table"),
    ({"__metadata__": {"a": 3}}, "__metadata__.a is 3"),
    ("[" * 5000, "nested deeper"),
    ("[]", "not a table"),
    ('{"a": 1, "a": 1}', "occurs twice"),
])  # fmt: skip
def test_headers_of_weights_are_checked(tmp_path: Path, header: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=f"not a safetensors file: .*{words}"):
        files.header(safetensors(tmp_path / "a.safetensors", header, bytes(4)))


def test_weights_with_holes_that_exceed_the_memory(tmp_path: Path) -> None:
    length = 1 << 43
    header = {"a": {"dtype": "F32", "shape": [length // 4], "data_offsets": [0, length]}}
    path = safetensors(tmp_path / "a.safetensors", header)
    os.truncate(path, path.stat().st_size + length)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: it holds 8\.8 TB, and .* of memory are free"):
        files.header(path)


@pytest.mark.parametrize(("about", "words"), [
    ({"classes": "[" * 3000}, "nested deeper"),  # without a check, a RecursionError
    ({"std": "[0.0]"}, "a positive std"),  # ZeroDivisionError
    ({"mean": "[0.5, 0.5]"}, "for each of 1 channels"),
    ({"mean": "[1e300]"}, r"mean\[0\] is 1e\+300"),
    ({"input_shape": "[1000000000, 1, 1]"}, "holds 0 values, too few"),
    ({"input_shape": "[9007199254740992, 9007199254740992, 1]"}, "holds 0 values, too few"),
    ({"classes": "9007199254740992"}, "holds 0 values, too few"),
    ({"input_shape": "[60000, 60000, 1]"}, "holds 0 values, too few"),  # MemoryError
    ({"input_shape": "28"}, "input_shape is 28; expected a list of 3 values"),
    ({"classes": "-1"}, "classes is -1"),
    ({"classes": "true"}, "classes is True"),
    ({"model": "x"}, "unknown model 'x'"),
])  # fmt: skip
def test_metadata_of_weights_is_checked(tmp_path: Path, about: dict[str, str], words: str) -> None:
    import minidl

    path = safetensors(tmp_path / "a.safetensors", {"__metadata__": ABOUT | about})
    with pytest.raises(CheckpointError, match=words) as caught:
        minidl.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


# Clusters and graphs.


@pytest.mark.parametrize(("text_", "words"), [
    ('[devices.a]\nflops = 1e9\n[[nodes]]\nname = "n"\ncount = 1000000\ndevices = ["a", "a"]\n', "2,000,000 devices"),
    ('[devices.a]\nflops = 1e9\n[[nodes]]\nname = "n"\ncount = 99999\ndevices = ["a"]\n[between]\n'
     + '[[deaths]]\ntime = 1\nnode = "n"\n' * 12, "over 1,000,000 ranks"),
])  # fmt: skip
def test_a_cluster_of_too_many_devices_or_events(text_: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cluster.parse(text_).place(99_999)


def test_graphs_that_would_take_much_memory(tmp_path: Path) -> None:
    (tmp_path / "long").write_text("0 1\n" * 150_001)
    with pytest.raises(ConfigError, match="over 150,000 lines"):
        build(f"file:{tmp_path}/long", 2)
    bomb = '<!DOCTYPE a [<!ENTITY b "cccc">]><graphml>&b;</graphml>'
    (tmp_path / "a.graphml").write_text(bomb)
    with pytest.raises(ConfigError, match="it declares entities"):
        build(f"file:{tmp_path}/a.graphml", 2)
