"""Arithmetic on whole models on a GPU: one pass over memory, four neighbouring elements per thread (quads.py)."""

from __future__ import annotations

from numba import int32
from numpy import ndarray

from minidl.engine.cuda import cuda, kernel, launch

from ..elementwise.quads import QUAD, blocks, first, load, store, whole
from .reference import __all__ as __all__


@kernel()
def _mix(theta: ndarray, other: ndarray, weight: float, whole: int) -> None:
    i, n = first(), int32(theta.size)
    t, o = cuda.local.array(QUAD, theta.dtype), cuda.local.array(QUAD, theta.dtype)
    load(theta, i, n, whole, t)
    load(other, i, n, whole, o)
    for j in range(QUAD):
        t[j] += weight * (o[j] - t[j])
    store(theta, i, n, whole, t)


def mix(theta: ndarray, other: ndarray, weight: float) -> None:
    launch(_mix, blocks(theta.size), theta, other, theta.dtype.type(weight), whole(theta, other))


@kernel()
def _axpy(factor: float, x: ndarray, y: ndarray, whole: int) -> None:
    i, n = first(), int32(y.size)
    v, w = cuda.local.array(QUAD, y.dtype), cuda.local.array(QUAD, y.dtype)
    load(x, i, n, whole, v)
    load(y, i, n, whole, w)
    for j in range(QUAD):
        w[j] += factor * v[j]
    store(y, i, n, whole, w)


def axpy(factor: float, x: ndarray, y: ndarray) -> None:
    launch(_axpy, blocks(y.size), y.dtype.type(factor), x, y, whole(y, x))


@kernel()
def _pull(x: ndarray, center: ndarray, weight: float, out: ndarray, whole: int) -> None:
    i, n = first(), int32(out.size)
    v, c = cuda.local.array(QUAD, out.dtype), cuda.local.array(QUAD, out.dtype)
    load(x, i, n, whole, v)
    load(center, i, n, whole, c)
    for j in range(QUAD):
        v[j] = weight * (v[j] - c[j])
    store(out, i, n, whole, v)


def pull(x: ndarray, center: ndarray, weight: float, out: ndarray) -> None:
    launch(_pull, blocks(out.size), x, center, out.dtype.type(weight), out, whole(out, x, center))


@kernel()
def _elastic(x: ndarray, center: ndarray, weight: float, whole: int) -> None:
    i, n = first(), int32(x.size)
    v, c = cuda.local.array(QUAD, x.dtype), cuda.local.array(QUAD, x.dtype)
    load(x, i, n, whole, v)
    load(center, i, n, whole, c)
    for j in range(QUAD):
        d = weight * (v[j] - c[j])
        v[j] -= d
        c[j] += d
    store(x, i, n, whole, v)
    store(center, i, n, whole, c)


def elastic(x: ndarray, center: ndarray, weight: float) -> None:
    launch(_elastic, blocks(x.size), x, center, x.dtype.type(weight), whole(x, center))
