"""The tables of the lessons' GPU ladders are what facts.py prints, and the steps of a ladder agree."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import Emulator
from facts import row
from ladders import LADDERS, OF_MEMORY
from on_emulator import ROOT
from sample import each_row

from minidl.engine.cuda import launch_with

ROWS = {family: [case[0] for case in LADDERS[family]()] for family in LADDERS}
OF_PRODUCTS = [(family, name) for family in ROWS if family not in OF_MEMORY for name in ROWS[family]]


def lesson(family: str) -> str:
    file = "conv/WINOGRAD.md" if family == "winograd" else f"{family}/README.md"
    return (ROOT / "kernels" / file).read_text(encoding="utf-8")


def agrees_with_the_lesson(family: str, name: str) -> None:
    """Run a step for its line of the table, and compare its arrays with those after the ladder's last step."""
    case = next(case for case in LADDERS[family]() if case[0] == name)
    lines = lesson(family).splitlines()
    assert row(family, *case) in lines, f"python tests/cuda/facts.py {family} prints the new table"
    if family in OF_MEMORY:
        *_, (_, last, arguments, _) = LADDERS[family]()
        with launch_with(Emulator(fuse=False)):
            last(*arguments)
        for found, expected in zip(case[2], arguments, strict=True):
            if isinstance(found, np.ndarray) and not (family == "drift" and found.size == 768):  # sums of blocks
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("family", "name"), each_row(4, [(f, n) for f in OF_MEMORY for n in ROWS[f]]))
def test_steps_of_kernels_that_wait_for_memory(family: str, name: str) -> None:
    agrees_with_the_lesson(family, name)


@pytest.mark.parametrize(("family", "name"), each_row(14, OF_PRODUCTS))
def test_steps_of_products(family: str, name: str) -> None:
    agrees_with_the_lesson(family, name)


def test_each_step_of_a_table_is_a_step_of_the_ladder() -> None:
    for family, names in ROWS.items():
        text = lesson(family)
        table = text[text.index("predicted limit |") :].split("\n\n")[0].splitlines()[2:]
        assert set(names) >= {line.split("|")[1].strip() for line in table}, family
