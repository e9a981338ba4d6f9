"""The description of a checkpoint's state: which JSON values it has. training/resume.py checks what they mean."""

from __future__ import annotations

from minidl.run.progress import progress
from minidl.schema import LARGEST, Kind, count_or_number, mapping, maybe, number, record, several, text, whole

MEASURED = several(number(0.0))  # by a replica: see comm/balance.py


def _state(most: int) -> Kind:
    """Return the description of a checkpoint's state, whose counters are at most `most`: see training/resume.py."""
    count, at = whole(0, most), progress(most)
    random = record({"seed": whole(0, 2**32 - 1), "offset": count})
    method = maybe(mapping(count_or_number(most)))
    member = record({"progress": at, "optimizer_steps": count, "random": random, "images": count, "steps": count,
                     "method": method}, optional={"known": count, "measured": MEASURED})  # fmt: skip
    return record(
        {"progress": at, "optimizer": record({"steps": count}), "random": random, "layout": text(),
         "batches": whole(1, most), "config": text()},
        optional={"work": _work(most), "members": mapping(member, text("0|[1-9][0-9]{0,6}", "a rank"))},
    )  # fmt: skip


def _work(most: int) -> Kind:
    """Return the description of the work of a run (training/work.py). What it means is checked in resume.py."""
    count = whole(0, most)
    return record({"replicas": whole(1, 1 << 16)},
                  optional={"total": whole(1, most), "first": count, "left": several(count), "epoch": count,
                            "parts": several(several(count, 1), 1), "members": several(count, 1),
                            "balance": _balance(most)})  # fmt: skip


def _balance(most: int) -> Kind:
    """Return the description of how replicas divide their steps (comm/balance.py, training/balanced.py)."""
    count, flag = whole(0, most), whole(0, 1)
    division, times = several(whole(1, most), 1), several(several(number(0.0), 1))
    return record({"division": division, "coming": division, "known": several(division, 1), "due": count,
                   "times": times, "past": times, "fixed": several(number(0.0), 1), "new": flag, "constant": flag},
                  optional={"runs": several(several(count, 2), 1), "runs_of": count, "skipped": count})  # fmt: skip


VALID = _state(LARGEST)
RESUMABLE = _state(LARGEST >> 6)  # leaves room: after the run has continued, its counters must still be VALID
