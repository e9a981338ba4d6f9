"""Records a step: a device that computes nothing and writes down which kernels it was asked for.

While a Recorder is active, ops get it in place of their device (`device.acting`). Python runs the model as ever; each
array is as large as it would be, but memory that nobody has touched, and each kernel call becomes an entry in a list.
That takes a millisecond or two, and no result of a kernel exists in that time: code that wants to see one (`item`,
`numpy`, NumPy's functions, a comparison) cannot be recorded, and says so by raising `Unrecordable`.
"""

from __future__ import annotations

import bisect
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from minidl.engine.device import Device, address, recording
from minidl.errors import MinidlError


class Unrecordable(MinidlError, RuntimeError):
    """The model asked for something that a recorded step cannot do."""


def _refuse(*_: Any, **__: Any) -> Any:
    raise Unrecordable("values are looked at, or computed with, outside minidl's operations")


class Recorded(np.ndarray):
    """An array whose values do not exist yet. It can be sliced and reshaped; nothing can be computed with it."""

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        return part if isinstance(part, np.ndarray) else _refuse()

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        known = function in (np.broadcast_to, np.shape, np.ndim, np.size)
        return super().__array_function__(function, types, args, kwargs) if known else _refuse()

    __array_ufunc__ = __setitem__ = __iter__ = __bool__ = __float__ = __int__ = __contains__ = _refuse


_COMPUTING = """
    all any argmax argmin argsort astype clip copy cumsum dot fill item max mean min nonzero partition prod put repeat
    round sort std sum take tobytes tofile tolist trace var
"""
for _name in _COMPUTING.split():
    setattr(Recorded, _name, _refuse)


@dataclass(eq=False)
class Buffer:
    """A piece of memory: of the step's own, or (with a name) a vector that is given to it."""

    array: np.ndarray  # bytes
    name: str = ""

    @property
    def address(self) -> int:
        return address(self.array)


class Place(NamedTuple):
    """An array: where it lies in which buffer (in bytes), and what it looks like (an array of shape and type)."""

    buffer: Buffer
    offset: int
    like: np.ndarray

    def is_inner(self, wanted: set[Buffer]) -> bool:
        """Whether it is a whole buffer of the step's own, at which nobody looks from outside."""
        whole = self.offset == 0 and self.like.nbytes == self.buffer.array.nbytes
        return whole and not self.buffer.name and self.buffer not in wanted

    def same(self, other: Any) -> bool:
        """Whether both are the same bytes."""
        return (
            isinstance(other, Place)
            and (self.buffer, self.offset, self.like.nbytes) == (other.buffer, other.offset, other.like.nbytes)
        )  # fmt: skip


@dataclass(eq=False)
class Call:
    """A kernel and its arguments, by name: numbers, tuples, Places."""

    op: str
    kernel: str
    function: Any
    arguments: dict[str, Any]

    def places(self) -> Iterator[tuple[str, Place]]:
        return ((name, value) for name, value in self.arguments.items() if isinstance(value, Place))

    def replaced(self, **arguments: Any) -> Call:
        """The same call with some arguments changed."""
        return Call(self.op, self.kernel, self.function, {**self.arguments, **arguments})


class Drawn(int):
    """A number that is another one in each replay: `offset` numbers beyond where the random sequence then stands."""

    kind: str  # "seed" or "offset"
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __xor__ = _refuse

    @classmethod
    def make(cls, kind: str, value: int) -> Drawn:
        number = cls(value)
        number.kind = kind
        return number


@dataclass
class Recording:
    """What was recorded: the calls, and how many random numbers they draw."""

    calls: list[Call] = field(default_factory=list)
    drawn: int = 0


