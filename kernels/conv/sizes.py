"""All sizes of direct.py and weight_gradient.py. Block sizes have BLIS's names: a register tile has MR rows
(matmul/tile.py) and NR columns, sums go to a depth of KC, and a block of MC rows stays in cache."""

from minidl.engine.jit import VECTOR_BYTES

NR = VECTOR_BYTES // 2  # panel_width of float32; float64 needs no more memory
MC = 512  # pixels of a block, at most
KC = 384  # products that are summed in one go, about: a sum of such sums rounds less
WEIGHT_KC = 256  # the same for the weight gradient, which sums over pixels: pixels of a block

CHUNK = 64  # pixels that are summed, and then get bias and relu while they are in L1
MAX_BUNDLE = 8  # pixels computed as one (geometry.py): the window of a long bundle has many zeros
MAX_COPY = 48 * 1024  # numbers in the copy of a block: it shares L2 with a panel of weights
MAX_PIECE = 96 * 1024  # numbers of dweight that a task sums: they stay in L2
MAX_UNPACKED = 64  # up to so many weights in a piece, a copy of dy costs more than it saves
MIN_TASKS = 16  # tasks of the weight gradient, if there are enough blocks
SERIAL = 500_000  # products: fewer are not worth a second thread
