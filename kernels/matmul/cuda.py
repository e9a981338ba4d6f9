"""Matrix products on a GPU: a tile of out for each block of threads (cuda_tile.py), and the choice of the tile.

Each sum is computed by a single thread, which adds the products in the order of k. So bits do not depend on the GPU,
nor on the order of blocks. A narrow output gets narrow tiles: with the widest one, most threads would compute zeros.
"""

from __future__ import annotations

from numpy import ndarray

from minidl.engine.cuda import launch
from minidl.engine.device import address

from .cuda_tile import Tile, product
from .reference import __all__ as __all__

TILES = {  # of 256 threads: bytes of an element -> tiles, from narrow to wide
    4: (Tile(512, 8, 4, 4), Tile(256, 16, 4, 4), Tile(256, 32, 8, 4), Tile(128, 64, 8, 4), Tile(128, 128, 8, 8)),
    8: (Tile(256, 16, 4, 4), Tile(128, 32, 4, 4), Tile(64, 64, 4, 4)),
}
NARROW = (Tile(512, 8, 16, 4, blocks=6), Tile(512, 16, 8, 8, blocks=3), Tile(256, 32, 8, 8, blocks=3))
MEDIUM = Tile(128, 64, 8, 8)  # NARROW and MEDIUM: of 64 or 128 threads
MOST_PLANES = 65535  # the limit of CUDA for the third dimension of a grid
BY_ROWS = (*NARROW, Tile(128, 64, 8, 8, blocks=3))  # a's tile keeps its rows; the widest: for nt only


def nn_scratch(rows: int, columns: int, depth: int) -> int:
    """Return the number of elements of scratch: here 0."""
    return 0


def packed_size(rows: int, columns: int, depth: int) -> int:
    """Return the number of elements of nn's `packed`: 0, since these kernels keep no weights."""
    return 0


nt_scratch = tn_scratch = nn_scratch


def batched_scratch(count: int, rows: int, columns: int, depth: int) -> int:
    """Return the number of elements of batched's scratch: here 0."""
    return 0


def narrowest(tiles: tuple[Tile, ...], columns: int) -> Tile:
    """Return the first tile with enough columns, or else the last, which is the widest."""
    return next((tile for tile in tiles if tile.columns >= columns), tiles[-1])


def _tile(columns: int, item: int, quads: bool) -> Tile:
    """Return the tile for a product. quads: whether a is copied by 16 bytes.

    With fewer threads, a thread computes more. But it also copies more: single numbers would take too many addresses.
    """
    narrow, wide = (NARROW if quads else TILES[4][:3]), TILES[item]
    return narrowest((*narrow, MEDIUM, wide[-1]) if item == 4 else wide, columns)


def _wide(vector: int, *arrays: ndarray) -> bool:
    """Return whether each row of these matrices begins at a multiple of 16 bytes. vector: elements in 16 bytes."""
    return all(address(x) % 16 == 0 and x.shape[-1] % vector == 0 for x in arrays)


def _product(a: ndarray, b: ndarray, bias: ndarray, relu: bool, out: ndarray, a_along: bool, b_along: bool) -> None:
    """The arrays may have a first axis, of planes that are multiplied with each other."""
    (rows, columns), item, planes = out.shape[-2:], out.itemsize, out.ndim > 2
    depth = a.shape[-1] if a_along else a.shape[-2]
    across = [x for x, is_along in ((a, a_along), (b, b_along)) if not is_along]
    wide = _wide(4, out, *across)
    most = (BY_ROWS if b_along else NARROW)[-1].columns
    by_rows = item == 4 and a_along and _wide(4, a) and rows >= NARROW[0].rows and columns <= most
    tile = narrowest(BY_ROWS, columns) if by_rows else _tile(columns, item, wide and not a_along)
    compute = product(tile, a_along, b_along, wide, item, planes, by_rows)
    blocks = -(-rows // tile.rows), -(-columns // tile.columns), out.shape[0] if planes else 1
    launch(compute, blocks, a, b, bias, relu, out, rows, columns, depth, a.shape[-1], b.shape[-1])


def nn(
    a: ndarray, b: ndarray, bias: ndarray, relu: bool, packed: ndarray, scratch: ndarray, out: ndarray
) -> None:
    _product(a, b, bias, relu, out, a_along=True, b_along=False)


def nt(a: ndarray, b: ndarray, scratch: ndarray, out: ndarray) -> None:
    _product(a, b, scratch[:0], False, out, a_along=True, b_along=True)


def tn(a: ndarray, b: ndarray, scratch: ndarray, out: ndarray) -> None:
    _product(a, b, scratch[:0], False, out, a_along=False, b_along=False)


def batched(
    a: ndarray, a_transposed: bool, b: ndarray, b_transposed: bool, scratch: ndarray, out: ndarray
) -> None:
    for first in range(0, len(out), MOST_PLANES):
        part = slice(first, first + MOST_PLANES)
        _product(a[part], b[part], scratch[:0], False, out[part], not a_transposed, b_transposed)
