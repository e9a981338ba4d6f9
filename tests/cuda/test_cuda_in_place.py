"""Kernels that a plan lets write over their input (plan.IN_PLACE) do so on a GPU with the same bits, without races."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import Emulator
from kernel_cases.comparing import SCRATCH, module, parameters
from on_emulator import FOLDERS, cuda_cases, placed

from minidl.engine.cuda import launch_with
from minidl.program.plan import IN_PLACE


@pytest.mark.parametrize("name", [name for name in IN_PLACE if name.partition(".")[0] in FOLDERS])
@pytest.mark.parametrize("order", ["forward", "shuffled"])
def test_output_over_input(name: str, order: str) -> None:
    folder, kernel = name.split(".")
    source, target = IN_PLACE[name]
    checked = 0
    for arguments in cuda_cases(folder, kernel, "float32"):
        if arguments[source].shape != arguments[target].shape:
            continue
        found = []
        for shared in (False, True):
            arrays = {p: placed(v, 0) for p, v in arguments.items() if isinstance(v, np.ndarray)}
            if shared:
                arrays[target] = arrays[source]
            with launch_with(Emulator(order=order, fuse=False)):
                getattr(module(folder, "cuda"), kernel)(*((arguments | arrays)[p] for p in parameters(folder, kernel)))
            found.append({p: v for p, v in arrays.items() if p != source and p not in SCRATCH})
        for p, array in found[0].items():
            assert array.tobytes() == found[1][p].tobytes(), p
        checked += 1
    assert checked
