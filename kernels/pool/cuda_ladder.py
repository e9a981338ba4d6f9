"""The steps of README.md for a GPU: y = the largest of 2 x 2 pixels, for x (N, H, W, C) in float32 with even H and W.

`python tests/cuda/facts.py pool` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import int32
from numpy import ndarray

from minidl.engine.cuda import Kernel, cuda, kernel, launch
from minidl.engine.cuda_memory import get, put

from ..reduce.block_sum import THREADS
from . import cuda as fast

TWO, NONE = (2, 2), (0, 0)


def _outputs(channels_first: bool) -> Kernel:
    """Return the kernel in which neighbouring threads have neighbouring channels, or else neighbouring pixels."""

    def max_pool(x: ndarray, pixels: int, width: int, channels: int, y: ndarray, place: ndarray) -> None:
        """pixels: of y, in all images; width: of y"""
        number = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        if channels_first:
            pixel, c = number // channels, number % channels
        else:
            pixel, c = number % pixels, number // pixels
        if pixel < pixels and c < channels:
            line = pixel // width
            begin = int32((line * 2 * width * 2 + pixel % width * 2) * channels + c)  # lines of an image follow another
            best, where = get(x, begin), int32(0)
            for tap in range(1, 4):
                value = get(x, int32(begin + (tap // 2 * width * 2 + tap % 2) * channels))
                if value > best or value != value:  # NaN wins
                    best, where = value, int32(tap)
            put(y, int32(pixel * channels + c), best)
            put(place, int32(pixel * channels + c), np.uint8(where))

    return kernel(threads=THREADS)(max_pool)


_pixels, _channels = _outputs(False), _outputs(True)


def naive(x: ndarray, y: ndarray, place: ndarray) -> None:
    """A thread for each output. Neighbouring threads compute neighbouring pixels."""
    _launch(_pixels, x, y, place)


def coalesced(x: ndarray, y: ndarray, place: ndarray) -> None:
    """Neighbouring threads compute neighbouring channels."""
    _launch(_channels, x, y, place)


def sixteen_bytes(x: ndarray, y: ndarray, place: ndarray) -> None:
    """Call cuda.py: a thread computes four channels."""
    fast.max_pool(x, TWO, TWO, NONE, y, place)


def _launch(compute: Kernel, x: ndarray, y: ndarray, place: ndarray) -> None:
    images, height, width, channels = y.shape
    launch(compute, -(-y.size // THREADS), x, images * height * width, width, channels, y, place)


RUNGS: dict[str, Callable[[ndarray, ndarray, ndarray], None]] = {
    "1 naive": naive,
    "2 coalesced": coalesced,
    "3 16 bytes": sixteen_bytes,
}
