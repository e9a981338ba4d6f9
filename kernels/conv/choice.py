"""The choice between the direct kernel of a convolution and Winograd's forms.

The form F(m x m, r x r) computes m x m outputs of an r x r kernel together (WINOGRAD.md). The table shows the speed of
a form divided by the speed of the direct kernel: first for the forward pass, after the slash for the weight gradient.
It was measured with 64 images and stride 1 on 2 cores of a Zen 5 (AVX-512):

    image     channels     F(4x4,3x3)     F(2x2,3x3)          image     channels     F(4x4,3x3)     F(2x2,3x3)
     4x4        8 -> 8      0.6 / 1.3      0.7 / 0.9          16x16       8 -> 8      0.7 / 1.0      0.4 / 0.6
               16 -> 16     1.3 / 2.6      1.4 / 2.0                     16 -> 16     2.1 / 2.9      1.3 / 1.8
               64 -> 64     2.5 / 3.7      1.9 / 2.3                     64 -> 64     2.3 / 1.8      1.7 / 1.8
              256 -> 256    2.7 / 4.2      2.2 / 2.7                    256 -> 256    3.4 / 3.3      2.1 / 2.2
     7x7       16 -> 16     1.8 / 2.8      1.1 / 1.8          28x28       3 -> 32     0.4 / 0.3      0.2 / 0.2
               64 -> 64     2.3 / 2.3      1.5 / 1.7                     16 -> 16     2.1 / 2.9      1.3 / 1.7
    14x14      16 -> 16     1.7 / 2.4      1.3 / 1.8                    128 -> 128    2.8 / 2.6      1.9 / 2.0

With few channels, a vector is not full and the transforms cost more than they save. When the table was measured, tiles
whose channels do not fill vectors were not yet copied as vectors (planes.py). On an Intel Xeon (AVX-512) y, dx and
dweight now take these parts of the direct kernels' time:

    3x3, 37 images of 29 x 31, 12 -> 28     0.8, 0.7, 0.7         5x5, 64 images of 14 x 14, 6 -> 16     0.9, 0.6, 0.9
    3x3, 64 images of 28 x 28, 8 -> 16      0.8, 0.6, 0.8         5x5, 64 images of 28 x 28, 6 -> 6      1.2, 1.3, 1.3
                               8 -> 8       1.0, 1.2, 1.2
                               4 -> 8       1.7, 1.7, 1.7

Kernels of other sizes, and stride 2: parts of the direct kernels' time for y, dx and dweight, on one thread of a Zen 4,
with 64 images:

    3x3, stride 2, 32 x 32,  8 -> 16      1.4, 1.3, 1.5         4x4, stride 2, 32 x 32,   8 -> 16     0.7, 0.9, 0.7
                            16 -> 32      0.9, 0.7, 0.9                        30 x 30,  20 -> 36     0.8, 0.7, 0.7
                            32 -> 64      0.8, 0.8, 0.8                        16 x 16,  64 -> 128    0.5, 0.5, 0.6
                   30 x 30, 16 -> 32      1.0, 0.8, 1.0         4x4            16 x 16,   8 -> 12     0.8, 0.9, 0.8
                            64 -> 64      0.8, 0.9, 0.9                                  64 -> 64     0.3, 0.4, 0.3
                            20 -> 36      1.1, 1.0, 1.1         2x2            16 x 16,   8 -> 12     1.0, 1.8, 1.0
                            24 -> 40      1.1, 1.0, 1.0                                  16 -> 32     0.9, 1.1, 0.9
                   16 x 16, 64 -> 128     0.7, 0.7, 0.8                                  64 -> 64     0.6, 0.7, 0.7
                          192 -> 192      0.6, 0.6, 0.6         in four groups
                    8 x 8,  64 -> 128     0.6, 0.6, 0.7         3x3, stride 2, 30 x 30,  64 -> 128    1.1, 1.1, 1.0
                                                                4x4, stride 2, 30 x 30,  64 -> 64     1.0, 0.8, 0.9

    Lines of taps, and pieces (WINOGRAD.md): y, dx and dweight on two threads of an Intel Xeon (family 6, model 207)

    1x3      64 images of 16 x 16,  16 -> 16      1.5, 1.4, 1.3     2x3      64 of 16 x 16,  16 -> 16    0.9, 0.9, 1.1
             37 of 31 x 31,         40 -> 40      1.0, 1.0, 1.0              37 of 31 x 31,  24 -> 40    0.9, 0.8, 0.9
                                    53 -> 71      0.8, 1.0, 0.8     3x5      64 of 16 x 16,  16 -> 16    0.8, 0.8, 0.8
    5x1      64 of 16 x 16,         32 -> 32      0.8, 0.8, 0.7                              64 -> 64    0.4, 0.4, 0.4
    1x7      64 of 16 x 16,         16 -> 16      1.0, 1.0, 0.9     6x6      64 of 16 x 16,  16 -> 16    0.7, 0.6, 0.7
             37 of 31 x 31,         24 -> 40      0.8, 0.9, 0.8     9x9      64 of 16 x 16,  16 -> 16    0.6, 0.6, 0.5

    7x7      64 images of 16 x 16,  64 -> 64      0.4, 0.4, 0.4     (two threads)
             37 of 31 x 31,         24 -> 24      0.6, 0.6, 0.6
                                    16 -> 16      0.6, 0.6, 0.9
                                     8 -> 16      1.0, 0.8, 1.6
              8 of 8 x 8,         256 -> 256      0.5, 0.5, 0.5

So a form is used from 8 channels on (5x5: 6; 2x2 and 7x7: 16; 3x3 with stride 2: 16 for multiples of 16, else 24), for
FEWEST_PAIRS pairs of channels and more. (In a net, where x is seldom in the caches, 24 -> 40 with stride 2 takes as
long as with the direct kernel, which has no prefetches.) With groups, it is used from 16 channels on, if each group has
at least 4, unless all have 4 in x and in y: then depthwise.py takes 0.3 to 0.6 of the time (with 8 channels 1.2 to 2
times as long). 3x3 with stride 2 and groups never uses a form. The form with the fewest multiplications is the fastest,
or nearly so. For 3 x 3, this is F(2x2,3x3) if the output has two rows or two columns, otherwise F(4x4,3x3). Lines are
used if the taps times the channels of a group are at least FEWEST_TIMES_TAPS, and pieces from 16 channels on, in groups
from 24 channels of a group on.

The transform of a large layer's weights costs more than it saves for few pixels. So the form depends on the number of
images, and the result for an image may depend in its last bits on how many others its batch has. (With AMX, too, which
AMX_TILES tiles or more use.) Direct and Winograd (winograd_large.py), in ms, on two threads of an Intel Xeon (family 6,
model 207), weights and images in the third-level cache; y in a prediction, whose weights are packed, and in training:

    512 -> 512             1 image of 4 x 4       y 1.2, 2.8    2.0, 2.7     dx 2.2, -        dweight 2.3, -
                           2                        1.7, 2.8    2.5, 2.7        2.6, -                2.2, -
                           4                        3.1, 2.8    3.8, 2.8        3.9, 3.9              3.8, 3.4
                           8                        5.5, 3.6    6.5, 3.7        7.0, 5.2              7.8, 4.7
                           1 image of 2 x 2         0.9, 1.7    1.4, 1.6        1.6, -                1.7, -
    256 -> 256             1 image of 4 x 4         0.3, 0.7    0.4, 0.8        0.4, 1.0              0.4, 0.8
                           4                        0.7, 0.8    0.8, 0.8        0.9, 1.1              0.8, 0.9
                           8                        1.2, 0.9    1.4, 0.9        1.4, 1.3              1.3, 1.0
                           1 image of 2 x 2         0.2, 0.4    0.3, 0.4        0.4, 0.7              0.5, 0.6
                          16                        0.7, 0.7    0.9, 0.7        0.8, 0.9              0.8, 0.8
    128 -> 128             1 image of 8 x 8         0.2, 0.2    0.3, 0.4
    256 -> 512, stride 2   1 image of 8 x 8         0.5, 1.8    0.8, 1.8        0.9, -                1.1, -
                           8                        2.6, 3.1    3.1, 3.0        2.9, -                3.1, -
                          16                        5.4, 5.1    5.9, 5.2        5.0, 4.6              7.3, 4.8
    128 -> 256, stride 2   1 image of 8 x 8                                     0.3, 0.8              0.2, 0.6
                          16                                                    1.3, 1.5              1.4, 1.2
"""

