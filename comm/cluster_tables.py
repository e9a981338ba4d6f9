"""Tables of a cluster file (cluster.py), read with checks. Each error names the table and the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minidl.errors import ConfigError, nearest
from minidl.run.options import options
from minidl.schema import shown


class Wrong(Exception):
    """An error in a file, without the file's name."""


def check_keys(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            place = f"{where} " if where else ""
            raise Wrong(f"{place}unknown key {shown(key)}.{nearest(key, known)} Known: {', '.join(known)}")


def table_of(tables: Mapping[str, Any], key: str) -> dict[str, Any]:
    table = tables.get(key, {})
    if not isinstance(table, dict):
        raise Wrong(f"{key}: expected a table [{key}], got {table!r}")
    return table


def tables_of(tables: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    found = tables.get(key, [])
    if not isinstance(found, list) or not all(isinstance(table, dict) for table in found):
        raise Wrong(f"{key}: expected tables [[{key}]]")
    return found


def read_table(kind: type, table: Any, where: str, besides: tuple[str, ...] = ()) -> Any:
    """Create an object of a dataclass from a table, and check the values."""
    if not isinstance(table, dict):
        raise Wrong(f"{where} expected a table, got {table!r}")
    known = {name: entry for name, entry in options(kind).items() if name not in besides}
    check_keys(table, (*known, *besides), where)
    try:
        return kind(**{key: known[key].check(value) for key, value in table.items()})
    except ConfigError as error:
        raise Wrong(f"{where} {error}") from None
