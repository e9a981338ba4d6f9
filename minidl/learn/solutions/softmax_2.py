"""Softmax 2: the gradient of the cross-entropy: a solution."""

import numpy as np
from numpy import ndarray


def gradient(p: ndarray, labels: ndarray, smoothing: float) -> ndarray:
    """Return the gradient of the loss with respect to the logits; p (rows, classes), labels (rows,)."""
    rows, classes = p.shape
    targets = np.full(p.shape, smoothing / classes)
    targets[np.arange(rows), labels] += 1 - smoothing
    return (p - targets) / rows
