"""Finds nvdisasm, NVIDIA's disassembler, from the package nvidia-cuda-nvdisasm."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path


def find_nvdisasm() -> str | None:
    """Return its path, or None."""
    folder = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    found = [*sorted(folder.glob("*/bin/nvdisasm")), Path(sys.prefix) / "bin" / "nvdisasm"]
    return next((str(path) for path in found if path.is_file()), shutil.which("nvdisasm"))
