"""Read files that others wrote. Every size, depth and type is checked before the content is used.

    text(path, limit)            the text of a small regular file
    json_value(text)             JSON: numbers are finite, keys are unique, nesting is limited
    toml_table(text)             TOML, likewise, except that numbers may be infinite
    npy_header(stream)           the header of an array in an .npz file
    safetensors_header(file)     the header of a .safetensors file, compared with the size of the file

They raise Unreadable, schema.Mismatch or OSError. `blaming` converts these into an error of minidl/errors.py that names
the file. Further checks, such as which keys a table has, are in schema.py.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from os import PathLike
from typing import Any, BinaryIO, NamedTuple

from minidl import schema
from minidl.errors import MinidlError

MB = 1 << 20
JSON_LIMIT = 8 * MB  # characters; values of JSON take up to 30 times the memory of their text
JSON_VALUES = 500_000
TOML_LIMIT = MB // 4  # characters
TOML_DOTS = 64  # in a line: Python's reader of dotted keys takes quadratic time
DEPTH = 32  # of nested lists and tables
BITS = 128  # of a whole number
NPY_LIMIT = 4096  # bytes of a header
AXES = 32
ELEMENTS = 1 << 48


class Unreadable(ValueError):
    """The content of a file is not as expected."""


# Files.


def opened(path: str | PathLike[str]) -> BufferedReader:
    """Open a regular file. Raises Unreadable for a folder, a pipe or a device, which could block or be endless."""
    if "\0" in os.fspath(path):
        raise Unreadable("its name contains a null character")
    _require_regular(os.stat(path).st_mode)  # opening a device may have an effect
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _require_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise Unreadable(f"it is {kinds.get(stat.S_IFMT(mode), 'a device')}; expected a regular file")


def content(path: str | PathLike[str], limit: int) -> bytes:
    """Return the bytes of a regular file. Raises Unreadable if it has more than `limit` bytes."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > limit else file.read(limit + 1) or b""  # files in /proc have the size 0
    if max(size, len(data)) > limit:
        raise Unreadable(f"it has {max(size, len(data)):,} bytes or more; expected at most {limit:,}")
    return data


