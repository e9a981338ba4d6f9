"""The launches of a recorded step, made by compiled code: a launch takes no time in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from minidl.engine.jit import jit

COLUMNS = 6  # of a table


@intrinsic
def _launch(typing: Any, driver: Any, stream: Any, row: Any) -> Any:
    """Call cuLaunchKernel, whose address is `driver`. row: function, blocks x, y, z, threads, parameters' addresses."""

    def generate(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        word, half, place = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(half, [place, *[half] * 7, place, place, place])
        driver, stream, row = values
        function, *numbers, parameters = (builder.extract_value(row, i) for i in range(COLUMNS))
        x, y, z, threads = (builder.trunc(value, half) for value in numbers)
        function, stream, parameters = (builder.inttoptr(value, place) for value in (function, stream, parameters))
        one, zero, none = half(1), half(0), word(0).inttoptr(place)
        callee = builder.inttoptr(driver, kind.as_pointer())
        return builder.call(callee, [function, x, y, z, threads, one, one, zero, stream, parameters, none])

    return types.int32(types.int64, types.int64, types.UniTuple(types.int64, COLUMNS)), generate


@jit
def walk(launch: int, table: np.ndarray, stream: int) -> int:
    """Make the launches of a table (launches, 6); return the driver's code of the first that fails, else 0.

    launch: the address of cuLaunchKernel.
    """
    for i in range(len(table)):
        row = table[i]
        code = _launch(launch, stream, (row[0], row[1], row[2], row[3], row[4], row[5]))
        if code:
            return code
    return 0