from __future__ import annotations

from minidl.engine.jit import HAS_AMX, helper

from .geometry import ceildiv
from .reference import Pair
from .sizes import NARROW

Tiles = tuple[int, int, int, int]

DIRECT, F4X4_3X3, F2X2_3X3, F4X4_5X5, F5X5_2X2, F3X3_4X4 = 0, 1, 2, 3, 4, 5
F2X2_7X7 = 6
F1X4_1X3, F1X4_1X5, F1X4_1X7, F4X1_3X1, F4X1_5X1, F4X1_7X1 = 7, 8, 9, 10, 11, 12  # along a line of pixels
STRIDE2_3X3, STRIDE2_4X4 = 13, 14  # 4 x 4 outputs with stride 2: y and dweight
SPACED_3X3, SPACED_4X4 = 15, 16  # 8 x 8 pixels of dx in such a layer
FREQUENT = F4X4_3X3, F2X2_3X3, F4X4_5X5  # in well-known networks
FEWEST, FEWEST_5X5, FEWEST_SMALL, FEWEST_STRIDED, FEWEST_WITH_GROUPS = 8, 6, 16, 24, 16  # channels
FEWEST_TIMES_TAPS = 150  # of a line: the taps times the channels in a group
FEWEST_IN_PIECES, FEWEST_IN_PIECES_OF_GROUPS = 16, 24  # channels; channels in a group
FEWEST_PAIRS, FEWEST_IN_GROUP = 96, 4  # pairs of an input and an output channel; channels in a group
AMX_CHANNELS, AMX_TILES = 32, 64  # at least, for y and dx on AMX; elsewhere vectors are as fast
AMX_LEAST_PAIRS, AMX_MOST_PAIRS = 2**11, 2**14  # with more pairs of channels, U waits for the third-level cache
# With MANY_PAIRS pairs of channels or more, a layer is direct if all images together have fewer pixels than FEW_PIXELS
# (with stride 2: STRIDED). OTHERS: dx and dweight of layers that winograd_large.py does not compute.
MANY_PAIRS, MANY_PAIRS_OTHERS = 2**15, 2**17
FEW_PIXELS, FEW_PIXELS_STRIDED = 48, 256
FEW_PIXELS_OTHERS, FEW_PIXELS_OTHERS_STRIDED = 192, 768
LARGE_U_IN_PIECES, FEW_TILES_IN_PIECES = 2**21, 16  # numbers of U and tiles: with fewer tiles, it costs too much
# A form is used if the direct kernel needs at least GAIN times as many multiplications; pieces transform x repeatedly.
GAIN, GAIN_IN_PIECES = 1.5, 2.0


