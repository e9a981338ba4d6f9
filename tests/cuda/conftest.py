"""The tests of CUDA kernels need numba-cuda and nvdisasm, but no GPU. They are not collected without these packages."""

from __future__ import annotations

from importlib.util import find_spec

from nvdisasm import find_nvdisasm

if find_spec("numba_cuda") is None or find_nvdisasm() is None:
    collect_ignore_glob = ["test_*.py"]