def text(path: str | PathLike[str], limit: int) -> str:
    """Return the text of a regular file. Raises Unreadable if it has more than `limit` bytes, or is not UTF-8."""
    try:
        return content(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Unreadable("it is not UTF-8 text") from None


@contextmanager
def blaming(what: str, error: type[MinidlError]) -> Iterator[None]:
    """Convert Unreadable, schema.Mismatch and OSError into `error`. what: the file, as its message names it."""
    try:
        yield
    except (Unreadable, schema.Mismatch) as problem:
        raise error(f"{what}: {problem}") from None
    except FileNotFoundError:
        raise error(f"{what} does not exist") from None
    except OSError as problem:
        raise error(f"cannot read {what}: {problem.strerror or problem}") from None


# Formats.


def json_value(text: str) -> Any:
    """Return the value of a JSON text. Raises Unreadable if it is not JSON, too large, too deep or not finite."""
    if len(text) > JSON_LIMIT:
        raise Unreadable(f"it has {len(text):,} characters of JSON; expected at most {JSON_LIMIT:,}")
    values = text.count(",") + text.count("[") + text.count("{")  # an upper limit: it also counts inside strings
    if values > JSON_VALUES:
        raise Unreadable(f"it has about {values:,} values in JSON; expected at most {JSON_VALUES:,}")
    try:
        value = json.loads(text, object_pairs_hook=_table, parse_constant=_constant, parse_int=_integer)
    except RecursionError:
        raise Unreadable(f"it is nested deeper than {DEPTH} levels") from None
    except json.JSONDecodeError as error:
        raise Unreadable(f"it is not JSON: {error}") from None
    _require_plain(value, finite=True)
    return value


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise Unreadable(f"key {schema.shown(twice)} occurs twice in a table")
    return table


def _constant(word: str) -> None:
    raise Unreadable(f"it contains {word}; expected finite numbers")


def _integer(digits: str) -> int:
    if len(digits) > 40:  # 2^128 has 39
        raise Unreadable(f"it contains a number of {len(digits):,} digits; expected at most 39")
    return int(digits)


def toml_table(text: str) -> dict[str, Any]:
    """Return the table of a TOML text. Raises Unreadable if it is not TOML, too large or too deep."""
    import tomllib  # here, because --help does not need it

    if len(text) > TOML_LIMIT:
        raise Unreadable(f"it has {len(text):,} characters of TOML; expected at most {TOML_LIMIT:,}")
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > TOML_DOTS:
            raise Unreadable(f"line {number} has {line.count('.'):,} dots; expected at most {TOML_DOTS}")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise Unreadable(f"it is nested deeper than {DEPTH} levels") from None
    except ValueError as error:  # TOMLDecodeError, or a number of more than 4,300 digits
        reason = error if isinstance(error, tomllib.TOMLDecodeError) else "a number has too many digits"
        raise Unreadable(f"not readable as TOML: {reason}") from None
    _require_plain(table, finite=False)  # `Option.check` rejects infinite numbers, and names the option
    return table


def _require_plain(value: Any, finite: bool) -> None:
    """Raise Unreadable if nesting is deep, a whole number is long, or a string is not valid Unicode.

    finite: whether numbers must be finite.
    """
    stack: list[tuple[Any, int, str]] = [(value, 1, "it")]  # value, depth, name
    while stack:
        value, depth, name = stack.pop()
        if isinstance(value, (dict, list)):
            if depth > DEPTH:
                raise Unreadable(f"{name} is nested deeper than {DEPTH} levels")
            if isinstance(value, dict):
                stack += [(key, depth, "a key") for key in value]
                stack += [(one, depth + 1, schema.named(key)) for key, one in value.items()]
            else:
                stack += [(one, depth + 1, name) for one in value]
        elif isinstance(value, str):
            if not schema.is_plain(value):
                raise Unreadable(f"{name} contains {schema.shown(value)}; expected Unicode without null characters")
        elif isinstance(value, float):
            if finite and not math.isfinite(value):
                raise Unreadable(f"{name} contains {value}; expected finite numbers")
        elif isinstance(value, int) and value.bit_length() > BITS:
            raise Unreadable(f"{name} contains a number of {value.bit_length():,} bits; expected at most {BITS}")


NPY_KEY = r"""\s* (?: '(\w+)' | "(\w+)" ) \s* : \s*"""
NPY_VALUE = r"""(?: '([^'\\]*)' | "([^"\\]*)" | (True|False) | \( ([\d\sL,]*) \) ) \s* (?: ,\s* | $ )"""
NPY_ITEM = re.compile(NPY_KEY + NPY_VALUE, re.VERBOSE)


class Npy(NamedTuple):
    """An array's header. descr: NumPy's code of its data type, such as "<f4". fortran: whether in Fortran order."""

    descr: str
    fortran: bool
    shape: tuple[int, ...]


def npy_header(stream: Any) -> Npy:
    """Read the header of an array in .npy format. Raises Unreadable if it does not describe an array of plain numbers.

    NumPy's own reader parses the header as Python code, and raises errors of many types.
    """
    magic = stream.read(8)
    if magic[:6] != b"\x93NUMPY" or len(magic) < 8:
        raise Unreadable("is not in .npy format")
    version = magic[6], magic[7]
    if version not in ((1, 0), (2, 0)):
        raise Unreadable(f"is in .npy format {version}, expected 1.0 or 2.0: save an array of plain numbers")
    length = int.from_bytes(stream.read(2 * version[0]), "little")
    found = _npy_items(stream.read(length).decode("latin-1")) if length <= NPY_LIMIT else {}
    descr, fortran, shape = (found.get(key) for key in ("descr", "fortran_order", "shape"))
    if len(found) != 3 or type(descr) is not str or type(fortran) is not bool or type(shape) is not tuple:
        raise Unreadable("has a header that does not describe an array of plain numbers: save it with NumPy")
    require_shape(shape)
    return Npy(descr, fortran, shape)


def _npy_items(header: str) -> dict[str, Any]:
    """Return the items of a header such as {'descr': '<f4', 'fortran_order': False, 'shape': (3,), }; {} if invalid."""
    found: dict[str, Any] = {}
    header, at = header.strip(), 0
    inside = header[1:-1].strip() if header[:1] == "{" and header[-1:] == "}" else ""
    while at < len(inside):
        item = NPY_ITEM.match(inside, at)
        if not item or (item[1] or item[2]) in found:
            return {}
        found[item[1] or item[2]] = _npy_value(item)
        at = item.end()
    return found


def _npy_value(item: re.Match[str]) -> str | bool | tuple[int, ...] | None:
    if item[5]:
        return item[5] == "True"
    if item[6] is None:
        return item[3] if item[3] is not None else item[4]
    words = [word.strip().removesuffix("L") for word in item[6].split(",")]  # Python 2 wrote 5L
    if words[-1] == "":
        words.pop()
    return tuple(int(word) for word in words) if all(re.fullmatch(r"\d{1,18}", word) for word in words) else None


def require_shape(shape: Sequence[int], array: str = "") -> None:
    """Raise Unreadable if a shape has too many axes, or if an axis has the length 0 and others are too long.

    array: the beginning of the message, such as "weight "; "" if the caller puts the array's name before it.
    """
    if len(shape) > AXES:
        raise Unreadable(f"{array}has a shape of {len(shape):,} axes; expected at most {AXES}")
    if 0 in shape and math.prod(filter(None, shape)) > ELEMENTS:  # NumPy cannot represent such an array
        raise Unreadable(f"{array}has the shape {shape}: one axis is empty, and the others are too long")


class Stored(NamedTuple):
    """An array in a .safetensors file: its type, such as F32, its shape, and its bytes from `start` to `stop`."""

    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int


KINDS = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4,
         "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}  # bytes of an element  # fmt: skip
METADATA = schema.mapping(schema.text())
STORED: Callable[..., None] = schema.record({
    "dtype": schema.text(words="the name of a type"),
    "shape": schema.several(schema.whole()),
    "data_offsets": schema.several(schema.whole(), 2, 2),
})  # fmt: skip


def safetensors_header(file: BinaryIO) -> tuple[dict[str, Stored], dict[str, str]]:
    """Read the header of a .safetensors file: arrays by name, and metadata.

    Raises Unreadable or Mismatch if the header is not valid, or if the arrays do not fill the rest of the file exactly.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if length > size - 8:
        raise Unreadable(f"it has {size:,} bytes, too few for a header of {length:,}")
    if length > JSON_LIMIT:
        raise Unreadable(f"its header has {length:,} bytes; expected at most {JSON_LIMIT:,}")
    try:
        header = json_value(file.read(length).decode())
    except UnicodeDecodeError:
        raise Unreadable("its header is not UTF-8 text") from None
    if not isinstance(header, dict):
        raise Unreadable("its header is not a table")
    metadata = header.pop("__metadata__", {})
    METADATA(metadata, "__metadata__")
    arrays, at = {}, 0
    for name, entry in sorted(header.items(), key=_offsets):
        label = schema.named(name)
        STORED(entry, label)
        (start, stop), shape, kind = entry["data_offsets"], entry["shape"], entry["dtype"]
        require_shape(shape, f"{label} ")
        if kind not in KINDS:
            raise Unreadable(f"{label} has the unknown type {schema.shown(kind)}")
        if start != at or stop - start != math.prod(shape) * KINDS[kind]:
            raise Unreadable(f"{label} is {kind} {shape} at bytes {start} to {stop}; expected "
                             f"{math.prod(shape) * KINDS[kind]} bytes from {at}")  # fmt: skip
        at = stop
        arrays[name] = Stored(kind, tuple(shape), 8 + length + start, 8 + length + stop)
    if at != size - 8 - length:
        raise Unreadable(f"its arrays take {at:,} bytes, and the file has {size - 8 - length:,} for them")
    return arrays, metadata


def _offsets(item: tuple[str, Any]) -> tuple[int, int]:
    """Return the key by which arrays are sorted: their offsets, or (0, 0) for an entry that is not valid."""
    try:
        start, stop = item[1]["data_offsets"]
        return int(start), int(stop)
    except (TypeError, KeyError, ValueError):
        return 0, 0
