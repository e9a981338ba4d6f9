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
from minidl.program.dependence import Calls, accesses
from minidl.program.record import Call, Memory, Place

NORM = ("x", "weight", "bias", "mean", "rstd", "relu")  # what the sums for the gradients depend on, besides dy


def sum_in_convolutions(calls: Calls, outputs: set[Memory]) -> None:
    """Let convolutions compute the sums of the batch norms that follow them. outputs: memory of the step's results."""
    for norm in calls:
        if norm.name == "norm.batch_norm":
            conv = _last_writer(calls, norm, "x")
            if conv and conv.name == "conv.forward" and _adds_up(conv, "y", norm):
                calls.replace(conv, _renamed(conv, "forward_with_moments", partial=norm.arguments["partial"]))
                calls.replace(norm, _renamed(norm, "batch_norm_with_moments"))
        elif norm.name == "norm.batch_norm_backward":
            _sum_gradients(calls, norm, outputs)


def _sum_gradients(calls: Calls, norm: Call, outputs: set[Memory]) -> None:
    a, conv = norm.arguments, _last_writer(calls, norm, "dy")
    relu, relu_y = None, a["dy"]._replace(like=a["dy"].like.reshape(-1)[:0])
    if conv and conv.name == "activation.relu_backward" and not norm.uses("relu"):
        relu, relu_y = conv, conv.arguments["y"]
        dy = relu.arguments["dy"]
        conv = _last_writer(calls, relu, "dy")
        if not dy.is_temporary(outputs) or calls.users(dy.memory) != [conv, relu]:
            return
    if not conv or conv.name != "conv.backward_input" or not _adds_up(conv, "dx", norm):
        return
    given = {f"norm_{name}": a[name] for name in NORM}
    if calls.unchanged([relu_y, *(place for place in given.values() if type(place) is Place)], since=conv, until=norm):
        dx = (relu.arguments["dx"] if relu else a["dy"]).shaped(conv.arguments["dx"])
        calls.replace(conv, _renamed(conv, "backward_input_with_sums", **given, relu_y=relu_y, dx=dx,
                                     partial=a["partial"]))  # fmt: skip
        calls.replace(norm, _renamed(norm, "batch_norm_backward_with_sums"))
        if relu:
            calls.replace(relu, None)


def _last_writer(calls: Calls, reader: Call, name: str) -> Call | None:
    """Return the call that computes the argument `name` of a call, if it is the last one that writes this array."""
    place, found = reader.arguments[name], None
    for call in calls.users(place.memory):
        if call is reader:
            break
        if any(written and other.overlaps(place) for other, written in accesses(call)):
            found = call
    return found if found and any(written and place.same(other) for other, written in accesses(found)) else None


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
