"""A recorded step on a GPU: a table of launches (function, blocks, threads, parameters), walked by compiled code.

Where the driver allows it, the walk is captured as a graph, which one call of the driver launches. A graph contains the
addresses of the regions, so each set of addresses has its own. The first run is not captured: the driver may load a
kernel at its first launch, which a capture forbids. Random numbers do not stop a capture: their seed and counter are in
the GPU's memory, where each run writes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from ctypes import byref, c_void_p
from typing import Any, NoReturn
from weakref import finalize

import numpy as np

from minidl.engine import cuda_driver, random
from minidl.engine.cuda import DATA, words_of
from minidl.engine.cuda_array import OnDevice, array_at
from minidl.engine.cuda_device import WORD, DeviceMemory, Gpu
from minidl.engine.cuda_driver import DriverError
from minidl.engine.device import address
from minidl.program.cuda_call import walk
from minidl.program.cuda_launches import APART, compile_all, launches_of
from minidl.program.cuda_launches import Call as KernelCall
from minidl.program.hidden import Drawn
from minidl.program.precompile import OnProgress
from minidl.program.record import Call, Memory, Place, Recorder
from minidl.program.table import WORKSPACE, Program

RANDOM = "random"  # the region of (seed, counter), both uint64
GRAPHS = 8  # that a program keeps: one for each place of a batch, and workspace


class ProgramOnGpu(Program):
    """A table of launches on regions of a GPU's memory."""

    def _build(
        self, recorder: Recorder, calls: Sequence[Call], offsets: Mapping[Memory, int], progress: OnProgress,
        also: Sequence[Any],
    ) -> None:  # fmt: skip
        self._gpu: Gpu = recorder.gpu
        self._offsets, self._regions = offsets, {WORKSPACE: APART}
        self._copies: dict[int, DeviceMemory] = {}  # address of a constant on the host -> its copy
        self._graphs: dict[Any, tuple[int, finalize[..., Any]]] = {}  # addresses of the regions -> graph, what frees it
        self._has_run = False
        made = [self._call(call) for call in calls]
        self._random = self._gpu.allocate(2 * WORD if recorder.drawn else 0)
        compile_all(self._gpu, [*made, *also], progress)
        words: list[int] = []
        rows: list[list[int]] = []
        relocations: dict[str, list[tuple[int, int]]] = defaultdict(list)  # region -> (word, offset in bytes)
        for kernel_call in made:
            for launch in launches_of(*kernel_call):
                rows.append([self._gpu.function(*launch.key), *launch.grid, launch.kernel.threads, len(words)])
                for argument in launch.arguments:
                    at = len(words)
                    words += words_of(argument)
                    if isinstance(argument, np.ndarray) and argument.ndim and argument.size:
                        self._relocate(argument, at + DATA, words, relocations)
        self._blocks = np.array(words, np.int64)
        self._relocations = {name: np.array(pairs, np.int64).T for name, pairs in relocations.items()}
        self._pointers = address(self._blocks) + WORD * np.arange(len(words) + 1, dtype=np.int64)
        self.table = np.array(rows, np.int64).reshape(-1, 6)
        self.table[:, 5] = address(self._pointers) + WORD * self.table[:, 5]

    def _call(self, call: Call) -> KernelCall:
        """Return the call with arrays at addresses that stand for a region and an offset."""
        op, name = call.name.split(".")
        return self._gpu.file(op), name, [self._argument(value) for value in call.arguments.values()]

    def _argument(self, value: Any) -> Any:
        if type(value) is Drawn:
            return array_at(self._base(RANDOM), (2,), np.uint64) if value.kind == "seed" else value.value
        if type(value) is not Place:
            return value
        memory, offset, like = value
        if memory.name == "constant" and like.size:
            return memory.array[offset // like.itemsize :][: like.size].reshape(like.shape)
        if not memory.name:
            offset += self._offsets[memory]
        return array_at(self._base(memory.name or WORKSPACE) + offset, like.shape, like.dtype)

    def _base(self, region: str) -> int:
        """Return the address that stands for the beginning of a region."""
        return self._regions.setdefault(region, (len(self._regions) + 1) * APART)

    def _relocate(self, array: np.ndarray, at: int, words: list[int], relocations: dict[str, Any]) -> None:
        """Note which region the address in a word is in. The address of a constant is that of a copy on the GPU."""
        place = address(array)
        if isinstance(array, OnDevice):
            name = list(self._regions)[place // APART - 1]
            relocations[name].append((at, place % APART))
            return
        if place not in self._copies:
            self._copies[place] = self._gpu.allocate(array.nbytes)
            self._gpu.send(array, self._copies[place].address)
        words[at] = self._copies[place].address

    def warm(self) -> None:
        walk(self._gpu.driver.launch_address, self.table[:0], self._gpu.main)

    def run(self, bases: Mapping[str, int], first: int = 0, last: int | None = None) -> None:
        """Launch all kernels, if `first` is 0, with each region at the address in `bases`. Do not wait for them."""
        if first:
            return
        gpu = self._gpu
        gpu.use()
        bases = {**bases, RANDOM: self._random.address}
        self.bind(bases)
        self.draw()
        key = tuple(bases.get(name) for name in self._relocations)
        if key not in self._graphs and gpu.captures and self._has_run:
            self._capture(key)
        if key in self._graphs:
            with gpu.errors():
                gpu.driver.cuGraphLaunch(self._graphs[key][0], gpu.main)
        else:
            self._walk()
        self._has_run = True

    def _walk(self) -> None:
        with self._gpu.errors():
            self._launch()

    def _launch(self) -> None:
        driver = self._gpu.driver
        driver.check(walk(driver.launch_address, self.table, self._gpu.main), "cuLaunchKernel")

    def _capture(self, key: Any) -> None:
        """Make a graph of the launches. If the driver refuses, no step is captured any more."""
        gpu, driver, graph = self._gpu, self._gpu.driver, c_void_p()
        try:
            driver.cuStreamBeginCapture_v2(gpu.main, cuda_driver.THREAD_LOCAL)
            try:
                self._launch()
            finally:
                driver.cuStreamEndCapture(gpu.main, byref(graph))  # also ends one that has failed
            made = driver.get("cuGraphInstantiateWithFlags", graph, 0, kind=c_void_p)
            driver.cuGraphDestroy(graph)
        except DriverError:
            gpu.captures = False
            return
        free = finalize(self, gpu.quietly, "cuGraphExecDestroy", made)
        free.atexit = False
        self._graphs[key] = made, free
        if len(self._graphs) > GRAPHS:
            _, free = self._graphs.pop(next(iter(self._graphs)))
            free()

    def draw(self) -> None:
        """Write the position of the next random numbers to the GPU's memory."""
        if self._drawn:
            seed, start = random.draw(self._drawn)
            self._gpu.send(np.array([seed % 2**64, start], np.uint64), self._random.address)

    def final(self, region: str, start: int, stop: int) -> int:
        return len(self.table)  # all launches are made together

    def twin(self) -> NoReturn:
        raise NotImplementedError("a program on a GPU runs in one thread")
