"""Convolutions on the emulator: all tiles, loaders and edges, the machine code of the main loop, and broken kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from emulator import Emulator, KernelError
from on_emulator import mutated, placed
from sample import each, each_row
from sass import Sass, read
from test_cuda_kernels import TARGETS

from minidl.engine.cuda import Grid, Kernel, launch_with, types_of
from minidl.kernels.conv import cuda as _cuda
from minidl.kernels.conv.cuda_ladder import RUNGS
from minidl.kernels.conv.reference import Pair, output_size

NAMES = ("forward", "backward_input", "backward_weight")


@dataclass(frozen=True)
class Layer:
    image: tuple[int, int, int, int]  # of x
    kernel: Pair
    outputs: int
    groups: int = 1
    stride: Pair = (1, 1)
    padding: Pair = (1, 1)
    dilation: Pair = (1, 1)

    @property
    def weight(self) -> tuple[int, int, int, int]:
        return *self.kernel, self.image[3] // self.groups, self.outputs

    @property
    def options(self) -> tuple[Any, ...]:
        return self.groups, self.stride, self.padding, self.dilation, False

    @property
    def y(self) -> tuple[int, int, int, int]:
        out = output_size(self.image, self.weight, self.stride, self.padding, self.dilation)
        return self.image[0], *out, self.outputs


def operands(layer: Layer, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {n: random.standard_normal(getattr(layer, s)).astype(dtype)
            for n, s in (("x", "image"), ("weight", "weight"), ("dy", "y"))}  # fmt: skip


def expected(name: str, layer: Layer, x: np.ndarray, weight: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """Return y, dx or dweight in float64: the sum over taps of products of slices."""
    G, (ph, pw), (sh, sw), (dh, dw) = layer.groups, layer.padding, layer.stride, layer.dilation
    (N, H, W, C), (_, Ho, Wo, O), (kh, kw) = layer.image, layer.y, layer.kernel
    padded = np.pad(x.astype(float), ((0, 0), (ph, ph), (pw, pw), (0, 0))).reshape(N, H + 2 * ph, W + 2 * pw, G, C // G)
    w, dy = weight.astype(float).reshape(kh, kw, C // G, G, O // G), dy.astype(float).reshape(N, Ho, Wo, G, O // G)
    y, dx, dweight = np.zeros(dy.shape), np.zeros(padded.shape), np.zeros(w.shape)
    for u, v in np.ndindex(kh, kw):
        at = slice(None), slice(u * dh, None, sh), slice(v * dw, None, sw)
        part = padded[at][:, :Ho, :Wo]
        y += np.einsum("nijgc,cgo->nijgo", part, w[u, v])
        dx[at][:, :Ho, :Wo] += np.einsum("nijgo,cgo->nijgc", dy, w[u, v])
        dweight[u, v] = np.einsum("nijgc,nijgo->cgo", part, dy)
    if name == "forward":
        return y.reshape(layer.y)
    return dx[:, ph : ph + H, pw : pw + W].reshape(layer.image) if name == "backward_input" else dweight.reshape(
        layer.weight)  # fmt: skip


def call(kernels: Any, name: str, layer: Layer, x: np.ndarray, weight: np.ndarray, dy: np.ndarray, out: Any) -> None:
    none = np.empty(0, x.dtype)
    scratch = np.full(getattr(kernels, f"{name}_scratch")(layer.image, layer.weight, *layer.options), np.nan, x.dtype)
    if name == "forward":
        kernels.forward(x, weight, none, none, none, none, False, *layer.options, none, scratch, out)
    elif name == "backward_input":
        kernels.backward_input(dy, weight, none, *layer.options, scratch, out)
    else:
        kernels.backward_weight(x, dy, *layer.options, scratch, out)


def convolve(
    name: str, layer: Layer, dtype: Any = np.float32, offset: int = 0, kernels: Any = _cuda, **options: Any
) -> Emulator:
    """Call a function on the emulator, and compare its result with the one in float64."""
    arrays = {n: placed(array, offset) for n, array in operands(layer, dtype).items()}
    for array in arrays.values():
        array.flags.writeable = False
    want = expected(name, layer, **arrays)
    out = placed(np.full(want.shape, np.nan, dtype), offset)
    emulator = Emulator(fuse=False, **options)
    with launch_with(emulator):
        call(kernels, name, layer, **arrays, out=out)
    # of a sum in any order; the longest sum is over all pixels
    terms = max(np.prod(layer.weight[:3]), np.prod(layer.y[:3]), layer.outputs * layer.kernel[0] * layer.kernel[1])
    bound = (terms + 2) * np.finfo(dtype).eps * expected(name, layer, **{n: abs(a) for n, a in arrays.items()})
    np.testing.assert_array_less(abs(out - want), bound + 1e-30)
    return emulator


LAYERS = {  # the smallest that cross an edge of a tile
    "128 x 128, C = 8": Layer((1, 10, 13, 8), (2, 1), 132, padding=(1, 0)),
    "odd channels": Layer((2, 9, 8, 12), (3, 2), 65, stride=(2, 1), dilation=(1, 2)),
    "128 x 64": Layer((1, 11, 12, 33), (1, 3), 36, padding=(0, 2)),
    "256 x 32, stride 2": Layer((3, 9, 10, 20), (3, 3), 17, stride=(2, 2)),
    "3 channels": Layer((1, 17, 16, 3), (3, 3), 16, padding=(2, 1)),
    "1 channel": Layer((2, 17, 16, 1), (5, 4), 6, padding=(2, 2)),
    "a stride beyond the kernel": Layer((2, 7, 8, 16), (1, 1), 12, stride=(3, 2), padding=(0, 0)),
    "more padding than image": Layer((1, 3, 2, 8), (3, 3), 8, padding=(6, 5), dilation=(3, 2)),
    "four parts": Layer((5, 12, 9, 4), (3, 3), 8, padding=(0, 1)),
    "15 lines of taps": Layer((1, 9, 4, 8), (15, 2), 6, padding=(7, 1)),
    "16 columns of taps": Layer((1, 3, 10, 8), (2, 16), 6, padding=(1, 8)),
    "groups": Layer((2, 5, 6, 24), (3, 3), 40, groups=2),
    "depthwise, two for each": Layer((2, 6, 5, 35), (3, 3), 70, groups=35, stride=(2, 1)),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layer", each(5, LAYERS))
def test_edges_of_tiles(layer: str, name: str) -> None:
    convolve(name, LAYERS[layer])


def test_parts_of_the_weight_gradient_do_not_depend_on_the_tile() -> None:
    layer = LAYERS["four parts"]
    results = []
    for offset, order in ((0, "forward"), (1, "shuffled")):  # copies of 16 bytes, copies of single numbers
        arrays = {n: placed(array, offset) for n, array in operands(layer).items()}
        out = np.empty(layer.weight, np.float32)
        with launch_with(Emulator(order=order)):
            call(_cuda, "backward_weight", layer, **arrays, out=out)
        results.append(out.tobytes())
    assert _cuda.backward_weight_scratch(layer.image, layer.weight, *layer.options) > 2 * out.size
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("file", "chunk", "few", "name", "layer"),
    [
        ("taps", "CHUNK = 128", "CHUNK = 4", "forward", "256 x 32, stride 2"),
        ("few", "CHUNK = 64", "CHUNK = 2", "forward", "3 channels"),
        ("weight", "CHUNK = 32", "CHUNK = 6", "backward_weight", "four parts"),
    ],
)
def test_tables_for_some_of_the_tiles(file: str, chunk: str, few: str, name: str, layer: str) -> None:
    with mutated("conv", f"conv/cuda_{file}.py", chunk, few) as kernels:
        convolve(name, LAYERS[layer], kernels=kernels, order="shuffled")


# -- machine code -----------------------------------------------------------------------------------------------------


def code(name: str, channels: int, outputs: int, cc: tuple[int, int], kernel: Pair = (3, 3)) -> Sass:
    """Return the kernel for a layer with so many channels."""
    found: list[Sass] = []

    def note(kernel: Kernel, grid: Grid, arguments: tuple[Any, ...]) -> None:
        if not found:  # the second kernel of dweight adds the parts
            found.append(read(kernel, types_of(arguments), cc))

    layer = Layer((2, 8, 8, channels), kernel, outputs)
    arrays = {n: placed(array, 0) for n, array in operands(layer).items()}
    out = placed(np.empty(dict(zip(NAMES, (layer.y, layer.image, layer.weight), strict=True))[name], np.float32), 0)
    with launch_with(note):
        call(_cuda, name, layer, **arrays, out=out)
    return found[0]


def check_limits(sass: Sass, least: float) -> None:
    assert (sass.compiled.stack, sass.compiled.spills) == (0, 0)
    assert sass.compiled.registers <= (128 if sass.kernel.threads == 256 else 168)
    assert sass.blocks_per_sm() >= 2
    assert sass.share() >= least
    assert set(sass.widths("LDS")) == {128}


@pytest.mark.parametrize("cc", each(2, TARGETS))
@pytest.mark.parametrize("name", NAMES)
def test_the_main_loop_multiplies(name: str, cc: tuple[int, int]) -> None:
    check_limits(code(name, 128, 128, cc), 0.85)


NARROW = {  # function, channels, outputs: least share of multiply-adds. Tiles are narrow, or copied by single numbers
    ("forward", 64, 64): 0.90, ("forward", 128, 127): 0.90, ("forward", 3, 64): 0.85, ("forward", 3, 16): 0.76,
    ("backward_weight", 64, 64): 0.90, ("backward_input", 64, 64): 0.90, ("backward_weight", 127, 128): 0.88,
    ("backward_weight", 16, 16): 0.87, ("forward", 16, 16): 0.87, ("backward_input", 32, 64): 0.85,
    ("backward_weight", 32, 32): 0.90, ("backward_weight", 13, 13): 0.85, ("backward_weight", 3, 16): 0.85,
    ("forward", 13, 16): 0.84, ("forward", 13, 8): 0.78, ("forward", 16, 8): 0.79,
}  # fmt: skip


@pytest.mark.parametrize(("name", "channels", "outputs"), each_row(4, NARROW))
def test_narrow_tiles(name: str, channels: int, outputs: int) -> None:
    check_limits(code(name, channels, outputs, TARGETS[0]), NARROW[name, channels, outputs])


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("forward", Layer((1, 16, 16, 8), (2, 1), 132)),
        ("forward", Layer((1, 16, 16, 3), (3, 3), 16)),
        ("backward_input", Layer((1, 16, 16, 36), (2, 1), 16)),
        ("backward_weight", Layer((1, 16, 16, 64), (2, 1), 128)),
        ("backward_weight", Layer((1, 16, 16, 3), (3, 3), 17)),
    ],
)
def test_shared_memory_has_no_conflicts(name: str, layer: Layer) -> None:
    counts = convolve(name, layer, counting=True).counts
    assert counts is not None
    for (line, nbytes), cost in counts.shared("read").items():
        assert nbytes == 16, f"PTX line {line}"
        assert cost.worst <= 2, f"PTX line {line}"
    for (line, _), cost in counts.shared("written").items():
        assert cost.units <= cost.least, f"PTX line {line}"


# -- the ladder, and broken kernels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", each(4, RUNGS))
def test_steps_of_the_ladder(rung: str) -> None:
    layer = Layer((2, 9, 8, 5), (3, 3), 18)
    x, weight, _ = operands(layer).values()
    y = np.empty(layer.y, np.float32)
    with launch_with(Emulator(fuse=False)):
        RUNGS[rung](x, weight, y)
    np.testing.assert_allclose(y, expected("forward", layer, **operands(layer)), rtol=0, atol=1e-4)


LOOP = "                wait_all()\n                cuda.syncthreads()\n                fetch(sa, sb, "
SECOND = LOOP + "0, 0, state"
HALVES = "at_a + A_HALF, at_b + B_HALF)\n            wait_all()"
STRIDED, GROUPS, PARTS = LAYERS["256 x 32, stride 2"], LAYERS["groups"], LAYERS["four parts"]
THREE, DEPTHWISE, ODD = LAYERS["3 channels"], LAYERS["depthwise, two for each"], LAYERS["odd channels"]
MUTANTS = {  # what is broken: (file, piece, replacement, function, layer)
    "no wait": ("pipeline", SECOND, SECOND.replace("wait_all()", "pass"), "forward", STRIDED),
    "no barrier": ("pipeline", SECOND, SECOND.replace("cuda.syncthreads()", "pass"), "forward", STRIDED),
    "the wrong half is filled": ("pipeline", SECOND, SECOND.replace("0, 0", "A_HALF, B_HALF"), "forward", STRIDED),
    "the same half twice": ("pipeline", HALVES, HALVES.replace("at_b + B_HALF", "at_b"), "forward", STRIDED),
    "two tiles too few": ("pipeline", "turns = int32(count >> 1)", "turns = int32((count - 2) >> 1)", "forward",
                          STRIDED),
    "the last tile is forgotten": ("pipeline", "if count & 1:", "if count & 0:", "forward", STRIDED),
    "a pixel beyond the image": ("geometry", "uint32(w) < uint32(width)", "uint32(w) <= uint32(width)", "forward", ODD),
    "a line beyond the image": ("geometry", "uint32(h) < uint32(height)", "True", "forward", STRIDED),
    "taps are not reversed": ("geometry", "w.tap_step * tap,", "tap,", "backward_input", GROUPS),
    "the first tap is 0": ("geometry", "(h.tap * kernel_w + w.tap) * tap", "0", "backward_input", STRIDED),
    "dx has no stride": ("geometry", "g.first_w + j * g.stride_w", "g.first_w + j", "backward_input", STRIDED),
    "channels count twice": ("taps", "int32(DEPTH) if number > 0 else first", "int32(DEPTH)", "forward", ODD),
    "rows are not bounded": ("taps", "bits_outside(h, w, g) if n < g.images else int32(-1)", "bits_outside(h, w, g)",
                             "forward", STRIDED),
    "a channel too many": ("taps", "k + q < size", "k + q <= size", "backward_input", LAYERS["1 channel"]),
    "the line of taps is too long": ("taps", "quotient(tap, g.taps_w)", "quotient(tap, g.taps_w + 1)", "forward", ODD),
    "a half of a row is copied elsewhere": ("taps", "(k ^ row & VECTOR)", "k", "forward", GROUPS),
    "lines and columns share bits": ("taps", "LINE = 16", "LINE = 0", "forward", ODD),
    "the table is not waited for": ("pipeline", "cuda.syncthreads()  # the table", "pass  # the table", "forward",
                                    THREE),
    "only columns are tested": ("few", "int32(1 << LINE + u | 1 << v)", "int32(1 << v)", "forward", THREE),
    "one row too many is written": ("convolve", "if m < g.images", "if m <= g.images", "forward", STRIDED),
    "groups share their channels": ("taps", "int32(group * g.inner + k)", "k", "forward", GROUPS),
    "a line ends late": ("channels", "if w >= state[END_W]", "if w > state[END_W]", "backward_weight", DEPTHWISE),
    "an image ends late": ("channels", "if h >= state[END_H]", "if h > state[END_H]", "backward_weight", DEPTHWISE),
    "a part is too long": ("weight", "min(state[BEGIN] + g.part, g.pixels)", "state[BEGIN] + g.part",
                           "backward_weight", PARTS),
    "a part reads the next one": ("weight", "pixel < state[STOP] and", "pixel >= 0 and", "backward_weight", PARTS),
    "a run goes beyond its tap": ("weight", "min(nominal, g.inner - size)", "nominal", "backward_weight",
                                  LAYERS["128 x 64"]),
    "columns of dy are not bounded": ("weight", "if column < g.outer else", "if column >= 0 else", "backward_weight",
                                      PARTS),
    "a run has its neighbour's tap": ("weight", "1 << LINE + u | 1 << v", "1 << LINE + u | 2 << v", "backward_weight",
                                      PARTS),
    "a part is not added": ("weight", "at = int32(i + size)\n", "at = int32(i + 2 * size)\n", "backward_weight", PARTS),
    "a warp is not added": ("channels", "range(1, DEPTH)", "range(2, DEPTH)", "backward_weight", DEPTHWISE),
    "sums are not waited for": ("channels", "    cuda.syncthreads()\n", "", "backward_weight", DEPTHWISE),
    "groups share weights": ("channels", "group = quotient(o, outer)", "group = 0", "backward_input", DEPTHWISE),
}  # fmt: skip


@pytest.mark.parametrize("broken", each(10, MUTANTS))
def test_a_broken_convolution_is_found(broken: str) -> None:
    file, old, new, name, layer = MUTANTS[broken]
    with mutated("conv", f"conv/cuda_{file}.py", old, new) as changed, pytest.raises((KernelError, AssertionError)):
        convolve(name, layer, kernels=changed)
