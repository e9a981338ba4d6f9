"""Inference engines for bench/predict.py: each loads the same model from a folder and predicts the same images.

    python -m bench.engines NET BATCH FOLDER      writes what the engines load; needs PyTorch, and onnx with onnxscript

state.npz   the weights under PyTorch's names       model.onnx   for ONNX Runtime and OpenVINO
x.npy       images (B, H, W, C)                     model.pt     TorchScript, traced and frozen, channels last
logits.npy  the outputs of PyTorch in float64       (model.onnx is missing if onnx or onnxscript is)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Predict = Callable[[], np.ndarray]
SHAPES = {"mlp": (28, 28, 1), "lenet": (28, 28, 1), "vgg": (32, 32, 3), "resnet20": (32, 32, 3)}


def export(net: str, batch: int, folder: Path) -> str:
    """Write the files above. Return why model.onnx is missing, or ""."""
    import torch

    from bench.pytorch_twins import TWINS

    torch.manual_seed(0)
    random = np.random.default_rng(0)
    x = random.standard_normal((batch, *SHAPES[net]), np.float32)
    images = torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))
    twin = TWINS[net](SHAPES[net], 10).eval()
    for module in twin.modules():
        if isinstance(module, torch.nn.BatchNorm2d):  # statistics and scales as after some training
            module.running_mean.normal_(0, 0.1), module.running_var.uniform_(0.5, 1.5)
            module.weight.data.uniform_(0.5, 1.5), module.bias.data.normal_(0, 0.1)
    state = {name: value.numpy() for name, value in twin.state_dict().items()}
    np.savez(folder / "state.npz", **state)
    np.save(folder / "x.npy", x)
    with torch.inference_mode():
        np.save(folder / "logits.npy", twin.double()(images.double()).numpy())
    twin = twin.float()
    why = ""
    try:
        torch.onnx.export(twin, (images,), str(folder / "model.onnx"), dynamo=True, verbose=False)
    except ImportError as error:
        why = str(error).splitlines()[0]
    layout = torch.channels_last
    with torch.no_grad():
        traced = torch.jit.trace(twin.to(memory_format=layout), images.contiguous(memory_format=layout))
        torch.jit.freeze(traced).save(str(folder / "model.pt"))
    return why


def minidl(net: str, folder: Path, threads: int) -> Predict:
    from minidl import models
    from minidl.program.replay import Prediction

    model = models.build(net, SHAPES[net], 10)
    with np.load(folder / "state.npz") as state:
        model.load_state_dict(dict(state))
    model.flatten()  # so that packed weights are kept
    prediction, x = Prediction(model.eval()), np.load(folder / "x.npy")
    return lambda: prediction(x)


def pytorch(net: str, folder: Path, threads: int) -> Predict:
    import torch

    torch.set_num_threads(threads)
    model = torch.jit.optimize_for_inference(torch.jit.load(str(folder / "model.pt")))
    images = torch.from_numpy(_images(folder)).contiguous(memory_format=torch.channels_last)

    def predict() -> np.ndarray:
        with torch.inference_mode():
            return model(images).numpy()

    return predict


def onnxruntime(net: str, folder: Path, threads: int) -> Predict:
    import onnxruntime as runtime

    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    session = runtime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: _images(folder)}
    return lambda: session.run(None, feed)[0]


def openvino(net: str, folder: Path, threads: int) -> Predict:
    import openvino as ov

    # Without the second line it would compute in bfloat16 on CPUs that can.
    config = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    request = ov.Core().compile_model(str(folder / "model.onnx"), "CPU", config).create_infer_request()
    images = _images(folder)
    return lambda: request.infer([images])[0]


def _images(folder: Path) -> np.ndarray:
    """Return the images (B, C, H, W)."""
    return np.ascontiguousarray(np.load(folder / "x.npy").transpose(0, 3, 1, 2))


ENGINES = {"minidl": minidl, "pytorch": pytorch, "onnxruntime": onnxruntime, "openvino": openvino}


def load(library: str, net: str, options: dict[str, Any]) -> Predict:
    return ENGINES[library](net, Path(options["folder"]), options["threads"])


def difference(outputs: np.ndarray, options: dict[str, Any]) -> float:
    """Return the largest error of the outputs, relative to the largest output."""
    expected = np.load(Path(options["folder"]) / "logits.npy")
    return float(np.abs(outputs - expected).max() / np.abs(expected).max())


if __name__ == "__main__":
    print(export(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
