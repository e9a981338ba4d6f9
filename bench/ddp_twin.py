"""LeNet on MNIST in PyTorch, two processes: DistributedDataParallel, decent-dp, or two independent processes.

    python -m bench.ddp_twin KIND OPTIONS      one rank, started by bench/comm.py; RANK and WORLD_SIZE identify it

Uses the same data, batch size, update rule and schedule as minidl. The backend is gloo, PyTorch's backend for CPUs.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.training import KEEP_MEMORY

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parent.parent


def run(kind: str, options: Mapping[str, Any], python: str = sys.executable, timeout: float = 600) -> list[Any]:
    """Run two ranks, each on its own core; return their results. timeout: seconds."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        cores = sorted(os.sched_getaffinity(0))
        ranks = []
        for rank in range(2):
            core = cores[rank % len(cores)]
            environment = {
                **os.environ, **(KEEP_MEMORY if options.get("tuned", True) else {}), "OMP_NUM_THREADS": "1",
                "MINIDL_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT),
            }  # fmt: skip
            arguments = json.dumps({**options, "results": folder})
            ranks.append(subprocess.Popen(
                [python, "-m", "bench.ddp_twin", kind, arguments], env=environment, stderr=subprocess.PIPE, text=True,
                preexec_fn=lambda core=core: os.sched_setaffinity(0, [core]),
            ))  # fmt: skip
        try:
            errors = [rank.communicate(timeout=timeout)[1] for rank in ranks]
        finally:
            for each in ranks:
                each.kill()
        if any(rank.returncode for rank in ranks):
            raise RuntimeError(f"PyTorch, {kind}: {''.join(errors).strip()[-500:]}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]


def batches(data: Any, rank: int, size: int) -> Any:
    """Yield batches of this rank's half of the images, endlessly."""
    import torch

    x, y = torch.from_numpy(data.x_train).permute(0, 3, 1, 2), torch.from_numpy(data.y_train).long()
    epoch, half = 0, len(y) // 2
    while True:
        order = np.random.default_rng(epoch).permutation(len(y))[rank * half : (rank + 1) * half]
        for i in range(0, half - size + 1, size):
            chosen = torch.from_numpy(order[i : i + size])
            yield x[chosen], y[chosen]
        epoch += 1


def train(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train LeNet as this rank; return images/s, seconds to the target accuracy (0: not reached), and test accuracy.

    options: steps, batch, lr, data_dir, channels_last; `tuned`: use faster settings of DDP and, in `run`, of malloc;
    `every`: number of steps between copies of the weights (0: no copies); `target`: accuracy to reach; `topology` and
    `bucket`: for decent-dp. After the run, the average of both ranks' k-th copies is tested for k = 1, 2, ... until it
    reaches the target. The returned accuracy is that of the last tested average.
    """
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from bench.pytorch_twins import lenet
    from minidl import schedules
    from minidl.data import load

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, steps, every, lr = int(os.environ["RANK"]), options["steps"], options["every"], options["lr"]
    dist.init_process_group("gloo")
    data = load("mnist", options["data_dir"] or None, 0.0, 0)
    plain = lenet((28, 28, 1), 10)
    if options["channels_last"]:
        plain = plain.to(memory_format=torch.channels_last)

    def optimizer_of(named: Any) -> torch.optim.Optimizer:
        parameters = [p for _, p in named]
        groups = [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": 5e-4},
                  {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}]  # fmt: skip
        return torch.optim.SGD([g for g in groups if g["params"]], lr=lr, momentum=0.9, fused=True)

    model: Any = plain
    if kind == "ddp":
        tuned = options.get("tuned", True)
        model = torch.nn.parallel.DistributedDataParallel(plain, gradient_as_bucket_view=tuned, static_graph=tuned)
    if kind == "decent-dp":
        from decent_dp.ddp import DecentralizedDataParallel

        model = DecentralizedDataParallel(plain, optimizer_of, topology=options["topology"],
                                          bucket_size_in_mb=options.get("bucket", 25))  # fmt: skip
        optimizers: Callable[[], list[Any]] = partial(getattr, model, "_optims")  # backward() calls their step()
    else:
        own = optimizer_of(plain.named_parameters())
        optimizers = partial(list, [own])
    schedule = schedules.build("cosine", steps)
    source = batches(data, rank, options["batch"])
    snapshots: list[tuple[float, list[torch.Tensor]]] = []  # (seconds since the start, weights)
    model.train()
    began = warm = 0.0
    for step in range(steps):
        if step == 5:
            dist.barrier()
            warm = time.perf_counter()
        began = began or time.perf_counter()
        x, y = next(source)
        for optimizer in optimizers():
            for group in optimizer.param_groups:
                group["lr"] = lr * schedule(step)
        loss = F.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        if kind != "decent-dp":
            own.step()
        if every and (step + 1) % every == 0:
            now = time.perf_counter() - began
            snapshots.append((now, [p.detach().clone() for p in plain.parameters()]))
    speed = options["batch"] * (steps - 5) / (time.perf_counter() - warm)
    reached, accuracy = 0.0, 0.0
    images, answers = torch.from_numpy(data.x_test).permute(0, 3, 1, 2), torch.from_numpy(data.y_test)
    tested = lenet((28, 28, 1), 10).eval()
    for seconds, parameters in snapshots:
        for one in parameters:
            dist.all_reduce(one)
        right = torch.zeros(1)
        with torch.no_grad():
            for place, one in zip(tested.parameters(), parameters):
                place.copy_(one / 2)
            for i in range(rank * 500, len(answers), 1000):  # each rank tests half of the images
                right += (tested(images[i : i + 500]).argmax(1) == answers[i : i + 500]).sum()
        dist.all_reduce(right)
        accuracy = right.item() / len(answers)
        if accuracy >= options["target"]:
            reached = seconds
            break
    return {"speed": speed, "reached": reached, "accuracy": accuracy}


def main() -> None:
    kind, options = sys.argv[1], json.loads(sys.argv[2])
    result = train(kind, options)
    (Path(options["results"]) / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may keep the process alive


if __name__ == "__main__":
    main()
