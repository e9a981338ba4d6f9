"""The arena: all parameters of a model in one flat vector.

    theta   | conv1.weight ....| conv1.bias ..| fc1.weight ..............| fc1.bias .|
    grad    |  the same layout                                                       |
    state   |  the same layout: momentum, Adam's moments ...                         |

Each parameter's array becomes a view into theta, its gradient a view into grad. Then the optimizer is one pass over
flat vectors, a message to another replica is one send, a checkpoint is one write. The vectors may lie anywhere: in
memory of our own, in shared memory, in an MPI window.

Each parameter begins on a 64-byte boundary. The gaps are zero in theta and in grad, and every update rule keeps zeros
zero.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from minidl.engine.device import ALIGNMENT, aligned
from minidl.engine.parameter import Parameter
from minidl.errors import ShapeError


class Slot(NamedTuple):
    """Where a parameter lies: elements [start, stop) of each vector, with this shape."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


class Arena:
    """Moves parameters into one vector.

    parameters: name -> Parameter, all of one type; a parameter under two names (tied weights) gets one place. Those
        that lie in another arena leave it, and so does whatever else lies there: that arena is dissolved.
    buffer: the memory for theta, or None for memory of our own: a writable, contiguous vector of the parameters' type
        with `Arena.required_size(parameters)` elements. The parameters' values are copied into it.

    theta, grad: the vectors. version: raised by every write, so that whoever keeps something computed from theta
    (packed weights, a published copy) knows when it is out of date; after a write of your own, call `touch`.
    cleared: the parameters whose gradient is known to be zero: the next one is written there, not added, which saves
    two passes over memory. Reading `parameter.grad` ends that, since it may be to write; who writes into the vector
    `grad` itself should do so after `backward`.
    """

    def __init__(self, parameters: Mapping[str, Parameter], buffer: np.ndarray | None = None) -> None:
        self.slots, size = _layout(parameters)
        self.parameters = {slot.name: parameters[slot.name] for slot in self.slots}
        dtypes = {parameter.dtype for parameter in self.parameters.values()}
        if len(dtypes) != 1:
            raise ShapeError(f"arena: parameters of {len(dtypes)} types; expected one or more parameters of one type")
        self.dtype = dtypes.pop()
        self.theta = aligned(size, self.dtype) if buffer is None else self._checked(buffer, size)
        self.grad = aligned(size, self.dtype)
        self.version = 0
        self.cleared: set[Parameter] = set()
        for parameter in self.parameters.values():
            if parameter.arena is not None:
                parameter.arena.dissolve()
        for slot, parameter in zip(self.slots, self.parameters.values(), strict=True):
            self.view(self.theta, slot)[...] = parameter.numpy()
            if parameter.grad is not None:
                self.view(self.grad, slot)[...] = parameter.grad
            parameter.move_into(self, self.view(self.theta, slot), self.view(self.grad, slot))

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
        """How many elements a buffer for these parameters needs."""
        return _layout(dict(parameters))[1]

    @property
    def size(self) -> int:
        """Elements of each vector, gaps included."""
        return self.theta.size

    @property
    def layout_hash(self) -> str:
        """Equal for two replicas if and only if one's theta means the same as the other's."""
        text = "\n".join(f"{slot.name} {slot.start} {slot.shape}" for slot in self.slots) + f"\n{self.dtype}"
        return hashlib.sha256(text.encode()).hexdigest()

    def holds(self, parameters: Mapping[str, Parameter]) -> bool:
        """Whether exactly these parameters lie here, under these names."""
        return self.parameters == parameters and all(p.arena is self for p in parameters.values())

    def dissolve(self) -> None:
        """Give every parameter arrays of its own, with the same values."""
        for slot, parameter in zip(self.slots, self.parameters.values(), strict=True):
            if parameter.arena is self:
                parameter.move_into(None, self.view(self.theta, slot).copy(), self.view(self.grad, slot).copy())

    def __deepcopy__(self, memo: dict[int, Any]) -> Arena:
        """An arena with vectors of its own for the copies of the parameters."""
        return Arena(copy.deepcopy(self.parameters, memo))

    def new_vector(self) -> np.ndarray:
        """Zeros in theta's layout: for momentum, say."""
        return aligned(self.size, self.dtype)

    def view(self, vector: np.ndarray, slot: Slot) -> np.ndarray:
        """The part of any vector in this layout that belongs to one parameter, in its shape."""
        return vector[slot.start : slot.stop].reshape(slot.shape)

    def views(self, vector: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """(name, part of the vector) for every parameter."""
        for slot in self.slots:
            yield slot.name, self.view(vector, slot)

    def zero_grad(self) -> None:
        self.grad[:] = 0
        self.cleared = set(self.parameters.values())

    def touch(self) -> None:
        """Say that theta was written to."""
        self.version += 1


def _layout(parameters: Mapping[str, Parameter]) -> tuple[list[Slot], int]:
    """Every distinct parameter's slot, in order, and the length of the whole."""
    slots, start, seen = [], 0, set()
    for name, parameter in parameters.items():
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        slots.append(Slot(name, start, start + parameter.size, parameter.shape))
        step = ALIGNMENT // parameter.dtype.itemsize
        start = -(-slots[-1].stop // step) * step
    return slots, start
