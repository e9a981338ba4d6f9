"""The pages of --help are quick, complete and narrow. Each topic, option, model, optimizer and method has one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from minidl import simulate, train
from minidl.run import declared
from minidl.run.config import CHOOSERS, GROUPS, Config
from minidl.run.help import MOST_USED, page
from minidl.run.options import options


def test_help_imports_no_slow_package_and_no_method(root: Path) -> None:
    for program in ("train", "simulate"):
        code = (
            f"import sys, minidl.{program}\n"
            f"assert minidl.{program}.main(['--help']) == 0\n"
            f"assert minidl.{program}.main(['--help', 'gossip']) == 0\n"
            "slow = ('numpy', 'numba', 'tqdm', 'scipy', 'minidl.models', 'minidl.comm.methods.gossip')\n"
            "print([name for name in slow if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]"


def test_the_first_page_holds_every_option_and_begins_with_the_most_used() -> None:
    lines = page(train.COMMAND).splitlines()
    assert max(map(len, lines)) <= 88
    first = lines[lines.index("most used") + 1 :]
    first = first[: first.index("")]
    expected = ["--" + name.replace("_", "-") for name in MOST_USED if name not in ("cluster", "ranks")]
    assert [line.split()[0] for line in first if line.startswith("  --")] == expected
    text = "\n".join(lines)
    for entry in options(Config).values():
        assert f"\n  --{entry.words}" in text
    for form in ("torus:RxC", "base-K", "file:PATH", "skewed:ALPHA", "synthetic:COUNTxHxWxC:CLASSES", "FILE.npz"):
        assert form in text
    for method in declared.choices("method"):
        assert f"only for the method {method}:" in text
    for words in ("(default: lenet)", "passes over the training set (default: 15)"):
        assert words in text, "the defaults are those of the default run"
    assert "(default: )" not in text


@pytest.mark.parametrize(("command", "topic", "words"), [
    (train.COMMAND, "gossip", ["asynchronous SGD without a center", "GoSGD", "--mix NAME", "push-sum", "(default: 1)"]),
    (train.COMMAND, "dpsgd", ["NeurIPS 2017", "--overlap", "torus:RxC"]),
    (train.COMMAND, "local-sgd", ["ICLR 2019", "--period N", "(default: 8)"]),
    (train.COMMAND, "local", ["takes no further options"]),
    (train.COMMAND, "adam", ["Kingma and Ba 2015", "--lr 0.001"]),
    (train.COMMAND, "vgg", ["Simonyan and Zisserman 2015", "--conv", "--lr 0.02", "one-cycle"]),
    (train.COMMAND, "period", ["steps between two averages (default: 8)", "steps between two exchanges (default: 1)"]),
    (train.COMMAND, "ring", ["--topology NAME", "the previous and the next replica"]),
    (train.COMMAND, "--batch-size", ["images per step and replica (default: 32)"]),
    (train.COMMAND, "data", ["--data NAME", "your own: arrays x_train"]),
    (simulate.COMMAND, "method", ["--cluster PATH", "--ranks N"]),
    (simulate.COMMAND, "allreduce", ["--bucket X"]),
])  # fmt: skip
def test_pages_of_topics(command: object, topic: str, words: list[str]) -> None:
    text = page(command, topic)  # type: ignore[arg-type]
    for each in words:
        assert each in " ".join(text.split())


def test_every_page_is_narrow_and_simulate_leaves_out_what_does_not_apply() -> None:
    topics = [*GROUPS, *options(Config), *(name for chooser in CHOOSERS for name in declared.choices(chooser))]
    for topic in topics:
        assert max(map(len, page(train.COMMAND, topic.replace("_", "-")).splitlines())) <= 88, topic
    text = page(simulate.COMMAND)
    assert "--cluster" in text and "--topology" in text
    assert not [name for name in simulate.LEFT_OUT if f"--{name} " in text]


@pytest.mark.parametrize("module", ["train", "info"])
def test_help_into_a_closed_pipe(root: Path, module: str) -> None:
    command = f"{sys.executable} -m minidl.{module} --help | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=root, capture_output=True, text=True)
    assert done.stderr == "" and done.stdout == f"usage: python -m minidl.{module} [options]\n"
