"""The multiply-adds of a recorded call, and the bytes that it moves, computed from shapes and block sizes.

    Stream(read, written, distance)      bytes that a call reads and writes, and how long ago they were used

The distance is the number of other bytes that the core has touched since it used these bytes last. They are found in
the nearest cache that is larger than this distance (the stack distance of Mattson et al., 1970, "Evaluation techniques
for storage hierarchies"). So a call is described without the sizes of the caches. Two kinds of distances are added up:

- between calls (`Reuse`): the bytes of all arrays that the step has used since it last used this one;
- within a call (`work`): the sizes of the blocks that the kernel's loops use again and again.

The model is a lower limit of the traffic. It takes caches that keep exactly the bytes that were used last. It leaves
out what stores read before they write, copies of `a` in matmul's `tn`, the additions of Winograd's transforms, all
arithmetic of kernels without products, and what merged convolutions (kernels/conv_norm) do for the batch norms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from minidl.kernels.conv import choice, forms, planes, pointwise, sizes, winograd_gradient, winograd_large
from minidl.kernels.conv.geometry import shares
from minidl.kernels.conv.line import HEIGHTS
from minidl.kernels.conv.reference import output_size
from minidl.kernels.conv.short import MOST_PRODUCTS
from minidl.kernels.matmul.amx import SIDE
from minidl.kernels.matmul.amx_product import DEPTH, WIDE, block_of_strips, depth_of_strips, uses_amx
from minidl.kernels.matmul.blocks import HEIGHTS_OF_TWO, LANES, MR, NR, PANELS, PRODUCT_MR, block_depth, block_strips
from minidl.kernels.matmul.cpu import LARGE
from minidl.kernels.matmul.share import B_IN_PLACE_STRIPS, PACK_A_PANELS
from minidl.kernels.matmul.tile import panels_of
from minidl.program.dependence import FIRST_WRITTEN
from minidl.program.table import Operand

FLOAT, PARTS = 4, 6  # bytes of a number, and of its parts on AMX
SCRATCH = "packed", "scratch", "partial", "sums"  # memory of the kernel itself: `work` counts how it is used
READ_TWICE = {"norm.batch_norm": ("x",), "norm.batch_norm_backward": ("dy", "x"), "norm.affine_backward": ("dy", "x")}
RUNNING = "running_mean", "running_var"
READ_AND_WRITTEN = {"elementwise.accumulate": ("out",), "norm.batch_norm": RUNNING, "conv_norm.batch_norm": RUNNING}
READ_BY_ALL = {"matmul.nn": ("a",), "matmul.nt": ("a",), "matmul.tn": ("a",)}  # each thread reads the whole array


class Stream(NamedTuple):
    """read, written: bytes, of all threads together. distance: bytes, as each core sees it."""

    read: float
    written: float
    distance: float


class Work(NamedTuple):
    """What a call does. multiply_adds: of float32 numbers, by the algorithm that the kernel uses. on_amx: where."""

    multiply_adds: float
    streams: list[Stream]
    on_amx: bool = False

    def beyond(self, size: float) -> tuple[float, float]:
        """Return the bytes (read, written) that a cache of this size per core does not hold."""
        far = [stream for stream in self.streams if stream.distance > size]
        return sum(stream.read for stream in far), sum(stream.written for stream in far)


class Reuse:
    """How long ago each array was used: the bytes of the other arrays that were used since then."""

    def __init__(self) -> None:
        self._used: list[tuple[str, int, int]] = []  # (region, first byte, end), the last used at the end

    def distances(self, arguments: Mapping[str, Any]) -> dict[str, float]:
        """Return the distance of each array of the next call. An array that no call has used yet is infinitely far."""
        found: dict[str, float] = {}
        now = {name: value for name, value in arguments.items() if isinstance(value, Operand)}
        for name, operand in now.items():
            found[name] = self._distance(operand)
        for operand in now.values():
            self._touch(operand)
        return found

    def _distance(self, operand: Operand) -> float:
        total = 0
        for used in reversed(self._used):
            total += used[2] - used[1]
            if _overlap(used, operand):
                return float(total)
        return math.inf

    def _touch(self, operand: Operand) -> None:
        if operand.nbytes:
            begin, stop = operand.offset, operand.offset + operand.nbytes
            rest = []
            for used in self._used:  # what is left of an array whose memory this one shares
                region, start, end = used
                parts = [(start, min(end, begin)), (max(start, stop), end)] if _overlap(used, operand) else [used[1:]]
                rest += [(region, a, b) for a, b in parts if a < b]
            self._used = [*rest, (operand.region, begin, stop)]


def _overlap(used: tuple[str, int, int], operand: Operand) -> bool:
    region, start, end = used
    return region == operand.region and start < operand.offset + operand.nbytes and operand.offset < end


def step(calls: Sequence[str], arguments: Sequence[Mapping[str, Any]], threads: int) -> list[Work]:
    """Return the work of each call of a step that is repeated: the first round only fills the caches."""
    reuse = Reuse()
    for given in arguments:
        reuse.distances(given)
    return [work(name, given, reuse.distances(given), threads) for name, given in zip(calls, arguments, strict=True)]


def work(name: str, arguments: Mapping[str, Any], distances: Mapping[str, float], threads: int) -> Work:
    """Return the work of one call. distances: of its arrays, for all threads together; each core has its share."""
    arrays = {key: value for key, value in arguments.items() if isinstance(value, Operand) and value.nbytes}
    first, streams, written = FIRST_WRITTEN.get(name), [], False
    whole = sum(operand.nbytes for key, operand in arrays.items() if key not in SCRATCH) / threads
    for key in arguments:
        written |= key == first
        if key not in arrays or key in SCRATCH:
            continue
        size, distance = float(arrays[key].nbytes), distances[key] / threads
        reads = not written or key in READ_AND_WRITTEN.get(name, ())
        copies = threads if key in READ_BY_ALL.get(name, ()) else 1
        streams.append(Stream(size * copies if reads else 0.0, size if written else 0.0, distance))
        if key in READ_TWICE.get(name, ()):
            streams.append(Stream(size, 0.0, whole))
    op, _, kernel = name.partition(".")
    shapes = {key: operand.shape for key, operand in arrays.items()}
    if op == "matmul":
        *batch, rows, columns = shapes["out"]
        if batch:
            kernel = "tn" if arguments["a_transposed"] else "nt" if arguments["b_transposed"] else "nn"
        depth, count = shapes["a"][-2 if kernel == "tn" else -1], math.prod(batch)
        alone = batch and rows * columns * depth < LARGE  # a thread computes whole matrices
        inside = _matmul(kernel, rows, columns, depth, 1 if alone else threads, "packed" in arrays)
        within = [Stream(count * s.read, count * s.written, s.distance) for s in inside.streams]
        return inside._replace(multiply_adds=count * inside.multiply_adds, streams=streams + within)
    if op.startswith("conv") and "batch_norm" not in kernel:
        inside = _convolution(kernel, shapes, arguments, threads)
        return inside._replace(streams=streams + inside.streams)
    return Work(0.0, streams)


def _up(x: float, step: int) -> int:
    return math.ceil(x / step)


def tile_size(columns: int) -> tuple[int, int]:
    """Return the rows and columns of a tile of kernels/matmul/product.py, for an output with this many columns."""
    return (HEIGHTS_OF_TWO[0], PANELS * NR) if PANELS == 2 and columns > NR else (PRODUCT_MR, NR)


def _matmul(form: str, rows: int, columns: int, depth: int, threads: int, packed: bool) -> Work:
    """Return the multiply-adds of a product, and what it moves within the call; form and packed: see product."""
    amx = uses_amx(rows, columns, depth)
    if amx:
        return Work(float(rows * columns * depth), product_on_amx(rows, columns, depth, threads, packed), True)
    return Work(float(rows * columns * depth), product(rows, columns, depth, threads, form, packed))


def product(
    rows: int, columns: int, depth: int, threads: int, form: str = "nn", packed: bool = False
) -> list[Stream]:
    """Return what kernels/matmul/cpu.py moves between caches for out (rows, columns), sums of `depth` products.

    form: nn, nt or tn; packed: whether an earlier call has packed the second matrix.
    """
    kc, (high, wide) = block_depth(depth), tile_size(columns)
    mc = min(rows, block_strips(_up(rows, PRODUCT_MR), kc) * PRODUCT_MR)
    panels, pairs, tiles, blocks = _up(columns, NR), _up(columns, wide), _up(rows, high), _up(rows, mc)
    pair, strip, block = FLOAT * kc * wide, FLOAT * kc * high, FLOAT * mc * kc
    b, out = FLOAT * columns * depth, FLOAT * rows * columns
    again = _up(depth, kc) - 1  # how often the sums are read and written again
    if packed or (_up(rows, PRODUCT_MR) <= B_IN_PLACE_STRIPS and form != "nt"):  # each tile reads b where it is
        return [
            Stream(FLOAT * (tiles - 1) * panels * NR * depth, 0, pair + strip),
            Stream(FLOAT * pairs * rows * depth, 0, block + pair),
            Stream(out * again, out * again, block),
        ]
    packs_a = form == "tn" and pairs * PANELS >= PACK_A_PANELS * threads
    return [
        Stream(FLOAT * tiles * panels * NR * depth, 0, pair + strip),  # each tile reads the panels of b
        Stream(FLOAT * pairs * rows * depth, 0, block + pair),  # each pair of panels reads the block of a
        Stream(b * (blocks - 1), b * blocks, block + FLOAT * kc * columns / threads),  # b is packed for each block
        Stream(0, FLOAT * rows * depth * threads * packs_a, block),  # each thread packs a
        Stream(out * again, out * again, block + FLOAT * (kc + mc) * columns / threads),
    ]


def product_on_amx(rows: int, columns: int, depth: int, threads: int, packed: bool = False) -> list[Stream]:
    """Return what kernels/matmul/amx_product.py moves: numbers of PARTS bytes, in strips and panels of SIDE."""
    mine = (rows, _up(columns, threads)) if columns >= rows else (_up(rows, threads), columns)
    block, whole = SIDE * block_of_strips(rows, columns, depth), depth_of_strips(rows, depth)
    strips, panels, blocks, again = _up(rows, SIDE), _up(columns, SIDE), _up(mine[0], block), _up(depth, DEPTH) - 1
    a, b, out = PARTS * rows * depth, PARTS * columns * depth, FLOAT * rows * columns
    copies = threads if columns >= rows else 1  # threads that split all of a
    bands = _up(mine[1], WIDE)  # how often they split it
    return [
        Stream(a * panels, a * copies * bands, PARTS * whole * block),
        Stream(b * strips, 0 if packed else b * blocks, 2 * PARTS * DEPTH * SIDE),
        Stream(out * again, out * again, FLOAT * block * min(mine[1], WIDE)),
    ]


def _convolution(
    kernel: str, shapes: Mapping[str, tuple[int, ...]], arguments: Mapping[str, Any], threads: int
) -> Work:
    """Return the multiply-adds of a convolution, and what it moves within the call."""
    weight = shapes.get("weight") or shapes["dweight"]
    groups, stride, dilation = (arguments[key] for key in ("groups", "stride", "dilation"))
    backward = kernel == "backward_input"
    source = shapes["dy"] if backward else shapes["x"]
    target = shapes["dx"] if backward else shapes.get("y") or shapes["dy"]
    channels, outputs = source[3], target[3]
    where = target[1:3], weight[:2], channels, outputs, stride
    if backward:
        form = choice.input_form(target[0], *where, arguments["padding"], dilation, groups)
    elif kernel == "backward_weight":
        form = choice.gradient_form(target[0], *where, dilation, groups)
    else:
        form = choice.winograd_form(target[0], *where, dilation, groups)
    if arguments["winograd"] and form != choice.DIRECT:
        make = _winograd_weight if kernel == "backward_weight" else _winograd
        cut = forms.kernel_of(form, weight[:2], stride)
        if backward:  # the phases of dx are like images
            step, cut = cut[2:], forms.kernel_of_dx(form, weight[:2], stride)
            source = (source[0] * math.prod(step), *source[1:])
            target = (source[0], _up(target[1], step[0]), _up(target[2], step[1]), outputs)
        return make(form, source, target, groups, cut, dilation)
    x = shapes["dx"] if backward else shapes["x"]
    images, high, wide, _ = x
    out = output_size(x, weight, stride, arguments["padding"], dilation)
    pixels = images * out[0] * out[1]  # of y: each of them has a product with each weight
    multiply_adds = float(pixels * math.prod(weight))
    if pointwise.is_product(weight, groups, stride, arguments["padding"]):
        if kernel == "backward_weight":
            return _matmul("tn", channels, outputs, pixels, threads, False)
        return _matmul("nt" if backward else "nn", pixels, outputs, channels, threads, "packed" in shapes)
    if kernel == "backward_weight":
        block = max(1, sizes.WEIGHT_KC // stride[1])
        moved = _direct_weight(pixels, block, math.prod(weight[:3]), weight[3], groups, math.prod(source))
        return Work(multiply_adds, moved)
    depth = weight[0] * weight[1] * channels // groups / (stride[0] * stride[1] if backward else 1)
    rows = images * high * wide if backward else pixels
    padded = arguments["padding"] != (0, 0)
    step = 1 if backward else stride[1]
    along = SimpleNamespace(spacing=dilation[1], step=step, taps=weight[1] // stride[1] if backward else weight[1])
    tile = _tile_of(outputs // groups, along)
    return Work(multiply_adds, _direct(rows, depth, outputs // groups, groups, math.prod(source), padded, tile))


def _tile_of(columns: int, axis: Any) -> tuple[int, float]:
    """Return the pixels of a tile of a direct convolution, and how many numbers it loads for a pixel and a product.

    axis: the horizontal axis of the pass, or what `shares` needs of it (kernels/conv/geometry.py). Bundles and short
    lines are not known here.
    """
    last = columns - (_panels(columns, 1)[0] - 1) * NR  # columns of the last panel
    vectors = _up(last, LANES)
    if not shares(axis) or vectors >= len(HEIGHTS) or 2 * last <= LANES:
        return MR, 1.0
    pixels, taps = HEIGHTS[vectors][0], 2 if axis.taps in (2, 4) else 3  # of most groups
    return pixels, ((pixels - 1) * axis.step + taps) / (pixels * taps)


def _panels(columns: int, groups: int) -> tuple[int, float]:
    """Return the number of panels of a direct convolution (panels_of in matmul/tile.py), and their mean width."""
    panels = int(panels_of(columns, np.empty(0, np.float32)))
    return groups * panels, _up(columns, LANES) * LANES / panels


def _direct(
    rows: int, depth: float, columns: int, groups: int, source: int, padded: bool, tile: tuple[int, float]
) -> list[Stream]:
    """Return what kernels/conv/direct.py moves: rows are pixels, and sums of `depth` products are cut after KC.

    tile: see _tile_of; the pixels that remain at the end of a line are counted like the others
    """
    kc, (panels, wide) = min(depth, sizes.KC), _panels(columns, groups)
    strips, chunks, blocks = _up(rows, tile[0]), _up(rows, sizes.CHUNK), _up(rows, sizes.MC)
    weights, block = FLOAT * depth * wide, FLOAT * source / blocks  # bytes of a panel of weights, of a block's pixels
    piece, windows = FLOAT * kc * wide, FLOAT * tile[0] * tile[1] * kc
    return [
        Stream(panels * weights * (strips - chunks), 0, piece + windows),
        Stream(panels * weights * (chunks - blocks), 0, weights + windows),
        Stream(panels * weights * blocks, 0, panels * weights + block),
        Stream(FLOAT * panels * rows * depth * tile[1], 0, windows),
        Stream(FLOAT * source * (panels - 1), FLOAT * source * padded, block + weights),
    ]


def _direct_weight(pixels: int, block: int, rows: int, outputs: int, groups: int, source: int) -> list[Stream]:
    """Return what kernels/conv/weight_gradient.py moves: rows are weights, and blocks of pixels are summed up."""
    columns = outputs // groups
    kc, (panels, wide) = min(pixels, block), _panels(columns, groups)
    blocks, gradient = _up(pixels, kc), FLOAT * rows * columns * groups
    window = FLOAT * source / blocks  # bytes of a block's pixels of x
    return [
        Stream(FLOAT * panels * _up(rows, MR) * wide * pixels, 0, FLOAT * kc * (wide + MR)),
        Stream(FLOAT * panels * rows * pixels, 0, FLOAT * kc * MR),
        Stream(FLOAT * source * (panels - 1), FLOAT * source, window + FLOAT * kc * wide),
        Stream(gradient * (blocks - 1), gradient * (blocks - 1), min(gradient, FLOAT * sizes.MAX_PIECE)),
    ]


def _halo(form: int, source: tuple[int, ...], cut: forms.Kernel) -> Stream:
    """Return what Winograd's tiles read again: their windows overlap, and each piece of the kernel has its own."""
    side, step = forms.window_of(form)
    again = forms.count_of_pieces(form, cut) * math.prod(side) / math.prod(step) / math.prod(cut[2:]) - 1
    return Stream(again * FLOAT * math.prod(source), 0, FLOAT * side[0] * source[2] * source[3])


