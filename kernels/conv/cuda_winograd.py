"""Winograd's form F(4x4,3x3) on a GPU: y and dx with a quarter of the multiplications (WINOGRAD.md).

Four kernels follow one another. Each writes all its planes to memory, since blocks cannot wait for each other:

    U (36, C, O)      = G g GT         a thread for each pair of channels
    V (36, tiles, C)  = BT d B         a thread for each tile of 6 x 6 pixels and each channel
    M (36, tiles, O)  = V @ U          a matrix product for each plane, all in one launch (matmul/cuda_tile.py)
    y                 = AT M A         a thread for each tile of 4 x 4 outputs and each channel

Neighbouring threads compute neighbouring channels, so a warp reads and writes 128 successive bytes. A thread has 36
loads on their way at once. The matrices are those of transforms.py, for the points 0, +-A, +-B and infinity. Two rows
that belong to p and -p are the sum and the difference of the same two parts.
"""

from __future__ import annotations

from numba import int32
from numpy import ndarray

from minidl.engine.cuda import cuda, device, kernel, launch
from minidl.engine.cuda_memory import get, put

from ..matmul import cuda as products
from ..matmul.cuda_loader import THREADS
from .cuda_convolve import added, scaled
from .cuda_geometry import inside, quotient, split
from .reference import Pair, Shape

TILE, TAPS, PATCH, PLANES = 4, 3, 6, 36  # outputs, weights and inputs of a tile along an axis; positions in a tile
SAVED = 1.5  # the direct sum must need so many times as many products: tiles may lie partly beyond the border
LEAST = 32  # of channels * outputs / (channels + outputs)
A, B = 3 / 4, 3 / 2
A2, B2, A3, B3 = A**2, B**2, A**3, B**3
SUM, PRODUCT = A2 + B2, A2 * B2
AT_0, AT_A, AT_B = 1 / PRODUCT, 1 / (2 * A2 * (A2 - B2)), 1 / (2 * B2 * (B2 - A2))  # factors of the rows of G


