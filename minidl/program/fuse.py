"""Which calls of a recorded step become one: each rule saves a pass over memory and changes no bit of any result.

A rule looks at a call and at the one that makes, or takes, one of its arrays. It applies only where nobody else looks
at that array, since it will not exist any more.

    x -> conv -> y -> affine -> z -> relu -> a      becomes      x -> conv -> a
    (affine is batch norm when evaluating; the convolution's last loop still holds the numbers in registers)

    x -> batch norm -> z, z + shortcut -> s -> relu -> a      becomes      x, shortcut -> batch norm -> a
    (likewise a convolution when evaluating, and a convolution's dx to which the gradient of the shortcut is added)

    da -> relu backward -> dy -> batch norm backward -> dx      becomes      da -> batch norm backward -> dx

    dp -> max pool backward -> da -> relu backward -> dy        becomes the other way round, on fewer numbers
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from minidl.program.record import Buffer, Call, Place

RELU_AFTER = {  # kernels that can apply relu to what they write, and the name of that argument
    ("matmul", "nn"): "out",
    ("conv", "forward"): "y",
    ("norm", "batch_norm"): "y",
    ("norm", "affine"): "y",
}

SHORTCUT_AFTER = {  # kernels that can add a shortcut to what they write, and the name of that argument
    ("norm", "batch_norm"): "y",
    ("conv", "forward"): "y",
    ("conv", "backward_input"): "dx",
}


def fuse(calls: list[Call], wanted: set[Buffer]) -> list[Call]:
    """The calls after all rules; arrays in the wanted buffers are looked at from outside."""
    calls = _fold_batch_norm_into_convolution(calls, wanted)
    calls = _shortcut_with_what_makes_the_sum(calls, wanted)
    calls = _relu_with_what_makes_its_input(calls, wanted)
    calls = _relu_backward_with_batch_norm_backward(calls, wanted)
    return _relu_backward_before_max_pool_backward(calls, wanted)


def users(calls: list[Call]) -> dict[Buffer, list[Call]]:
    """Which calls touch a buffer, in their order."""
    found: dict[Buffer, list[Call]] = defaultdict(list)
    for call in calls:
        for _, place in call.places():
            if call not in found[place.buffer][-1:]:
                found[place.buffer].append(call)
    return found


def _only_between(place: Place, maker: Call, taker: Call, using: dict[Buffer, list[Call]], wanted: set[Buffer]) -> bool:
    """Whether an array is a buffer of its own that one call makes, another takes, and nobody else ever sees."""
    return place.is_inner(wanted) and using[place.buffer] == [maker, taker]


def _merge(calls: list[Call], maker: Call, taker: Call, merged: Call) -> list[Call]:
    """In the taker's place, where everything that either reads is there."""
    return [merged if call is taker else call for call in calls if call is not maker]


def _maker(
    outputs: dict[tuple[str, str], str], x: Place, taker: Call, calls: list[Call], wanted: set[Buffer], unused: str = ""
) -> tuple[Call, str] | None:
    """The call that makes x for this taker only, and the name of that argument: one of these kernels with their
    outputs, if it does nothing yet with `unused`, and no relu."""
    using = users(calls)
    call = using[x.buffer][0]
    output = outputs.get((call.op, call.kernel))
    fits = (
        output
        and x.same(call.arguments[output])
        and _only_between(x, call, taker, using, wanted)
        and not (unused and call.arguments[unused].like.size)
        and not call.arguments.get("relu")
    )
    return (call, output) if output and fits else None


def _fold_batch_norm_into_convolution(calls: list[Call], wanted: set[Buffer]) -> list[Call]:
    for affine in [call for call in calls if (call.op, call.kernel) == ("norm", "affine")]:
        if found := _maker({("conv", "forward"): "y"}, affine.arguments["x"], affine, calls, wanted, unused="scale"):
            conv, _ = found
            scale, shift, relu, y = (affine.arguments[name] for name in ("scale", "shift", "relu", "y"))
            image = y._replace(like=y.like.reshape(conv.arguments["y"].like.shape))
            calls = _merge(calls, conv, affine, conv.replaced(scale=scale, shift=shift, relu=relu, y=image))
    return calls


