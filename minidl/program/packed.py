"""Packed weights: the form in which kernels read their weights, kept from one prediction to the next.

A convolution or a product first brings its weights into the form that its loops read: panels, or the planes of
Winograd's form. For images of one size, this form depends on nothing else, so a `Prediction` computes it once for each
version of the arena. With one image, packing may take as long as the rest of a layer. The results have the same bits.

A weight whose memory may change without a new version is packed in each run: a parameter outside an arena, a vector
that `bind` has set, the result of another call.
"""

from __future__ import annotations

from collections.abc import Hashable
from weakref import WeakValueDictionary

from minidl.engine.device import Device, aligned
from minidl.program.dependence import Calls
from minidl.program.record import Call, Memory, Place

WEIGHTS = {"conv.forward": "weight", "matmul.nn": "b"}  # kernel -> its argument with the weights
OPTIONS = ("groups", "stride", "padding", "dilation", "winograd")


class PackedWeights:
    """The packed weights that the programs of a model share: vectors, whose last number is 1 if they are valid.

    A vector is freed with the last program that uses it.
    """

    def __init__(self) -> None:
        self.vectors: WeakValueDictionary[Hashable, Memory] = WeakValueDictionary()  # weight, image, options -> packed
        self.version: object = None  # the version of the weights from which the vectors are computed

    def add_to(self, calls: Calls) -> None:
        """Let the convolutions and products of a recorded step keep their weights."""
        for call in calls:
            weight = call.arguments.get(WEIGHTS.get(call.name, ""))
            if weight is not None and weight.memory.name == "theta":
                place = self._place(call, weight)
                if place:
                    calls.replace(call, call.replaced(packed=place))

    def _place(self, call: Call, weight: Place) -> Place | None:
        """Return the place for the packed weights of a call, None if it reads weights as they are."""
        cpu = Device("cpu")
        key: tuple[Hashable, ...] = (weight.offset, weight.like.shape, weight.like.dtype)
        if call.name == "matmul.nn":
            size = cpu.matmul.packed_size(call.arguments["a"].like.shape[0], *weight.like.shape[::-1])
        else:
            shape, options = call.arguments["x"].like.shape, [call.arguments[name] for name in OPTIONS]
            size = cpu.conv.packed_size(shape, weight.like.shape, *options)
            key += shape[1:3], *options
        if size == 0:
            return None
        key += (size,)  # instead of the number of images: few images may have another form
        memory = self.vectors.get(key)
        if memory is None:
            memory = self.vectors[key] = Memory(aligned(size, weight.like.dtype), "constant")
        return Place(memory, 0, memory.array)

    def renew(self, version: object) -> None:
        """Discard what was computed from another version of the weights; None: any version."""
        if version is None or version != self.version:
            for memory in self.vectors.values():
                memory.array[-1] = 0
        self.version = version
