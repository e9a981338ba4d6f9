"""bench/faults.py: it hurts a job, and notices what is wrong with one."""

from __future__ import annotations

import random
from pathlib import Path

from bench.fault_jobs import KINDS, Job, untidy, wrong
from bench.soak import compared


def test_a_job_is_hurt_and_checked(tmp_path: Path) -> None:
    job = Job(KINDS[0]._replace(images=1440), 2, 1, tmp_path, random.Random(0))
    try:
        job.begin()
        running = job.ranks()
        assert set(running) == {0, 1} and job.able() == {0, 1}
        job.strike("freeze", 0, running[0], 0.1)
        job.strike("kill", 1, running[1], 0.0)
        job.hasten()
        code = job.wait()
    finally:
        job.close()
    assert not job.problems
    assert untidy(job) == "" and wrong(job, code) == ""

    notes, lines = job.notes.read_text(), job.notes.read_text().splitlines()
    piece = lines[-1].split()[3]
    job.notes.write_text("\n".join(line for line in lines if line.split()[3] != piece))
    assert wrong(job, code) == f"never trained: [{piece}] (1 pieces)"
    job.notes.write_text(notes + f"0.0 0 settled {piece}\n")
    assert wrong(job, code) == f"settled twice: [{piece}] (1 pieces, of which 0 may be)"
    job.notes.write_text(notes)
    assert wrong(job, 1) == "exit code 1"
    job.faults.clear()
    if '"batches_repeated": 1' in job.out.read_text():
        assert wrong(job, 0) == "1 batches repeated after 0 kills and long freezes"

    (job.folder / "tmp" / "file").touch()
    assert untidy(job) == "left behind: temporary files ['file']"
    said = job.errors.read_text()
    job.errors.write_text(said + "Traceback (most recent call last):\n")
    assert untidy(job) == "on stderr: Traceback (most recent call last):"


def test_memory_that_grows_is_seen() -> None:
    samples = [{"seconds": float(second), "all": 100.0 + second, "shared": 7.0} for second in range(100)]
    assert compared(samples, 100.0) == {
        "all": {"first": 112.0, "last": 187.5, "growth": 0.6741}, "shared": {"first": 7.0, "last": 7.0, "growth": 0.0},
    }  # fmt: skip