def _shortcut_with_what_makes_the_sum(calls: list[Call], wanted: set[Buffer]) -> list[Call]:
    """The sum of a residual block is made where one of its terms is written."""
    for add in [call for call in calls if (call.op, call.kernel) == ("elementwise", "add")]:
        if add.arguments["a"].same(add.arguments["b"]):
            continue  # y + y: nothing but the sum would be left
        for name, other in (("a", "b"), ("b", "a")):
            if found := _maker(SHORTCUT_AFTER, add.arguments[name], add, calls, wanted, unused="shortcut"):
                maker, output = found
                shortcut, total = add.arguments[other], add.arguments["out"]
                rows = shortcut.like.reshape(-1, *maker.arguments["shortcut"].like.shape[1:])
                total = total._replace(like=total.like.reshape(maker.arguments[output].like.shape))
                merged = maker.replaced(**{"shortcut": shortcut._replace(like=rows), output: total})
                calls = _merge(calls, maker, add, merged)
                break
    return calls


def _relu_with_what_makes_its_input(calls: list[Call], wanted: set[Buffer]) -> list[Call]:
    for relu in [call for call in calls if (call.op, call.kernel) == ("activation", "relu")]:
        if found := _maker(RELU_AFTER, relu.arguments["x"], relu, calls, wanted):
            (maker, output), y = found, relu.arguments["y"]
            shaped = y._replace(like=y.like.reshape(maker.arguments[output].like.shape))
            calls = _merge(calls, maker, relu, maker.replaced(relu=True, **{output: shaped}))
    return calls


def _relu_backward_with_batch_norm_backward(calls: list[Call], wanted: set[Buffer]) -> list[Call]:
    """Batch norm's backward pass computes its output anew and sees from its sign what relu let through."""
    normalized = {  # where the output of "batch norm, then relu" lies -> the call
        (call.arguments["y"].buffer, call.arguments["y"].offset): call
        for call in calls
        if (call.op, call.kernel) == ("norm", "batch_norm")
        and call.arguments["relu"]
        and not call.arguments["shortcut"].like.size
    }
    for relu in [call for call in calls if (call.op, call.kernel) == ("activation", "relu_backward")]:
        using, dx, y = users(calls), relu.arguments["dx"], relu.arguments["y"]
        taker, forward = using[dx.buffer][-1], normalized.get((y.buffer, y.offset))
        if (
            forward
            and (taker.op, taker.kernel) == ("norm", "batch_norm_backward")
            and dx.same(taker.arguments["dy"])
            and _only_between(dx, relu, taker, using, wanted)
            and all(taker.arguments[name].same(forward.arguments[name]) for name in ("x", "mean", "rstd"))
        ):
            dy = relu.arguments["dy"]
            rows = dy._replace(like=dy.like.reshape(taker.arguments["dy"].like.shape))
            calls = _merge(calls, relu, taker, taker.replaced(relu=True, dy=rows))
    return calls


def _relu_backward_before_max_pool_backward(calls: list[Call], wanted: set[Buffer]) -> list[Call]:
    """A pixel that is the largest of its window equals the pooled one, so relu let both through, or neither."""
    pooled = {  # where the input of a max pooling lies -> the call
        (call.arguments["x"].buffer, call.arguments["x"].offset): call
        for call in calls
        if (call.op, call.kernel) == ("pool", "max_pool")
    }
    for relu in [call for call in calls if (call.op, call.kernel) == ("activation", "relu_backward")]:
        using, da, y = users(calls), relu.arguments["dy"], relu.arguments["y"]
        pool, forward = using[da.buffer][0], pooled.get((y.buffer, y.offset))
        if (
            forward
            and (pool.op, pool.kernel) == ("pool", "max_pool_backward")
            and da.same(pool.arguments["dx"])
            and _only_between(da, pool, relu, using, wanted)
            and pool.arguments["place"].same(forward.arguments["place"])
        ):
            dp, p, dy = pool.arguments["dy"], forward.arguments["y"], relu.arguments["dx"]
            passed = Place(Buffer(np.empty(dp.like.nbytes, np.uint8)), 0, dp.like)
            flat = [place._replace(like=place.like.reshape(-1)) for place in (dp, p, passed)]
            first = relu.replaced(**dict(zip(("dy", "y", "dx"), flat, strict=True)))
            second = pool.replaced(dy=passed, dx=dy._replace(like=dy.like.reshape(pool.arguments["dx"].like.shape)))
            calls = [{pool: first, relu: second}.get(call, call) for call in calls]
    return calls
