"""Views of an image: changes that keep its label. Averaging the outputs for several views makes predictions better.

    mirror          the image and its mirror image
    mirror-shift    the same, and both of them for the image moved by one pixel, down to the right and up to the left
                    (Jordan 2024). The views of the image itself count half
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from minidl.checked import one_of
from minidl.data.augment import shifted
from minidl.errors import ConfigError

VIEWS = ("none", "mirror", "mirror-shift")


def views(name: str, x: np.ndarray) -> Iterator[tuple[float, np.ndarray]]:
    """Yield (weight, images) for each view of images x (N, H, W, C). The weights sum to 1.

    Raises ConfigError for an unknown name, and for features (N, D), which have no mirror image.
    """
    one_of("views", name, VIEWS)
    if name != "none" and x.ndim < 3:
        raise ConfigError(f"views {name}: an array of shape {x.shape}; expected images (N, H, W, C)")
    moves = ((0.5, 0), (0.25, 1), (0.25, -1)) if name == "mirror-shift" else ((1.0, 0),)
    for weight, pixels in moves:
        moved = shifted(x, pixels, pixels) if pixels else x
        if name == "none":
            yield weight, moved
        else:
            yield weight / 2, moved
            yield weight / 2, np.ascontiguousarray(moved[:, :, ::-1])


def averaged(outputs: Callable[[np.ndarray], np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    """Return the mean of outputs(view) over the views of images x: (N, classes)."""
    total: np.ndarray | None = None
    for weight, view in views(name, x):
        found = outputs(view)
        found *= found.dtype.type(weight)
        total = found if total is None else total + found
    assert total is not None
    return total
