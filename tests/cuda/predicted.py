"""Predicts the time of whole training steps on a GPU, as a sum over kernels. No figure of it is measured.

    python tests/cuda/predicted.py lenet vgg resnet20

A step is recorded on the fake driver, with the launches that a GPU gets. For each launch, the slower of two counts:

- memory: the bytes of its arrays, each read or written once, at the bandwidth of the GPU's memory
- arithmetic: its multiply-adds, at the GPU's rate times the share that its main loop allows (`limit`). If the number of
  blocks is no multiple of the number of SMs, some of them are idle in the last round.

To each launch LAUNCH is added, the time between two kernels of a graph. Latencies, caches and copies of batches are not
part of it: a step is slower than this.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from fake_driver import installed
from fake_driver.driver import Settings
from sass import Sass, read, width

from bench.worker import SHAPES, batch
from minidl import models, ops, optim
from minidl.program.cuda_launches import Launch, launches_of
from minidl.program.cuda_table import ProgramOnGpu
from minidl.program.record import Call
from minidl.program.replay import Gradient

BATCHES = {"lenet": 64, "vgg": 64, "resnet20": 128, "mlp": 128}
LAUNCH = 1.5e-6  # seconds, assumed
QUARTERS, SECTORS = 4, 4  # of an SM; sectors of global memory per cycle
FRAGMENT = 2  # wavefronts for a load from shared memory: the limit that the tests check


@dataclass(frozen=True)
class Model:
    """A GPU. lanes: FP32 units of an SM quarter. clock: cycles per second. bandwidth: bytes per second."""

    name: str
    cc: tuple[int, int]
    sms: int
    lanes: int
    clock: float
    bandwidth: float

    @property
    def rate(self) -> float:
        """Multiply-adds per second."""
        return self.sms * QUARTERS * self.lanes * self.clock


GPUS = (Model("A100", (8, 0), 108, 16, 1.41e9, 1.555e12), Model("H100", (9, 0), 132, 32, 1.98e9, 3.35e12))


@dataclass
class Cost:
    """Seconds of a step by what sets them."""

    launches: int = 0
    arithmetic: float = 0.0
    memory: float = 0.0
    products: float = 0.0  # multiply-adds

    @property
    def seconds(self) -> float:
        return self.arithmetic + self.memory + LAUNCH * self.launches


def recorded(net: str, images: int) -> list[tuple[Call, list[Launch]]]:
    """Return the calls of a training step, with their launches, and of the update."""
    found: list[tuple[Call, list[Launch]]] = []

    def note(program: ProgramOnGpu, recorder: Any, calls: Sequence[Call], offsets: Any, *rest: Any) -> None:
        program._gpu, program._offsets, program._regions = recorder.gpu, offsets, {"workspace": 1 << 48}
        found.extend((call, launches_of(*program._call(call))) for call in calls)
        raise _Noted

    with installed(Settings(memory=1 << 40)), patch.object(ProgramOnGpu, "_build", note):
        model = models.build(net, SHAPES[net], 10).to("cuda:0")
        optimizer, gradient = optim.SGD(model, 0.1, 0.9), Gradient(model, ops.cross_entropy)
        with suppress(_Noted):
            gradient.prepare(*batch(SHAPES[net], images))
        assert found, gradient.not_recorded
        for file, name, arguments in optimizer.kernels():
            found.append((Call(f"optim.{name}", None, {}), launches_of(file, name, arguments)))
    return found


class _Noted(Exception):
    """Ends a recording after its calls are noted."""


def products(call: Call) -> float:
    """Return the multiply-adds of a call, by definition. Only products and convolutions count."""
    shapes = {name: place.like.shape for name, place in call.places}
    op, name = call.name.split(".")
    if op == "matmul":
        depth = shapes["a"][0 if name == "tn" else 1]
        return float(np.prod(shapes["out"])) * depth
    if op == "conv":
        weight = shapes.get("weight") or shapes["dweight"]
        outputs = shapes.get("y") or shapes["dy"]
        return float(np.prod(outputs)) * float(np.prod(weight[:3]))
    return 0.0


def limit(sass: Sass, gpu: Model) -> float:
    """Return the share of the multiply-add rate that the main loop allows: facts.py explains the three units."""
    loop = sass.main_loop()
    names = Counter(operation.base for operation in loop)
    if not names["FFMA"]:
        return 0.0
    into = [width(operation) for operation in loop if operation.base in ("STS", "LDGSTS")]
    out_of = [width(operation) for operation in loop if operation.base in ("LDG", "LDGSTS")]
    memory = FRAGMENT * sass.widths("LDS").total() + sum(into) / 32 + sum(out_of) / 8 / SECTORS
    pipe, starts = names["FFMA"] * 32 / gpu.lanes, names.total() + sass.register_conflicts()
    return pipe / max(pipe, starts, QUARTERS * memory)


def cost(calls: Sequence[tuple[Call, list[Launch]]], gpu: Model) -> Cost:
    found = Cost()
    for call, launches in calls:
        work = products(call)
        found.products += work
        codes = [read(*launch.key, gpu.cc) if work else None for launch in launches]
        shares = [limit(code, gpu) if code else 0.0 for code in codes]
        for launch, code, share in zip(launches, codes, shares, strict=True):
            found.launches += 1
            arrays = [a for a in launch.arguments if isinstance(a, np.ndarray) and a.ndim]
            memory, arithmetic = sum(a.nbytes for a in arrays) / gpu.bandwidth, 0.0
            if code and share == max(shares):
                blocks = int(np.prod(launch.grid))
                busy = blocks / gpu.sms / -(-blocks // gpu.sms)  # the last round leaves SMs without work
                arithmetic = work / shares.count(share) / (gpu.rate * share * busy)
            if arithmetic > memory:
                found.arithmetic += arithmetic
            else:
                found.memory += memory
    return found


def lines(nets: Sequence[str]) -> list[str]:
    found = ["| predicted step | GPU | launches | ms | arithmetic | memory | launches | of the multiply-add rate |",
             "|" + " --- |" * 8]  # fmt: skip
    for net in nets:
        calls = recorded(net, BATCHES[net])
        for gpu in GPUS:
            one = cost(calls, gpu)
            shares = (one.arithmetic, one.memory, LAUNCH * one.launches, one.products / gpu.rate)
            cells = " | ".join(f"{share / one.seconds:.0%}" for share in shares)
            found.append(
                f"| {net}, batch {BATCHES[net]} | {gpu.name} | {one.launches} | {1e3 * one.seconds:.3f} | {cells} |"
            )
    return found


if __name__ == "__main__":
    print("\n".join(lines(sys.argv[1:] or ["lenet", "vgg", "resnet20"])))