def _winograd(
    form: int, source: tuple[int, ...], target: tuple[int, ...], apart: int, cut: forms.Kernel,
    dilation: tuple[int, int],
) -> Work:  # fmt: skip
    """Return multiply-adds and traffic of Winograd's forward pass or data gradient (names as in winograd.py).

    apart: the layer's groups of channels; `groups` are groups of tiles
    """
    channels, outputs, each, pieces = source[3], target[3], forms.planes_of(form), forms.count_of_pieces(form, cut)
    tiles = choice.count_of(source[0], choice.tiles_of(forms.tile_of(form)[0], *target[1:3], dilation))
    group = planes.group_of(form, channels, outputs, apart, pieces, tiles)
    amx = choice.on_amx(channels, outputs, apart, pieces, tiles)
    channels *= pieces  # in a row of V
    groups, panels, (high, wide) = _up(tiles, group), _up(outputs // apart, NR), tile_size(outputs // apart)
    v, products = FLOAT * each * tiles * channels, FLOAT * each * tiles * outputs
    u = FLOAT * forms.weight_planes(form) * channels * outputs // apart
    replaced = planes.in_place(form, source[3], outputs, apart, pieces, LANES)  # V by M
    near = FLOAT * each * group * (max(channels, outputs) if replaced else channels + outputs)
    panel = FLOAT * each * panels * NR * channels  # a row of tiles reads this much of U
    multiply_adds = float(each * tiles * channels * outputs // apart)
    halo = _halo(form, source, cut)
    if pieces == 1 and forms.uses_blocks(form, channels, outputs, apart, tiles):
        deep = forms.depth_of_sums(form, channels, outputs, apart)
        panels = _up(outputs, winograd_large.width_of(outputs, deep))
        blocks = _by_blocks(v, u, products, panels, _up(channels, deep))
        tiled = Stream(u * (_up(tiles, high) - 1), 0, FLOAT * deep * (wide + high))
        return Work(multiply_adds, [*blocks, tiled, halo])
    short = apart > 1 and channels // apart <= MOST_PRODUCTS and outputs // apart <= LANES  # U stays in registers
    if amx:  # V is read once, and split; M replaces it
        near, strips = FLOAT * each * group * max(channels, outputs), PARTS * group * channels
        return Work(multiply_adds, [
            Stream(v, v, near),
            Stream(v * PARTS / FLOAT * panels, v * PARTS / FLOAT, strips),
            Stream(products, products, near),
            Stream(u * PARTS / FLOAT * groups, u * (1 + PARTS / FLOAT), near + u * PARTS / FLOAT),
            Stream(u * PARTS / FLOAT * groups * (_up(group, SIDE) - 1), 0, strips + PARTS * SIDE * channels),
            halo,
        ], True)  # fmt: skip
    return Work(multiply_adds, [
        Stream(v * _up(outputs // apart, wide), v, near),
        Stream(products, products, near),
        Stream(0 if short else panel * groups * (_up(group, high) - 1), 0, FLOAT * channels // apart * (wide + high)),
        Stream(u * groups, u, near + u),
        halo,
    ])  # fmt: skip


def _by_blocks(v: float, made: float, kept: float, panels: int, pieces: int) -> list[Stream]:
    """Return what winograd_large.py moves. made: bytes of U, or of dU. kept: of M, or of D."""
    block = made / panels / pieces + kept / panels + v / pieces
    return [Stream(v * panels, v, v + block), Stream(made, made, block), Stream(kept * pieces, kept * pieces, block)]


def _winograd_weight(
    form: int, source: tuple[int, ...], target: tuple[int, ...], apart: int, cut: forms.Kernel,
    dilation: tuple[int, int],
) -> Work:  # fmt: skip
    """Return multiply-adds and traffic of Winograd's weight gradient: dU[k] = V[k]^T @ D[k] for all planes."""
    channels, outputs, each, pieces = source[3], target[3], forms.planes_of(form), forms.count_of_pieces(form, cut)
    tiles = choice.count_of(source[0], choice.tiles_of(forms.tile_of(form)[0], *target[1:3], dilation))
    parts, group = winograd_gradient.gradient_sizes(form, cut, channels, outputs, apart, tiles, dilation)[:2]
    groups, panels = parts * _up(_up(tiles, parts), group), _up(outputs // apart, NR)
    high, wide = tile_size(outputs // apart)
    v, du, d = (FLOAT * each * size for size in (tiles * channels, channels * outputs // apart, tiles * outputs))
    halo, v, du = _halo(form, source, cut), v * pieces, du * pieces
    near = FLOAT * each * group * (channels + outputs)
    panels_of_d = FLOAT * each * apart * panels * NR * tiles  # a strip of V^T, of each group, reads this much of D
    again = pieces * _up(channels // apart, high) - 1
    products = [
        Stream(v * _up(outputs // apart, wide), v, near),
        Stream(d, d, near),
        Stream(panels_of_d * again, 0, FLOAT * group * (wide + high)),
    ]
    if pieces == 1 and forms.uses_blocks(form, channels, outputs, apart, tiles):
        panels = _up(outputs, winograd_large.width_of(outputs, winograd_large.DEEP))
        products = _by_blocks(v, du, d, panels, _up(channels, winograd_large.DEEP))
        products.append(Stream(panels_of_d * again, 0, FLOAT * tiles * (wide + high)))
        return Work(float(each * tiles * channels * outputs), [*products, halo])
    return Work(float(each * tiles * channels * pieces * outputs // apart), [
        *products,
        Stream(du * (groups - parts), du * groups, near + du),
        halo,
    ])  # fmt: skip