class Recorder(Device):
    """Stands in for a device."""

    def __new__(cls, device: Device) -> Recorder:
        recorder: Recorder = object.__new__(cls)
        return recorder

    def __init__(self, device: Device) -> None:
        self.name, self.device = device.name, device
        self.recording = Recording()
        self._starts: list[int] = []  # addresses, sorted
        self._buffers: list[Buffer] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it, ops of this thread are recorded here."""
        before, recording.recorder = getattr(recording, "recorder", None), self
        try:
            yield
        finally:
            recording.recorder = before

    refuse = staticmethod(_refuse)

    # -- what ops see of a device ------------------------------------------------------------------------

    def __getattr__(self, op: str) -> Any:
        if op.startswith("_"):
            raise AttributeError(op)
        table = _Table(self, op, getattr(self.device, op))
        setattr(self, op, table)
        return table

    def empty(self, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.ndarray:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        memory = np.empty(max(size, 1), np.uint8)  # untouched: costs addresses, no memory
        self._add(Buffer(memory))
        return memory[:size].view(dtype).reshape(shape).view(Recorded)

    def zeros(self, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.ndarray:
        array = self.empty(shape, dtype)
        self.elementwise.fill(0.0, array.reshape(-1))
        return array

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        self.elementwise.copy(source.reshape(-1), target.reshape(-1))

    def digest(self) -> list[Any]:
        """Equal for two recordings that do the same."""
        numbers: dict[Buffer, int] = {}

        def told(value: Any) -> Any:
            if not isinstance(value, Place):
                return value
            buffer, like = value.buffer, value.like
            if buffer.name == "constant":
                where: Any = buffer.array.tobytes()
            else:
                where = buffer.name or numbers.setdefault(buffer, len(numbers))
            return where, value.offset, like.shape, like.dtype

        return [
            (call.op, call.kernel, *(told(value) for value in call.arguments.values())) for call in self.recording.calls
        ]

    # -- recording ---------------------------------------------------------------------------------------

    def region(self, name: str, array: np.ndarray) -> np.ndarray:
        """Take note of memory that each replay is given; returns the array as ops should see it."""
        self._add(Buffer(array.reshape(-1).view(np.uint8), name))
        return array.view(Recorded)

    def draw(self, seed: int, count: int) -> tuple[int, int]:
        """What `random.draw` returns while recording."""
        offset = self.recording.drawn
        self.recording.drawn += count
        return Drawn.make("seed", seed), Drawn.make("offset", offset)

    def record(self, op: str, name: str, function: Any, arguments: tuple[Any, ...]) -> None:
        if not hasattr(function, "py_func"):
            raise Unrecordable(f"{op}.{name} of device {self.name!r} is not compiled")
        constants = (op, name) == ("movement", "copy")
        places = (self.place(a, constants) if isinstance(a, np.ndarray) else a for a in arguments)
        names = inspect.signature(function.py_func).parameters
        self.recording.calls.append(Call(op, name, function, dict(zip(names, places, strict=True))))

    def place(self, array: np.ndarray, constants: bool = False) -> Place:
        """Where an array lies. Raises Unrecordable for memory that this step did not make and was not given.

        constants: whether it may be a few integers (a shape, strides) that are the same in each replay.
        """
        if not array.flags.c_contiguous:
            raise Unrecordable("an array is not contiguous")
        if not array.size:  # stands for "none"
            return Place(Buffer(np.zeros(1, np.uint8), "constant"), 0, array)
        start = address(array)
        i = bisect.bisect_right(self._starts, start) - 1
        if i >= 0 and start + array.nbytes <= self._starts[i] + self._buffers[i].array.nbytes:
            return Place(self._buffers[i], start - self._starts[i], array)
        if constants and array.dtype == np.int64:
            return Place(Buffer(array.copy().reshape(-1).view(np.uint8), "constant"), 0, array)
        raise Unrecordable("an array is not a result of minidl's operations")

    def _add(self, buffer: Buffer) -> None:
        if buffer.array.size:
            i = bisect.bisect(self._starts, buffer.address)
            self._starts.insert(i, buffer.address)
            self._buffers.insert(i, buffer)


class _Table:
    """The kernels of one op: calls of them are recorded; what only computes sizes is called."""

    def __init__(self, recorder: Recorder, op: str, kernels: ModuleType) -> None:
        self._recorder, self._op, self._kernels = recorder, op, kernels

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._kernels, name)
        if name not in self._kernels.__all__:
            return function
        return lambda *arguments: self._recorder.record(self._op, name, function, arguments)
