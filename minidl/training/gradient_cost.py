"""What a gradient costs: the FLOPs of a model, and the time that this machine takes. A simulated clock uses them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from minidl import nn
from minidl.comm import cluster as clusters
from minidl.comm.replica import Engine
from minidl.errors import ConfigError
from minidl.program.replay import Prediction
from minidl.run.config import Config
from minidl.run.folder import write
from minidl.training.session import prepare
from minidl.training.trainer import Entry

MEASURED = 20  # gradients that --measure times; the first, which compiles, is not counted


def flops_per_image(model: nn.Module, shape: tuple[int, ...]) -> float:
    """Return the FLOPs of one image's gradient.

    In a linear or convolution layer, the output, the gradient of the weights and the gradient of the input take the
    same number. Other layers are negligible.
    """
    found = 0.0

    def note(module: nn.Module, output: Any) -> None:
        nonlocal found
        weight = getattr(module, "weight", None)
        if isinstance(module, (nn.Linear, nn.Conv2d)) and weight is not None:
            places = math.prod(output.shape[1:3]) if isinstance(module, nn.Conv2d) else 1  # (1, H, W, C)
            found += 3 * 2 * weight.size * places

    recorder, batch = Prediction(model).recorder({"x": np.zeros((1, *shape), np.float32)})
    with recorder.active(), nn.watching(note), nn.evaluating(model):  # records, and compiles nothing
        model(recorder.tensor(batch["x"]))
    return found


def work_of(config: Config) -> str:
    """Return the key under [measured] in a cluster's file: "model data"."""
    return f"{Path(config.model).stem} {Path(config.data).stem}"


def measure(path: str, config: Config) -> Entry:
    """Time gradients on this machine, and write the seconds per image under [measured] in the cluster's file."""
    cluster = clusters.load(path)
    if not Path(path).is_file():
        raise ConfigError(f"--measure writes to the cluster's file, and {path!r} is an example that comes with minidl: "
                          f"copy {clusters.EXAMPLES / path}.toml and give the copy")  # fmt: skip
    dataset, model = prepare(config)
    engine = Engine(model, config)
    model.train()
    x, y = dataset.x_train[: config.batch_size], dataset.y_train[: config.batch_size]
    times = []
    for _ in range(MEASURED):
        began = perf_counter()
        engine.gradient(x, y)
        times.append((perf_counter() - began) / len(y))
    seconds = float(np.median(times[1:]))  # the first one compiles
    work = work_of(config)
    text = with_measured(Path(path).read_text(encoding="utf-8"), work, seconds)
    clusters.parse(text, path)  # may raise, so it comes before the write
    write(Path(path), text.encode())
    return {"work": work, "seconds_per_image": seconds, "cluster": cluster.file}


def with_measured(text: str, work: str, seconds: float) -> str:
    """Return the text of a cluster file with this entry added or replaced under [measured]."""
    line = f'"{work}" = {seconds:.4e}'
    lines = [each for each in text.splitlines() if not re.match(rf'\s*"{re.escape(work)}"\s*=', each)]
    heads = [number for number, each in enumerate(lines) if re.match(r"\s*\[measured\]", each)]
    if heads:
        lines.insert(heads[0] + 1, line)
    else:
        lines += ["", "[measured]  # seconds for an image's gradient, at speed 1", line]
    return "\n".join(lines) + "\n"
