"""Speed of strided copies (transposes, every second pixel), compared with contiguous copies, NumPy and PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import measure

import numpy as np  # isort: skip

from minidl.kernels.movement import ladder

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]


LAST = list(ladder.RUNGS)[-1]


def steps(x: np.ndarray, view: np.ndarray, target: np.ndarray) -> dict[str, Callable[[], object]]:
    """Return functions that copy `view` to `target`, one for each version. `view` begins at the first element of x."""
    strides, into = (np.array(array.strides) // array.itemsize for array in (view, target))
    shape = np.array(view.shape)
    return measure.rungs(ladder.RUNGS, x.reshape(-1), 0, strides, shape, 0, into, target.reshape(-1))


def main() -> None:
    report = measure.Report(measure.arguments(__doc__).parse_args())
    for shape in ((128, 32, 32, 16), (64, 7, 7, 64), (64, 32, 32, 3)):
        x = np.random.default_rng(0).standard_normal(shape, np.float32)
        for what, view in (("channels first", x.transpose(0, 3, 1, 2)), ("every second pixel", x[:, ::2, ::2])):
            target = np.empty(view.shape, np.float32)
            functions = steps(x, view, target)
            functions["NumPy"] = lambda: np.copyto(target, view)  # noqa: B023
            if torch is not None:
                torch.set_num_threads(report.threads)
                into, strided = torch.from_numpy(target), torch.from_numpy(view)
                functions["PyTorch"] = lambda: into.copy_(strided)  # noqa: B023
            name = "x".join(map(str, shape))
            traffic = 2 * target.nbytes
            share = report.ladder(f"{what}, {name}", functions, traffic=traffic, bytes_=target.nbytes)
            report.row(f"{what.replace(' ', '-')}-{name}", share[LAST], "% of copying", ">= 90")
    report.finish()


if __name__ == "__main__":
    main()
