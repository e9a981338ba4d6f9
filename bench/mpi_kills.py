"""Kill ranks of MPI jobs at random moments: python -m bench.mpi_kills --kills 100 --out runs/mpi-kills

Needs Open MPI 5: each job runs under `mpiexec --with-ft ulfm`. While it trains, SIGKILL ends one or two of its
replicas. The others must finish, and train each batch of the run. Each seed determines the method, the nodes, the
victims, and after how many batches they die. The results are saved after each job, so the same command continues.
`--seed N` repeats one job. At least one replica survives on the node with the ledger of the work: without it the run
ends.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
COUNTING = ROOT / "tests" / "replicas" / "counting.py"  # a replica that writes the pieces that it settles into a file
REPLICAS, EPOCHS, PIECES, SAMPLES = 4, 20, 57, 450
RUN = ["--data", "synthetic:500x4x4x1:4", "--model", "mlp", "--batch-size", "8", "--validation", "0.1", "--quiet",
       "--json", "--threads", "1", "--epochs", str(EPOCHS)]  # fmt: skip
METHODS = [["gossip"], ["gossip", "--exchange", "pull"], ["gossip", "--exchange", "push-pull", "--mix", "mass"],
           ["ps"]]  # fmt: skip
NODES = {"one": "0", "two": "$((OMPI_COMM_WORLD_RANK % 2))", "apart": "$OMPI_COMM_WORLD_RANK"}
LONGEST = 300  # seconds of a job
MARK = "MINIDL_KILLS"  # environment variable that identifies the processes of a job


def processes(mark: str) -> dict[int, int]:
    """Return the processes of a job, by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = dict(line.split("=", 1) for line in (folder / "environ").read_text().split("\0") if "=" in line)
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if words.get(MARK) == mark and "OMPI_COMM_WORLD_RANK" in words and state not in "ZX":
                found[int(words["OMPI_COMM_WORLD_RANK"])] = int(folder.name)
    return found


def job(seed: int) -> dict[str, Any]:
    """Run the job of a seed. Returns what it was and what happened; "fault" says what was wrong, or is ""."""
    chance = random.Random(seed)
    method, nodes = chance.choice(METHODS), chance.choice(sorted(NODES))
    keepers = {"one": {0, 1, 2, 3}, "two": {0, 2}, "apart": {0}}[nodes]
    kills = chance.choice([1, 2])
    victims = next(some for some in iter(lambda: chance.sample(range(REPLICAS), kills), None) if keepers - set(some))
    after = sorted(chance.randrange(1, int(0.9 * EPOCHS * PIECES)) for _ in victims)
    about = {"seed": seed, "method": " ".join(method), "nodes": nodes, "victims": victims, "after": after}
    ranks = REPLICAS + (method == ["ps"])
    with tempfile.TemporaryDirectory() as folder:
        log, mark = Path(folder) / "log", f"{os.getpid()}-{seed}"
        log.touch()
        words = [sys.executable, str(COUNTING), str(log), "", *RUN, "--method", *method, "--out", f"{folder}/run"]
        command = f'MINIDL_NODE={NODES[nodes]} exec "$@"'
        mpiexec = [str(Path(sys.executable).parent / "mpiexec"), "--with-ft", "ulfm", "--oversubscribe", "-n",
                   str(ranks), "sh", "-c", command, "sh", *words]  # fmt: skip
        environment = os.environ | {MARK: mark, "PYTHONPATH": str(ROOT), "OMPI_ALLOW_RUN_AS_ROOT": "1",
                                    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # fmt: skip
        began = time.monotonic()
        process = subprocess.Popen(mpiexec, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        waiting = list(zip(after, victims))
        try:
            while waiting and process.poll() is None and time.monotonic() - began < LONGEST:
                if len(log.read_text().split()) >= waiting[0][0]:
                    _, victim = waiting.pop(0)
                    os.kill(processes(mark)[victim], signal.SIGKILL)
                time.sleep(0.005)
            out, errors = process.communicate(timeout=max(1.0, LONGEST - (time.monotonic() - began)))
            settled = Counter(map(int, log.read_text().split()))
            fault = wrong(process.returncode, out, settled, len(victims) - len(waiting), nodes == "one")
        except subprocess.TimeoutExpired:
            fault, errors = f"it did not end within {LONGEST} s", ""
        left = processes(mark)
        for one in left.values():
            os.kill(one, signal.SIGKILL)
        process.kill()
        fault = fault or (f"left behind: ranks {sorted(left)}" if left else "")
    seconds = round(time.monotonic() - began, 1)
    return {**about, "killed": len(victims) - len(waiting), "seconds": seconds, "fault": fault,
            **({"stderr": errors[-2000:]} if fault else {})}  # fmt: skip


def wrong(code: int, out: str, settled: Counter[int], killed: int, together: bool) -> str:
    """Return what is wrong with a job that has ended, or "". together: whether all ranks share memory."""
    if code:
        return f"exit code {code}"
    results = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if len(results) != 1:
        return f"{len(results)} results"
    alive, samples = results[0]["replicas_alive"], results[0]["samples"]
    if alive != REPLICAS - killed or samples != EPOCHS * SAMPLES:
        return f"{alive} replicas alive and {samples} samples after {killed} deaths"
    missing = EPOCHS * PIECES - len(settled)
    if missing > killed:  # a victim may die after it has settled a batch in the ledger, and before it notes that
        return f"{missing} batches were never trained"
    # The last settlements of a rank on another node than the ledger may be lost with it.
    twice = sum(settled.values()) - len(settled)
    return f"{twice} batches were settled twice" if twice > (0 if together else 4 * killed) else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/mpi-kills"))
    parser.add_argument("--seed", type=int, help="run this job alone")
    options = parser.parse_args()
    if options.seed is not None:
        print(json.dumps(job(options.seed), indent=2))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "jobs.jsonl"
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    while sum(one["killed"] for one in done) < options.kills:
        done.append(job(len(done)))
        with file.open("a") as out:
            out.write(json.dumps(done[-1]) + "\n")
        faults = sum(bool(one["fault"]) for one in done)
        print(f"{len(done)} jobs, {sum(one['killed'] for one in done)} kills, {faults} faults; the last one: "
              f"{done[-1]['fault'] or 'good'}", flush=True)  # fmt: skip
    return 1 if any(one["fault"] for one in done) else 0


if __name__ == "__main__":
    sys.exit(main())
