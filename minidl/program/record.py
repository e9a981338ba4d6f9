"""Recording of a step: a device that computes nothing and lists the kernel calls it receives.

While a Recorder is active, ops use it in place of their device (`device.acting`). Python runs the model as usual, but
each kernel call only becomes an entry in a list. New arrays have their real sizes; nothing is written to them. Results
of kernels do not exist during a recording, so code that reads them (`item`, `numpy`, `data`, NumPy's functions, a
comparison) raises `Unrecordable`. So does code that reads labels or parameters, because their values may differ in each
replay.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import numpy as np
from numpy.typing import DTypeLike

from minidl.engine.changes import count_change
from minidl.engine.device import ALIGNMENT, Device, address, recording
from minidl.engine.tensor import Tensor
from minidl.program.hidden import Drawn, Labels, Lost, Recorded, Running, Unrecordable

CHUNK = 1 << 26  # bytes. Temporaries are cut from chunks of at least this size, because each allocation takes time.
READ = "values are read or computed outside minidl's operations"


class Memory:
    """The memory of an array.

    name: "" for a temporary of the step; "constant" for values that the recording keeps; else the name of a region.
        Each replay provides the memory of regions (the weights, a batch ...).
    """

    __slots__ = ("__weakref__", "array", "name", "nbytes")

    def __init__(self, array: np.ndarray, name: str = "") -> None:
        self.array, self.name, self.nbytes = array, name, array.nbytes


EMPTY = Memory(np.zeros(1, np.uint8), "constant")  # the memory of all arrays of size 0


class Place(NamedTuple):
    """An array of a recorded step. offset: in bytes, from the beginning of `memory`. like: an array of the same shape
    and type."""

    memory: Memory
    offset: int
    like: np.ndarray

    def is_temporary(self, outputs: set[Memory]) -> bool:
        """Return whether the array fills a whole temporary that holds no result. outputs: the memory of all results."""
        whole = self.offset == 0 and self.like.nbytes == self.memory.nbytes
        return whole and not self.memory.name and self.memory not in outputs

    def same(self, other: Place) -> bool:
        """Return whether both arrays are the same bytes in memory."""
        return (self.memory, self.offset, self.like.nbytes) == (other.memory, other.offset, other.like.nbytes)

    def overlaps(self, other: Place) -> bool:
        """Return whether a byte of one array is a byte of the other."""
        return (
            self.memory is other.memory
            and self.offset < other.offset + other.like.nbytes
            and other.offset < self.offset + self.like.nbytes
        )

    def shaped(self, other: Place) -> Place:
        """Return the same bytes in the shape of another array."""
        return self._replace(like=self.like.reshape(other.like.shape))


class Call:
    """A call of a kernel. name: op and kernel, such as "conv.forward". arguments: name -> number, tuple or Place."""

    __slots__ = ("arguments", "function", "name")

    def __init__(self, name: str, function: Any, arguments: dict[str, Any]) -> None:
        self.name, self.function, self.arguments = name, function, arguments

    @property
    def places(self) -> list[tuple[str, Place]]:
        """The arguments that are arrays."""
        return [item for item in self.arguments.items() if type(item[1]) is Place]

    def uses(self, name: str) -> bool:
        """Return whether an optional argument is used: an array that is not empty, a number other than 0, or True."""
        value = self.arguments.get(name)
        return bool(value.like.size if isinstance(value, Place) else value)

    def replaced(self, **arguments: Any) -> Call:
        """Return the same call with some arguments changed."""
        return Call(self.name, self.function, {**self.arguments, **arguments})


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause Python's garbage collector within the `with` block.

    A recording makes many objects that stay alive, and no cycles. The collector would search them several times.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Recorder(Device):
    """A stand-in for a device that records `calls`. drawn: the number of random numbers that these calls draw.

    gpu: the GPU whose kernels are recorded (engine/cuda_device.py); None: those of the device.
    """

    def __new__(cls, *_: Any) -> Recorder:
        recorder: Recorder = object.__new__(cls)  # not by Device.__new__, which returns a shared object
        return recorder

    def __init__(self, device: Device, gpu: Any = None) -> None:
        self.name, self.device, self.gpu = device.name, device, gpu
        self.sum_parts = (gpu or device).sum_parts
        self.calls: list[Call] = []
        self.drawn = 0
        self.refused = ""  # why this step cannot be recorded; stays set even if the step's code catches the exception
        self.changed: list[tuple[object, str, Any]] = []  # objects, attributes, earlier values; oldest first
        self._tensors: list[ref[Tensor]] = []  # the tensors of the step
        self._places: dict[int, Place] = {}  # id of an array -> its place
        self._regions: list[tuple[int, Place]] = []  # (address, region)
        self._chunk, self._used = np.empty(CHUNK, np.uint8), 0  # memory of temporaries, and how much of it is used

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record the kernel calls of this thread during the `with` block. At its end, undo changes of layers' modes."""
        before, recording.recorder = recording.recorder, self
        running, Running.recorder = Running.recorder, self
        count_change()
        try:
            yield
        finally:
            recording.recorder, Running.recorder = before, running
            count_change()
            for owner, name, value in reversed(self.changed):
                setattr(owner, name, value)
            for op in [name for name, value in vars(self).items() if isinstance(value, _Table)]:
                delattr(self, op)  # it refers to this recorder: the cycle would keep the model's memory alive

    def refuse(self, reason: str = READ) -> NoReturn:
        """Raise Unrecordable."""
        self.refused = self.refused or reason
        raise Unrecordable(reason)

    # -- the interface of a device, as ops use it --------------------------------------------------------

    def __getattr__(self, op: str) -> Any:
        if op.startswith("_"):
            raise AttributeError(op)
        table = _Table(self, op, self.gpu.kernels(op) if self.gpu else getattr(self.device, op))
        setattr(self, op, table)
        return table

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if self._used + size > self._chunk.size:
            self._chunk, self._used = np.empty(max(size, CHUNK), np.uint8), 0
        array = Recorded(shape, dtype, self._chunk, self._used)  # never written: it takes address space, not memory
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        if size:
            self._places[id(array)] = Place(Memory(array), 0, array)
        return array

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        array = self.empty(shape, dtype)
        self.elementwise.fill(0.0, array.reshape(-1))
        return array

    def labels(self, values: Any) -> np.ndarray:
        return Labels.array_of(values)

    def hidden(self, array: np.ndarray) -> np.ndarray:
        """Return the array to pass to a Function: a view whose values cannot be read."""
        return array if type(array) is Recorded else array.view(Recorded)

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        self.elementwise.copy(source.reshape(-1), target.reshape(-1))

    def digest(self) -> list[Any]:
        """Return a description of the calls, for a comparison of two recordings."""
        numbers: dict[Memory, int] = defaultdict(itertools.count().__next__)  # temporary -> number, by first use
        found: list[Any] = []
        for call in self.calls:
            found.append(call.name)
            for value in call.arguments.values():
                if type(value) is Place:
                    memory, offset, like = value
                    where: Any = memory.name or numbers[memory]
                    if where == "constant":
                        where = memory.array.tobytes()
                    found.append((where, offset, like.shape, like.dtype))
                else:
                    found.append((value.kind, value.value) if type(value) is Drawn else value)
        return found

    # -- the tensors of the step -------------------------------------------------------------------------

    def made(self, tensor: Tensor) -> None:
        self._tensors.append(ref(tensor))

    def tensor(self, array: np.ndarray) -> Tensor:
        """Return a tensor for a region, as the step's input."""
        tensor = Tensor.wrap(array, self.device)
        self.made(tensor)
        return tensor

    def kept(self) -> bool:
        """Return whether an object outside the step still refers to a tensor of the step."""
        if any(made() is not None for made in self._tensors):
            gc.collect(0)  # frees cycles, such as a recursive function inside `forward` that refers to itself
        return any(made() is not None for made in self._tensors)

    def invalidate(self) -> None:
        """Take the arrays from all tensors of the step that still exist: using one of them raises Unrecordable."""
        for made in self._tensors:
            if (tensor := made()) is not None:
                tensor._data = Lost()  # type: ignore[assignment]
                tensor._grad = tensor.creator = None

    # -- recording ---------------------------------------------------------------------------------------

    def region(self, name: str, array: np.ndarray) -> np.ndarray:
        """Register memory that each replay provides; return the array to pass to ops. array: contiguous."""
        if not array.flags.c_contiguous:
            self.refuse(f"{name} is not contiguous")
        view = array.view(Recorded)
        region = Place(Memory(view, name), 0, view)
        self._places[id(array)] = self._places[id(view)] = region
        self._regions.append((address(view), region))
        return view

    def draw(self, seed: int, count: int) -> tuple[int, int]:
        """Return placeholders for the (seed, offset) that `random.draw` returns."""
        self.drawn += count
        return Drawn("seed", seed), Drawn("offset", self.drawn - count)  # type: ignore[return-value]

    def record(self, name: str, function: Any, *arguments: Any) -> None:
        """Append a call. Raises Unrecordable if the kernel is not a Numba function, or if `place` refuses an array."""
        names = tuple(inspect.signature(function).parameters) if self.gpu else parameters(function)
        if names is None:
            self.refuse(f"{name} is not a Numba function")
        constants = name == "movement.copy"
        values = [self.place(a, constants) if isinstance(a, np.ndarray) else a for a in arguments]
        self.calls.append(Call(name, function, dict(zip(names, values, strict=True))))

    def place(self, array: np.ndarray, constants: bool = False) -> Place:
        """Return the memory and the offset of an array.

        constants: also accept any array of int64 (a shape, strides); each replay uses a copy of its present values.
        Raises Unrecordable if the array is not contiguous, or if its memory is neither a temporary nor a region.
        """
        known = self._places.get(id(array))
        if known is not None:
            return known
        if not array.flags.c_contiguous:
            self.refuse("an array is not contiguous")
        if not array.size:  # an optional argument that is not used
            return Place(EMPTY, 0, array)
        whole = self._places.get(id(array.base))
        if whole is not None and whole.like.nbytes == array.nbytes:  # the same array in another shape
            return Place(whole.memory, whole.offset, array)
        start = address(array)
        for first, region in self._regions if whole is None else [(address(whole.like), whole)]:
            offset = start - first
            if 0 <= offset <= region.like.nbytes - array.nbytes:
                place = self._places[id(array)] = Place(region.memory, region.offset + offset, array)
                return place
        if constants and array.dtype == np.int64:
            return Place(Memory(array.copy(), "constant"), 0, array)
        self.refuse("an array is not a result of minidl's operations")


@functools.cache
def parameters(kernel: Any) -> tuple[str, ...] | None:
    """Return the names of a kernel's parameters, or None if it is not a Numba function."""
    return tuple(inspect.signature(kernel.py_func).parameters) if hasattr(kernel, "py_func") else None


class _Table:
    """The functions of one op, such as conv. Calls of kernels are recorded. The other functions only compute sizes;
    they are called as usual."""

    def __init__(self, recorder: Recorder, op: str, kernels: ModuleType) -> None:
        self._recorder, self._op, self._kernels = recorder, op, kernels

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._kernels, name)
        if name in self._kernels.__all__:
            function = functools.partial(self._recorder.record, f"{self._op}.{name}", function)
        setattr(self, name, function)  # later look-ups find this attribute and do not call __getattr__
        return function
