"""The examples in the courses of docs/ print what the pages show."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest


@pytest.mark.parametrize("page", ["decentralised.md", "elastic.md"])
def test_examples(page: str) -> None:
    result = doctest.testfile(str(Path(__file__).parent.parent / "docs" / page), module_relative=False)
    assert result.attempted > 10
    assert result.failed == 0
