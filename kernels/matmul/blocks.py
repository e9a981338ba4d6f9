"""The block sizes of a matrix product out (M, N) = a (M, K) @ b (K, N), under the names that BLIS gives them.

| name | size                                   | what it is                   | stays in                     |
|------|----------------------------------------|------------------------------|------------------------------|
| MR   | 12, 8 or 4 (6, 4 or 2 with 16          | rows of a tile of out        | registers, MR x NR sums, or  |
|      | registers), 6 or 4 with two panels;    |                              | twice as many columns        |
|      | convolutions: 8 (6), with a tile of    |                              |                              |
|      | three vectors 8 (4)                    |                              |                              |
| NR   | 2 vectors: 32 float32 with AVX-512     | columns of a panel; a tile   | registers                    |
|      |                                        | has one panel or two         |                              |
| KC   | 512 at most; all blocks of a product   | depth of a block: summands   | L2: two panels of b          |
|      | have about equal depth                 |                              | (KC, 2 * NR)                 |
| MC   | MC * KC numbers fill up to 5/8 of L2;  | rows of a block of a         | L2: a block of a (MC, KC)    |
|      | all blocks are about equally high      |                              |                              |
| NC   | not used here                          | columns of a block of b      | L3, in BLIS                  |

Source: Van Zee and van de Geijn, "BLIS: A Framework for Rapidly Instantiating BLAS Functionality", 2015. NR is given
for float32. In float64 NR is half as large, so a panel of `b` needs as much memory as in float32. A block of
`a` needs twice as much as in float32.

The rest of L2 is for the panels of b, their successors, if they are prefetched, and out. MC follows from the machine's
L2. KC does not: it decides where a sum is split, so the bits would differ from one machine to another.

A smaller KC would keep panels in L1. But for each piece of KC products, a tile loads and stores its sums, which are in
L2 at best. README.md (step 6) has what that costs.
"""

from __future__ import annotations

from numpy import ndarray

from minidl.engine.jit import L2, REGISTERS, VECTOR_BYTES, helper

LANES = VECTOR_BYTES // 4  # float32 numbers in a vector
MR = 8 if REGISTERS == 32 else 6  # for convolutions: their tile needs a register for the address of each row
WIDE_MR = 8 if REGISTERS == 32 else 4  # rows of a tile of three vectors, for convolutions
PRODUCT_MR = 12 if REGISTERS == 32 else 6  # 2 * MR vectors of sums, 2 of b and 1 of a must fit into the registers
HEIGHTS = PRODUCT_MR, PRODUCT_MR // 3 * 2, PRODUCT_MR // 3  # the last rows of a product have a lower tile
PANELS = 2 if REGISTERS == 32 else 1  # a tile of a product has up to this many panels
HEIGHTS_OF_TWO = 6, 4  # rows of a tile of two panels: 6 * 4 vectors of sums, 4 of b and 1 of a
NR = 2 * LANES
KC = 512
MC_KC = L2 // 2 // 4
LINE = 16  # float32 numbers in a cache line; scratch sizes include as many spare numbers, which `aligned` may skip
MOST_FEW = 4  # tiles of up to this many rows are in few.py


@helper
def few_rows(rows: int, in_place: bool) -> int:
    """Return the rows of each tile of few.py for a product of this many rows, 0 if it has other tiles.

    A product of 6, 7 or 8 rows with b in place has two tiles, of 3 or 4 rows: reading b twice, the second time from L2,
    takes less time than reading the narrow rows of a panel, which are far apart. (A product of 5 rows would have two
    tiles of different width.)
    """
    if rows <= MOST_FEW:
        return rows
    return (rows + 1) // 2 if in_place and 6 <= rows <= min(MR, 2 * MOST_FEW) else 0


@helper
def few_panels(rows: int) -> int:
    """Return the number of panels that a tile of few.py with this many rows computes together; 0 for 0 rows.

    Half of the registers hold sums. So a tile of 1 row has 16 vectors (8 with 16 registers), one of 4 rows has 4 (2).
    """
    return REGISTERS // 2 // rows // 2 if rows else 0


@helper
def tile_rows(rows: int, panels: int) -> int:
    """Return the rows of the next tile of a product, if `rows` remain and the tile has this many panels.

    Two tiles of 4 rows take less time than one of 6 and one with 1 or 2 rows.
    """
    if panels == 1:
        return min(rows, PRODUCT_MR)
    return HEIGHTS_OF_TWO[1] if 6 < rows <= 8 else min(rows, HEIGHTS_OF_TWO[0])


@helper
def equal_blocks(count: int, most: int) -> int:
    """Return the size of each block if `count` > 0 is divided into the fewest blocks of at most `most`, about equal."""
    blocks = (count + most - 1) // most
    return (count + blocks - 1) // blocks


@helper
def block_depth(depth: int) -> int:
    """Return KC for sums of `depth` > 0 products: blocks of about equal depth, of at most KC products each."""
    return equal_blocks(depth, KC)


@helper
def most_strips(kc: int) -> int:
    """Return the most strips of PRODUCT_MR rows that a block of a has if its depth is kc > 0."""
    return max(1, MC_KC * 5 // 4 // kc // PRODUCT_MR)


@helper
def block_strips(strips: int, kc: int) -> int:
    """Return the strips of each block of a: MC / PRODUCT_MR, if a thread computes `strips` > 0 strips of depth kc > 0.

    The blocks are about equally high, since a last block of few rows would need all panels of b for these.
    """
    return equal_blocks(strips, most_strips(kc))


@helper
def aligned(scratch: ndarray) -> ndarray:
    """Return the part of scratch that begins on a cache line: a vector across two lines costs two loads."""
    return scratch[(-scratch.ctypes.data % 64) // scratch.itemsize :]
