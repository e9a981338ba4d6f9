"""Docstrings for the documentation site: minidl's plain text becomes reStructuredText, which Sphinx reads.

    text                               text; `code` is set as code, and no other character has a special meaning
    name: text, or name    text        an item of a list, with the lines that follow it
    - text                             the same
        indented lines                 a block of code, coloured if it is Python
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from textwrap import dedent

NAME = r"[a-z_]\w*(?:, [a-z_]\w*)*(?: \([^)]*\))?"
ITEM = re.compile(rf"- |(?P<name>{NAME})(?:: | {{2,}})(?=\S)")
SENTENCE = re.compile("Raises |Returns ")  # ends a list without an empty line


def as_rst(lines: Sequence[str]) -> list[str]:
    """Return the lines of a docstring, dedented, as lines of reStructuredText."""
    blocks: list[tuple[str, list[str]]] = [("text", [])]  # the first line is a sentence
    for line in lines:
        kind, block = blocks[-1]
        if not line.strip():
            if kind == "code":
                block.append("")
            else:
                blocks.append(("empty", []))
        elif line.startswith(" ") and kind != "item":
            if kind != "code":
                blocks.append(("code", []))
            blocks[-1][1].append(line)
        elif kind != "text" and ITEM.match(line):
            blocks.append(("item", [line]))
        elif kind == "text" or (kind == "item" and not SENTENCE.match(line)):
            block.append(line.strip())
        else:
            blocks.append(("text", [line]))
    write = {"text": _text, "item": _item, "code": _code, "empty": lambda block: []}
    return [line for kind, block in blocks for line in [*write[kind](block), ""]]


def _text(block: list[str]) -> list[str]:
    """Escape what reStructuredText would read as markup, outside of `code`, which may continue on the next line."""

    def replaced(found: re.Match[str]) -> str:
        return f"``{found[1]}``" if found[1] else "\\" + found[2]

    return re.sub(r"`([^`]+)`|([\\*|_`])", replaced, "\n".join(block)).splitlines()


def _item(block: list[str]) -> list[str]:
    found = ITEM.match(block[0])
    assert found
    first, *rest = _text([block[0][found.end() :], *block[1:]])
    name = f"**{found['name']}**: " if found["name"] else ""
    return [f"- {name}{first}", *(f"  {line}" for line in rest)]


def _code(block: list[str]) -> list[str]:
    text = dedent("\n".join(block)).strip("\n")
    try:
        ast.parse(text)
        language = "python"
    except SyntaxError:
        language = "none"
    return [f".. code-block:: {language}", "", *(f"    {line}" for line in text.splitlines())]
