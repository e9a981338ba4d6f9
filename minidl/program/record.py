"""Recording of a step: a device that computes nothing and lists the kernel calls it receives.

While a Recorder is active, ops use it in place of their device (`device.acting`). Python runs the model as usual, but
each kernel call only becomes an entry in a list. New arrays have their real sizes; nothing is written to them. A
recording takes a millisecond or two. Results of kernels do not exist during a recording, so code that reads them
(`item`, `numpy`, `data`, NumPy's functions, a comparison) raises `Unrecordable`. So does code that reads labels or
parameters, because their values may differ in each replay.
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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from minidl.engine.device import ALIGNMENT, Device, address, recording
from minidl.errors import MinidlError

CHUNK = 1 << 26  # bytes: temporaries are parts of chunks of at least this size, because each allocation takes time


class Unrecordable(MinidlError, RuntimeError):
    """The model does something that cannot be recorded."""


def _refuse(*_: Any, **__: Any) -> Any:
    recorder = getattr(recording, "recorder", None)
    reason = "values are read or computed outside minidl's operations"
    if recorder is not None:
        recorder.refuse(reason)
    raise Unrecordable(reason)


class Recorded(np.ndarray):
    """An array whose values must not be read during recording. It can be sliced and reshaped."""

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        return part if isinstance(part, np.ndarray) else _refuse()

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        allowed = function in (np.broadcast_to, np.shape, np.ndim, np.size)
        return super().__array_function__(function, types, args, kwargs) if allowed else _refuse()

    __array_ufunc__ = __setitem__ = __iter__ = __bool__ = __float__ = __int__ = __contains__ = __index__ = _refuse
    __complex__ = __reduce__ = __reduce_ex__ = __copy__ = __deepcopy__ = __format__ = _refuse
    flat = data = property(_refuse)


_COMPUTING = """
    all any argmax argmin argpartition argsort astype byteswap choose clip compress conj conjugate copy cumprod cumsum
    diagonal dot dump dumps fill getfield item max mean min nonzero partition prod put repeat resize round searchsorted
    setfield sort std sum take tobytes tofile tolist trace var
"""
for _name in _COMPUTING.split():
    setattr(Recorded, _name, _refuse)


class Labels:
    """The labels of a batch during recording: a shape and a type. Code that reads values raises Unrecordable.

    This is no array, because NumPy would read its values. Losses may reshape it and pass it to `ops.cross_entropy`.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array.view(Recorded)
        self.shape, self.dtype, self.ndim, self.size = array.shape, array.dtype, array.ndim, array.size

    def __len__(self) -> int:
        return len(self.array)

    def reshape(self, *shape: Any) -> Labels:
        return Labels(self.array.reshape(*shape))

    def ravel(self) -> Labels:
        return Labels(self.array.reshape(-1))

    flatten = ravel

    def squeeze(self, axis: Any = None) -> Labels:
        return Labels(self.array.squeeze(axis))

    def astype(self, dtype: DTypeLike, *_: Any, **__: Any) -> Labels:
        return self if np.dtype(dtype) == self.dtype else _refuse()

    def __getitem__(self, key: Any) -> Labels:
        parts = key if isinstance(key, tuple) else (key,)
        basic = all(part is None or part is ... or isinstance(part, slice) for part in parts)
        return Labels(self.array[key]) if basic else _refuse()

    def __getattr__(self, name: str) -> Any:
        return _refuse()

    __array_ufunc__ = __setitem__ = __iter__ = __bool__ = __float__ = __int__ = __contains__ = __index__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __floordiv__ = _refuse
    __truediv__ = __pow__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __invert__ = __neg__ = __abs__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __copy__ = __deepcopy__ = __reduce_ex__ = _refuse
    __repr__ = __str__ = __format__ = __hash__ = _refuse


class Memory:
    """The memory of an array.

    name: "" for a temporary of the step; "constant" for values that the recording keeps; else the name of a region.
        Each replay provides the memory of regions (the weights, a batch ...).
    """

    __slots__ = ("array", "name", "nbytes")

    def __init__(self, array: np.ndarray, name: str = "") -> None:
        self.array, self.name, self.nbytes = array, name, array.nbytes


_EMPTY = Memory(np.zeros(1, np.uint8), "constant")  # the memory of all arrays of size 0


class Place(NamedTuple):
    """An array of a recorded step. offset: in bytes, from the beginning of `memory`. like: an array of the same shape
    and type."""

    memory: Memory
    offset: int
    like: np.ndarray

    def is_temporary(self, outputs: set[Memory]) -> bool:
        """Return whether the array is a whole temporary and no result. outputs: the memory of all results."""
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


