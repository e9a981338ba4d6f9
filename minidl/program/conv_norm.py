"""Merge batch norms with the convolutions beside them, on the CPU. The kernels are those of kernels/conv_norm.

    x -> conv -> y -> batch norm -> z, relu -> a -> conv            in three steps:

    1. conv adds up y while it writes it        x -> conv -> y, sums;      y, sums -> batch norm -> a -> conv
    2. the next conv normalises what it reads   x -> conv -> y, sums;      sums -> mean, rstd;   y, mean, rstd -> conv
    3. backward: conv adds up dx in the same way, and applies the gradient of a relu after a shortcut

So fewer arrays are read from slow memory, and `a` is not stored. Not all shapes can be merged (`adds_up`, `normalizes`
in kernels/conv_norm/cpu.py). All bits of the results stay the same: the sums are added in the order in which the batch
norm itself would add them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from minidl.engine.device import Device
from minidl.program.dependence import Calls, accesses
from minidl.program.record import EMPTY, Call, Memory, Place, parameters

NORM = "weight", "bias", "mean", "rstd"  # what a convolution needs to know of a batch norm
OPTIONS = "groups", "stride", "padding", "dilation", "winograd"


def merge_norms(calls: Calls, outputs: set[Memory]) -> None:
    """Merge the batch norms of a step with convolutions, where possible. outputs: the memory of the step's results."""
    for call in calls:
        if call.name == "norm.batch_norm":
            _sum_in_forward(calls, call)
        elif call.name == "norm.batch_norm_backward":
            _sum_in_backward(calls, call, outputs)
    for call in calls:
        if call.name in ("norm.batch_norm", "conv_norm.batch_norm"):
            _normalize_in_convolutions(calls, call, outputs)


def _sum_in_forward(calls: Calls, norm: Call) -> None:
    """Let the convolution that writes the input of a batch norm also compute its moments."""
    conv = _writer(calls, norm, "x")
    if conv and conv.name == "conv.forward" and _adds_up(conv, "y", norm):
        sums, none = norm.arguments["partial"], _empty(norm.arguments["x"].like.dtype, 0)
        calls.replace(conv, _renamed(conv, "forward", {f"norm_{name}": none for name in NORM}, sums=sums))
        calls.replace(norm, _renamed(norm, "batch_norm", sums=sums))


def _sum_in_backward(calls: Calls, norm: Call, outputs: set[Memory]) -> None:
    """Let the convolution that writes the gradient of a batch norm's output also compute the sums of this gradient.

    If there is a relu between them (it follows the sum of batch norm and shortcut), also apply its gradient.
    """
    a, relu, conv = norm.arguments, None, _writer(calls, norm, "dy")
    dx, relu_y = a["dy"], _empty(a["dy"].like.dtype, 0)
    if conv and conv.name == "activation.relu_backward" and not norm.uses("relu"):
        relu, relu_y = conv, conv.arguments["y"]
        dx, before = relu.arguments["dx"], relu.arguments["dy"]
        conv = _writer(calls, relu, "dy")
        if not before.is_temporary(outputs) or calls.users(before.memory) != [conv, relu]:
            return
    if not conv or conv.name != "conv.backward_input" or not _adds_up(conv, "dx", norm):
        return
    given = {f"norm_{name}": a[name] for name in ("x", "relu", *NORM)} | {"relu_y": relu_y}
    arrays = [place for place in given.values() if type(place) is Place]
    if calls.unchanged(arrays, since=conv, until=norm) and (not relu or calls.unused(dx, since=conv, until=relu)):
        dx, sums = dx.shaped(conv.arguments["dx"]), a["partial"]
        calls.replace(conv, _renamed(conv, "backward_input", given, dx=dx, sums=sums))
        calls.replace(norm, _renamed(norm, "batch_norm_backward", sums=sums))
        if relu:
            calls.replace(relu, None)


