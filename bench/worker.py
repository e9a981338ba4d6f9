"""A process that uses one library: it builds a net, makes steps on request, and sleeps in between.

bench/training.py starts it (`python -m bench.worker LIBRARY`). Requests and replies are lines of JSON:

    {"do": "build", "net": "lenet", "batch": 64, "predict": false, "options": {...}}      -> {"seconds": ...}
    {"do": "steps", "steps": 5}                                                           -> {"seconds": [...]}

`serve` also handles check, peak, flops, memory and compare. A step is a complete training step (forward, loss,
backward, momentum SGD). With "predict" it is a forward pass in evaluation mode. With the option "folder" it is a
prediction of the model in this folder (engines.py). For the net "sgd", which only PyTorch has, it is only the update of
a vector; "batch" is the size of the vector in bytes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

LR, MOMENTUM = 1e-4, 0.9  # a small rate, so that gradients do not vanish after thousands of steps on one batch
Step = Callable[[], object]
SHAPES = {"mlp": (28, 28, 1), "lenet": (28, 28, 1), "vgg": (32, 32, 3), "resnet20": (32, 32, 3)}


def batch(shape: tuple[int, int, int], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random (images (B, H, W, C), labels (B,))."""
    random = np.random.default_rng(0)
    return random.standard_normal((size, *shape), np.float32), random.integers(0, 10, size)


# -- minidl ----------------------------------------------------------------------------------------------------------


def minidl_step(model: Any, x: np.ndarray, y: np.ndarray, eager: bool = False) -> Step:
    """Return a training step as `fit` makes it. eager: run the layers in Python instead of a recorded step."""
    from minidl import ops, optim
    from minidl.program.replay import Gradient

    optimizer = optim.SGD(model.train(), LR, MOMENTUM)
    gradient = Gradient(model, ops.cross_entropy)

    def step() -> float:
        loss, _ = gradient.by_tape(x, y) if eager else gradient(x, y)
        optimizer.step()
        return loss

    return step


def minidl_prediction(model: Any, x: np.ndarray, eager: bool = False) -> Step:
    """Return a forward pass as `predict` makes it. eager: run the layers in Python instead of a recorded pass."""
    from minidl import no_grad
    from minidl.program.replay import Prediction

    model.flatten()  # so that packed weights are kept
    prediction = Prediction(model.eval())

    def tape() -> np.ndarray:
        with no_grad():
            return model(x).numpy()

    return tape if eager else lambda: prediction(x)


def build_minidl(net: str, size: int, predict: bool, options: dict[str, Any]) -> Step:
    """Return a training step, or a forward pass if `predict`. options: eager (default False), device (default cpu)."""
    from bench import odd
    from minidl import models

    shape = SHAPES.get(net, odd.SHAPE)
    model = models.build(net, shape, 10) if net in SHAPES else odd.minidl_net(net)
    model.to(options.get("device", "cpu"))
    x, y = batch(shape, size)
    eager = options.get("eager", False)
    return minidl_prediction(model, x, eager) if predict else minidl_step(model, x, y, eager)


# -- PyTorch ---------------------------------------------------------------------------------------------------------