class Drawn(int):
    """A placeholder for a number that each replay sets: the seed of dropout's random sequence, or an offset in it.

    During the recording, an offset counts from the position at which the step begins.
    """

    kind: str  # "seed" or "offset"
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __xor__ = _refuse

    @classmethod
    def make(cls, kind: str, value: int) -> Drawn:
        number = cls(value)
        number.kind = kind
        return number


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
    """A stand-in for a device that records `calls`. drawn: the number of random numbers that these calls draw."""

    def __new__(cls, device: Device) -> Recorder:
        recorder: Recorder = object.__new__(cls)  # not by Device.__new__, which returns a shared object
        return recorder

    def __init__(self, device: Device) -> None:
        self.name, self.device = device.name, device
        self.calls: list[Call] = []
        self.drawn = 0
        self.refused = ""  # why this step cannot be recorded; stays set even if the step's code catches the exception
        self._places: dict[int, Place] = {}  # by the id of the array
        self._regions: list[tuple[int, Place]] = []  # with their addresses
        self._chunk, self._used = np.empty(CHUNK, np.uint8), 0  # memory of temporaries, and how much of it is used

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record the kernel calls of this thread during the `with` block."""
        before, recording.recorder = getattr(recording, "recorder", None), self
        try:
            yield
        finally:
            recording.recorder = before
            for op in [name for name, value in vars(self).items() if isinstance(value, _Table)]:
                delattr(self, op)  # it refers to this recorder: the cycle would keep the model's memory alive

    def refuse(self, reason: str = "values are read or computed outside minidl's operations") -> None:
        """Raise Unrecordable."""
        self.refused = self.refused or reason
        raise Unrecordable(reason)

    # -- the interface of a device, as ops use it --------------------------------------------------------

    def __getattr__(self, op: str) -> Any:
        if op.startswith("_"):
            raise AttributeError(op)
        table = _Table(self, op, getattr(self.device, op))
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
        return values.array if isinstance(values, Labels) else np.asarray(values)

    def hidden(self, array: np.ndarray) -> np.ndarray:
        return array if type(array) is Recorded else array.view(Recorded)

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        self.elementwise.copy(source.reshape(-1), target.reshape(-1))

    def digest(self) -> list[Any]:
        """Return a description of the calls, for a comparison of two recordings."""
        numbers: dict[Memory, int] = defaultdict(itertools.count().__next__)  # of temporaries, by their first use
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
                    found.append(value)
        return found

    # -- recording ---------------------------------------------------------------------------------------

    def region(self, name: str, array: np.ndarray) -> np.ndarray:
        """Register memory that each replay provides; return the array to pass to ops. array: contiguous."""
        if not array.flags.c_contiguous:
            raise Unrecordable(f"{name} is not contiguous")
        view = array.view(Recorded)
        region = Place(Memory(view, name), 0, view)
        self._places[id(array)] = self._places[id(view)] = region
        self._regions.append((address(view), region))
        return view

    def draw(self, seed: int, count: int) -> tuple[int, int]:
        """Return placeholders for the (seed, offset) that `random.draw` returns."""
        self.drawn += count
        return Drawn.make("seed", seed), Drawn.make("offset", self.drawn - count)

    def record(self, name: str, function: Any, *arguments: Any) -> None:
        """Append a call. Raises Unrecordable if the kernel is not a Numba function, or if `place` refuses an array."""
        constants = name == "movement.copy"
        values = [self.place(a, constants) if isinstance(a, np.ndarray) else a for a in arguments]
        self.calls.append(Call(name, function, dict(zip(_parameters(name, function), values, strict=True))))

    def place(self, array: np.ndarray, constants: bool = False) -> Place:
        """Return the memory and the offset of an array.

        constants: also accept any array of int64 (a shape, strides); each replay uses a copy of its present values.
        Raises Unrecordable if the array is not contiguous, or if its memory is neither a temporary nor a region.
        """
        known = self._places.get(id(array))
        if known is not None:
            return known
        if not array.flags.c_contiguous:
            raise Unrecordable("an array is not contiguous")
        if not array.size:  # an optional argument that is not used
            return Place(_EMPTY, 0, array)
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
        raise Unrecordable("an array is not a result of minidl's operations")


@functools.cache
def _parameters(name: str, kernel: Any) -> tuple[str, ...]:
    """Return the names of a kernel's parameters. Raises Unrecordable if it is not a Numba function."""
    if not hasattr(kernel, "py_func"):
        raise Unrecordable(f"{name} is not a Numba function")
    return tuple(inspect.signature(kernel.py_func).parameters)


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
