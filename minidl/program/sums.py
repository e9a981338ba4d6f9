"""Sums of batch norm, computed by convolutions: each convolution adds up what it has just written, on the CPU.

    x -> conv -> y;  y -> batch norm        becomes     x -> conv -> y, moments of y;  y, moments -> batch norm

    dy -> conv backward -> dx;  dx -> batch norm backward
                                            becomes     dy -> conv backward -> dx, sums;  dx, sums -> ...

Batch norm then reads y (or dx) once instead of twice: the convolution adds up rows that are still in a fast cache. The
order of the additions is that of the batch norm's own kernel (kernels/norm/blocks.py), so the bits are the same.
"""

from __future__ import annotations

from typing import Any

from minidl.engine.device import Device
from minidl.program.dependence import Calls
from minidl.program.record import Call, Place

NORM = ("weight", "bias", "mean", "rstd")  # what the sums for the gradients depend on, besides x and dy


def sum_in_convolutions(calls: Calls) -> None:
    """Let convolutions compute the sums of the batch norms that follow them."""
    for norm in calls:
        if norm.name == "norm.batch_norm":
            conv = _writer(calls, "conv.forward", "y", norm, "x", ())
            if conv:
                partial = norm.arguments["partial"]
                calls.replace(conv, _renamed(conv, "forward_with_moments", partial=partial))
                calls.replace(norm, _renamed(norm, "batch_norm_with_moments"))
        elif norm.name == "norm.batch_norm_backward":
            conv = _writer(calls, "conv.backward_input", "dx", norm, "dy", ("x", *NORM))
            if conv:
                a = norm.arguments
                given = {f"norm_{name}": a[name] for name in ("x", "relu", *NORM)}
                calls.replace(conv, _renamed(conv, "backward_input_with_sums", partial=a["partial"], **given))
                calls.replace(norm, _renamed(norm, "batch_norm_backward_with_sums"))


def _writer(calls: Calls, kernel: str, output: str, norm: Call, name: str, also: tuple[str, ...]) -> Call | None:
    """Return the convolution that computes the argument `name` of a batch norm, if it can compute the sums.

    also: other arguments of the batch norm that the convolution then reads.
    """
    read = [norm.arguments[key] for key in (name, *also)]
    for conv in calls.users(read[0].memory):
        if conv.name == kernel and conv.arguments[output].same(read[0]) and _adds_up(conv, output, norm):
            if calls.unchanged(read, since=conv, until=norm):
                return conv
    return None


def _adds_up(conv: Call, output: str, norm: Call) -> bool:
    a, y = conv.arguments, conv.arguments[output].like
    shape = a["weight"].like.shape
    if output == "dx":
        shape = *shape[:2], shape[3], shape[2]
    options = (a[name] for name in ("groups", "stride", "dilation", "winograd"))
    cpu = Device("cpu")
    blocks = cpu.norm.parts(y.size // y.shape[3], y.shape[3])
    return norm.arguments["partial"].like.shape[0] == blocks and cpu.conv.adds_up(
        y.shape[0], y.shape[1:3], shape, *options
    )


def _renamed(call: Call, kernel: str, **arguments: Any) -> Call:
    """Return a call of another kernel of the same module, with the same arguments and some more."""
    op = call.name.partition(".")[0]
    function = getattr(getattr(Device("cpu"), op), kernel)
    every: dict[str, Place | Any] = {**call.arguments, **arguments}
    code = function.py_func.__code__
    return Call(f"{op}.{kernel}", function, {name: every[name] for name in code.co_varnames[: code.co_argcount]})
