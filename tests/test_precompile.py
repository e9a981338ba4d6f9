"""Several processes compile kernels into the cache. If a process or the cache fails, every kernel is still compiled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from minidl import models, optim
from minidl.engine.device import Device
from minidl.program import precompile
from minidl.program.call import numba_type

RUN = """
import numpy
from minidl.program import precompile
from minidl.program.call import numba_type
{before}
vector = numba_type(numpy.zeros(2, "f"))
numbers = dict(absolute=2, absolute_backward=3, maximum_backward=5)  # of arguments. These compile in a short time
kernels = [precompile.Kernel("cpu", "elementwise", name, (vector,) * n) for name, n in numbers.items()][:{count}]
precompile.compile_all(kernels, lambda ready, total: print(ready, total))
hits = [sum(kernel.function.stats.cache_hits.values()) for kernel in kernels]
print(*hits, all(kernel.signature in kernel.function.overloads for kernel in kernels))
"""
KILL = """
import os, signal
ask, asked = precompile._request, []
def ask_and_kill(worker, kernel):
    ask(worker, kernel)
    if not asked:
        os.kill(worker.pid, signal.SIGKILL)
    asked.append(kernel)
precompile._request = ask_and_kill
"""
NONE = """
def none(*arguments):
    raise AssertionError("a process was started")
precompile.compile_in_processes = none
"""


def start(cache: Path, root: Path, before: str = "", count: int = 3, **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "TMPDIR": str(cache / "none"), "NUMBA_NUM_THREADS": "2"}
    environment.pop("NUMBA_CACHE_DIR", None)
    environment.pop("MINIDL_THREADS", None)
    command = [sys.executable, "-c", RUN.format(before=before, count=count)]
    return subprocess.Popen(
        command, cwd=root, env=environment | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def run(cache: Path, root: Path, before: str = "", count: int = 3, **variables: str) -> list[str]:
    """Return the lines printed by a process that compiles so many kernels."""
    process = start(cache, root, before, count, **variables)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output.splitlines()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_other_processes_compile_and_this_one_loads(tmp_path: Path, root: Path) -> None:
    *progress, last = run(tmp_path, root)
    assert progress == ["0 3", "1 3", "2 3", "3 3", "3 3"] and last == "1 1 1 True"
    assert run(tmp_path, root, NONE) == ["3 3", "3 3", "1 1 1 True"]  # nothing is left to compile


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_the_kernel_of_a_process_that_dies_is_compiled_in_this_process(tmp_path: Path, root: Path) -> None:
    *progress, last = run(tmp_path, root, KILL)
    assert progress[-1] == "3 3" and last.endswith("True") and "0" in last


def test_one_thread_means_one_process(tmp_path: Path, root: Path) -> None:
    assert run(tmp_path, root, NONE, 1, NUMBA_NUM_THREADS="1")[-1] == "0 True"


def test_without_a_cache_everything_is_compiled_in_this_process(tmp_path: Path, root: Path) -> None:
    (tmp_path / "minidl").write_text("not a folder")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / f"minidl-{os.getuid()}").write_text("not a folder")
    assert run(tmp_path, root, count=2)[-1] == "0 0 True"


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_cache_that_disappears(tmp_path: Path, root: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / f"minidl-{os.getuid()}").write_text("not a folder")
    gone = """
import shutil
from minidl.engine.jit import _folder
shutil.rmtree(_folder)
_folder.write_text("not a folder")
"""
    assert run(tmp_path, root, gone)[-1] == "0 0 0 True"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_behind(tmp_path: Path, root: Path, number: signal.Signals) -> None:
    tell = """
ask = precompile._request
def ask_and_tell(worker, kernel):
    ask(worker, kernel)
    print(worker.pid, flush=True)
precompile._request = ask_and_tell
"""
    process = start(tmp_path, root, tell)
    assert process.stdout
    lines = [process.stdout.readline() for _ in range(3)]  # "0 3", then two process ids
    process.send_signal(number)
    process.communicate()
    assert process.returncode == -number
    for pid in map(int, lines[1:]):
        with suppress(OSError):  # OSError: the process is gone; a zombie (Z) has exited, too
            while "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
                time.sleep(0.05)


def test_types_are_encoded_and_decoded_without_loss() -> None:
    values = [np.zeros((1, 2, 3, 4), "f"), np.zeros(1), np.zeros((1, 1), np.uint8), True, 3, 0.5, (1, 2)]
    for value in values:
        kind = numba_type(value)
        assert precompile._decode(precompile._encode(kind)) == kind
    assert Device("cpu").conv.forward is precompile.Kernel("cpu", "conv", "forward", ()).function


@pytest.mark.parametrize(
    ("w_shape", "groups", "algorithm"),
    [((3, 3, 64, 64), 1, "winograd"), ((1, 1, 64, 64), 1, "product"), ((3, 3, 1, 64), 64, "narrow"),
     ((9, 9, 64, 64), 1, "winograd"), ((9, 9, 16, 64), 4, "direct")],
)  # fmt: skip
@pytest.mark.parametrize("winograd", [True, False])
def test_a_convolution_is_the_kernel_of_one_algorithm(
    w_shape: tuple[int, ...], groups: int, algorithm: str, winograd: bool
) -> None:
    x, weight, none = np.empty((2, 16, 16, 64), "f"), np.empty(w_shape, "f"), np.empty(0, "f")
    padding = w_shape[0] // 2, w_shape[1] // 2
    options = groups, (1, 1), padding, (1, 1), winograd
    for name, arguments in (
        ("forward", (x, weight, none, none, none, none, False, *options, none, none, x)),
        ("backward_input", (x, weight, none, *options, none, x)),
        ("backward_weight", (x, x, *options, none, weight)),
    ):
        kernel = precompile.Kernel.of("cpu", "conv", name, arguments)
        expected = "direct" if algorithm == "winograd" and not winograd else algorithm
        assert kernel.name == f"{expected}_{name}"
        assert kernel.signature == tuple(map(numba_type, arguments)) and hasattr(kernel.function, "overloads")


@pytest.mark.parametrize("name", list(optim.OPTIMIZERS))
def test_an_optimizer_lists_the_kernels_that_it_calls(name: str) -> None:
    model = models.build("mlp", (4, 4, 1), 3)
    optimizer = optim.build(name, model, lr=0.1, clip=1.0)
    before = model.flatten().theta.copy()
    kernels = optimizer.kernels()
    assert kernels and (model.flatten().theta == before).all()
    precompile.compile_all(kernels)
    compiled = {kernel.function: len(kernel.function.signatures) for kernel in kernels}
    optimizer.step()
    assert compiled == {function: len(function.signatures) for function in compiled}
