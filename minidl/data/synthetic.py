"""Synthetic images of any number and shape, for tests and benchmarks without data files."""

from __future__ import annotations

import math
import re

import numpy as np

from minidl.data.dataset import Splits
from minidl.data.seeds import Purpose, generator
from minidl.errors import ConfigError
from minidl.resources import available
from minidl.resources import size as text_of

DEFAULT = "4096x8x8x1:10"
NOISE = 2.0
COPIES = 3  # arrays as large as all images: the images, `prototypes[labels]` and the standardised images


def read_synthetic(size: str, seed: int) -> Splits:
    """Generate COUNT training images and COUNT / 4 test images. size: "COUNTxHEIGHTxWIDTHxCHANNELS:CLASSES".

    Each class has a prototype of standard normal pixels; an image is the prototype of its class plus normal noise of
    standard deviation 2. A single noisy pixel carries little information about the class; all pixels together identify
    it. There is at least one test image per class. Raises ConfigError if `size` has another form or does not fit into
    memory.
    """
    match = re.fullmatch(r"(\d{1,18})x(\d{1,18})x(\d{1,18})x(\d{1,18}):(\d{1,18})", size or DEFAULT, re.ASCII)
    numbers = [int(number) for number in match.groups()] if match else [0]
    if min(numbers) < 1 or numbers[0] < numbers[-1]:
        raise ConfigError(
            f"'synthetic:{size}' must read synthetic:COUNTxHEIGHTxWIDTHxCHANNELS:CLASSES with every number at least 1 "
            f"and COUNT at least CLASSES, such as synthetic:{DEFAULT}"
        )
    count, *shape, classes = numbers
    tests = max(count // 4, classes)
    needed, free = COPIES * 4 * (count + tests + classes) * math.prod(shape), available()
    if needed > free:
        raise ConfigError(f"'synthetic:{size}' does not fit into memory: it needs about {text_of(needed)}, and "
                          f"{text_of(free)} are free: use fewer or smaller images")  # fmt: skip
    rng = generator(Purpose.SYNTHETIC, seed)
    prototypes = rng.standard_normal((classes, *shape), dtype=np.float32)
    y_train, x_train = _draw(count, prototypes, rng)
    y_test, x_test = _draw(tests, prototypes, rng)
    return Splits(x_train, y_train, x_test, y_test, classes)


def _draw(count: int, prototypes: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    labels = rng.permutation(np.arange(count) % len(prototypes))
    images = rng.standard_normal((count, *prototypes.shape[1:]), dtype=np.float32)
    images *= NOISE
    images += prototypes[labels]
    return labels, images
