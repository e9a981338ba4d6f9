"""The sizes of direct convolution. Block sizes have BLIS's names: a register tile has MR rows (matmul/blocks.py) and
NR columns, KC products are summed in one go, and a block of MC rows stays in cache. A row is a pixel here."""

from minidl.kernels.matmul.blocks import NR as NR

MC = 512  # output pixels of a block, at most, unless a single row has more
KC = 384  # products that are summed in one go, about: a sum of such sums has a smaller rounding error
WEIGHT_KC = 256  # output pixels that the weight gradient sums in one go, a block: at most, unless a single row has more

CHUNK = 64  # pixels: their sums are computed, and then bias, relu, ... are applied while the sums are in L1
MAX_BUNDLE = 8  # pixels that are computed as one, at most (geometry.py): the window of a long bundle has many zeros
MAX_COPY = 48 * 1024  # numbers in a block's copy, at most (one row of outputs may read more); weights share L2
MAX_PIECE = 96 * 1024  # numbers of dweight that a task sums at a time, about: they stay in L2
MAX_UNPACKED = 64  # with up to this many weights for each output, a copy of dy costs more than it saves
MIN_TASKS = 16  # separate sums in the weight gradient (pieces times parts), about, if there are enough pixels
SERIAL = 500_000  # with up to this many products, a second thread costs more than it saves