def pays(out: Pair, kernel: Pair, channels: int, outputs: int, stride: Pair, dilation: Pair, groups: int) -> bool:
    """Return whether this form should compute y, with `channels` channels in x, or dx, with `channels` in dy.

    The products saved grow with channels * outputs, and the bytes of the planes with channels + outputs. WINOGRAD.md
    derives LEAST from both: predicted, not measured.
    """
    if kernel != (TAPS, TAPS) or (stride, dilation, groups) != ((1, 1), (1, 1), 1):
        return False
    tiles = -(-out[0] // TILE) * -(-out[1] // TILE)
    saved = out[0] * out[1] * TAPS * TAPS >= SAVED * tiles * PLANES
    return saved and channels * outputs >= LEAST * (channels + outputs)


def tiles_of(shape: Shape) -> tuple[int, int]:
    """Return the number of lines and columns of tiles in an image of y (N, Ho, Wo, O)."""
    return -(-shape[1] // TILE), -(-shape[2] // TILE)


def _scratch(images: int, out: Pair, channels: int, outputs: int) -> int:
    """Return the number of elements of the planes U, V and M."""
    lines, columns = tiles_of((images, *out, outputs))
    return PLANES * (channels * outputs + images * lines * columns * (channels + outputs))


def forward_scratch(x_shape: Shape, w_shape: Shape, padding: Pair) -> int:
    images, height, width, channels = x_shape
    out = height + 2 * padding[0] - TAPS + 1, width + 2 * padding[1] - TAPS + 1
    return _scratch(images, out, channels, w_shape[3])


def backward_input_scratch(x_shape: Shape, w_shape: Shape, padding: Pair) -> int:
    images, height, width, channels = x_shape
    return _scratch(images, (height, width), w_shape[3], channels)


@device
def _weights(p: ndarray, at: int, step: int) -> None:
    """Replace three numbers g of p, `step` apart, by the six numbers G g."""
    number = p.dtype.type
    g0, g1, g2 = p[at], p[at + step], p[at + 2 * step]
    even, odd = (g0 + number(A2) * g2) * number(AT_A), number(A) * g1 * number(AT_A)
    p[at], p[at + step], p[at + 2 * step] = g0 * number(AT_0), even + odd, even - odd
    even, odd = (g0 + number(B2) * g2) * number(AT_B), number(B) * g1 * number(AT_B)
    p[at + 3 * step], p[at + 4 * step], p[at + 5 * step] = even + odd, even - odd, g2


@device
def _inputs(p: ndarray, at: int, step: int) -> None:
    """Replace six numbers d of p by BT d."""
    number = p.dtype.type
    d0, d1, d2 = p[at], p[at + step], p[at + 2 * step]
    d3, d4, d5 = p[at + 3 * step], p[at + 4 * step], p[at + 5 * step]
    p[at] = number(PRODUCT) * d0 - number(SUM) * d2 + d4
    even, odd = d4 - number(B2) * d2, number(A) * (d3 - number(B2) * d1)
    p[at + step], p[at + 2 * step] = even + odd, even - odd
    even, odd = d4 - number(A2) * d2, number(B) * (d3 - number(A2) * d1)
    p[at + 3 * step], p[at + 4 * step] = even + odd, even - odd
    p[at + 5 * step] = number(PRODUCT) * d1 - number(SUM) * d3 + d5


@device
def _outputs(p: ndarray, at: int, step: int) -> None:
    """Replace the first four of six numbers m of p by AT m."""
    number = p.dtype.type
    m1, m2, m3, m4 = p[at + step], p[at + 2 * step], p[at + 3 * step], p[at + 4 * step]
    even_a, odd_a, even_b, odd_b = m1 + m2, m1 - m2, m3 + m4, m3 - m4
    p[at] += even_a + even_b
    p[at + step] = number(A) * odd_a + number(B) * odd_b
    p[at + 2 * step] = number(A2) * even_a + number(B2) * even_b
    p[at + 3 * step] = number(A3) * odd_a + number(B3) * odd_b + p[at + 5 * step]


@device
def _store(p: ndarray, planes: ndarray, at: int, size: int) -> None:
    """Write p to element `at` of the planes, which have `size` elements each."""
    for k in range(PLANES):
        put(planes, int32(at + k * size), p[k])


@kernel(threads=THREADS)
def _weight_to_planes(weight: ndarray, channels: int, outputs: int, backward: bool, u: ndarray) -> None:
    """u (36, channels, outputs). backward: weight is (3, 3, outputs, channels), and its taps are reversed."""
    size = int32(channels * outputs)
    at = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
    if at < size:
        c = quotient(at, outputs)
        first = int32((at - c * outputs) * channels + c + 8 * size) if backward else at
        step = int32(-size if backward else size)
        p = cuda.local.array(PLANES, weight.dtype)
        for i in range(TAPS):
            for j in range(TAPS):
                p[PATCH * i + j] = get(weight, int32(first + (TAPS * i + j) * step))
        for j in range(TAPS):
            _weights(p, j, PATCH)
        for i in range(PATCH):
            _weights(p, PATCH * i, 1)
        _store(p, u, at, size)


@kernel(threads=THREADS)
def _to_planes(
    x: ndarray, images: int, height: int, width: int, channels: int, tiles_h: int, tiles_w: int, padding_h: int,
    padding_w: int, v: ndarray,
) -> None:  # fmt: skip
    number = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
    tile = quotient(number, channels)
    n, i, j = split(tile, tiles_h, tiles_w)
    if n < images:
        p = cuda.local.array(PLANES, x.dtype)
        top, left = int32(i * TILE - padding_h), int32(j * TILE - padding_w)
        first = int32(((n * height + top) * width + left) * channels + number - tile * channels)
        for h in range(PATCH):
            for w in range(PATCH):
                at = int32(first + (h * width + w) * channels)
                p[PATCH * h + w] = get(x, at) if inside(top + h, left + w, height, width) else x.dtype.type(0)
        for w in range(PATCH):
            _inputs(p, w, PATCH)
        for h in range(PATCH):
            _inputs(p, PATCH * h, 1)
        _store(p, v, number, int32(images * tiles_h * tiles_w * channels))


@kernel(threads=THREADS)
def _from_planes(
    m: ndarray, bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool, images: int, height: int,
    width: int, outputs: int, tiles_h: int, tiles_w: int, y: ndarray,
) -> None:  # fmt: skip
    number = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
    tile, size = quotient(number, outputs), int32(images * tiles_h * tiles_w * outputs)
    n, i, j = split(tile, tiles_h, tiles_w)
    if n < images:
        o, p = int32(number - tile * outputs), cuda.local.array(PLANES, y.dtype)
        for k in range(PLANES):
            p[k] = get(m, int32(number + k * size))
        for w in range(PATCH):
            _outputs(p, w, PATCH)
        for h in range(TILE):
            _outputs(p, PATCH * h, 1)
        for h in range(TILE):
            for w in range(TILE):
                p[PATCH * h + w] = scaled(p[PATCH * h + w], o, bias, scale, shift)
        top, left = int32(i * TILE), int32(j * TILE)
        first = int32(((n * height + top) * width + left) * outputs + o)
        for h in range(TILE):
            for w in range(TILE):
                if top + h < height and left + w < width:
                    at = int32(first + (h * width + w) * outputs)
                    put(y, at, added(p[PATCH * h + w], at, shortcut, relu))


def weight_to_planes(weight: ndarray, backward: bool, u: ndarray) -> None:
    """u (36, C, O) from weight (3, 3, C, O), or from (3, 3, O, C) with reversed taps"""
    launch(_weight_to_planes, -(-u[0].size // THREADS), weight, *u.shape[1:], backward, u)


def to_planes(x: ndarray, tiles: Pair, padding: Pair, v: ndarray) -> None:
    """v (36, N * tiles, C) from x (N, H, W, C)"""
    launch(_to_planes, -(-v[0].size // THREADS), x, *x.shape, *tiles, *padding, v)


def from_planes(
    m: ndarray, bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool, y: ndarray
) -> None:
    """y (N, Ho, Wo, O) from m (36, N * tiles, O)"""
    blocks = -(-m[0].size // THREADS)
    launch(_from_planes, blocks, m, bias, scale, shift, shortcut, relu, *y.shape, *tiles_of(y.shape), y)


def _convolve(
    source: ndarray, weight: ndarray, bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool,
    padding: Pair, backward: bool, scratch: ndarray, out: ndarray,
) -> None:  # fmt: skip
    channels, outputs, tiles, none = source.shape[3], out.shape[3], tiles_of(out.shape), scratch[:0]
    total, end = out.shape[0] * tiles[0] * tiles[1], PLANES * channels * outputs
    u = scratch[:end].reshape(PLANES, channels, outputs)
    v = scratch[end : end + PLANES * total * channels].reshape(PLANES, total, channels)
    end += v.size
    m = scratch[end : end + PLANES * total * outputs].reshape(PLANES, total, outputs)
    weight_to_planes(weight, backward, u)
    to_planes(source, tiles, padding, v)
    products.nn(v, u, none, False, none, none, m)
    from_planes(m, bias, scale, shift, shortcut, relu, out)


def forward(
    x: ndarray, weight: ndarray, bias: ndarray, scale: ndarray, shift: ndarray, shortcut: ndarray, relu: bool,
    padding: Pair, scratch: ndarray, y: ndarray,
) -> None:  # fmt: skip
    """Compute y (N, Ho, Wo, O) = conv(x, weight) [+ bias] [* scale + shift] [+ shortcut] [relu], with stride 1."""
    _convolve(x, weight, bias, scale, shift, shortcut, relu, padding, False, scratch, y)


def backward_input(
    dy: ndarray, weight: ndarray, shortcut: ndarray, padding: Pair, scratch: ndarray, dx: ndarray
) -> None:
    """Compute dx (N, H, W, C) [+ shortcut] from dy (N, Ho, Wo, O)."""
    none, edge = scratch[:0], TAPS - 1
    reverse = edge - padding[0], edge - padding[1]
    _convolve(dy, weight, none, none, none, shortcut, False, reverse, True, scratch, dx)
