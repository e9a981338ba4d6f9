"""The cache of compiled kernels: processes load from it until a kernel is edited. Numba's own cache is not affected."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minidl.engine.jit import VECTOR_BYTES
from minidl.kernels.conv.planes import round_up
from minidl.kernels.matmul.tile import panel_width

RUN = """
import os, sys, numpy, numba
environment = dict(os.environ)
from minidl.engine.jit import _folder
from minidl import Device
before = numba.config.CACHE_DIR
kernel = Device("cpu").elementwise.copy
kernel(numpy.ones(3), numpy.empty(3))
assert numba.config.CACHE_DIR == before == os.environ.get("NUMBA_CACHE_DIR", "")
assert os.environ.get("NUMBA_CACHE_DIR") == environment.get("NUMBA_CACHE_DIR")
print(_folder, sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()))
"""


def run(code: Path, **environment: str) -> tuple[Path, int, int]:
    """Run one kernel in a new process; return its (cache folder, cache hits, cache misses)."""
    usual = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=code, env=usual | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    folder, hits, misses = done.stdout.split()
    return Path(folder), int(hits), int(misses)


@pytest.fixture
def code(tmp_path: Path, root: Path) -> Path:
    """Return the folder of a copy of the package, which a test may edit."""
    compiled = shutil.ignore_patterns("__pycache__")
    for name in ("minidl", "kernels"):
        shutil.copytree(root / name, tmp_path / "code" / name, symlinks=True, ignore=compiled)
    return tmp_path / "code"


def test_the_cache_is_used_until_a_helper_is_edited(code: Path, tmp_path: Path) -> None:
    cache, theirs = tmp_path / "cache" / "minidl" / "kernels", tmp_path / "numba"
    folder, hits, misses = run(code, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert folder.parent == cache and list(folder.iterdir()) and (hits, misses) == (0, 1)

    # Folders that were not used for a month are deleted, but never the folder in use.
    old, recent = cache / "old", cache / "recent"
    for path, days in ((old, 31), (recent, 29), (folder, 300)):
        path.mkdir(exist_ok=True)
        then = path.stat().st_mtime - days * 24 * 3600
        os.utime(path, (then, then))
    assert run(code, XDG_CACHE_HOME=str(tmp_path / "cache")) == (folder, 1, 0)
    assert recent.is_dir() and not old.exists()

    # With NUMBA_CACHE_DIR, the cache is a subfolder of it.
    other = theirs / "minidl" / "kernels" / folder.name
    shutil.copytree(folder, other)
    assert run(code, NUMBA_CACHE_DIR=str(theirs)) == (other, 1, 0)

    with (code / "kernels/optim/cpu.py").open("a") as helper:  # any file below kernels/
        helper.write("# edited\n")
    edited, hits, misses = run(code, NUMBA_CACHE_DIR=str(theirs))
    assert edited.parent == other.parent and edited != other and (hits, misses) == (0, 1)


BITS = """
import hashlib, numpy
from minidl import Device, Tensor, models, nn, ops
nn.seed(0)
model = models.resnet((8, 8, 3), depth=8)
random = numpy.random.default_rng(0)
loss = ops.cross_entropy(model(random.normal(size=(64, 8, 8, 3)).astype("f")), random.integers(10, size=64))
loss.backward()
print(hashlib.sha256(model.flatten().grad.tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_compiled_and_loaded_kernels_give_the_same_bits(root: Path, tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)
    first, second = (
        subprocess.run([sys.executable, "-c", BITS], cwd=root, env=environment, capture_output=True, check=True).stdout
        for _ in range(2)
    )
    assert first == second


LITERALS = """
import sys, types
from minidl.engine.jit import apart_jit, jit

@jit
def inner(a, flag):
    return a + 1 if flag else a

@apart_jit
def outer(a):
    return inner(a, True) + inner(3, False) + inner(4, a > 2)

@jit
def top(a):
    return outer(a) + outer(5)
assert top(2) == 3 + 3 + 4 + (6 + 3 + 5), top(2)
found = outer.compiled
print(len(inner.signatures), len(found.signatures), *top.stats.cache_hits.values(), *found.stats.cache_hits.values())
"""


PARTS = """
from __future__ import annotations
import inspect
import numpy as np
from minidl.engine.jit import Part, in_parts, jit

@jit
def rows(a):
    return a.shape[0]

@jit
def row(a, part, parts):
    return a[part : part + 1]

@jit
def number(a, part, parts):
    return 10 * parts + part

@in_parts(rows, row, code=number)
def add(x: Part, factor: float, out: Part, code: int):
    out[0, 0] = factor * x[0, 0] + code

for n in (1, 3):
    out = np.zeros((n, 1))
    add(np.ones((n, 1)), 100.0, out)
    assert out[:, 0].tolist() == [100 + 10 * n + part for part in range(n)]
print(*inspect.signature(add.py_func).parameters, *add.stats.cache_hits.values(), len(add.part.compiled.signatures))
"""


def test_two_processes_that_share_a_cache(tmp_path: Path, root: Path) -> None:
    """The second one loads what the first one has compiled.

    - A kernel made of parts has the function's parameters and is cached.
    - Literals need no extra versions, and functions compiled apart are loaded with their callers.
    """
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "literals.py").write_text(LITERALS)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": f"{root}:{tmp_path}"}
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, "-c", "import parts, literals"]
    first, second = (
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert first.splitlines() == ["x factor out 1", "1 1"]
    # The code of `outer` contains `inner`; that of `top` only calls `outer`.
    assert second.splitlines() == ["x factor out 1 1", "0 1 1 1"]


def test_python_runs_a_helper_as_python_unless_it_gets_an_array() -> None:
    assert round_up(17, 16) == 32 and "kernel" not in vars(round_up)  # not compiled for Python
    assert panel_width(np.empty(0)) == 2 * VECTOR_BYTES // 8 and panel_width.kernel.signatures
