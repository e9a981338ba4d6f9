"""The cache of compiled CUDA kernels on disk, beside that of the CPU's kernels (kernel_cache.py).

    SHA-256 of the rest | length of the header, 8 bytes | header: JSON | PTX | cubin, the machine code

The name of the folder is a hash of the source files and of the versions on which the code depends; the name of a file
is a hash of the kernel, its types and the compute capability. A file is written under another name and then renamed, so
it is complete or missing. The GPU executes what the files contain: a folder that another user could change is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from minidl.engine import cuda
from minidl.engine.cuda import Compiled, Kernel
from minidl.engine.jit import KERNELS
from minidl.engine.kernel_cache import DIGEST, find_folder

LENGTH = 8  # bytes of the header's length
PACKAGES = ("numba", "numba-cuda", "llvmlite", "cuda-core", "cuda-bindings", "nvidia-nvvm", "nvidia-nvjitlink",
            "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12")  # fmt: skip

Signature = tuple[Any, ...]  # of Numba types
Capability = tuple[int, int]


def load(kernel: Kernel, signature: Signature, cc: Capability) -> Compiled:
    """Return a kernel's machine code, from the cache or from the compiler. The parameters are those of `compiled`."""
    path = _path(kernel, signature, cc)
    found = _read(path) if path else None
    if found is None:
        found = cuda.compiled(kernel, signature, cc)
        if path:
            with suppress(OSError):  # the next process compiles it again
                _write(path, found)
    return found


def contains(kernel: Kernel, signature: Signature, cc: Capability) -> bool:
    path = _path(kernel, signature, cc)
    return path is not None and _read(path) is not None


def _path(kernel: Kernel, signature: Signature, cc: Capability) -> Path | None:
    """Return the file of a kernel. None: there is no folder, or what the kernel encloses cannot be described."""
    folder = _folder()
    if folder is None:
        return None
    try:
        described = repr((_identity(kernel.function), kernel.threads, kernel.blocks_per_sm, signature, cc))
    except TypeError:
        return None
    return folder / f"{kernel.name}-{hashlib.sha256(described.encode()).hexdigest()[:DIGEST]}"


@cache
def _folder() -> Path | None:
    digest = hashlib.sha256()
    root = KERNELS if KERNELS.is_dir() else KERNELS.parent.parent / "kernels"
    for file in sorted([*root.rglob("*.py"), *Path(__file__).parent.glob("cuda*.py")]):
        digest.update(file.read_bytes())
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            digest.update(f"{package} {version(package)}".encode())
    return find_folder(f"cuda-{digest.hexdigest()[:16]}")[0]


def _identity(value: Any) -> Any:
    """Describe a function, or a value in its closure, so that equal descriptions mean equal code.

    What a function finds in its module is the same in all processes, because the folder depends on the sources. Raises
    TypeError for a value whose description could differ between processes.
    """
    value = getattr(value, "py_func", value)  # a function that Numba compiles
    if isinstance(value, FunctionType):
        enclosed = [_identity(cell.cell_contents) for cell in value.__closure__ or ()]
        return value.__module__, _identity(value.__code__), enclosed, _identity(value.__defaults__)
    if isinstance(value, CodeType):
        constants = [_identity(constant) for constant in value.co_consts]
        return value.co_qualname, value.co_firstlineno, value.co_code.hex(), value.co_names, constants
    if isinstance(value, tuple | list):
        return [_identity(one) for one in value]
    if value is None or isinstance(value, bool | int | float | str | type):
        return repr(value)
    if type(value).__module__.startswith("numba."):  # a type, or an intrinsic: defined in the sources
        return str(value) if hasattr(value, "mangling_args") else getattr(value, "_name", None) or _unknown(value)
    return _unknown(value)


def _unknown(value: Any) -> Any:
    raise TypeError(f"{value!r} cannot be described")


def _read(path: Path) -> Compiled | None:
    """Return the contents of a file; None if it is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, rest = content[:DIGEST], content[DIGEST:]
    if digest != hashlib.sha256(rest).digest():
        return None
    end = LENGTH + int.from_bytes(rest[:LENGTH], "little")
    header = json.loads(rest[LENGTH:end])
    start = end + header.pop("ptx")
    return Compiled(ptx=rest[end:start].decode(), cubin=rest[start:], **header)


def _write(path: Path, kernel: Compiled) -> None:
    fields = {name: value for name, value in vars(kernel).items() if name not in ("ptx", "cubin")}
    ptx = kernel.ptx.encode()
    header = json.dumps(fields | {"ptx": len(ptx)}).encode()
    rest = len(header).to_bytes(LENGTH, "little") + header + ptx + kernel.cubin
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix="writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(rest).digest() + rest)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
