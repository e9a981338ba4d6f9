"""Configuration files: with sections, without sections, and of earlier versions. Errors name the file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl import train
from minidl.errors import ConfigError
from minidl.run import declared
from minidl.run.config import AUGMENTATIONS, DATASETS, Config, options_of, resolve
from minidl.run.config_file import from_toml, read_toml, saved, to_toml
from minidl.run.folder import read_options, read_run


@pytest.mark.parametrize(("text", "message"), [
    ("modle = 'mlp'", "unknown key 'modle'. Did you mean 'model'?"),
    ("batch-size = 3", "Did you mean 'batch_size'?"),
    ("lr = '0.1'", "lr: expected a number above 0, got '0.1'"),
    ("lr = true", "lr: expected a number above 0, got True"),
    ("lr = " + "9" * 400, "number"),
    ("seed = " + "9" * 5000, "not readable as TOML"),
    ("epochs = 3.0", "epochs: expected a whole number"),
    ("augment = [1]", "augment: expected names separated by commas, got [1]"),
    ("data_dir = \"a\\u0000\"", "x00"),
    ("out = 'x'", "key 'out' is for the command line only: give --out"),
    ("[model]\nname = 'mlp'", "unknown key 'name'"),
    ("[data]\nlr = 1", "key 'lr' is in [data], but belongs into [optimizer]"),
    ("[method.gosip]", "unknown section [method.gosip]"),
    ("[data.digits]", "unknown section [data.digits]"),
    ("[modle]", "unknown section [modle]. Did you mean 'model'?"),
    ("[method.gossip]\nmix = 'mass'", "[method.gossip] holds options of the method gossip: set method = \"gossip\""),
    ("[method.gossip]\noverlap = true", "[method.gossip]: gossip has no option 'overlap'"),
    ("lr = 1\n[optimizer]\nlr = 1", "key 'lr' is given twice"),
    ("model = 3", "model: expected text"),
    ("method = ['gossip']", "method: expected text"),
    ("[[model]]", "model: expected text"),
    ("lr = ", "Invalid value"),
    ("a = " + "[" * 5000, "file.toml"),
])  # fmt: skip
def test_errors_of_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "file.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_toml(file)
    assert message in str(caught.value) and str(file) in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "latin.toml").write_bytes(b"model = '\xff'")
    for path, message in [("none.toml", "none.toml"), (".", "config file"), ("fifo", "config file"),
                          ("latin.toml", "not UTF-8")]:  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            read_toml(tmp_path / path)


def test_a_file_may_rely_on_defaults_and_names_itself_in_messages(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("method = 'dpsgd'\nmix = 'mass'")
    with pytest.raises(ConfigError, match=r"config file '.*mine.toml': mix is an option of the method gossip"):
        resolve(read_toml(file), {"seed": 1})
    file.write_text("mix = 'mass'\n[method]\nmethod = 'gossip'\nperiod = 3\n[optimizer.sgd]\nmomentum = 0.5")
    with pytest.raises(ConfigError, match="set optimizer = \"sgd\""):
        read_toml(file)
    file.write_text("mix = 'mass'\n[method]\nmethod = 'gossip'\nperiod = 3\n[optimizer]\nmomentum = 0.5")
    config = resolve(read_toml(file))
    assert (config.mix, config.period, config.momentum) == ("mass", 3, 0.5)


EARLIER_FILE = """# Every option of a run. To repeat the run: `python -m minidl.train --config FILE`
# what to train
model = "mlp"
data = "synthetic:96x4x4x1:4"
data_dir = ""
layout = "channels-last"
validation = 0.0
augment = []
# optimization
epochs = 15
steps = 8
batch_size = 16
optimizer = "adam"
lr = 0.01
momentum = 0.9
weight_decay = 0.0
schedule = "cosine"
warmup = 0
clip = 0.0
label_smoothing = 0.0
# several replicas
workers = 1
method = "local-sgd"
topology = "one-peer-exponential"
period = 4
probability = 0.0
exchange = "push"
peer = "uniform"
inside = 0.9
mix = "half"
block = "whole"
velocity = "local"
overlap = false
bucket = 1.0
reduce = "tree"
shards = "iid"
stall = 30.0
# the run
seed = 0
threads = 0
conv = "auto"
keep = 2
"""


def test_a_file_of_an_earlier_version_is_read() -> None:
    given = from_toml(EARLIER_FILE)
    config = resolve(given)
    assert (config.model, config.optimizer, config.method, config.period, config.velocity, config.steps) == (
        "mlp", "adam", "local-sgd", 4, "local", 8)  # fmt: skip
    assert (config.momentum, config.mix, config.conv, config.layout, config.epochs) == (None,) * 5
    assert resolve(from_toml(to_toml(config))) == config
    assert resolve(given, {"method": "gossip"}).period == 1


VALUES = {
    "data": st.sampled_from((*DATASETS, "mine.npz")),
    "data_dir": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    "augment": st.lists(st.sampled_from(list(AUGMENTATIONS)), unique=True).map(tuple),
    "validation": st.floats(0, 1, exclude_max=True),
    "lr": st.floats(0, exclude_min=True, allow_infinity=False),
    "clip": st.floats(0, allow_infinity=False),
    "seed": st.integers(0, 2**32 - 1),
    "steps": st.integers(0, 2**53),
}
CHOSEN = {chooser: st.sampled_from([name.replace("FILE", "/my_net").replace("FUNCTION", "f")
                                    for name in declared.choices(chooser)])
          for chooser in ("model", "optimizer", "method")}  # fmt: skip


@given(st.fixed_dictionaries({}, optional=VALUES | CHOSEN))
def test_toml_round_trip(values: dict[str, Any]) -> None:
    config = Config(**values)
    read = from_toml(to_toml(config))
    assert Config(**read) == config, "an option without a value, such as data_dir = '', is not written"
    assert set(read) == set(saved(config)), "a written config holds every option that has an effect, and no other"
    assert not set(read) & {"out", "resume", "evaluate", "config", "json", "quiet"}
    assert None not in read.values() and options_of(vars(config)).keys() >= set(read)
    absolute = {"data_dir": config.data_dir, "data": config.data}
    assert replace(resolve(read), **absolute) == config, "presets do not change a complete config"


def test_a_run_of_an_earlier_version_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(EARLIER_FILE)
    assert resolve(read_run(tmp_path / "run")).method == "local-sgd"
    assert train.main(["--resume", str(tmp_path / "run"), "--quiet"]) == 0, "without a checkpoint, a run starts again"
    assert "2 epochs, 8 steps" in capsys.readouterr().out


def test_a_file_may_hold_options_that_change_nothing() -> None:
    """config.toml of a single replica holds the topology, so that the run can be resumed with several replicas."""
    file = from_toml("workers = 1\ntopology = 'ring'\ndata = 'synthetic'\ndata_dir = '/x'")
    assert resolve(file).topology == "ring" and resolve(file).data_dir == "/x"
    assert resolve(file, {"workers": 2}).topology == "ring"
    for option in ({"topology": "ring"}, {"shards": "iid"}, {"data_dir": "/y"}):
        with pytest.raises(ConfigError, match="has an effect only with"):
            resolve(file, option)
    assert resolve(file, {"workers": 2, "topology": "star"}).topology == "star"
    assert resolve(file, {"data": "mnist", "data_dir": "/y"}).data_dir == "/y"


@pytest.mark.parametrize(("method", "lacking"), [
    ("easgd", "compress"),
    ("allreduce", "compress"), ("dpsgd", "compress"), ("ps", "compress staleness"),
    ("sync-easgd", "compress messages reduce"),
])  # fmt: skip
def test_a_run_of_an_earlier_version_lacks_options_that_methods_have_gained(
    tmp_path: Path, method: str, lacking: str
) -> None:
    config = resolve({"method": method, "workers": 2})
    lines = [line for line in to_toml(config).splitlines() if line.split(" = ")[0] not in lacking.split()]
    (tmp_path / "config.toml").write_text("\n".join(lines))
    found = read_options(tmp_path / "config.toml")
    assert not found.keys() & {*lacking.split()} and resolve(found) == config
