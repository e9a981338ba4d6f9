"""Counts of changes, so that a recorded step can notice a change without comparing all settings.

A recorded step depends on attributes and modes of layers, on flags and arrays of parameters, and on settings of the
thread: Winograd's switch, `no_grad`, watchers and recorders of forward passes. All code that changes one of these calls
`count_change`. If `latest_change` returns the same number as before in the same thread, none of them has changed
(program/latest.py).
"""

from __future__ import annotations

import itertools

_counter = itertools.count(1)
_latest = _attributes = _modes = 0  # numbers of the latest changes


def count_change(attribute: bool = False, mode: bool = False) -> None:
    """Count a change. attribute: of a module, except `training`; mode: of a module's `training`."""
    global _latest, _attributes, _modes  # not += 1: two threads could get the same number
    number = next(_counter)
    if attribute:
        _attributes = number
    if mode:
        _modes = number
    _latest = number


def latest_change() -> int:
    """Return a number that changes with every change."""
    return _latest


def changes() -> int:
    """Return a number that changes whenever an attribute of any module changes, except `training`."""
    return _attributes


def mode_changes() -> int:
    """Return a number that changes whenever `training` changes in any module."""
    return _modes
