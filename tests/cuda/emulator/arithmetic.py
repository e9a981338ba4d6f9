"""The arithmetic of PTX on NumPy vectors, where NumPy's own differs: rounding, NaN, division, shifts, bit fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Vector = Any  # a NumPy vector with one element per thread, or a scalar that is the same for all

ORDERED = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
OPPOSITE = {"neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}  # true if a number is NaN


def compare(how: str, a: Vector, b: Vector) -> Vector:
    """Return whether `a how b`. Names that end in u are also true if one of the numbers is NaN."""
    if how in ORDERED:
        return ORDERED[how](a, b)
    if how == "ne":
        return (a < b) | (a > b)  # false for NaN
    if how == "equ":
        return ~((a < b) | (a > b))
    if how in ("num", "nan"):
        nan = np.isnan(a) | np.isnan(b)
        return nan if how == "nan" else ~nan
    return ~ORDERED[OPPOSITE[how]](a, b)


def divide(a: Vector, b: Vector) -> Vector:
    """Return a / b; integers are rounded towards 0."""
    kind = np.asarray(a).dtype
    if kind.kind == "f":
        return a / b
    if kind.kind == "u":
        return a // b
    return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(kind)


def remainder(a: Vector, b: Vector) -> Vector:
    return a - divide(a, b) * b


def fused(a: Vector, b: Vector, c: Vector, mode: str) -> Vector:
    """Return a * b + c for float32, rounded once: the product is exact in float64, and the sum nearly so.

    mode: rn to nearest, rm down, rp up, rz towards 0.
    """
    exact = np.multiply(a, b, dtype=np.float64) + c
    return round_to_float32(exact, mode)


def round_to_float32(exact: Vector, mode: str) -> Vector:
    nearest = np.asarray(exact).astype(np.float32)
    if mode == "rn":
        return nearest
    above = nearest > exact if mode == "rm" else nearest < exact if mode == "rp" else np.abs(nearest) > np.abs(exact)
    goal = np.float32(-np.inf if mode == "rm" else np.inf if mode == "rp" else 0)
    return np.where(above, np.nextafter(nearest, goal), nearest)


def shift(left: bool, a: Vector, by: Vector) -> Vector:
    """Shift the bits of a. Shifts by more than all bits are allowed: they leave 0, or the sign."""
    kind = np.asarray(a).dtype
    bits = 8 * kind.itemsize
    within = np.minimum(by, bits - 1).astype(kind)
    if not left and kind.kind == "i":
        return a >> within
    return np.where(np.asarray(by) < bits, a << within if left else a >> within, kind.type(0))


def insert_bits(a: Vector, b: Vector, at: Vector, length: Vector) -> Vector:
    """Return b with `length` bits from bit `at` on replaced by the lowest bits of a."""
    one = np.asarray(b).dtype.type(1)
    mask = shift(True, shift(True, one, length) - one, at)
    return (b & ~mask) | (shift(True, a, at) & mask)


def extract_bits(a: Vector, at: Vector, length: Vector) -> Vector:
    """Return `length` bits of a from bit `at` on, with the sign for signed types."""
    bits = np.uint32(8 * np.asarray(a).dtype.itemsize)
    up = bits - np.minimum(at + length, bits)
    return shift(False, shift(True, a, up), up + at)


def count_bits(a: Vector) -> Vector:
    return np.bitwise_count(a).astype(np.uint32)


def leading_zeros(a: Vector) -> Vector:
    bits = np.asarray(a).dtype.itemsize * 8
    for by in (1, 2, 4, 8, 16, 32)[: bits.bit_length() - 1]:
        a = a | (a >> np.asarray(a).dtype.type(by))
    return (bits - np.bitwise_count(a)).astype(np.uint32)


def convert(a: Vector, target: type, parts: list[str]) -> Vector:
    """Return a as another type. Floats become integers within the range of the type, NaN becomes 0."""
    source, kind = np.asarray(a).dtype.kind, np.dtype(target).kind
    if source == "f" and kind in "iu":
        limits = np.iinfo(target)
        whole = np.nan_to_num(np.asarray(_whole(a, parts), np.float64), nan=0.0, posinf=2.0**80, neginf=-(2.0**80))
        inside = np.clip(whole, limits.min, np.nextafter(float(limits.max) + 1, 0))
        return np.where(whole >= limits.max, limits.max, inside.astype(target))
    if source == "f" and kind == "f" and any(part in WHOLE for part in parts):
        a = _whole(a, parts)
    if np.asarray(a).dtype == np.float64 and target is np.float32:
        a = round_to_float32(a, next((p for p in parts if p in ("rn", "rm", "rp", "rz")), "rn"))
    return np.clip(np.asarray(a), 0, 1).astype(target) if "sat" in parts else np.asarray(a).astype(target)


WHOLE: dict[str, Callable[..., Any]] = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def _whole(a: Vector, parts: list[str]) -> Vector:
    return next((WHOLE[part] for part in parts if part in WHOLE), np.trunc)(a)


def multiply_wide(a: Vector, b: Vector) -> Vector:
    """Return the product in a type of twice the bits."""
    kind = np.asarray(a).dtype
    wide = np.dtype(f"{kind.kind}{2 * kind.itemsize}")
    return np.asarray(a).astype(wide) * np.asarray(b).astype(wide)


def multiply_high(a: Vector, b: Vector) -> Vector:
    """Return the upper half of the product."""
    kind = np.asarray(a).dtype
    if kind.itemsize < 8:
        return (multiply_wide(a, b) >> (8 * kind.itemsize)).astype(kind)
    half, mask = np.uint64(32), np.uint64(2**32 - 1)
    x, y = np.asarray(a).view(np.uint64), np.asarray(b).view(np.uint64)
    low, high = x & mask, x >> half
    middle = high * (y & mask) + (low * (y & mask) >> half)
    other = low * (y >> half) + (middle & mask)
    result = high * (y >> half) + (middle >> half) + (other >> half)
    if kind.kind == "i":
        result = result - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return result.view(kind)


UNARY: dict[str, Callable[[Vector], Vector]] = {
    "neg": np.negative, "abs": np.abs, "not": np.invert, "sqrt": np.sqrt, "rsqrt": lambda a: 1 / np.sqrt(a),
    "rcp": lambda a: 1 / a, "ex2": np.exp2, "lg2": np.log2, "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
    "popc": count_bits, "clz": leading_zeros,
}  # fmt: skip
BINARY: dict[str, Callable[[Vector, Vector], Vector]] = {
    "add": np.add, "sub": np.subtract, "min": np.fmin, "max": np.fmax, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "div": divide, "rem": remainder, "copysign": lambda a, b: np.copysign(b, a),
}  # fmt: skip
