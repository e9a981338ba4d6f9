"""The speed of the links between the ranks of a job, for `python -m minidl.info --measure`.

Rank 0 and another rank exchange vectors, while all others wait: each sends one to the other, and waits for that of the
other. So both directions of the link are used at once, as in an exchange of models.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import minidl.start  # noqa: F401 (before all others: see there)
from minidl.comm.launch import local
from minidl.engine.environment import prepare
from minidl.resources import size
from minidl.run.config import Config
from minidl.training.job import Job, find_job

SMALL, LARGE = 1, 2_000_000  # elements of 4 bytes
TURNS = {SMALL: 300, LARGE: 15}  # of which a third are not counted
MOST = 16  # ranks to which a link is measured

Links = list[dict[str, Any]]


def between_processes() -> Links:
    """Measure the link between two processes on this machine. Raises ConfigError if they cannot be started."""
    with TemporaryDirectory(prefix="minidl-") as folder:
        file = Path(folder) / "links.json"
        local.run([str(file)], 2, quiet=True, program=("-m", "minidl.cli.links"))
        return list(json.loads(file.read_text())) if file.exists() else []


def text(link: dict[str, Any]) -> str:
    """Return a link as text."""
    return (f"on {link['on']}: {link['microseconds']:.3g} us for {4 * SMALL} bytes, "
            f"{size(link['bytes_per_second'])}/s in each direction for {size(4 * LARGE)}")  # fmt: skip


def of_job(job: Job) -> Links:
    """Measure the links between rank 0 and the others. All ranks call this; rank 0 gets the result, others []."""
    import numpy as np

    from minidl.comm.fabric.base import BufferSpec

    fabric = job.join(Config())
    fabric.join(BufferSpec(nbytes=4 * LARGE, mail=2), "links")
    found = []
    for peer in range(1, min(fabric.size, MOST)):
        seconds = {}
        for elements, turns in TURNS.items():
            vector, times = np.ones(elements, np.float32), []
            fabric.barrier()
            for _ in range(turns if fabric.rank in (0, peer) else 0):
                began, other = fabric.now(), peer - fabric.rank
                for _message in fabric.exchange([other], [other], vector)():
                    pass
                times.append(fabric.now() - began)
            seconds[elements] = median(times[turns // 3 :]) if times else 0.0
        if not fabric.rank:
            same = fabric.nodes[0] == fabric.nodes[peer]
            found.append({
                "from": 0,
                "to": peer,
                "on": "one machine" if same else "two machines",
                "microseconds": 1e6 * seconds[SMALL],
                "bytes_per_second": 4 * LARGE / seconds[LARGE],
            })
    fabric.barrier()
    fabric.close()
    return found


def main() -> int:
    """Measure as a rank that `between_processes` has started. Rank 0 writes the result to the file in sys.argv."""
    job = find_job()
    assert job
    local.follow()
    prepare()
    found = of_job(job)
    if found:
        Path(sys.argv[1]).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