@helper
def tiles_of(m: Pair, height: int, width: int, dilation: Pair) -> Tiles:
    """Return how many tiles of m[0] x m[1] outputs cover height x width outputs.

    With dilation d, an output reads only every d-th input. So d x d separate images, each of every d-th pixel, have
    convolutions without dilation. The result is: rows of tiles and tiles in a row of such an image, and the dilation.
    """
    step = m[0] * dilation[0], m[1] * dilation[1]
    return (height + step[0] - 1) // step[0], (width + step[1] - 1) // step[1], dilation[0], dilation[1]


@helper
def count_of(images: int, tiles: Tiles) -> int:
    """Return the number of tiles in all images."""
    return images * tiles[0] * tiles[1] * tiles[2] * tiles[3]


@helper
def form_of_dx(form: int) -> int:
    """Return the form of dx in a layer that uses this form for y."""
    return form - STRIDE2_3X3 + SPACED_3X3 if form >= STRIDE2_3X3 else form


@helper
def input_form(
    images: int, out: Pair, kernel: Pair, channels: int, outputs: int, stride: Pair, padding: Pair, dilation: Pair,
    groups: int,
) -> int:  # fmt: skip
    """Return the form of dx, or DIRECT: dy has `channels` channels, dx has `outputs` channels, and out = (H, W)."""
    phase = ceildiv(out[0], stride[0]), ceildiv(out[1], stride[1])  # every stride-th row and column
    form = gradient_form(images, phase, kernel, channels, outputs, stride, dilation, groups)
    if form >= STRIDE2_3X3:
        even = padding[0] % 2 == 0 or padding[1] % 2 == 0  # the matrices are for odd paddings
        return DIRECT if even else form_of_dx(form)
    without_taps = kernel[0] < stride[0] or kernel[1] < stride[1]  # some pixels of dx
    return DIRECT if without_taps else form


