"""PyTorch's side of bench/gpu.py computes the same as minidl's kernels. Here it computes on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from bench.gpu_kernels import PASSES, Peer
from bench.kernels import Layer
from minidl.engine.device import Device

torch = pytest.importorskip("torch")
CPU = Device("cpu")


@pytest.fixture
def peer() -> Peer:
    torch.manual_seed(0)
    return Peer("cpu")


@pytest.mark.parametrize("form", ["nn", "nt", "tn"])
def test_products_run(peer: Peer, form: str) -> None:
    peer.product(2, form, 8)()


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("stride", [1, 2])
def test_passes_of_a_convolution_are_minidls(peer: Peer, which: str, stride: int) -> None:
    layer = Layer(2, 7, 3, 5, 3, stride)
    assert set(peer.convolution(1, layer, which)) == {"channels_last", "contiguous_format"}
    to = (7 - 1) // stride + 1
    x, weight, dy = torch.randn(2, 3, 7, 7), torch.randn(5, 3, 3, 3), torch.randn(2, 5, to, to)
    found = peer._pass(which, x, weight, dy, stride, 1)()
    found = found if which == "forward" else next(one for one in found if one is not None)
    images, filters, grad = (
        np.ascontiguousarray(one.numpy().transpose(axes))
        for one, axes in ((x, (0, 2, 3, 1)), (weight, (2, 3, 1, 0)), (dy, (0, 2, 3, 1)))
    )
    where = 1, (stride, stride), (1, 1), (1, 1), False
    scratch = np.empty(getattr(CPU.conv, f"{which}_scratch")(images.shape, filters.shape, *where), np.float32)
    none = np.empty(0, np.float32)
    if which == "forward":
        out = np.empty_like(grad)
        CPU.conv.forward(images, filters, none, none, none, none, False, *where, none, scratch, out)
        expected = out.transpose(0, 3, 1, 2)
    elif which == "backward_input":
        out = np.empty_like(images)
        CPU.conv.backward_input(grad, filters, none, *where, scratch, out)
        expected = out.transpose(0, 3, 1, 2)
    else:
        out = np.empty_like(filters)
        CPU.conv.backward_weight(images, grad, *where, scratch, out)
        expected = out.transpose(3, 2, 0, 1)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-4)
