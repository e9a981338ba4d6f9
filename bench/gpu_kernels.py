"""Kernels of minidl and of PyTorch (cuBLAS, cuDNN) on one GPU, as functions to measure: see bench/gpu.py.

Each function makes a number of calls, then waits for the GPU. minidl's launches are made by compiled code, as in a
recorded step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bench.kernels import Layer

Function = Callable[[], object]
PASSES = ("forward", "backward_input", "backward_weight")


class Bench:
    """Memory and launches on a GPU."""

    def __init__(self, gpu: Any) -> None:
        self.gpu = gpu

    def array(self, *shape: int, dtype: str = "float32") -> Any:
        """Return an array on the GPU, with normal random numbers. The Bench keeps its memory."""
        from minidl.engine.cuda_array import array_at

        values = np.random.default_rng(0).standard_normal(shape, np.float32).astype(dtype)
        memory = self.gpu.allocate(values.nbytes)
        self.gpu.send(values, memory.address)
        vars(self).setdefault("memory", []).append(memory)
        return array_at(memory.address, shape, dtype)

    def replay(self, calls: int, op: str, name: str, *arguments: Any) -> Function:
        """Return a function that calls a kernel `calls` times."""
        from minidl.engine.cuda import words_of
        from minidl.engine.device import address
        from minidl.program.cuda_call import walk
        from minidl.program.cuda_launches import launches_of

        gpu, rows, kept = self.gpu, [], []
        for launch in launches_of(gpu.file(op), name, arguments):
            words = np.array([word for argument in launch.arguments for word in words_of(argument)], np.int64)
            pointers = address(words) + words.itemsize * np.arange(len(words), dtype=np.int64)
            kept.append((words, pointers))
            rows.append([gpu.function(*launch.key), *launch.grid, launch.kernel.threads, address(pointers)])
        table = np.array(rows * calls, np.int64)

        def run(keep_alive: Any = (kept, arguments)) -> None:
            gpu.use()
            gpu.driver.check(walk(gpu.driver.launch_address, table, gpu.main), "cuLaunchKernel")
            gpu.synchronize()

        return run

    def copy(self, calls: int, nbytes: int) -> Function:
        """Return a function that copies memory on the device: it reads and writes `nbytes` each time."""
        source, target = self.gpu.allocate(nbytes), self.gpu.allocate(nbytes)
        self.gpu.clear(source)

        def run() -> None:
            for _ in range(calls):
                self.gpu.copy(source.address, target.address, nbytes)
            self.gpu.synchronize()

        return run

    def product(self, calls: int, form: str, n: int) -> Function:
        """Return a product of two matrices (n, n). form: nn, nt or tn, where t means transposed."""
        a, b, out, none = self.array(n, n), self.array(n, n), self.array(n, n), self.array(0)
        before = (none, False, none) if form == "nn" else ()
        return self.replay(calls, "matmul", form, a, b, *before, none, out)

    def convolution(self, calls: int, layer: Layer, which: str) -> Function:
        n, size, inputs, outputs, k, stride = layer
        to = (size - 1) // stride + 1
        x, weight, y = (
            self.array(n, size, size, inputs),
            self.array(k, k, inputs, outputs),
            self.array(n, to, to, outputs),
        )
        where = 1, (stride, stride), (k // 2, k // 2), (1, 1), False
        needed = getattr(self.gpu.kernels("conv"), f"{which}_scratch")(x.shape, weight.shape, *where)
        scratch, none = self.array(needed), self.array(0)
        arguments: dict[str, tuple[Any, ...]] = {
            "forward": (x, weight, none, none, none, none, False, *where, none, scratch, y),
            "backward_input": (y, weight, none, *where, scratch, x),
            "backward_weight": (x, y, *where, scratch, weight),
        }
        return self.replay(calls, "conv", which, *arguments[which])

    def streams(self, calls: int, size: int) -> dict[str, tuple[Function, int]]:
        """Return kernels that wait for memory: name -> (function, vectors of `size` elements read or written)."""
        a, b, c, d = (self.array(size) for _ in range(4))
        segments = self.array(1, dtype="int64"), self.array(1, dtype="int64")
        self.gpu.send(np.array([0]), _address(segments[0]))
        self.gpu.send(np.array([size]), _address(segments[1]))
        rates = self.array(1, dtype="float64"), self.array(1, dtype="float64")
        kernels: dict[str, tuple[tuple[Any, ...], int]] = {
            "optim.sgd": ((a, b, c, *segments, *rates, 0.9, False, False, 1.0), 5),
            "optim.adam": ((a, b, c, d, *segments, *rates, 0.9, 0.999, 1e-8, 10, False, 1.0), 7),
            "mix.mix": ((a, b, 0.5), 3),
            "activation.relu": ((a, b), 2),
            "activation.relu_backward": ((a, b, c), 3),
            "activation.gelu": ((a, b), 2),
            "elementwise.add": ((a, b, c), 3),
        }
        return {name: (self.replay(calls, *name.split("."), *arguments), vectors)
                for name, (arguments, vectors) in kernels.items()}  # fmt: skip


def _address(array: Any) -> int:
    from minidl.engine.device import address

    return address(array)


# -- PyTorch ---------------------------------------------------------------------------------------------------------


class Peer:
    """The same work in PyTorch. device: cuda:0, or cpu for tests of this class. TF32 is off."""

    def __init__(self, device: str) -> None:
        import torch

        self.torch, self.device = torch, torch.device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = True  # it tries all its algorithms

    def _function(self, calls: int, work: Function) -> Function:
        def run() -> None:
            for _ in range(calls):
                work()
            if self.device.type == "cuda":
                self.torch.cuda.synchronize(self.device)

        return run

    def array(self, *shape: int) -> Any:
        return self.torch.randn(shape, device=self.device)

    def product(self, calls: int, form: str, n: int) -> Function:
        a, b, out = self.array(n, n), self.array(n, n), self.array(n, n)
        left, right = a.T if form[0] == "t" else a, b.T if form[1] == "t" else b
        return self._function(calls, lambda: self.torch.mm(left, right, out=out))

    def convolution(self, calls: int, layer: Layer, which: str) -> dict[str, Function]:
        """Return a pass in both layouts: name -> function."""
        found = {}
        for name in ("channels_last", "contiguous_format"):
            layout = getattr(self.torch, name)
            n, size, inputs, outputs, k, stride = layer
            to = (size - 1) // stride + 1
            x, weight, dy = (
                self.array(*shape).contiguous(memory_format=layout)
                for shape in ((n, inputs, size, size), (outputs, inputs, k, k), (n, outputs, to, to))
            )
            found[name] = self._function(calls, self._pass(which, x, weight, dy, stride, k // 2))
        return found

    def _pass(self, which: str, x: Any, weight: Any, dy: Any, stride: int, padding: int) -> Function:
        torch, geometry = self.torch, ([stride] * 2, [padding] * 2, [1, 1])
        if which == "forward":
            return lambda: torch.ops.aten.convolution(x, weight, None, *geometry, False, [0, 0], 1)
        wanted = [which == "backward_input", which == "backward_weight", False]
        return lambda: torch.ops.aten.convolution_backward(
            dy, x, weight, None, *geometry, False, [0, 0], 1, wanted
        )  # fmt: skip
