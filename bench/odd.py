"""Unusual networks in minidl and in PyTorch: odd channels, strides, dilations, groups, batch and image sizes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

SHAPE = (29, 31, 3)  # H, W, C

# (outputs, kernel, stride, padding, dilation, groups) of each convolution; batch norm and ReLU follow.
Size = int | tuple[int, int]
ODD: dict[str, list[tuple[int, Size, int, Size, int, int]]] = {
    "strided": [(24, 3, 1, 1, 1, 1), (40, 3, 2, 1, 1, 1), (72, 3, 2, 1, 1, 1)],
    "grouped": [(24, 3, 1, 1, 1, 1), (40, 5, 1, 2, 1, 4), (72, 3, 2, 1, 1, 8)],
    "dilated": [(24, 3, 1, 1, 1, 1), (40, 3, 1, 2, 2, 1), (72, 3, 1, 2, 2, 1)],
    "depthwise": [(24, 3, 2, 1, 1, 1), (24, 3, 1, 1, 1, 24), (40, 1, 1, 0, 1, 1),
                  (40, 3, 2, 1, 1, 40), (72, 1, 1, 0, 1, 1)],
    "mixed": [(24, 5, 1, 2, 1, 1), (40, 3, 2, 1, 1, 1), (72, 5, 1, 2, 1, 4), (72, 3, 1, 2, 2, 1), (72, 3, 1, 1, 1, 72)],
    # ResNet-18's layers for small images
    "resnet18": [(64, 3, 1, 1, 1, 1)] * 5 + [(128, 3, 2, 1, 1, 1)] + [(128, 3, 1, 1, 1, 1)] * 3
    + [(256, 3, 2, 1, 1, 1)] + [(256, 3, 1, 1, 1, 1)] * 3 + [(512, 3, 2, 1, 1, 1)] + [(512, 3, 1, 1, 1, 1)] * 3,
    # wide layers of few pixels: down to one pixel, and MobileNet's blocks
    "deep": [(64, 7, 2, 3, 1, 1), (64, 3, 2, 1, 1, 1), (128, 3, 2, 1, 1, 1), (256, 3, 2, 1, 1, 1), (256, 3, 1, 1, 1, 1),
             (512, 3, 2, 1, 1, 1), (512, 3, 1, 1, 1, 1)],
    "pointwise": [(32, 3, 2, 1, 1, 1), (32, 3, 1, 1, 1, 32), (128, 1, 1, 0, 1, 1), (128, 3, 2, 1, 1, 128),
                  (256, 1, 1, 0, 1, 1), (256, 3, 2, 1, 1, 256), (512, 1, 1, 0, 1, 1), (512, 3, 1, 1, 1, 512),
                  (512, 1, 1, 0, 1, 1)],
    # ResNeXt's blocks: groups of 4 channels, and of 8 and 2
    "narrow": [(64, 3, 2, 1, 1, 1), (128, 1, 1, 0, 1, 1), (128, 3, 1, 1, 1, 32), (128, 1, 1, 0, 1, 1),
               (128, 3, 2, 1, 1, 32), (256, 1, 1, 0, 1, 1), (256, 3, 2, 1, 1, 32), (96, 1, 1, 0, 1, 1),
               (96, 5, 1, 2, 1, 48)],
    # Inception's lines of taps
    "lines": [(40, 3, 2, 1, 1, 1), (64, (1, 7), 1, (0, 3), 1, 1), (64, (7, 1), 1, (3, 0), 1, 1),
              (96, (1, 5), 1, (0, 2), 1, 1), (96, (5, 1), 1, (2, 0), 1, 1), (128, 3, 2, 1, 1, 1),
              (128, (1, 3), 1, (0, 1), 1, 1), (128, (3, 1), 1, (1, 0), 1, 1)],
    "sizes": [(32, 5, 1, 2, 1, 1), (48, (3, 5), 1, (1, 2), 1, 1), (64, 6, 1, 3, 1, 1), (96, 5, 2, 2, 1, 1),
              (128, 5, 2, 2, 1, 1)],
}  # fmt: skip
BATCH = 37


def _net(nn: Any, name: str, pool: Any) -> Any:
    """Build a net of ODD. nn: minidl.nn or torch.nn, which have the same layers. pool: the global average pooling."""
    layers: list[Any] = []
    inputs = SHAPE[2]
    for outputs, kernel, stride, padding, dilation, groups in ODD[name]:
        layers.append(nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups))
        layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, pool, nn.Flatten(), nn.Linear(inputs, 10))


def minidl_net(name: str) -> Any:
    from minidl import nn

    return _net(nn, name, nn.GlobalAvgPool2d())


def pytorch_net(name: str) -> Any:
    from torch import nn

    return _net(nn, name, nn.AdaptiveAvgPool2d(1))


def compare(name: str, size: int) -> dict[str, Any]:
    """Return errors relative to PyTorch in float64. size: images in the batch.

    "loss", "gradient": errors of minidl's recorded step in float32. "gradient64": error of its gradients in float64.
    "pytorch_gradient": error of PyTorch's gradients in float32. "worst": the name of the parameter whose gradient has
    the largest error in minidl in float32.

    The error of a parameter's gradient is the largest error of an element, divided by the largest exact element. The
    largest of these errors is returned. In float32, rounding can change the sign of a ReLU's input. In both libraries
    this changes a small gradient by up to 1%.
    """
    import torch
    import torch.nn.functional as F

    from bench.worker import batch
    from minidl import ops
    from minidl.program.replay import Gradient

    ours, x, y = minidl_net(name), *batch(SHAPE, size)
    found: dict[str, dict[str, Any]] = {}
    losses: dict[str, float] = {}
    for kind, model in (("minidl64", copy.deepcopy(ours).astype("float64")), ("minidl", ours)):
        gradient = Gradient(model.train(), ops.cross_entropy)
        images = x.astype(next(model.parameters()).dtype)
        gradient(images, y)  # the step is recorded here ...
        losses[kind], _ = gradient(images, y)  # ... and the recorded step runs here
        found[kind] = {name: np.transpose(p.grad, p.torch_axes) for name, p in model.named_parameters()}
    for kind, dtype in (("float32", torch.float32), ("float64", torch.float64)):
        twin = pytorch_net(name).to(dtype)
        twin.load_state_dict({name: torch.from_numpy(value) for name, value in ours.state_dict().items()})
        images = torch.from_numpy(x).to(dtype).permute(0, 3, 1, 2)
        loss = F.cross_entropy(twin.train()(images), torch.from_numpy(y))
        loss.backward()
        losses[kind] = loss.item()
        found[kind] = {name: p.grad.numpy() for name, p in twin.named_parameters()}

    def error(kind: str, parameter: str) -> float:
        exact = found["float64"][parameter]
        return float(np.abs(found[kind][parameter] - exact).max() / max(np.abs(exact).max(), 1e-30))

    # The gradient of a bias before batch norm is 0. Its computed value is only rounding error.
    named = [name for name, exact in found["float64"].items() if np.abs(exact).max() > 1e-10]
    return {
        "loss": abs(losses["minidl"] - losses["float64"]) / abs(losses["float64"]),
        "gradient64": max(error("minidl64", name) for name in named),
        "gradient": max(error("minidl", name) for name in named),
        "pytorch_gradient": max(error("float32", name) for name in named),
        "worst": max(named, key=lambda name: error("minidl", name)),
    }
