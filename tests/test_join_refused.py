"""What `--join` and `--max-workers` refuse, in one line; and the file by which --join finds a job."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minidl.comm.launch import local
from minidl.comm.launch.join import FILE, _started, connected, read
from minidl.errors import ConfigError, MinidlError
from minidl.resources import cores
from minidl.run.config import Config, resolve
from minidl.run.config_file import to_toml
from minidl.run.folder import RunFolder
from minidl.train import main, places


def run_folder(folder: Path, **options: Any) -> Path:
    folder.mkdir()
    config = resolve({"workers": 2, "method": "gossip", **options})
    (folder / "config.toml").write_text(to_toml(config))
    return folder


def invitation(folder: Path, **changed: Any) -> Path:
    found = {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid()), "fd": 0, "places": 2}
    path = folder / FILE
    path.write_text(json.dumps(found | changed))
    path.chmod(0o600)
    return path


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("minidl: error: ")
    return lines[0].removeprefix("minidl: error: ")


def test_runs_that_nobody_can_join(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "--join", str(tmp_path / "none")).endswith("none does not exist")
    run = run_folder(tmp_path / "run")
    assert refused(capsys, "--join", str(run)) == f"{run} is not being trained now"
    with RunFolder.open(run):
        assert refused(capsys, "--join", str(run)) == (
            f"{run} is trained in one process or under MPI: --join needs a run of several --workers")  # fmt: skip
    invitation(run)  # of a process that is no launcher
    assert refused(capsys, "--join", str(run)) == f"{run} is not being trained any more"
    alone = run_folder(tmp_path / "alone", method="local")
    assert refused(capsys, "--join", str(alone)) == (
        f"{alone} is trained with --method local: --join needs one of gossip, fast, ps, async-easgd, eamsgd, dpsgd, "
        "allreduce, local-sgd, with --shards iid")  # fmt: skip
    skewed = run_folder(tmp_path / "skewed", shards="skewed:0.3")
    assert "--method gossip and --shards skewed:0.3" in refused(capsys, "--join", str(skewed))
    over = run_folder(tmp_path / "over")
    result = {"epochs": 1, "steps": 1, "test_accuracy": 1.0, "test_loss": 0.0, "seconds": 1.0, "images_per_second": 1.0}
    (over / "summary.json").write_text(json.dumps(result | {"out": "over"}))
    assert refused(capsys, "--join", str(over)) == f"{over} has finished: no replica can join it"


@pytest.mark.parametrize(("words", "message"), [
    (["--model", "mlp"], "--model mlp is not what {run} has, which is lenet: leave it out"),
    (["--lr", "0.5"], "--lr 0.5 is not what {run} has, which is 0.1: leave it out"),
    (["--trace"], "--trace cannot be given with --join"),
    (["--out", "x"], "give only one of these: --out begins a run, --join adds replicas to a running job"),
    (["--model", "lenet", "--workers", "0"], "{run} is not being trained now"),
])  # fmt: skip
def test_other_options_than_those_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    run = run_folder(tmp_path / "run", lr=0.1)
    assert refused(capsys, "--join", str(run), *words) == message.format(run=run)


def test_the_file_of_a_job_must_be_its_users(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    path = invitation(run)
    assert read(path).pid == os.getpid()
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="which nobody else can write to"):
        read(path)
    if os.geteuid() == 0:
        path.chmod(0o600)
        os.chown(path, 12345, -1)
        with pytest.raises(ConfigError, match="a regular file of this user"):
            read(path)
    path.unlink()
    path.symlink_to(invitation(tmp_path))
    with pytest.raises(ConfigError, match="cannot read"):
        read(path)


@pytest.mark.parametrize("changed", [
    {"host": "elsewhere"}, {"pid": 2**31 - 1}, {"started": 1}, {"fd": 10**6}, {"fd": 0}, {"places": 65536},
])  # fmt: skip
def test_another_process_than_the_launcher(tmp_path: Path, changed: dict[str, Any]) -> None:
    run = run_folder(tmp_path / "run")
    invitation(run, **changed)
    reason = "is trained on host 'elsewhere'" if "host" in changed else "is not being trained any more"
    with pytest.raises(ConfigError, match=reason), connected(run):
        pass


def test_places() -> None:
    def count(**options: Any) -> tuple[int, list[int]]:
        config = Config(**{"workers": 2, "method": "gossip", **options})
        found = places(config, config.workers + (config.method == "ps"))
        return found.number, list(found.servers)

    assert count() == (4, []) and count(max_workers=3) == (3, []) and count(method="ps") == (5, [2])
    assert count(method="dpsgd") == (2, []) and count(method="dpsgd", max_workers=3) == (3, [])
    most = local.PER_CORE * cores()
    assert count(workers=most) == (most, [])
    with pytest.raises(ConfigError, match="--max-workers 1: expected at least the 2 workers"):
        count(max_workers=1)
    with pytest.raises(MinidlError, match=f"{most + 1} workers on {cores()} cores"):
        count(max_workers=most + 1)


def test_max_workers_needs_a_method_that_others_can_join(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "--method", "local", "--workers", "2", "--max-workers", "4")
    assert message.startswith("max-workers has an effect only with method gossip, fast, ps, async-easgd, eamsgd, dpsgd")


def test_places_that_nobody_fills_take_no_memory(root: Path) -> None:
    code = """if True:
        import json, os, sys
        from minidl.comm.fabric.base import BufferSpec, Column, Fabric, State
        from minidl.comm.stats import Stats
        from minidl.comm.transport.shm import ShmTransport
        fabric = Fabric(ShmTransport.from_environment(Stats()))
        fabric.join(BufferSpec(nbytes=1 << 20, mail=2), "layout")
        blocks = os.fstat(fabric.transport.segment.fd).st_blocks
        os.write(1, json.dumps([fabric.size, fabric.replicas, blocks]).encode() + b"\\n")
        fabric.set_status(Column.STATE, State.FINISHED)
    """
    start = ("import sys; from minidl.comm.launch import local; places = local.Places(int(sys.argv[2]))\n"
             "sys.exit(local.run([], 2, quiet=True, program=('-c', sys.argv[1]), places=places))")  # fmt: skip
    found = {}
    for count in (2, 8):
        done = subprocess.run([sys.executable, "-c", start, code, str(count)], capture_output=True, text=True,
                              env=os.environ | {"PYTHONPATH": str(root)}, timeout=300)  # fmt: skip
        assert done.returncode == 0, done.stderr
        found[count] = [json.loads(line) for line in done.stdout.splitlines()]
        assert [one[:2] for one in found[count]] == [[count, [0, 1]]] * 2
    more = max(one[2] for one in found[8]) - max(one[2] for one in found[2])
    assert 512 * more < 1 << 20  # six mailboxes would take 12 MiB and more
