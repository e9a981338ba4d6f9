"""Recording of a step: a device that computes nothing and lists the kernel calls it receives.

While a Recorder is active, ops use it in place of their device (`device.acting`). Python runs the model as usual, but
each kernel call only becomes an entry in a list. New arrays have their real sizes; nothing is written to them. A
recording takes a millisecond or two. Results of kernels do not exist during a recording, so code that reads them
(`item`, `numpy`, NumPy's functions, a comparison) cannot be recorded: it raises `Unrecordable`.
"""

from __future__ import annotations

import bisect
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from minidl.engine.device import Device, address, recording
from minidl.errors import MinidlError


class Unrecordable(MinidlError, RuntimeError):
    """The model does something that cannot be recorded."""


def _refuse(*_: Any, **__: Any) -> Any:
    raise Unrecordable("values are read or computed outside minidl's operations")


class Recorded(np.ndarray):
    """An array whose values must not be read during recording. It can be sliced and reshaped."""

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        return part if isinstance(part, np.ndarray) else _refuse()

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        allowed = function in (np.broadcast_to, np.shape, np.ndim, np.size)
        return super().__array_function__(function, types, args, kwargs) if allowed else _refuse()

    __array_ufunc__ = __setitem__ = __iter__ = __bool__ = __float__ = __int__ = __contains__ = _refuse


_COMPUTING = """
    all any argmax argmin argsort astype clip copy cumsum dot fill item max mean min nonzero partition prod put repeat
    round sort std sum take tobytes tofile tolist trace var
"""
for _name in _COMPUTING.split():
    setattr(Recorded, _name, _refuse)


@dataclass(eq=False)
class Memory:
    """A piece of memory.

    name: "" for a temporary of the step, "constant" for values that the recording keeps, else the name of a region: of
        memory that each run provides (the weights, a batch ...).
    """

    array: np.ndarray  # bytes
    name: str = ""

    @property
    def address(self) -> int:
        return address(self.array)


class Place(NamedTuple):
    """An array of a recorded step: its memory, its offset in this memory in bytes, and `like`, which has its shape and
    type."""

    memory: Memory
    offset: int
    like: np.ndarray

    def is_temporary(self, outputs: set[Memory]) -> bool:
        """Return whether the array fills a whole temporary that holds no result. outputs: the memory of all results."""
        whole = self.offset == 0 and self.like.nbytes == self.memory.array.nbytes
        return whole and not self.memory.name and self.memory not in outputs

    def same(self, other: Place) -> bool:
        """Return whether both arrays are the same bytes in memory."""
        return (self.memory, self.offset, self.like.nbytes) == (other.memory, other.offset, other.like.nbytes)

    def shaped(self, other: Place) -> Place:
        """Return the same bytes in the shape of another array."""
        return self._replace(like=self.like.reshape(other.like.shape))


@dataclass(eq=False)
class Call:
    """A call of a kernel. arguments: name -> number, tuple or Place."""

    op: str
    kernel: str
    function: Any
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.op}.{self.kernel}"

    def places(self) -> Iterator[tuple[str, Place]]:
        return ((name, value) for name, value in self.arguments.items() if isinstance(value, Place))

    def uses(self, name: str) -> bool:
        """Return whether an optional argument is used: an array that is not empty, a number other than 0, or True."""
        value = self.arguments.get(name)
        return bool(value.like.size if isinstance(value, Place) else value)

    def replaced(self, **arguments: Any) -> Call:
        """Return the same call with some arguments changed."""
        return Call(self.op, self.kernel, self.function, {**self.arguments, **arguments})


class Drawn(int):
    """A placeholder for a number that each replay sets: the seed of dropout's random sequence, or an offset in it.

    The value of an offset is relative to the position in the sequence at which a replay begins.
    """

    kind: str  # "seed" or "offset"
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __xor__ = _refuse

    @classmethod
    def make(cls, kind: str, value: int) -> Drawn:
        number = cls(value)
        number.kind = kind
        return number


