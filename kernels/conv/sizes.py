"""The block sizes of convolutions. NR, MC and KC are BLIS's names (matmul/blocks.py); here, a row is a pixel.

GROUP_SIZE follows from the second-level cache of the machine. The others do not, because most of them
decide where a sum is split: the bits would differ from one machine to another.
"""

from minidl.engine.jit import L2, VECTOR_BYTES
from minidl.kernels.matmul.blocks import NR as NR

MC = 512  # at most this many output pixels are in a block, unless a single row has more
KC = 384  # about this many products are summed in one go; adding such sums has a smaller error than one long sum
KC_EIGHT = 64  # the same limit for Winograd's forms with eight points, which enlarge rounding errors
LARGE_U = 2**20  # a layer is large (forms.py) if U has at least this many numbers
MOST_IN_ONE_GO = 256  # in a large layer, Winograd's other forms sum up to this many channels in one go,
KC_LARGE = 64  # and more channels in pieces of this many
TILES_EIGHT = 32  # tiles that their weight gradient sums in one go, if it has only one partial sum
WEIGHT_KC = 256  # like MC, for a block of the direct weight gradient; divided by the horizontal stride

CHUNK = 128  # about as many pixels' sums are computed together for each panel, while the pixels are in L1 or L2
FEWEST_PIXELS = 64  # in a block, if a task has several: each block reads all weights, and its last tile is seldom full
MAX_BUNDLE = 8  # at most this many pixels are computed as one (geometry.py): the window of a long bundle has many zeros
MAX_COPY = 48 * 1024  # a block's copy has at most this many numbers, unless one output row needs more: it stays in L2
MAX_PIECE = 96 * 1024  # about this many numbers of dweight are summed at a time: they stay in L2
MAX_UNPACKED = 64  # with up to this many weights for each output, a copy of dy costs more than it saves
MIN_TASKS = 16  # the weight gradient has about this many separate sums (pieces * parts), if there are enough pixels
NARROW = tuple(size for size in (1, 2, 4, 8) if 8 * size <= VECTOR_BYTES)  # channels in a group of depthwise.py
SERIAL = 250_000  # with up to this many products, a second thread costs more than it saves

# Winograd's form (winograd.py)
# V and M of a group have at most this many numbers, half of L2, unless LEAST_TILES tiles have more. If U has more than
# this, V and M have the rest of L2. If the rest is too small, U comes from L3 for each group, and they have 3/2 of L2.
GROUP_SIZE = L2 // 4 // 2
GROUP_IN_PLACE = GROUP_SIZE // 4  # numbers of V if M replaces V; the pixels of the next group must fit into L2, too
LEAST_TILES = 16  # in a group
WINOGRAD_SERIAL = 2**19  # one thread computes y or dx if the products have fewer multiplications
U_PER_TILE = 2**14  # winograd_large.py computes a large layer if U has at least this many numbers for each tile
LEAST_OUTPUTS = 128  # in winograd_large.py: four panels
DIVIDED_U = 2**16  # if U has at least this many numbers, and there are at most
FEW_TILES = 32  # this many tiles, the threads divide the outputs among themselves, not the tiles
