"""Packed weights of direct convolutions: panels that the micro-kernels read from beginning to end.

A row of a panel contains the weights of one product of each sum, for as many outputs as a tile has columns. Its columns
are whole vectors; those beyond the last output have any value. In weight (kh, kw, C / groups, O), the outputs of the
forward pass are contiguous, so vectors are copied. Those of the data gradient are not, so squares are transposed
(../matmul/pack.py). With 512 -> 512 channels, this takes a sixth of the time of copying one number after the other.
Bundles and vectors across groups have few weights, which are copied one by one.
"""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from minidl.engine.jit import apart_jit, helper
from minidl.kernels.matmul.pack import pack_columns, pack_rows
from minidl.kernels.matmul.tile import columns_of, lanes, panel_width, panels_of, whole_vectors

from .blocks import Cut, row_of_outputs
from .geometry import Layer, by_channels
from .line import threes_of


@helper
def _weight(layer: Layer, weight: ndarray, backward: bool, u: int, v: int, k: int, o: int) -> float:
    """Return the weight at (u, v) from input channel k of a group to output channel o; 0 if there is no column v."""
    if v < 0 or v >= weight.shape[1]:
        return weight.dtype.type(0)
    if backward:
        return weight[u, v, o % layer.outer, o // layer.outer * layer.inner + k]
    return weight[u, v, k, o]


@helper
def panel_at(cut: Cut, group: int, number: int, array: ndarray) -> int:
    """Return how many columns precede this panel of a group, if each group is rounded up to whole vectors."""
    return group * whole_vectors(cut.h.bundle * cut.layer.outer, array) + number * panel_width(array)


@helper
def products_of(cut: Cut, lined: bool) -> ndarray:
    """Return the order of the products of a sum: for each of them, the line and the column of taps, and the channel.

    The channels of a tap follow one another or, if line.py computes pixels (`lined`), the taps of a group do.
    """
    taps, threes = cut.h.taps, threes_of(cut.h.taps)
    threes, twos, ones = (threes, (taps - 3 * threes) // 2, 0) if lined else (0, 0, taps)
    found = np.empty((cut.v.taps * taps * cut.layer.inner, 3), np.int64)
    number, first = 0, 0
    for size, groups in ((3, threes), (2, twos), (1, ones)):
        for s in range(cut.v.taps):
            for group in range(groups):
                for k in range(cut.layer.inner):
                    for t in range(first + group * size, first + (group + 1) * size):
                        found[number, 0], found[number, 1], found[number, 2] = s, t, k
                        number += 1
        first += groups * size
    return found


@helper
def count_of_threes(cut: Cut) -> int:
    """Return how many products belong to groups of 3 taps (line.py): these are the first ones."""
    return cut.v.taps * 3 * threes_of(cut.h.taps) * cut.layer.inner


@apart_jit
def pack(number: int, cut: Cut, products: ndarray, weight: ndarray, backward: bool, packed: ndarray) -> None:
    """Pack the weights of panel `number`, counted over all groups: (products, columns), in the order of products_of."""
    layer, v, h, outer = cut.layer, cut.v, cut.h, cut.layer.outer
    if by_channels(layer):
        width, each, first, at = row_of_outputs(layer, 1, packed), layer.groups * outer, 0, 0
    else:
        columns = h.bundle * outer
        group, panel = divmod(number, panels_of(columns, packed))
        each = columns_of(panel, columns, packed)
        width, first = whole_vectors(each, packed), group * outer + panel * panel_width(packed)
        at = panel_at(cut, group, panel, packed) * v.taps * h.taps * layer.inner
    packed, whole = packed[at:], 0  # whole: how many input channels are packed as vectors
    if h.bundle == 1 and layer.inner > 1 and not by_channels(layer):
        whole = layer.inner // lanes(packed) * lanes(packed) if backward else layer.inner
        _pack_vectors(whole, cut, products, weight, backward, first, each, width, packed)
    if whole == layer.inner:
        return
    for product in range(products.shape[0]):
        s, t, k = products[product, 0], products[product, 1], products[product, 2]
        if k < whole:
            continue
        u, column = v.tap + s * v.tap_step, h.tap + t * h.tap_step
        row = packed[product * width : (product + 1) * width]
        for p in range(h.bundle):
            part = row[p * outer : p * outer + each // h.bundle]
            for j in range(part.size):
                part[j] = _weight(layer, weight, backward, u, column + p * h.tap_pixel, k, first + j)
        for j in range(each, width):
            row[j] = 0


@helper
def _pack_vectors(
    count: int, cut: Cut, products: ndarray, weight: ndarray, backward: bool, first: int, each: int, width: int,
    packed: ndarray,
) -> None:  # fmt: skip
    """Pack the first `count` input channels of each tap, for the outputs [first, first + each) counted over all groups.

    If `backward`, `count` is a multiple of `lanes`.
    """
    layer, v, h, flat, outputs = cut.layer, cut.v, cut.h, weight.reshape(-1), weight.shape[3]
    group, column_of_panel = first // layer.outer, first % layer.outer
    if count == 0:
        return
    product = 0
    while product < products.shape[0]:
        taps = 1  # whose channels alternate (products_of)
        while product + taps < products.shape[0] and products[product + taps, 2] == 0:
            taps += 1
        for i in range(taps):
            s, t, to = products[product + i, 0], products[product + i, 1], (product + i) * width
            tap = (v.tap + s * v.tap_step) * layer.kernel[1] + h.tap + t * h.tap_step
            if backward:
                at = (tap * layer.outer + column_of_panel) * outputs + group * layer.inner
                pack_columns(flat, at, outputs, count, each, packed[to:], taps * width)
            else:
                pack_rows(flat, tap * layer.inner * outputs + first, outputs, count, each, packed[to:], taps * width)
        product += taps * layer.inner
