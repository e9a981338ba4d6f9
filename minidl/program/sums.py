"""Sums of batch norm, computed by convolutions: each convolution adds up what it has just written, on the CPU.

    x -> conv -> y;  y -> batch norm        becomes     x -> conv -> y, moments of y;  y, moments -> batch norm

    dy -> conv backward -> dx;  dx -> batch norm backward
                                            becomes     dy -> conv backward -> dx, sums;  dx, sums -> ...

Batch norm then reads y (or dx) once instead of twice: the convolution adds up rows that are still in a fast cache. The
order of the additions is that of the batch norm's own kernel (kernels/norm/blocks.py), so the bits are the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl.engine.device import Device
from minidl.program.dependence import Calls, accesses
from minidl.program.record import Call, Memory, Place

BEFORE = "weight", "bias", "mean", "rstd"
OPTIONS = "groups", "stride", "padding", "dilation", "winograd"
NORM = ("x", "weight", "bias", "mean", "rstd", "relu")  # what the sums for the gradients depend on, besides dy


def sum_in_convolutions(calls: Calls, outputs: set[Memory]) -> None:
    """Let convolutions compute the sums of the batch norms that follow them. outputs: memory of the step's results."""
    for norm in calls:
        if norm.name == "norm.batch_norm":
            conv = _last_writer(calls, norm, "x")
            if conv and conv.name == "conv.forward" and _adds_up(conv, "y", norm):
                _replace_forward(calls, conv, partial=norm.arguments["partial"])
                calls.replace(norm, _renamed(norm, "batch_norm_with_moments"))
        elif norm.name == "norm.batch_norm_backward":
            _sum_gradients(calls, norm, outputs)


def _replace_forward(calls: Calls, conv: Call, **arguments: Any) -> None:
    """Let a convolution normalise its input or compute the moments of its output."""
    x = conv.arguments["x"].like
    none = {f"norm_{name}": _empty(x.dtype, 0) for name in BEFORE} | {"partial": _empty(np.dtype(np.float64), 0, 2, 0)}
    if conv.name == "conv.forward_with_norms":
        calls.replace(conv, conv.replaced(**arguments))
    else:
        calls.replace(conv, _renamed(conv, "forward_with_norms", **{**none, **arguments}))


def _empty(dtype: np.dtype[Any], *shape: int) -> Place:
    return Place(Memory(np.zeros(1, np.uint8), "constant"), 0, np.empty(shape, dtype))


def normalize_in_convolutions(calls: Calls, outputs: set[Memory]) -> None:
    """Let convolutions normalise and rectify what they read, so that the output of a batch norm is not stored."""
    for norm in calls:
        if not norm.name.startswith("norm.batch_norm") or "backward" in norm.name:
            continue
        a = norm.arguments
        if not norm.uses("relu") or norm.uses("shortcut") or not a["y"].is_temporary(outputs):
            continue
        first, *readers = calls.users(a["y"].memory)
        given = {f"norm_{name}": a[name] for name in BEFORE}
        places = [a["x"], *given.values()]
        if first is not norm or not all(_can_normalize(call, a["y"], calls) for call in readers):
            continue
        if not all(calls.unchanged(places, since=norm, until=call) for call in readers):
            continue
        x = a["x"]
        for call in readers:
            shaped = x.shaped(call.arguments["x"])
            name = "backward_weight_with_norm" if call.name == "conv.backward_weight" else "forward_with_norms"
            scratch = _scratch(name, call)
            if call.name == "conv.backward_weight":
                calls.replace(call, _renamed(call, name, **given | {"x": shaped, "scratch": scratch}))
            else:
                _replace_forward(calls, call, **given, x=shaped, scratch=scratch)
        calls.replace(norm, norm.replaced(y=_empty(x.like.dtype, 0, x.like.shape[1])))


def _can_normalize(call: Call, y: Place, calls: Calls) -> bool:
    if call.name not in ("conv.forward", "conv.forward_with_norms", "conv.backward_weight"):
        return False
    x = call.arguments["x"]
    options = [call.arguments[name] for name in OPTIONS]
    weight = _weight_shape(call)
    return x.same(y) and calls.count(call, y.memory) == 1 and Device("cpu").conv.normalizes(x.like.shape, weight, *options)


def _weight_shape(call: Call) -> tuple[int, ...]:
    return call.arguments["dweight" if call.name == "conv.backward_weight" else "weight"].like.shape


def _scratch(kernel: str, call: Call) -> Place:
    options = [call.arguments[name] for name in OPTIONS]
    x = call.arguments["x"].like
    size = getattr(Device("cpu").conv, f"{kernel}_scratch")(x.shape, _weight_shape(call), *options)
    array = np.empty(size, x.dtype)
    return Place(Memory(array), 0, array)


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
