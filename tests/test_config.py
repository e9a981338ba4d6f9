"""Options: one dataclass defines the command line, the keys of configuration files, the checks and the messages."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl.errors import ConfigError
from minidl.run import config as names
from minidl.run.config import AUGMENTATIONS, DATASETS, MODELS, OPTIMIZERS, SCHEDULES, Config, resolve
from minidl.run.options import from_toml, options, parse, read_toml, to_toml


def command_line(*argv: str) -> dict[str, Any]:
    return parse(Config, list(argv), "minidl")


def test_names_of_choices_match_the_code() -> None:
    from minidl import data, models, optim, schedules

    assert set(MODELS) == set(models.MODELS)
    assert set(DATASETS) == set(data.DATASETS)
    assert set(AUGMENTATIONS) == set(data.AUGMENTATIONS)
    assert set(OPTIMIZERS) == set(optim.OPTIMIZERS)
    assert set(SCHEDULES) == set(schedules.SCHEDULES)


def test_presets_hold_known_options() -> None:
    for option, presets in names.PRESETS.items():
        for value, preset in presets.items():
            replace(Config(), **{option: value}, **preset)


def test_command_line_overrides_file_and_file_overrides_presets() -> None:
    file = {"data": "cifar10", "lr": 0.3, "epochs": 7}
    config = resolve(file, command_line("--epochs", "3", "--augment", "none"))
    assert (config.epochs, config.lr, config.augment) == (3, 0.3, ())
    assert config.batch_size == names.DATA_PRESETS["cifar10"]["batch_size"]
    assert resolve({"data": "cifar10", "optimizer": "adam"}).lr == names.OPTIMIZER_PRESETS["adam"]["lr"]
    assert resolve({"data": "cifar10", "optimizer": "adam", "lr": 0.5}).lr == 0.5
    assert [resolve({"method": name}).period for name in ("gossip", "local-sgd")] == [1, 8]


def test_changing_optimizer_or_data_discards_their_values_in_a_file() -> None:
    file = asdict(resolve({"data": "cifar10", "momentum": 0.8, "epochs": 3, "schedule": "steps"}))
    same = resolve(file, command_line("--optimizer", "sgd", "--data", "cifar10"))
    assert (same.lr, same.epochs, same.augment) == (0.1, 3, ("pad-crop", "flip"))
    adam = resolve(file, command_line("--optimizer", "adam"))
    assert (adam.lr, adam.weight_decay, adam.epochs, adam.momentum) == (1e-3, 0.0, 3, 0.8)
    back = resolve(asdict(adam), command_line("--optimizer", "sgd"))
    assert (back.lr, back.weight_decay) == (0.1, 5e-4)
    digits = resolve(file, command_line("--data", "digits"))
    assert (digits.lr, digits.epochs, digits.batch_size, digits.augment) == (0.05, 15, 32, ())
    assert digits.schedule == "steps"
    assert resolve(file, command_line("--data", "digits", "--lr", "0.3")).lr == 0.3
    mine = asdict(resolve({"data": "mine.npz", "epochs": 3}))
    assert resolve(mine, command_line("--data", "mine.npz")).epochs == 3, "the relative path names the same file"


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MINIDL_DATA", raising=False)
    assert resolve({}).data_dir == ""
    assert resolve({"data": "mine.npz", "data_dir": "x"}).data == str(tmp_path / "mine.npz")
    assert resolve({"data_dir": "x"}).data_dir == str(tmp_path / "x")
    monkeypatch.setenv("MINIDL_DATA", "there")
    assert resolve({}).data_dir == str(tmp_path / "there")


def test_only_given_options_are_parsed() -> None:
    assert command_line() == {}
    assert command_line("--batch-size", "7", "--json", "--augment=flip,cutout") == {
        "batch_size": 7, "json": True, "augment": ("flip", "cutout")}  # fmt: skip


@pytest.mark.parametrize(("argv", "message"), [
    (["--model", "lene"], "unknown model 'lene'. Did you mean 'lenet'?"),
    (["--data", "minst"], "unknown data 'minst'. Did you mean 'mnist'?"),
    (["--optimizer", "adma"], "unknown optimizer 'adma'. Did you mean 'adam'?"),
    (["--schedule", "cosin"], "unknown schedule 'cosin'. Did you mean 'cosine'?"),
    (["--augment", "flip,crop"], "unknown augment 'crop'. Did you mean 'pad-crop'?"),
    (["--epoch", "3"], "unknown option --epoch. Did you mean '--epochs'?"),
    (["--batchsize=3"], "unknown option --batchsize. Did you mean '--batch-size'?"),
    (["digits"], "unexpected argument 'digits'"),
    (["--lr"], "--lr: expected one argument"),
    (["--lr", "fast"], "lr: expected a number above 0, got 'fast'"),
    (["--lr", "0"], "lr: expected a number above 0, got 0.0"),
    (["--lr", "nan"], "lr: expected a number above 0, got nan"),
    (["--lr", "inf"], "lr: expected a number above 0, got inf"),
    (["--batch-size", "0"], "batch-size: expected a whole number of 1 or more, got 0"),
    (["--batch-size", "1.5"], "batch-size: expected a whole number of 1 or more, got '1.5'"),
    (["--validation", "1"], "validation: expected a number of 0 or more and below 1, got 1.0"),
    (["--seed", "-1"], "seed: expected a whole number between 0 and 2^32 - 1, got -1"),
    (["--out", "a\udcffb"], "out: expected text"),
])  # fmt: skip
def test_errors_of_the_command_line(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        command_line(*argv)
    assert message in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [
    ("modle = 'mlp'", "unknown key 'modle'. Did you mean 'model'?"),
    ("batch-size = 3", "Did you mean 'batch_size'?"),
    ("lr = '0.1'", "lr: expected a number above 0, got '0.1'"),
    ("lr = true", "lr: expected a number above 0, got True"),
    ("lr = " + "9" * 400, "lr contains a number of 1,329 bits"),
    ("seed = " + "9" * 5000, "not readable as TOML"),
    ("epochs = 3.0", "epochs: expected a whole number"),
    ("augment = [1]", "augment: expected names separated by commas, got [1]"),
    ("data_dir = \"a\\u0000\"", "data_dir contains"),
    ("out = 'x'", "key 'out' is for the command line only: give --out"),
    ("[model]\nname = 'mlp'", "model: expected text"),
    ("lr = ", "Invalid value"),
    ("a = " + "[" * 5000, "file.toml"),
])  # fmt: skip
def test_errors_of_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "file.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_toml(Config, file)
    assert message in str(caught.value) and str(file) in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"model = '\xff'")
    for path, message in [("none.toml", "No such file"), (".", "it is a folder"), ("latin.toml", "not UTF-8")]:
        with pytest.raises(ConfigError, match=message):
            read_toml(Config, tmp_path / path)


VALUES = {
    "model": st.sampled_from(MODELS),
    "data": st.sampled_from(DATASETS),
    "data_dir": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    "augment": st.lists(st.sampled_from(AUGMENTATIONS)).map(tuple),
    "validation": st.floats(0, 1, exclude_max=True),
    "lr": st.floats(0, exclude_min=True, allow_infinity=False),
    "clip": st.floats(0, allow_infinity=False),
    "epochs": st.integers(1),
    "seed": st.integers(0, 2**32 - 1),
}


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_toml_round_trip(values: dict[str, Any]) -> None:
    config = Config(**values)
    read = from_toml(Config, to_toml(config))
    assert Config(**read) == config
    saved = {name for name, entry in options(Config).items() if entry.saved}
    assert set(read) == saved, "a written config holds every saved option"
    assert not saved & {"out", "resume", "evaluate", "config", "json", "quiet"}


@given(st.text(), st.sampled_from(["model", "lr", "epochs", "augment", "data_dir", "seed"]))
def test_any_text_is_a_value_or_an_error_that_names_the_option(text: str, name: str) -> None:
    entry = options(Config)[name]
    try:
        assert asdict(Config(**{name: entry.parse(text)}))[name] is not None
    except ConfigError as error:
        assert entry.words in str(error)


def test_help_is_quick_and_complete(root: Path) -> None:
    code = (
        "import sys, minidl.train\n"
        "assert minidl.train.main(['--help']) == 0\n"
        "print([name for name in ('numpy', 'numba', 'tqdm', 'scipy', 'tomllib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]", "--help must not import slow packages"
    for entry in options(Config).values():
        assert "--" + entry.words in done.stdout and entry.group + ":" in done.stdout
    assert "examples:" in done.stdout and "(default: lenet)" in done.stdout
