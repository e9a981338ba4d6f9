"""An emulator of PTX: it runs the code that Numba compiled for a GPU, on the CPU, and checks it while it runs.

    with launch_with(Emulator(cc=(8, 0))):
        device.optim.sgd(theta, grad, velocity, ...)     # NumPy arrays serve as device memory

It raises KernelError for: accesses outside an array, or at addresses that are not multiples of their size; writes to
an input (an array that is not writeable); races, in shared memory and between blocks; shared memory read before it
is written; copies in the background that are not waited for; barriers that not all threads reach; shuffles and votes by
parts of a warp. It counts sectors of global memory and wavefronts of shared memory (`Emulator.counts`).

Limits:
- It knows the instructions that minidl's kernels need (instructions.py), and raises Unsupported for others. There is
  no local memory, there are no atomics, no constant memory, no named barriers, no blocks that are not whole warps, and
  no functions that call themselves.
- Threads of a warp need a barrier, too, before they read each other's writes (CUDA would also allow syncwarp).
- A value read from a register that only other threads have written is 0, without an error.
- It says nothing about time, registers or occupancy: tests/cuda/sass.py reads those from the machine code.
- exp2, log2, sin, cos, tanh, reciprocals and square roots are NumPy's; a GPU's `approx` versions are less accurate.
- A product of tensor cores is exact before it is rounded to float32 (tensor.py).
- fma on float64 rounds the product. On float32 it does, too, if `fuse` is false: that is several times faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl.engine.cuda import Grid, Kernel, to_ptx, types_of, words_of

from .checks import KernelError
from .counts import Counts, wavefronts
from .machine import Code, State
from .memory import GlobalMemory
from .ptx import Unsupported, parse

__all__ = ["Counts", "Emulator", "KernelError", "Unsupported", "run", "run_words", "wavefronts"]

THREADS = 8192  # that run together at most, unless one block has more
_codes: dict[str, Code] = {}  # PTX -> translated code


class Emulator:
    """A launcher for `launch_with`: it runs each launch at once.

    order: "forward", "backward" or "shuffled", the order in which blocks run. counting: fill `counts`.
    """

    def __init__(
        self, cc: tuple[int, int] = (8, 0), order: str = "forward", fuse: bool = True, counting: bool = False
    ) -> None:
        self.cc, self.order, self.fuse = cc, order, fuse
        self.counts = Counts() if counting else None
        self.launched: list[str] = []  # names of kernels

    def __call__(self, kernel: Kernel, grid: Grid, arguments: tuple[Any, ...]) -> None:
        self.launched.append(kernel.name)
        ptx = to_ptx(kernel, types_of(arguments), self.cc)
        run(ptx, grid, kernel.threads, arguments, self.order, self.fuse, self.counts)


def run(
    ptx: str, grid: Grid, threads: int, arguments: tuple[Any, ...], order: str = "forward", fuse: bool = True,
    counts: Counts | None = None,
) -> None:  # fmt: skip
    """Run a kernel on NumPy arrays and numbers, of exactly the types that it was compiled for."""
    arrays = [a for a in arguments if isinstance(a, np.ndarray) and a.ndim]
    words = [word for argument in arguments for word in words_of(argument)]
    run_words(ptx, grid, threads, words, arrays, order, fuse, counts)


def run_words(
    ptx: str, grid: Grid, threads: int, words: list[int], arrays: list[np.ndarray], order: str = "forward",
    fuse: bool = True, counts: Counts | None = None,
) -> None:  # fmt: skip
    """Run a kernel with these words as parameters. It may access these arrays only."""
    code = _codes.setdefault(ptx, Code(parse(ptx))) if ptx not in _codes else _codes[ptx]
    numbers = np.arange(grid[0] * grid[1] * grid[2])
    if order == "backward":
        numbers = numbers[::-1]
    elif order == "shuffled":
        numbers = np.random.default_rng(0).permutation(numbers)
    memory = GlobalMemory(arrays, counts)
    together = max(1, THREADS // threads)
    with np.errstate(all="ignore"):
        for first in range(0, numbers.size, together):
            some = numbers[first : first + together]
            State(code, words, memory, grid, (threads, 1, 1), some, fuse, counts).run()