@helper
def gradient_form(
    images: int, out: Pair, kernel: Pair, channels: int, outputs: int, stride: Pair, dilation: Pair, groups: int
) -> int:
    """Return the form of dweight, or of dx with stride 1: that of y, unless U or dU is stored and costs too much."""
    few = FEW_PIXELS_OTHERS_STRIDED if stride == (2, 2) else FEW_PIXELS_OTHERS
    stored = (groups > 1 or outputs % 16 > 0) and channels * outputs // groups >= MANY_PAIRS_OTHERS
    if stored and images * out[0] * out[1] < few:
        return DIRECT
    return winograd_form(images, out, kernel, channels, outputs, stride, dilation, groups)


@helper
def winograd_form(
    images: int, out: Pair, kernel: Pair, channels: int, outputs: int, stride: Pair, dilation: Pair, groups: int
) -> int:
    """Return the form that is used for y, or DIRECT: for few pixels, a large layer's U costs more than it saves.

    x has `channels` channels, y has `outputs` channels, and out = (Ho, Wo).
    """
    few = FEW_PIXELS_STRIDED if stride == (2, 2) else FEW_PIXELS
    if channels * outputs // groups >= MANY_PAIRS and images * out[0] * out[1] < few:
        return DIRECT
    return _form(images, out, kernel, channels, outputs, stride, dilation, groups)


@helper
def _form(
    images: int, out: Pair, kernel: Pair, channels: int, outputs: int, stride: Pair, dilation: Pair, groups: int
) -> int:
    """Return the form for this number of images at least."""
    r, by_two = max(kernel), stride == (2, 2)
    if min(kernel) == 1:
        return _line_form(out, kernel, channels, outputs, stride, dilation, groups)
    whole = (by_two and (r == 3 or r == 4)) or (stride == (1, 1) and r != 6 and r <= 7)
    if kernel[0] != kernel[1] or not whole:
        return _form_in_pieces(images, out, kernel, channels, outputs, stride, dilation, groups)
    least = FEWEST_5X5 if r == 5 else FEWEST_SMALL if r in (2, 7) else FEWEST
    if r == 3 and by_two:
        least = FEWEST_SMALL if channels % 16 == 0 and outputs % 16 == 0 else FEWEST_STRIDED
    if groups > 1:
        least = max(FEWEST_WITH_GROUPS, FEWEST_IN_GROUP * groups)
    if min(channels, outputs) < least or channels * outputs < FEWEST_PAIRS:
        return DIRECT
    if 1 < groups and channels == outputs == 4 * groups and 4 in NARROW:
        return DIRECT
    if by_two and ((r == 3 and groups > 1) or dilation != (1, 1)):
        return DIRECT
    # Multiplications for each input channel and output channel: n^2 for each tile
    n = r + 6 if by_two else 8 if r >= 5 else 6
    m = 4 if by_two else n - r + 1
    many = count_of(1, tiles_of((m, m), out[0], out[1], dilation)) * n**2
    two = count_of(1, tiles_of((2, 2), out[0], out[1], dilation)) * 4**2 if r == 3 and not by_two else many
    if out[0] * out[1] * r * r < GAIN * min(many, two):
        return DIRECT
    if by_two:
        return STRIDE2_3X3 if r == 3 else STRIDE2_4X4
    if r == 3:
        return F4X4_3X3 if many <= two else F2X2_3X3
    if r >= 5:
        return F4X4_5X5 if r == 5 else F2X2_7X7
    return F5X5_2X2 if r == 2 else F3X3_4X4


