"""The page of a run: what it shows, that it is one HTML file without requests, and what it does with bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl.errors import MinidlError
from minidl.report import __main__ as command
from minidl.report import at_end, data, page, predictions
from minidl.report.run_page import ending, run_page
from minidl.run.folder import replacing
from minidl.simulate import main as simulate
from minidl.train import main as train

pytest.importorskip("matplotlib")
VOID = {"meta", "img", "link", "br", "image", "path", "use", "rect"}
SECTIONS = ["Loss and accuracy", "Learning rate", "Answers to the test images", "Speed", "The model",
            "How to repeat it"]  # fmt: skip
OF_REPLICAS = ["Replicas", "Traffic", "Where the time went", "Deaths, joins and speeds"]
LARGEST = 1 << 20


class Checked(HTMLParser):
    """Reads a page, and fails for unclosed tags, equal ids, and figures without words."""

    def __init__(self, content: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.headings: list[tuple[int, str]] = []
        self.words = ""
        self.images = self.figures = 0
        self.feed(content)
        self.close()
        assert not self.open, self.open
        assert len(self.ids) == len(set(self.ids))
        assert set(self.references) <= set(self.ids)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        assert tag not in ("script", "iframe", "object", "embed", "link")
        assert not [name for name in found if name.startswith("on")]
        for name in ("src", "href", "xlink:href"):
            link = found.get(name) or ""
            assert not link or link.startswith(("#", "data:image/png;base64,")), link
            self.references += [link[1:]] if link.startswith("#") else []
        self.references += re.findall(r"url\(#([^)]*)\)", " ".join(map(str, found.values())))
        self.ids += [str(found["id"])] if "id" in found else []
        if tag == "img":
            assert found.get("alt")
            self.images += 1
        if tag == "svg":
            assert found.get("role") == "img" and found.get("aria-label")
            self.figures += 1
        if re.fullmatch("h[1-6]", tag):
            self.headings.append((int(tag[1]), ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, words: str) -> None:
        if self.open and re.fullmatch("h[1-6]", self.open[-1]):
            level, before = self.headings[-1]
            self.headings[-1] = level, before + words
        if not self.open or self.open[-1] != "style":
            self.words += words


def check(content: str) -> Checked:
    """Check a page, and return what it contains."""
    assert "http" not in content.replace("http-equiv", "") and len(content) < LARGEST
    found = Checked(content)
    levels = [level for level, _ in found.headings]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    return found


def titles(found: Checked) -> list[str]:
    return [title for level, title in found.headings if level == 2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of one replica with validation. It has never had a page."""
    out = tmp_path_factory.mktemp("report") / "run"
    argv = ["--data", "synthetic:96x4x4x1:4", "--model", "mlp", "--epochs", "2", "--batch-size", "16", "--quiet"]
    assert train([*argv, "--validation", "0.2", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a simulated run of 4 replicas, one of which dies."""
    folder = tmp_path_factory.mktemp("report-sim")
    cluster = folder / "mine.toml"
    cluster.write_text('devices.core = {flops = 1e9}\nnodes = [{name = "node", count = 4, devices = ["core"]}]\n'
                       'between = {alpha = 1e-5, rate = 1e10}\ndeaths = [{rank = 2, time = 1e-3}]\n')  # fmt: skip
    argv = ["--data", "synthetic:96x4x4x1:4", "--model", "mlp", "--epochs", "3", "--batch-size", "8", "--quiet"]
    argv += ["--method", "gossip", "--cluster", str(cluster), "--ranks", "4", "--out", str(folder / "sim")]
    assert simulate(argv) == 0
    return folder / "sim"


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_the_page_of_one_replica(trained: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    found = check(run_page(data.read(trained)))
    assert before == {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    assert titles(found) == SECTIONS
    assert found.figures == 6 and found.images == predictions.SHOWN  # 4 curves of learning, learning rate, speed
    result = json.loads((trained / "summary.json").read_text())
    assert f"a test accuracy of {result['test_accuracy']:.2%}" in found.words
    assert f"python -m minidl.train --config {trained / 'config.toml'}" in found.words
    for words in ("synthetic:96x4x4x1:4", "batch-size", "numba", "seed", "Linear", "parameters", "best"):
        assert words in found.words
    assert "left out" not in found.words.lower()


def test_what_the_model_says_is_what_was_measured(trained: Path) -> None:
    answers, layers = predictions.ask(data.read(trained))
    result = json.loads((trained / "summary.json").read_text())
    right = int(answers.confusion.trace())
    assert right / answers.total == pytest.approx(result["test_accuracy"])
    assert sum(row[3] for row in layers) == result["parameters"]
    of_label = answers.probabilities[range(answers.total), answers.labels]
    assert of_label[answers.worst()].tolist() == sorted(of_label)[: predictions.SHOWN]
    assert f"said {answers.probabilities[answers.worst()[0]].argmax()}" in answers.described(answers.worst()[0])


def test_the_page_of_a_simulation(simulated: Path) -> None:
    run = data.read(simulated)
    found = check(run_page(run))
    assert titles(found) == [*SECTIONS[:-1], *OF_REPLICAS, "The cluster", SECTIONS[-1]]
    assert "replica 2 left after" in found.words and "deaths = [" in found.words
    assert {one["rank"] for one in run.result["replicas"]} >= {0, 1, 3}
    matrix = run.result["traffic"]["bytes"]
    assert sum(map(sum, matrix)) == run.result["bytes_sent"] > 0 and not any(matrix[i][i] for i in range(4))
    assert "--cluster" in run.repeat and "--ranks 4" in run.repeat
    assert "virtual seconds" in found.words


def test_many_replicas_are_summarised(simulated: Path, tmp_path: Path) -> None:
    folder, ranks = Path(shutil.copytree(simulated, tmp_path / "many")), 1024
    summary = json.loads((folder / "summary.json").read_text())
    one = summary["replicas"][0]
    each = [one | {"rank": rank, "accuracy": None if rank % 32 else 0.5} for rank in range(ranks)]
    cells = {"ranks_per_cell": 16, "bytes": [[int(i != j) for i in range(64)] for j in range(64)]}
    summary |= {"workers": ranks, "ranks": ranks, "replicas": each, "traffic": cells}
    (folder / "summary.json").write_text(json.dumps(summary))
    members = [[*range(ranks)], [rank for rank in range(ranks) if rank != 77]]
    lines = [{"event": "members", "when": 1, "seconds": at, "members": present} for at, present in enumerate(members)]
    (folder / "history.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "cluster.toml").write_text("repeat = true\n" + (folder / "cluster.toml").read_text())
    content = run_page(data.read(folder))
    found = check(content)
    for words in ("Test accuracy of 32 of the 1,024 replicas alone", "Topology: groups of 32 ranks",
                  "40 of 1,024 replicas are drawn", "Mean speed of each replica", "replica 77 left after 1 s",
                  "The list of nodes repeats: there are 1,024 ranks, and 4 devices"):  # fmt: skip
        assert words in found.words, words
    assert content.count(">77<") == 1, "a replica that has died is drawn"


def test_the_page_of_a_run_that_was_continued(copied: Path) -> None:
    lines = (copied / "history.jsonl").read_text().splitlines()
    again = json.loads(lines[0]) | {"step": 5, "seconds": 0.01}
    stopped = {"event": "stopped", "when": 2, "why": "SIGINT", "step": 5, "seconds": 0.01}
    (copied / "history.jsonl").write_text("\n".join([lines[0], *map(json.dumps, (stopped, again)), *lines[1:]]))
    found = check(run_page(data.read(copied)))
    assert " (continued once, at step 5), with a test accuracy of" in found.words
    assert found.words.count("continued") == 6, "two figures, the event, and three captions and sentences"


def test_the_end_of_a_run_writes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                        capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setenv("MINIDL_REPORT", "1")
    argv = ["--data", "synthetic:48x2x2x1:2", "--model", "mlp", "--epochs", "1", "--workers", "1"]
    out = tmp_path / "with"
    assert train([*argv, "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.err.rstrip().endswith(f"report: {out}/report.html") and "test accuracy" in captured.out
    assert "It finished after 1 epoch" in (out / "report.html").read_text()
    assert train([*argv, "--no-report", "--out", str(tmp_path / "without")]) == 0
    assert not (tmp_path / "without" / "report.html").exists()


def test_a_run_that_diverged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                             capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setenv("MINIDL_REPORT", "1")
    out = tmp_path / "run"
    argv = ["--data", "synthetic:96x4x4x1:4", "--model", "mlp", "--epochs", "5", "--lr", "1e30", "--workers", "1"]
    assert train([*argv, "--out", str(out)]) == 2
    assert "diverged in step" in capsys.readouterr().err
    found = check((out / "report.html").read_text())
    assert "It failed" in found.words and "diverged in step" in found.words and titles(found) == SECTIONS


# Runs that are incomplete, damaged, hostile, or of an earlier version.


def test_a_run_of_an_earlier_version(copied: Path) -> None:
    (copied / "history.jsonl").unlink()
    lines = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    for entry in lines:
        del entry["seconds"]
    (copied / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = (copied / "config.toml").read_text().replace("[run]", "[run]\nancient = 7")
    (copied / "config.toml").write_text(config)
    found = check(run_page(data.read(copied)))
    assert titles(found) == SECTIONS and "ancient" in found.words
    for words in ("The curves over seconds are left out", "history.jsonl does not exist", "unknown key 'ancient'"):
        assert words in found.words


def test_metrics_that_end_in_the_middle_of_a_line(copied: Path) -> None:
    whole = (copied / "metrics.jsonl").read_bytes()
    (copied / "metrics.jsonl").write_bytes(whole[:-30])
    run = data.read(copied)
    assert len(run.entries) == whole.count(b"\n") - 1 and any("1 line of metrics.jsonl is" in w for w in run.missing)
    check(run_page(run))
    assert (copied / "metrics.jsonl").read_bytes() == whole[:-30]


@settings(max_examples=30)
@given(cut=st.integers(0, 400), place=st.integers(0, 400), noise=st.binary(max_size=12), values=st.lists(
    st.dictionaries(st.sampled_from(["event", "step", "epoch", "loss", "seconds", "lr"]),
                    st.none() | st.integers() | st.floats() | st.text(max_size=3)), max_size=3))  # fmt: skip
def test_damaged_metrics_are_left_out(trained: Path, tmp_path_factory: pytest.TempPathFactory, cut: int, place: int,
                                      noise: bytes, values: list[dict[str, object]]) -> None:  # fmt: skip
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    shutil.copy(trained / "config.toml", folder)
    whole = (trained / "metrics.jsonl").read_bytes()
    content = whole[: len(whole) - cut]
    content = content[:place] + noise + content[place:] + "\n".join(map(json.dumps, values)).encode()
    (folder / "metrics.jsonl").write_bytes(content)
    run = data.read(folder)
    assert all(type(entry["step"]) is int for entry in run.entries) and len(run.entries) <= content.count(b"\n") + 1
    for entry in run.entries:
        data.ENTRY(entry)


def test_names_and_options_are_escaped(copied: Path, tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'&\x07"
    folder = copied.rename(tmp_path / "<script>alert('name')<")
    config = (folder / "config.toml").read_text().replace("[run]", f"[run]\nevil = {json.dumps(evil)}")
    (folder / "config.toml").write_text(config)
    with open(folder / "history.jsonl", "a") as file:
        file.write(json.dumps({"event": "failed", "when": 1, "why": evil, "step": 3, "epoch": 0}) + "\n")
    (folder / "summary.json").unlink()
    content = run_page(data.read(folder))
    assert "<script" not in content
    assert "It failed after step" in check(content).words
    assert page.text("<a href='x'>\x00") == "&lt;a href=&#x27;x&#x27;&gt;\ufffd"


def test_parts_without_data_are_left_out(copied: Path) -> None:
    shutil.rmtree(copied / "checkpoints")
    for name in ("model.safetensors", "summary.json", "metrics.jsonl", "history.jsonl"):
        (copied / name).unlink()
    found = check(run_page(data.read(copied)))
    assert titles(found) == SECTIONS and found.figures == 0 and "It has not begun" in found.words


def test_how_a_run_has_ended(copied: Path) -> None:
    (copied / "summary.json").unlink()
    lines = (copied / "history.jsonl").read_text().splitlines()
    (copied / "history.jsonl").write_text("\n".join(lines[:-1]) + "\n")  # without "finished"
    assert "its process was killed" in ending(data.read(copied))
    os.truncate(copied / "history.jsonl", 0)
    (copied / "history.jsonl").write_text(json.dumps({"event": "stopped", "when": 1, "why": "SIGTERM"}) + "\n")
    words = ending(data.read(copied))
    assert "It was stopped after step" in words and f"python -m minidl.train --resume {copied}" in words


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["nowhere"], "the folder nowhere does not exist"),
        (["."], ". is not the folder of a run: it has no config.toml"),
        ([], "expected the folder of a run"),
        (["run", "--sort", "seconds"], "--sort has an effect only with several runs: leave it out"),
        (["run", "--out", "no/such/page.html"], "cannot write no/such/page.html: No such file"),
        (["run", "--wrong"], "--wrong"),
    ],
)
def test_bad_command_lines(given: list[str], words: str, copied: Path, monkeypatch: pytest.MonkeyPatch,
                           capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.chdir(copied.parent)
    before = sorted(copied.rglob("*"))
    assert command.main(given) == 2
    error = capsys.readouterr().err
    assert error.startswith("minidl: error: ") and words in error and error.count("\n") == 1
    assert sorted(copied.rglob("*")) == before


def test_the_command_writes_beside_and_renames(copied: Path, capsys: pytest.CaptureFixture[str],
                                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    assert command.main([str(copied)]) == 0
    assert capsys.readouterr().out == f"report: {copied}/report.html\n"
    check((copied / "report.html").read_text())
    files = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}

    def full(path: Path, content: bytes) -> None:
        with replacing(path) as file:
            file.write(content[:100])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("minidl.report.run_page.write", full)
    assert command.main([str(copied)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    monkeypatch.setenv("MINIDL_REPORT", "1")
    at_end(copied, {})
    assert capsys.readouterr().err == (
        f"minidl: no report.html: cannot write {copied}/report.html: No space left on device: give another --out\n"
    )  # fmt: skip
    assert {path: path.read_bytes() for path in files} == files and not list(copied.glob(".report*"))


@pytest.mark.parametrize("refused", [False, True])
def test_without_matplotlib(refused: bool, copied: Path, capsys: pytest.CaptureFixture[str],
                            monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    def find_spec(name: str) -> None:
        if refused:
            raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    monkeypatch.setenv("MINIDL_REPORT", "1")
    assert command.main([str(copied)]) == 2
    at_end(copied, {})
    own, end = capsys.readouterr().err.splitlines()
    assert own == "minidl: error: a report needs Matplotlib: pip install 'minidl[report]'"
    assert end == "minidl: no report.html: it needs Matplotlib: pip install 'minidl[report]'"
    assert not (copied / "report.html").exists()


def test_a_matplotlib_that_cannot_be_imported(copied: Path, capsys: pytest.CaptureFixture[str],
                                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    package = copied.parent / "broken" / "matplotlib"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libpng is missing')")
    monkeypatch.delitem(sys.modules, "matplotlib")
    monkeypatch.syspath_prepend(package.parent)
    assert command.main([str(copied)]) == 2
    error = capsys.readouterr().err
    assert "a report needs Matplotlib, which cannot be imported (libpng is missing)" in error and error.count("\n") == 1
    assert not (copied / "report.html").exists()


def test_a_fault_of_the_page_does_not_disturb_the_run(copied: Path, capsys: pytest.CaptureFixture[str],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("MINIDL_REPORT", "1")
    monkeypatch.setattr("minidl.report.run_page.run_page", lambda run, model: 1 / 0)
    at_end(copied, {})
    assert "no report.html: ZeroDivisionError" in capsys.readouterr().err


def test_a_model_from_a_file_is_imported_only_if_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "net.py"
    own.write_text("from pathlib import Path\nfrom minidl import nn\n\n\ndef build(shape, classes):\n"
                   "    Path(__file__).with_name('imported').touch()\n"
                   "    return nn.Sequential(nn.Flatten(), nn.Linear(4, classes))\n")  # fmt: skip
    out = tmp_path / "run"
    argv = ["--data", "synthetic:48x2x2x1:2", "--model", f"{own}:build", "--epochs", "1", "--workers", "1", "--quiet"]
    assert train([*argv, "--out", str(out)]) == 0
    (tmp_path / "imported").unlink()
    found = check(run_page(data.read(out)))
    assert not (tmp_path / "imported").exists() and "--model FOLDER/net.py:build" in found.words
    found = check(run_page(data.read(out), f"{own}:build"))
    assert (tmp_path / "imported").exists() and "Linear" in found.words


def test_a_folder_that_vanishes_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(MinidlError, match="does not exist"):
        data.read(tmp_path / "gone")
