"""The arena: all parameters of a model in one flat vector.

    theta   | conv1.weight ....| conv1.bias ..| fc1.weight ..............| fc1.bias .|
    grad    |  the same layout                                                       |
    state   |  the same layout: momentum, Adam's moments ...                         |

Each parameter's array becomes a view into theta, the vector of all parameters, and its gradient a view into grad. The
optimizer, messages between replicas and checkpoints then handle a few flat vectors instead of many arrays.

Each parameter begins on a 64-byte boundary. The gaps between parameters are zero in theta and in grad; every update
rule keeps them zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from minidl.engine.changes import count_change
from minidl.engine.device import ALIGNMENT, aligned, forbid_recording
from minidl.engine.parameter import Parameter
from minidl.errors import MinidlError, ShapeError


class Slot(NamedTuple):
    """The location of one parameter: elements [start, stop) of each vector, to be viewed in this shape."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


class Arena:
    """Flat storage for parameters. The constructor moves the parameters into it.

    parameters: name -> Parameter, all of one data type. A parameter with two names (tied weights) gets one slot. If a
        parameter is in another arena, that arena is dissolved: all its parameters get separate arrays first.
    buffer: the memory for theta: a writable, contiguous vector of the parameters' type, 64-byte aligned, with
        `Arena.required_size(parameters)` elements. The parameters' values are copied into it. None: a new vector.

    theta, grad: the vectors. The code of a step that is being recorded cannot read them, or `version`.
    version: increases with each write to theta through minidl. Caches of data computed from theta (packed weights, a
        published copy) compare versions. After a direct write, call `touch`.
    dissolved: whether the parameters have left the arena. A dissolved arena stores nothing that a model uses.
    cleared: the parameters whose gradient is known to be zero. Their next gradient is written, not added. This saves
        reading the old gradient and, in a recorded step (program/), setting it to zero. Reading `parameter.grad`
        removes the parameter from the set, because the caller may modify the gradient. Between `zero_grad` and
        `backward`, do not write to the vector `grad` directly: `backward` would overwrite it.

    Raises ShapeError if there are no parameters, if their types differ, or if the buffer does not fit.
    """

    def __init__(self, parameters: Mapping[str, Parameter], buffer: np.ndarray | None = None) -> None:
        self.slots, size = _layout(parameters)
        self.parameters = {slot.name: parameters[slot.name] for slot in self.slots}
        dtypes = {parameter.dtype for parameter in self.parameters.values()}
        if len(dtypes) != 1:
            raise ShapeError(f"arena: parameters of {len(dtypes)} types; expected one or more parameters of one type")
        self.dtype = dtypes.pop()
        self._theta = aligned(size, self.dtype) if buffer is None else self._checked(buffer, size)
        self._grad = aligned(size, self.dtype)
        self._version = 0
        self._there: Any = None  # the vectors on a GPU, after `move` (cuda_vectors.py)
        self.dissolved = False
        self.cleared: set[Parameter] = set()
        for parameter in self.parameters.values():
            if parameter.arena is not None:
                parameter.arena.dissolve()
        for slot, parameter in zip(self.slots, self.parameters.values(), strict=True):
            self.view(self._theta, slot)[...] = parameter.numpy()
            if parameter.grad is not None:
                self.view(self._grad, slot)[...] = parameter.grad
            parameter.move_into(self, self.view(self._theta, slot), self.view(self._grad, slot))

    def _checked(self, buffer: np.ndarray, size: int) -> np.ndarray:
        good = buffer.shape == (size,) and buffer.dtype == self.dtype
        if not (good and buffer.flags.c_contiguous and buffer.flags.writeable and buffer.ctypes.data % ALIGNMENT == 0):
            raise ShapeError(
                f"arena: a buffer of {buffer.dtype} {buffer.shape}; expected a writable contiguous vector of "
                f"{size} {self.dtype} that begins on a {ALIGNMENT}-byte boundary"
            )
        buffer[:] = 0
        return buffer

    @staticmethod
    def required_size(parameters: Mapping[str, Parameter]) -> int:
        """Return the number of elements that a buffer for these parameters must have."""
        return _layout(dict(parameters))[1]

    @property
    def theta(self) -> np.ndarray:
        forbid_recording()
        return self._theta if self._there is None else self._there.host("theta")

    @property
    def grad(self) -> np.ndarray:
        forbid_recording()
        return self._grad if self._there is None else self._there.host("grad")

    @property
    def gpu(self) -> Any:
        """The GPU on which programs and optimizers compute (engine/cuda_device.py), or None."""
        return None if self._there is None else self._there.gpu

    def move(self, gpu: Any) -> None:
        """Let programs and optimizers compute on a GPU from now on; None: on the CPU."""
        if gpu is self.gpu:
            return
        self.fetch()
        self._there = None
        count_change()
        if gpu is not None:
            from minidl.engine.cuda_vectors import ArenaOnGpu

            self._there = ArenaOnGpu(gpu, self.slots, self.parameters, self._theta, self._grad)

    def array(self, name: str) -> np.ndarray:
        """Return theta or grad as an array on the GPU, which then owns the values (cuda_vectors.py)."""
        found: np.ndarray = self._there.array(name)
        return found

    def fetch(self) -> None:
        """Copy the vectors to the host, if they are on a GPU: the host then owns the values."""
        if self._there is not None:
            self._there.host("theta")
            self._there.host("grad")

    @property
    def version(self) -> int:
        forbid_recording()
        return self._version

    @property
    def size(self) -> int:
        """The number of elements of each vector, gaps included."""
        return self._theta.size

    @property
    def layout_hash(self) -> str:
        """A hash of the names, offsets, shapes and data type: equal if and only if two arenas have the same layout."""
        text = "\n".join(f"{slot.name} {slot.start} {slot.shape}" for slot in self.slots) + f"\n{self.dtype}"
        return hashlib.sha256(text.encode()).hexdigest()

    def holds(self, parameters: Mapping[str, Parameter]) -> bool:
        """Return whether this arena stores exactly these parameters, under these names."""
        own = {name: id(parameter) for name, parameter in self.parameters.items()}
        return not self.dissolved and own == {name: id(parameter) for name, parameter in parameters.items()}

    def dissolve(self) -> None:
        """Move every parameter out of the arena, into a separate array with the same values."""
        self.fetch()
        self.dissolved = True
        for slot, parameter in zip(self.slots, self.parameters.values(), strict=True):
            if parameter.arena is self:
                parameter.move_into(None, self.view(self._theta, slot).copy(), self.view(self._grad, slot).copy())

    def __reduce__(self) -> Any:
        """Describe a copy for deepcopy and pickle: a new arena with its own memory and with copies of the parameters.

        Values and gradients come from the copied parameters. A copy of a dissolved arena is dissolved as well. The copy
        of an arena on a GPU computes on the CPU.
        """
        self.fetch()
        return _copied, (type(self), self.parameters, self.cleared, self.version, self.dissolved)

    def __copy__(self) -> Arena:
        raise MinidlError("copy.copy of an arena would move the parameters out of it; use copy.deepcopy")

    def new_vector(self) -> np.ndarray:
        """Return a vector of zeros in theta's layout, for example for momentum."""
        return aligned(self.size, self.dtype)

    def view(self, vector: np.ndarray, slot: Slot) -> np.ndarray:
        """Return one parameter's part of a vector in this layout, as a view in the parameter's shape."""
        return vector[slot.start : slot.stop].reshape(slot.shape)

    def views(self, vector: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, view of the parameter's part of the vector) for every parameter."""
        for slot in self.slots:
            yield slot.name, self.view(vector, slot)

    def zero_grad(self) -> None:
        if self._there is not None:
            self._there.host("grad")
        self._grad[:] = 0
        self.cleared = set(self.parameters.values())

    def touch(self) -> None:
        """Increase the version. Call this after each write to theta."""
        self._version += 1


def _copied(
    kind: type[Arena], parameters: dict[str, Parameter], cleared: set[Parameter], version: int, dissolved: bool
) -> Arena:
    """Return a new arena for copied parameters (see `Arena.__reduce__`)."""
    if dissolved:  # the parameters are elsewhere, and must stay there
        arena = kind({name: Parameter(parameter._data.copy()) for name, parameter in parameters.items()})
        arena.dissolve()
        arena.parameters = parameters
    else:
        arena = kind(parameters)
    arena.cleared, arena._version = cleared, version
    return arena


def _layout(parameters: Mapping[str, Parameter]) -> tuple[list[Slot], int]:
    """Return the slots of the distinct parameters, in order, and the length of the vectors."""
    slots, start, seen = [], 0, set()
    for name, parameter in parameters.items():
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        slots.append(Slot(name, start, start + parameter.size, parameter.shape))
        step = ALIGNMENT // parameter.dtype.itemsize
        start = -(-slots[-1].stop // step) * step
    return slots, start