@helper
def pieces_along(taps: int, stride: int, r: int) -> int:
    """Return into how many pieces of r taps a kernel is cut along an axis (`pieces_of` in forms.py)."""
    return min(taps, stride) * ceildiv(ceildiv(taps, stride), r)


@helper
def _line_form(
    out: Pair, kernel: Pair, channels: int, outputs: int, stride: Pair, dilation: Pair, groups: int
) -> int:
    """Return _form for a kernel that is a line of taps: pieces of 3, 5 or 7 taps with the fewest products."""
    length, across = max(kernel), kernel[0] == 1
    few = length * min(channels, outputs) < FEWEST_TIMES_TAPS * groups
    if few or (stride != (1, 1) and dilation != (1, 1)):
        return DIRECT
    r, each, step = 0, 0, stride[1] if across else stride[0]
    for taps in (3, 5, 7):
        products = pieces_along(length, step, taps) * (taps + 3)  # a tile has 4 outputs
        if r == 0 or products < each:
            r, each = taps, products
    tiles = tiles_of((1, 4) if across else (4, 1), out[0], out[1], dilation)
    if out[0] * out[1] * length < GAIN * count_of(1, tiles) * each:
        return DIRECT
    return (F1X4_1X3 if across else F4X1_3X1) + (r - 3) // 2


@helper
def _form_in_pieces(
    images: int, out: Pair, kernel: Pair, channels: int, outputs: int, stride: Pair, dilation: Pair, groups: int
) -> int:
    """Return _form for a kernel that is computed as several kernels of 3 x 3 or of 4 x 4 taps."""
    least = FEWEST_IN_PIECES if groups == 1 else FEWEST_IN_PIECES_OF_GROUPS * groups
    if min(channels, outputs) < least or (stride != (1, 1) and dilation != (1, 1)):
        return DIRECT
    three, tiles_of_three = 1, count_of(1, tiles_of((4, 4), out[0], out[1], dilation))
    four, tiles_of_four = 1, count_of(1, tiles_of((3, 3), out[0], out[1], dilation))
    for axis in range(2):
        three *= pieces_along(kernel[axis], stride[axis], 3)
        four *= pieces_along(kernel[axis], stride[axis], 4)
    form, pieces, tiles = F4X4_3X3, three, tiles_of_three
    if four * tiles_of_four < three * tiles_of_three:
        form, pieces, tiles = F3X3_4X4, four, tiles_of_four
    few = images * tiles < FEW_TILES_IN_PIECES and 6**2 * pieces * channels * outputs >= LARGE_U_IN_PIECES
    if few or out[0] * out[1] * kernel[0] * kernel[1] < GAIN_IN_PIECES * 6**2 * pieces * tiles:
        return DIRECT
    return form


@helper
def on_amx(channels: int, outputs: int, groups: int, pieces: int, tiles: int) -> bool:
    """Return whether Winograd's products for y and dx of float32 numbers are computed on AMX (winograd_amx.py)."""
    deep = channels * pieces
    some = AMX_LEAST_PAIRS <= deep * outputs <= AMX_MOST_PAIRS and min(deep, outputs) >= AMX_CHANNELS
    whole = pieces == 1 or channels % 16 == 0  # winograd_amx.py: a vector of rows of U belongs to one piece
    return HAS_AMX and groups == 1 and some and whole and tiles >= AMX_TILES