def build_pytorch(net: str, size: int, predict: bool, options: dict[str, Any]) -> Step:
    """Return a training step, or a forward pass if `predict`. options: threads, channels_last, compile.

    device: the default is cpu. TF32 is off, since minidl computes in float32.
    """
    import torch
    import torch.nn.functional as F

    from bench import odd
    from bench.pytorch_twins import TWINS

    torch.set_num_threads(options["threads"])
    torch.set_flush_denormal(True)  # otherwise velocities behind dead ReLUs make its optimizer slow (kernels/optim)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    torch._dynamo.reset()
    device = options.get("device", "cpu")
    shape = SHAPES.get(net, odd.SHAPE)
    model = TWINS[net](shape, 10) if net in SHAPES else odd.pytorch_net(net)
    x, y = (torch.from_numpy(array).to(device) for array in batch(shape, size))
    x = x.permute(0, 3, 1, 2)
    layout = torch.channels_last if options["channels_last"] else torch.contiguous_format
    x, model = x.contiguous(memory_format=layout), model.to(device, memory_format=layout)
    if options["compile"]:
        from torch._inductor import config

        config.freezing = predict  # fold batch norm into the convolutions, pack weights in advance
        if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
            config.cpp.simdlen = 256
    if predict:
        forward = torch.compile(model.eval()) if options["compile"] else model.eval()

        def prediction() -> np.ndarray:
            with torch.inference_mode() if not options["compile"] else torch.no_grad():  # (freezing needs no_grad)
                return forward(x).cpu().numpy()

        return prediction
    optimizer = torch.optim.SGD(model.train().parameters(), lr=LR, momentum=MOMENTUM, fused=True)

    def compute_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    compute = torch.compile(compute_loss) if options["compile"] else compute_loss

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = compute(x, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def build_pytorch_sgd(bytes_: int) -> Step:
    """Return a step of PyTorch's fused SGD with momentum on one vector, without the Python code of the optimizer."""
    import torch

    theta, grad, velocity = (torch.ones(bytes_ // 4) for _ in range(3))
    numbers = {"weight_decay": 0.0, "momentum": MOMENTUM, "lr": LR, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": False}
    return lambda: torch._fused_sgd_([theta], [grad], [velocity], **numbers, **flags)


# -- JAX -------------------------------------------------------------------------------------------------------------


def build_jax(net: str, size: int, predict: bool, options: dict[str, Any]) -> Step:
    import jax

    from bench import jax_twins

    if options.get("device", "cpu") != "cpu" and jax.default_backend() != "gpu":
        raise RuntimeError(f"JAX {jax.__version__} finds no GPU")
    x, y = batch(SHAPES[net], size)
    return jax_twins.prediction(net, x) if predict else jax_twins.training_step(net, x, y, LR)


BUILD = {"minidl": build_minidl, "pytorch": build_pytorch, "jax": build_jax}


# -- the process -----------------------------------------------------------------------------------------------------


def timed(step: Step) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def resident(field: str) -> int:
    """Return the resident memory of this process in bytes. field: VmRSS (now) or VmHWM (maximum since the reset)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{field}:")[1].split()[0])


def peak_memory(library: str, net: str, size: int) -> dict[str, int]:
    """Return the peak resident memory of the process during three training steps, in bytes.

    "growth" is "peak" minus the memory in use after the library's import, before the net is built.
    """
    batch(SHAPES[net], size)
    if library == "minidl":
        import minidl.optim
        import minidl.program.replay  # noqa: F401
    else:
        import torch

        torch._dynamo  # noqa: B018 (imported on first access)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    options = {"threads": len(os.sched_getaffinity(0)), "channels_last": True, "compile": False}
    step = BUILD[library](net, size, False, options)
    for _ in range(3):
        step()
    return {"growth": resident("VmHWM") - before, "peak": resident("VmHWM")}


def fma_peak() -> list[float]:
    """Measure the GFLOP/s of multiply-adds on registers with all threads, 20 times."""
    from bench import measure
    from minidl.engine.jit import threads

    loop, flops = measure.peak_loop(threads())
    loop()
    return [flops / timed(loop) / 1e9 for _ in range(20)]


def count_flops(net: str, size: int, predict: bool) -> float:
    """Count the floating-point operations of a step (or forward pass) of one batch.

    Only linear layers and convolutions count, by their definitions. A step computes their outputs, the gradients of
    their weights and, except in the first such layer, the gradients of their inputs.
    """
    from bench import odd
    from minidl import models, nn

    shape = SHAPES.get(net, odd.SHAPE)
    model = models.build(net, shape, 10) if net in SHAPES else odd.minidl_net(net)
    products: list[float] = []

    def note(module: nn.Module, output: Any) -> None:
        if isinstance(module, nn.Linear | nn.Conv2d):
            pixels = output.size // output.shape[-1]
            products.append(2.0 * module.weight.size * pixels)

    with nn.watching(note), nn.evaluating(model):
        model(np.zeros((1, *shape), np.float32))
    return size * (sum(products) if predict else 3 * sum(products) - products[0])


def serve(library: str) -> None:
    """Process requests from standard input until it is closed."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library's own output goes to standard error
    step: Step = lambda: None  # noqa: E731
    for line in sys.stdin:
        request = json.loads(line)
        reply: dict[str, Any]
        try:
            if request["do"] == "build":
                step = lambda: None  # noqa: E731 (frees the previous net before the next one is built)
                if "folder" in request["options"]:
                    from bench import engines

                    step = engines.load(library, request["net"], request["options"])
                elif library == "pytorch" and request["net"] == "sgd":
                    step = build_pytorch_sgd(request["batch"])
                else:
                    step = BUILD[library](request["net"], request["batch"], request["predict"], request["options"])
                reply = {"seconds": [timed(step) for _ in range(3)]}
            elif request["do"] == "check":
                from bench import engines

                reply = {"difference": engines.difference(step(), request["options"]), "resident": resident("VmRSS")}
            elif request["do"] == "steps":
                reply = {"seconds": [timed(step) for _ in range(request["steps"])]}
            elif request["do"] == "peak":
                reply = {"gflops": fma_peak()}
            elif request["do"] == "flops":
                reply = {"flops": count_flops(request["net"], request["batch"], request["predict"])}
            elif request["do"] == "memory":
                reply = peak_memory(library, request["net"], request["batch"])
            else:
                from bench import odd

                reply = odd.compare(request["net"], request["batch"])
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


def first_step(library: str) -> None:
    """Make one step of LeNet and print "done" (`bench/training.py --startup` measures the time until then)."""
    options = {"threads": len(os.sched_getaffinity(0)), "channels_last": False, "compile": False}
    BUILD[library]("lenet", 64, False, options)()
    print("done", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--first-step"]:
        first_step(sys.argv[2])
    else:
        serve(sys.argv[1])
