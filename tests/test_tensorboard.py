"""--tensorboard: the event files, read back: all replicas, all kinds of events, little time, and no harm to the run."""

from __future__ import annotations

import errno
import importlib.util
import io
import struct
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sessions import SMALL_MODEL, Sessions

pytest.importorskip("tensorboardX")

from minidl import simulate, train
from minidl.run import event_file
from minidl.run.event_file import EventFile, histogram, images, scalars
from minidl.training import tensorboard
from minidl.training.tensorboard import Budget

SMALL = ["--data", "synthetic:96x4x4x1:4", "--model", "mlp", "--batch-size", "16", "--epochs", "3", "--no-report"]


def crc32c(data: bytes) -> int:
    """The checksum of RFC 3720, bit by bit."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    value = crc32c(data)
    return ((value >> 15 | value << 17) + 0xA282EAD8) % 2**32


def events(folder: Path) -> list[Any]:
    """Return the events of all files in this folder, oldest file first. Check their format."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        stream, number = io.BytesIO(path.read_bytes()), 0
        while head := stream.read(8):
            size = struct.unpack("<Q", head)[0]
            assert struct.unpack("<I", stream.read(4))[0] == masked(head)
            data = stream.read(size)
            assert struct.unpack("<I", stream.read(4))[0] == masked(data)
            found.append(Event.FromString(data))
            assert number or found[-1].file_version == "brain.Event:2"
            number += 1
    return found