def _normalize_in_convolutions(calls: Calls, norm: Call, outputs: set[Memory]) -> None:
    """Let convolutions normalise and rectify what they read, if only they read the output of a batch norm and relu."""
    a, given = norm.arguments, {f"norm_{name}": norm.arguments[name] for name in NORM}
    x, y = a["x"], a["y"]
    if not norm.uses("relu") or norm.uses("shortcut") or not y.is_temporary(outputs):
        return
    first, *readers = calls.users(y.memory)
    if first is not norm or not all(_normalizes(calls, call, y) for call in readers):
        return
    if all(calls.unchanged([x, *given.values()], since=norm, until=call) for call in readers):
        for call in readers:
            op, _, kernel = call.name.partition(".")
            others = {"sums": _empty(np.dtype(np.float64), 0, 2, 0)} if op == "conv" else {}
            calls.replace(call, _renamed(call, kernel, given, others, x=x.shaped(call.arguments["x"])))
        calls.replace(norm, norm.replaced(y=_empty(x.like.dtype, 0, x.like.shape[1])))


def _writer(calls: Calls, reader: Call, name: str) -> Call | None:
    """Return the last call before `reader` that writes the array of its argument `name`, if it writes all of it."""
    place, found, same = reader.arguments[name], None, False
    for call in calls.users(place.memory):
        if call is reader:
            break
        written = [other for other, writes in accesses(call) if writes and other.overlaps(place)]
        if written:
            found, same = call, len(written) == 1 and place.same(written[0])
    return found if same else None


def _adds_up(conv: Call, output: str, norm: Call) -> bool:
    """Return whether a convolution can compute the sums of its result, the argument `output`, for a batch norm."""
    y, cpu = conv.arguments[output].like, Device("cpu")
    if norm.arguments["x"].like.shape[-1] != y.shape[-1]:
        return False  # a reshape between them
    x_shape = conv.arguments["x" if output == "y" else "dx"].like.shape
    blocks = cpu.norm.parts(y.size // y.shape[3], y.shape[3])
    return len(norm.arguments["partial"].like) == blocks and bool(
        cpu.conv_norm.adds_up(output, x_shape, _weight(conv), *_options(conv))
    )


def _normalizes(calls: Calls, call: Call, y: Place) -> bool:
    """Return whether a call is a convolution that reads the whole array y, and can normalise it."""
    if call.name not in ("conv.forward", "conv_norm.forward", "conv.backward_weight"):
        return False
    x = call.arguments["x"]
    same = x.same(y) and x.like.shape[-1] == y.like.shape[-1]  # no reshape between them
    if not same or calls.count(call, y.memory) > 1 or call.uses("norm_mean"):
        return False
    return bool(Device("cpu").conv_norm.normalizes(x.like.shape, _weight(call), *_options(call)))


def _weight(conv: Call) -> tuple[int, ...]:
    """Return the shape of a convolution's weight."""
    weight: Place = conv.arguments["dweight" if conv.name.endswith("weight") else "weight"]
    return weight.like.shape


def _options(conv: Call) -> list[Any]:
    return [conv.arguments[name] for name in OPTIONS]


def _empty(dtype: np.dtype[Any], *shape: int) -> Place:
    """Return an argument that is not used."""
    return Place(EMPTY, 0, np.empty(shape, dtype))


def _renamed(call: Call, kernel: str, *more: Mapping[str, Any], **replaced: Any) -> Call:
    """Return a call of a kernel of conv_norm with the arguments of `call`, of which some are replaced or added."""
    kernels = Device("cpu").conv_norm
    every = dict(call.arguments)
    for some in (*more, replaced):
        every |= some
    if "scratch" in every:
        x: Place = every["x" if "x" in every else "dx"]
        size = getattr(kernels, f"{kernel}_scratch")(x.like.shape, _weight(call), *_options(call))
        scratch = np.empty(size, x.like.dtype)
        every["scratch"] = Place(Memory(scratch), 0, scratch)
    function = getattr(kernels, kernel)
    return Call(f"conv_norm.{kernel}", function, {name: every[name] for name in parameters(function) or ()})
