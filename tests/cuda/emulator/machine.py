"""The threads of several blocks, which run together on NumPy vectors with one element for each thread.

A vector instruction on many threads costs little more than on one. All threads that stand at the same basic block
execute it together; those that are furthest behind go first. Threads that wait at a barrier go on when all threads of
their block have reached the same barrier.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .checks import KernelError
from .counts import Counts
from .instructions import Action, translate
from .memory import Access, Copies, GlobalMemory, SharedMemory, stamp_of
from .ptx import Instruction, Program, register_type

Dimensions = tuple[int, int, int]
WARP = 32  # threads
ENDED = -1  # instead of the number of a basic block


class Code:
    """A program, translated block by block when a block is first executed."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._actions: dict[int, list[tuple[int, Action]]] = {}

    def actions(self, block: int) -> list[tuple[int, Action]]:
        """Return (PTX line, function) of each instruction of a basic block, except of a jump or barrier at its end."""
        if block not in self._actions:
            instructions = [i for i in self.program.blocks[block] if i.base not in ("bra", "bar", "ret", "exit")]
            self._actions[block] = [(i.line, translate(self.program, i)) for i in instructions]
        return self._actions[block]

    def end(self, block: int) -> Instruction | None:
        """Return the jump, barrier or return at the end of a basic block."""
        last = self.program.blocks[block][-1]
        return last if last.base in ("bra", "bar", "ret", "exit") else None


class State:
    """Registers, memory and position of the threads of some blocks of the grid.

    lanes: the threads that execute the current basic block, or None for all. Registers keep one element per thread.
    """

    def __init__(
        self, code: Code, words: list[int], memory: GlobalMemory, grid: Dimensions, block: Dimensions,
        numbers: np.ndarray, fuse: bool, counts: Counts | None,
    ) -> None:  # fmt: skip
        self.code, self.words, self.fuse, self.counts = code, words, fuse, counts
        per_block = block[0] * block[1] * block[2]
        self.size, self.blocks, self.per_block = numbers.size * per_block, numbers.size, per_block
        self.row = np.repeat(np.arange(numbers.size), per_block)  # of the thread's block in this state
        self.number = numbers[self.row]  # of the thread's block in the grid
        self.thread = np.tile(np.arange(per_block), numbers.size)  # within the block
        self.tid, self.ctaid = _along_axes(self.thread, block), _along_axes(self.number, grid)
        self.ntid, self.nctaid = ([np.full(self.size, n) for n in lengths] for lengths in (block, grid))
        self.epoch = np.zeros(numbers.size, np.int64)  # barriers that each block has passed
        self.global_memory = memory
        self.shared_memory = SharedMemory(numbers.size, code.program.shared_bytes, counts)
        self.copies = Copies(memory, self.shared_memory, self.size)
        self.registers: dict[str, np.ndarray] = {}
        self.everyone = np.arange(self.size)
        self.lanes: np.ndarray | None = None
        self.position = np.zeros(self.size, np.int64)  # the basic block that each thread executes next
        self.barrier = np.zeros(self.size, np.int64)  # the PTX line of the barrier at which a thread waits, or 0

    # -- what instructions use

    def threads(self) -> np.ndarray:
        return self.everyone if self.lanes is None else self.lanes

    def select(self, values: np.ndarray) -> np.ndarray:
        return values if self.lanes is None else values[self.lanes]

    def read(self, name: str) -> np.ndarray:
        try:
            return self.select(self.registers[name])
        except KeyError:
            raise KernelError(f"register {name} is read before it is written") from None

    def write(self, name: str, value: Any) -> None:
        kind, value = np.dtype(register_type(name)), np.asarray(value)
        if value.dtype != kind:
            value = value.view(kind) if value.dtype.itemsize == kind.itemsize else value.astype(kind)
        if self.lanes is None:
            self.registers[name] = np.full(self.size, value) if value.ndim == 0 else value
        else:
            before = self.registers.get(name)
            after = np.zeros(self.size, kind) if before is None else before.copy()
            after[self.lanes] = value
            self.registers[name] = after

    def parameter(self, position: int, kind: type) -> Any:
        return np.array([self.words[position]], np.int64).view(np.uint8)[: np.dtype(kind).itemsize].view(kind)[0]

    def memory(self, space: str) -> GlobalMemory | SharedMemory:
        return self.shared_memory if space == "shared" else self.global_memory

    def stamp(self) -> np.ndarray:
        return stamp_of(self.epoch[self.select(self.row)], self.select(self.thread))

    def access(self, address: Any) -> Access:
        row = self.select(self.row)
        warp = self.threads() // WARP
        return Access(np.broadcast_to(address, row.shape), self.stamp(), self.select(self.number), row, warp)

    # -- control flow

    def run(self) -> None:
        """Execute the kernel until all threads have ended."""
        while True:
            running = (self.position != ENDED) & (self.barrier == 0)
            if not running.any():
                if not self.barrier.any():
                    break
                raise KernelError("a barrier that some threads of a block do not reach")
            block = int(self.position[running].min())
            here = running & (self.position == block)
            self.lanes = None if here.all() else np.flatnonzero(here)
            if self.counts is not None:
                warps = np.unique(self.threads() // WARP).size
                self.counts.instructions += warps * len(self.code.program.blocks[block])
            for line, action in self.code.actions(block):
                self._execute(line, action)
            self._leave(block)
        if self.copies.pending:
            raise KernelError("the kernel ends before its copies are waited for")

    def _execute(self, line: int, action: Action) -> None:
        if self.counts is not None:
            self.counts.line = line
        try:
            action(self)
        except KernelError as error:
            raise KernelError(f"{error}; PTX line {line}") from None

    def _leave(self, block: int) -> None:
        """Move the threads that have executed a basic block to the next one."""
        end, lanes = self.code.end(block), self.threads()
        if end is None:
            self.position[lanes] = block + 1
        elif end.base == "bra":
            taken: Any = True
            if end.guard:
                taken = self.read(end.guard) != end.negated
            self.position[lanes] = np.where(taken, self.code.program.labels[end.operands[0]], block + 1)
        elif end.base == "bar":
            if end.guard or end.operands != ("0",):
                raise KernelError(f"{end.name} {end.operands}: expected bar.sync 0; PTX line {end.line}")
            self.position[lanes], self.barrier[lanes] = block + 1, end.line
            self._release()
        else:
            self.position[lanes] = ENDED

    def _release(self) -> None:
        """Let the blocks go on whose threads have all reached the same barrier."""
        barrier = self.barrier.reshape(self.blocks, self.per_block)
        complete = (barrier == barrier[:, :1]).all(1) & (barrier[:, 0] > 0)
        self.epoch[complete] += 1
        barrier[complete] = 0


def _along_axes(number: np.ndarray, lengths: Dimensions) -> tuple[np.ndarray, ...]:
    return number % lengths[0], number // lengths[0] % lengths[1], number // (lengths[0] * lengths[1])