def values(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Return the values in a folder: {tag: [(step, value), ...]}."""
    found = defaultdict(list)
    for event in events(folder):
        for value in event.summary.value:
            found[value.tag].append((event.step, value))
    return dict(found)


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "SHARE", 1e9)
    monkeypatch.setattr(tensorboard, "EVERY", 1)


def test_one_replica(tmp_path: Path, unlimited: None, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert train.main([*SMALL, "--workers", "1", "--tensorboard", "--validation", "0.2", "--out", str(out)]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("for TensorBoard: ")]
    assert len(told) == 1 and str(out / "tensorboard") in told[0] and "s of writing while it trained (" in told[0]
    found = values(out / "tensorboard")
    losses = [(step, value.simple_value) for step, value in found["step/loss"]]
    assert [step for step, _ in losses] == list(range(1, 16)) and losses[-1][1] < losses[0][1]
    for name in ("accuracy", "lr", "images_per_second"):
        assert len(found[f"step/{name}"]) == 15
    for name in ("loss", "accuracy", "validation_loss", "validation_accuracy"):
        assert [step for step, _ in found[f"epoch/{name}"]] == [5, 10, 15]
    weights = [tag for tag in found if tag.startswith("weights/")]
    assert len(weights) == 6 and all([s for s, _ in found[tag]] == [0, 5, 10, 15] for tag in weights)
    gradients = [tag for tag in found if tag.startswith("gradients/")]
    assert [tag.partition("/")[2] for tag in gradients] == [tag.partition("/")[2] for tag in weights]
    first = found["weights/1.weight" if "weights/1.weight" in found else weights[0]][0][1].histo
    assert sum(first.bucket) == first.num > 0 and first.min < 0 < first.max
    assert all(any(v.histo.max > v.histo.min for _, v in found[tag]) for tag in gradients), "no gradient is all zero"
    assert b"Linear" in found["model/text_summary"][0][1].tensor.string_val[0]
    picture = found["test_images/worst"][-1][1].image
    assert picture.encoded_image_string.startswith(b"\x89PNG") and picture.width == picture.height
    assert b"answer" in found["test_images/worst/text_summary"][-1][1].tensor.string_val[0]


def test_options_and_result(tmp_path: Path) -> None:
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    out = tmp_path / "run"
    assert train.main([*SMALL, "--workers", "1", "--tensorboard", "--lr", "0.03", "--quiet", "--out", str(out)]) == 0
    found = values(out / "tensorboard")
    read = {tag: HParamsPluginData.FromString(pairs[0][1].metadata.plugin_data.content)
            for tag, pairs in found.items() if tag.startswith("_hparams_")}  # fmt: skip
    begun = read["_hparams_/session_start_info"].session_start_info.hparams
    assert begun["lr"].number_value == 0.03 and begun["model"].string_value == "mlp"
    assert {info.name.tag for info in read["_hparams_/experiment"].experiment.metric_infos} <= found.keys()
    assert "_hparams_/session_end_info" in read
    assert 0 <= found["result/test_accuracy"][0][1].simple_value <= 1


@pytest.mark.parametrize("method", ["dpsgd", "gossip", "ps"])
def test_all_replicas_write(tmp_path: Path, method: str, unlimited: None) -> None:
    out = tmp_path / "run"
    run = Sessions(out, 4, {}, method=method, epochs=3, tensorboard=True)
    assert run.summary
    replicas = range(3 if method == "ps" else 4)
    assert sorted(path.name for path in (out / "tensorboard").iterdir()) == [
        "all", *(f"replica-{rank}" for rank in replicas)]  # fmt: skip
    each = [values(out / "tensorboard" / f"replica-{rank}") for rank in replicas]
    for found in each:
        assert found["step/loss"] and found["epoch/loss"]
        assert {tag.partition("/")[0] for tag in found} == {"step", "epoch", "weights", "gradients"}
    assert len({found["epoch/loss"][-1][1].simple_value for found in each}) == len(each), "each has its own loss"
    together = values(out / "tensorboard" / "all")
    assert len(together["epoch/loss"]) == 3 and "model/text_summary" in together and "result/test_loss" in together
    assert "test_images/worst" in together and not any(tag.startswith("weights/") for tag in together)


def test_a_simulation_with_many_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "MOST_REPLICAS", 3)
    assert simulate.main([*SMALL, "--ranks", "7", "--tensorboard", "--quiet", "--out", str(tmp_path / "run")]) == 0
    folders = sorted(path.name for path in (tmp_path / "run" / "tensorboard").iterdir())
    assert folders == ["all", "replica-0", "replica-3", "replica-6"]
    found = values(tmp_path / "run" / "tensorboard" / "all")
    assert "epoch/accuracy_average" in found and "epoch/consensus_distance" in found


def test_a_resume_voids_later_events(tmp_path: Path, unlimited: None) -> None:
    out = tmp_path / "run"
    step = Sessions(out, 2, {}, stop=0.02, method="dpsgd", epochs=30, tensorboard=True).last().state["progress"]["step"]
    assert not any(event.HasField("session_log") for event in events(out / "tensorboard" / "replica-1"))
    with SMALL_MODEL:
        assert train.main(["--resume", str(out), "--workers", "1", "--tensorboard", "--quiet", "--no-report"]) == 0
    resumed = [event for event in events(out / "tensorboard") if event.HasField("session_log")]
    assert [(event.step, event.session_log.status) for event in resumed] == [(step + 1, 1)]


def test_the_result_does_not_depend_on_it(tmp_path: Path) -> None:
    runs = [tmp_path / "with", tmp_path / "without"]
    for out, more in zip(runs, (["--tensorboard"], [])):
        assert train.main([*SMALL, "--workers", "1", "--quiet", "--out", str(out), *more]) == 0
    assert (runs[0] / "model.safetensors").read_bytes() == (runs[1] / "model.safetensors").read_bytes()
    assert not (runs[1] / "tensorboard").exists()


def test_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(tensorboard.time, "perf_counter", lambda: now[0])
    budget = Budget()
    budget.began = 100.0
    with budget.writing("first", trains=False):
        now[0] += 5
    assert budget.spent == 0 and budget.beside == 5
    written = 0
    for _ in range(10_000):
        now[0] += 0.01
        if budget.allows("step"):
            with budget.writing("step"):
                now[0] += 0.002
            written += 1
    budget.ended = now[0]
    assert written > 100 and budget.spent == pytest.approx(0.002 * written)
    assert 0.9 * tensorboard.SHARE < budget.spent / (now[0] - 100) <= tensorboard.SHARE
    assert not budget.allows("images", first=60.0) and "(0.50% of that time), 5.00 s before" in budget.told()


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    def full(self: EventFile, *arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(EventFile, "add", full)
    assert train.main([*SMALL, "--workers", "1", "--tensorboard", "--out", str(tmp_path / "run")]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "TensorBoard" in line]
    assert told == ["minidl: no more events for TensorBoard; the run goes on: No space left on device"]


def test_without_tensorboardx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                              capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert train.main([*SMALL, "--tensorboard", "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == (
        "minidl: error: --tensorboard needs tensorboardX: pip install 'minidl[tensorboard]'\n")  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_pytorch_is_not_imported(tmp_path: Path) -> None:
    """tensorboardX imports PyTorch where it is installed, which would take seconds in every replica."""
    import subprocess

    code = ("import sys; from minidl.run import event_file; event_file.scalars({'a': 1.0}); "
            "print('torch' in sys.modules)")  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_a_histogram_counts_finite_values_and_many_of_them(tmp_path: Path) -> None:
    ordinary = histogram("h", np.arange(10.0)).value[0].histo
    assert (ordinary.min, ordinary.max, ordinary.num, ordinary.sum) == (0, 9, 10, 45)
    assert sum(ordinary.bucket) == 10 and ordinary.bucket_limit[-1] == 9
    many = histogram("h", np.ones(event_file.MOST_VALUES * 3 + 1, np.float32)).value[0].histo
    assert 0.5 * event_file.MOST_VALUES <= many.num <= event_file.MOST_VALUES
    strange = histogram("h", np.array([np.nan, np.inf, 2.0])).value[0].histo
    assert (strange.num, strange.sum) == (1, 2.0)
    assert histogram("h", np.full(3, np.nan)).value[0].histo.num == 1


@pytest.mark.parametrize("shape", [(1, 8, 8, 1), (5, 8, 6, 3), (25, 32, 32, 2)])
def test_a_picture_of_images(shape: tuple[int, ...]) -> None:
    image = images("i", np.random.default_rng(0).standard_normal(shape).astype(np.float32)).value[0].image
    side = int(np.ceil(np.sqrt(shape[0])))
    larger = -(-event_file.SMALLEST // max(shape[1:3]))
    assert (image.height, image.width) == (side * (shape[1] + 1) * larger, side * (shape[2] + 1) * larger)


def test_files_of_one_process_have_different_names(tmp_path: Path) -> None:
    for step in (0, 5):
        file = EventFile(tmp_path, step)
        file.add(step, 1.0, scalars({"a": float(step)}))
        file.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert [event.session_log.status for event in events(tmp_path) if event.HasField("session_log")] == [1]
    assert [value.simple_value for _, value in values(tmp_path)["a"]] == [0.0, 5.0]
