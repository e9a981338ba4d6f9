"""check_op compares an op with PyTorch, with the plain loops of the device "reference" and with difference quotients.

If PyTorch is not installed, only the last two comparisons run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minidl.engine.autograd import gradcheck
from minidl.engine.tensor import Tensor

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]
else:
    torch.set_num_threads(1)  # all inputs are small

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}  # relative to the largest element

Op = Callable[..., Any]


def check_op(
    ours: Op, theirs: Op | None, *inputs: tuple[int, ...] | np.ndarray, loops: bool = True, differences: bool = True
) -> None:
    """Compare y = ours(*inputs) and all its gradients, for a random dL/dy.

    theirs: the same function in PyTorch; None if `ours` accepts tensors of minidl and of PyTorch.
    inputs: arrays, or shapes to fill with normally distributed numbers. Each input requires a gradient.
    loops: whether to compare with the plain loops. differences: whether to run `gradcheck`, which fails at a kink.
    """
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(x) if isinstance(x, tuple) else np.asarray(x, np.float64) for x in inputs]
    for dtype, tolerance in TOLERANCE.items():
        found = run(ours, arrays, dtype)
        if torch is not None:
            compare(found, run_torch(theirs or ours, arrays, dtype), tolerance, f"PyTorch in {dtype}")
        if loops:  # the plain loops compute in float64, from inputs rounded to `dtype`
            rounded = [array.astype(dtype) for array in arrays]
            compare(found, run(ours, rounded, "float64", "reference"), tolerance, f"the plain loops in {dtype}")
    if differences:
        assert gradcheck(ours, *(Tensor(array, requires_grad=True) for array in arrays))


def run(op: Op, arrays: list[np.ndarray], dtype: str, device: str = "cpu") -> list[np.ndarray]:
    """Return [output, gradient of each input]."""
    tensors = [Tensor(array.astype(dtype), requires_grad=True, device=device) for array in arrays]
    y = op(*tensors)
    dy = cotangent(y.shape, dtype)
    y.backward(dy)
    np.testing.assert_array_equal(dy, cotangent(y.shape, dtype), "dL/dy was written to")
    for tensor, array in zip(tensors, arrays):
        np.testing.assert_array_equal(tensor.numpy(), array.astype(dtype), "an input was written to")
    found = [y.numpy(), *(tensor.grad for tensor in tensors)]
    assert all(array.dtype == dtype and array.flags.c_contiguous for array in found)
    return found


def run_torch(op: Op, arrays: list[np.ndarray], dtype: str) -> list[np.ndarray]:
    tensors = [torch.from_numpy(array.astype(dtype)).requires_grad_() for array in arrays]
    y = op(*tensors)
    y.backward(torch.from_numpy(cotangent(tuple(y.shape), dtype)))
    return [y.detach().numpy(), *(tensor.grad.numpy() for tensor in tensors)]


def cotangent(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.asarray(np.random.default_rng(1).standard_normal(shape), dtype)


def compare(found: list[np.ndarray], expected: list[np.ndarray], tolerance: float, oracle: str) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        what = f"{'output' if i == 0 else f'gradient of input {i - 1}'} against {oracle}"
        assert a.shape == b.shape, what
        largest = np.max(abs(b), where=np.isfinite(b), initial=0)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * largest, err_msg=what)