class Recorder(Device):
    """A stand-in for a device that records `calls`. drawn: the number of random numbers that these calls draw."""

    def __new__(cls, device: Device) -> Recorder:
        recorder: Recorder = object.__new__(cls)  # not by Device.__new__, which returns a shared object
        return recorder

    def __init__(self, device: Device) -> None:
        self.name, self.device = device.name, device
        self.calls: list[Call] = []
        self.drawn = 0
        self._starts: list[int] = []  # addresses of `_memory`, ascending
        self._memory: list[Memory] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record the kernel calls of this thread during the `with` block."""
        before, recording.recorder = getattr(recording, "recorder", None), self
        try:
            yield
        finally:
            recording.recorder = before

    refuse = staticmethod(_refuse)

    # -- the interface of a device, as ops use it --------------------------------------------------------

    def __getattr__(self, op: str) -> Any:
        if op.startswith("_"):
            raise AttributeError(op)
        table = _Table(self, op, getattr(self.device, op))
        setattr(self, op, table)
        return table

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        memory = np.empty(max(size, 1), np.uint8)  # never written: it takes address space, not memory
        self._add(Memory(memory))
        return memory[:size].view(dtype).reshape(shape).view(Recorded)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        array = self.empty(shape, dtype)
        self.elementwise.fill(0.0, array.reshape(-1))
        return array

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        self.elementwise.copy(source.reshape(-1), target.reshape(-1))

    def digest(self) -> list[Any]:
        """Return a description of the calls, for a comparison of two recordings."""
        numbers: dict[Memory, int] = {}

        def describe(value: Any) -> Any:
            if not isinstance(value, Place):
                return value
            memory, like = value.memory, value.like
            if memory.name == "constant":
                where: Any = memory.array.tobytes()
            else:
                where = memory.name or numbers.setdefault(memory, len(numbers))
            return where, value.offset, like.shape, like.dtype

        return [(call.name, *map(describe, call.arguments.values())) for call in self.calls]

    # -- recording ---------------------------------------------------------------------------------------

    def region(self, name: str, array: np.ndarray) -> np.ndarray:
        """Register memory that each replay provides; return the array to pass to ops."""
        self._add(Memory(array.reshape(-1).view(np.uint8), name))
        return array.view(Recorded)

    def draw(self, seed: int, count: int) -> tuple[int, int]:
        """Return placeholders for the (seed, offset) that `random.draw` returns."""
        self.drawn += count
        return Drawn.make("seed", seed), Drawn.make("offset", self.drawn - count)

    def record(self, op: str, name: str, function: Any, arguments: tuple[Any, ...]) -> None:
        """Append a call. Raises Unrecordable if the kernel is not a Numba function, or if `place` refuses an array."""
        if not hasattr(function, "py_func"):
            raise Unrecordable(f"{op}.{name} of device {self.name!r} is not a Numba function")
        constants = (op, name) == ("movement", "copy")
        places = (self.place(a, constants) if isinstance(a, np.ndarray) else a for a in arguments)
        names = inspect.signature(function.py_func).parameters
        self.calls.append(Call(op, name, function, dict(zip(names, places, strict=True))))

    def place(self, array: np.ndarray, constants: bool = False) -> Place:
        """Return the memory and the offset of an array.

        constants: also accept any array of int64 (a shape, strides); each replay uses a copy of its present values.
        Raises Unrecordable if the array is not contiguous, or neither created in this recording nor part of a region.
        """
        if not array.flags.c_contiguous:
            raise Unrecordable("an array is not contiguous")
        if not array.size:  # an optional argument that is not used
            return Place(Memory(np.zeros(1, np.uint8), "constant"), 0, array)
        start = address(array)
        i = bisect.bisect_right(self._starts, start) - 1
        if i >= 0 and start + array.nbytes <= self._starts[i] + self._memory[i].array.nbytes:
            return Place(self._memory[i], start - self._starts[i], array)
        if constants and array.dtype == np.int64:
            return Place(Memory(array.copy().reshape(-1).view(np.uint8), "constant"), 0, array)
        raise Unrecordable("an array is not a result of minidl's operations")

    def _add(self, memory: Memory) -> None:
        if memory.array.size:
            i = bisect.bisect(self._starts, memory.address)
            self._starts.insert(i, memory.address)
            self._memory.insert(i, memory)


class _Table:
    """The functions of one op, such as conv. Calls of its kernels are recorded. Its other functions, which only
    compute sizes, are called as usual."""

    def __init__(self, recorder: Recorder, op: str, kernels: ModuleType) -> None:
        self._recorder, self._op, self._kernels = recorder, op, kernels

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._kernels, name)
        if name not in self._kernels.__all__:
            return function
        return lambda *arguments: self._recorder.record(self._op, name, function, arguments)
