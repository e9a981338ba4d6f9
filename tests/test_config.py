"""Options: one dataclass defines the command line, the keys of configuration files, the checks and the messages.

Some options belong to a model, an optimizer or a method. They are refused with any other.
"""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl.errors import ConfigError
from minidl.run import declared
from minidl.run.config import (
    AUGMENTATIONS,
    DATASETS,
    OWN_MODEL,
    RECIPES,
    SCHEDULES,
    VIEWS,
    Config,
    complete,
    options_of,
    resolve,
)  # fmt: skip
from minidl.run.config_file import from_toml, to_toml
from minidl.run.options import options, parse
from minidl.run.presets import NAMED, PRESETS, depending_on, preset


def command_line(*argv: str) -> dict[str, Any]:
    return parse(Config, argv)


def test_names_of_choices_match_the_code() -> None:
    from minidl import data, models, optim, schedules
    from minidl.comm.methods import METHODS
    from minidl.comm.topology import TOPOLOGIES

    assert list(declared.choices("model")) == [*models.MODELS, OWN_MODEL]
    assert list(declared.choices("optimizer")) == list(optim.OPTIMIZERS)
    assert list(declared.choices("method")) == list(METHODS)
    assert set(DATASETS) == set(data.DATASETS)
    assert set(AUGMENTATIONS) == set(data.AUGMENTATIONS)
    assert set(SCHEDULES) == set(schedules.SCHEDULES)
    assert set(VIEWS) == set(data.VIEWS)
    plain = {name for name in options(Config)["topology"].choices if name == name.lower()}
    assert plain == set(TOPOLOGIES) - {"file", "base-3", "base-4"}


def test_presets_hold_options_that_have_an_effect() -> None:
    for conditions, values in PRESETS:
        config = resolve(conditions)
        assert {name: getattr(config, name) for name in values} == values


def test_command_line_overrides_file_and_file_overrides_presets() -> None:
    file = {"data": "cifar10", "lr": 0.3, "epochs": 7}
    config = resolve(file, command_line("--epochs", "3", "--augment", "none"))
    assert (config.epochs, config.lr, config.augment, config.batch_size) == (3, 0.3, (), 128)
    assert resolve({"data": "cifar10", "optimizer": "adam"}).lr == 1e-3
    assert resolve({"data": "cifar10", "optimizer": "adam", "lr": 0.5}).lr == 0.5
    assert [resolve({"method": name}).period for name in ("gossip", "local-sgd")] == [1, 8]
    vgg = resolve({"model": "vgg"})
    assert (vgg.lr, vgg.schedule) == (0.02, "one-cycle") and resolve({"model": "vgg", "optimizer": "adam"}).lr != vgg.lr


def test_changing_model_optimizer_or_data_discards_their_values_in_a_file() -> None:
    file = from_toml(to_toml(resolve({"data": "cifar10", "momentum": 0.8, "epochs": 3, "lr": 0.2, "clip": 2.0})))
    same = resolve(file, command_line("--optimizer", "sgd", "--data", "cifar10"))
    assert (same.lr, same.epochs, same.augment, same.momentum) == (0.2, 3, ("pad-crop", "flip"), 0.8)
    adam = resolve(file, command_line("--optimizer", "adam"))
    assert (adam.lr, adam.weight_decay, adam.epochs, adam.momentum) == (1e-3, 0.0, 3, None)
    back = resolve(from_toml(to_toml(adam)), command_line("--optimizer", "sgd"))
    assert (back.lr, back.weight_decay, back.momentum) == (0.05, 5e-4, 0.9)
    digits = resolve(file, command_line("--data", "digits"))
    assert (digits.lr, digits.epochs, digits.batch_size, digits.augment) == (0.2, 15, 32, ())
    assert digits.clip == 2.0
    assert resolve(file, command_line("--model", "vgg")).lr == 0.02
    assert resolve(file, command_line("--model", "vgg", "--lr", "0.3")).lr == 0.3
    mine = from_toml(to_toml(resolve({"data": "mine.npz", "epochs": 3})))
    assert resolve(mine, command_line("--data", "mine.npz")).epochs == 3, "the relative path names the same file"


@pytest.mark.parametrize(("argv", "message"), [
    (["--method", "dpsgd", "--mix", "mass"], "mix is an option of the method gossip, not of dpsgd: leave it out"),
    (["--mix", "half"], "mix is an option of the method gossip, not of dpsgd"),
    (["--method", "allreduce", "--topology", "ring"], "topology is an option of the methods dpsgd, gossip,"),
    (["--method", "local", "--period", "4"], "period is an option of the methods local-sgd, gossip, easgd,"),
    (["--method", "gossip", "--overlap"], "overlap is an option of the methods dpsgd, easgd, sync-easgd, not of g"),
    (["--method", "ps", "--velocity", "mixed"], "velocity is an option of the methods local-sgd, dpsgd, gossip,"),
    (["--bucket", "2"], "bucket is an option of the method allreduce, not of dpsgd"),
    (["--optimizer", "adam", "--momentum", "0.5"], "momentum is an option of the optimizers sgd, nesterov, sgdw, lar"),
    (["--model", "mlp", "--conv", "direct"], "conv is an option of the models lenet, vgg, resnet20, resnet20-gn,"),
    (["--layout", "channels-first"], "layout has an effect only with data FILE.npz, and data is 'digits'"),
    (["--method", "gossip", "--topology", "ring"], "topology has an effect only with peer topology, and peer is 'unif"),
    (["--method", "gossip", "--inside", "0.5"], "inside has an effect only with peer hierarchical, and peer is 'unifo"),
    (["--steps", "9", "--epochs", "3"], "steps and epochs exclude each other: give only one of them"),
    (["--method", "gossip", "--probability", "0.5", "--period", "2"], "probability and period exclude each other"),
    (["--method", "local-sgd", "--velocity", "quasi-global"], "unknown velocity 'quasi-global'. Known: local, mixed"),
])  # fmt: skip
def test_an_option_without_effect_is_refused(argv: list[str], message: str) -> None:
    given = command_line(*argv)
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(given)
    with pytest.raises(ConfigError, match=re.escape(message)):  # the option is in a file
        resolve(given, {"seed": 3})
    with pytest.raises(ConfigError, match=re.escape(message)):  # there is a file, but the option is not in it
        resolve({"seed": 3}, given)


def test_an_option_of_a_file_is_dropped_if_the_command_line_chooses_another_method() -> None:
    file = {"method": "gossip", "mix": "mass", "peer": "topology", "topology": "ring", "period": 4, "velocity": "mixed"}
    config = resolve(file, {"method": "dpsgd"})
    assert (config.topology, config.velocity, config.mix, config.peer, config.period) == (
        "ring", "mixed", None, None, None)  # fmt: skip
    assert resolve(file, {"method": "local-sgd"}).period == 8, "period 4 was chosen for gossip, not for local-sgd"
    assert resolve(file, {"peer": "uniform"}).topology is None
    assert resolve({"steps": 100}, {"epochs": 3}).epochs == 3 and not resolve({"steps": 100}, {"epochs": 3}).steps
    assert resolve({"epochs": 3}, {"steps": 100}).steps == 100
    config = resolve({"method": "gossip", "probability": 0.5}, {"period": 4})
    assert (config.period, config.probability) == (4, 0.0)
    with pytest.raises(ConfigError, match="mix is an option"):
        resolve(file, {"method": "dpsgd", "mix": "mass"})
    assert resolve({"mix": "mass"}, {"method": "gossip"}).mix == "mass", "the command line may choose the method"


def test_options_without_effect_are_none() -> None:
    assert (Config().mix, Config().momentum, Config(optimizer="adam").momentum) == (None, 0.9, None)
    sgd = Config(momentum=0.5)
    assert replace(sgd, lr=1.0).momentum == 0.5
    with pytest.raises(ConfigError, match="momentum is an option of the optimizers sgd"):
        replace(sgd, optimizer="adam")


NAMES = {chooser: [name if name != OWN_MODEL else "/my_net.py:build" for name in declared.choices(chooser)]
         for chooser in ("model", "optimizer", "method")}  # fmt: skip


@given(st.data())
def test_any_choice_takes_its_own_options_and_refuses_others(draw: st.DataObject) -> None:
    chosen = {chooser: draw.draw(st.sampled_from(names)) for chooser, names in NAMES.items()}
    name = draw.draw(st.sampled_from([name for name, entry in options(Config).items() if entry.saved]))
    own = options_of(complete(chosen))
    value = (own.get(name) or options(Config)[name]).default
    try:
        config = resolve(chosen, {name: value})
    except ConfigError as error:
        assert name not in own or own[name].needs or own[name].used_with, error
        assert name.replace("_", "-") in str(error)
    else:
        assert getattr(config, name) == value or name in NAMES
        assert from_toml(to_toml(config)).keys() >= ({name} if value not in ("", None) else set())


def test_a_new_method_needs_only_a_file_and_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read without importing it: its last line raises an error."""
    (tmp_path / "toys").mkdir()
    (tmp_path / "toys" / "__init__.py").write_text('METHODS = {\n    "swap": "swap.Swap",\n}\n')
    (tmp_path / "toys" / "swap.py").write_text(
        '"""Swaps models.\n\n    x <- y\n\nSee Doe (ICML 2020). It is slow.\n"""\n\n'
        'OPTIONS = {\n    "chance": {"default": 0.5, "min": 0, "max": 1, "help": "probability"},\n}\n'
        'PRESET = {"lr": 0.5}  # it mixes less\n\n\nclass Swap(Method):\n    servers = 2\n\n\n1 / 0\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(declared, "METHODS", "toys")
    found = declared.choices.__wrapped__("method")
    assert list(found) == ["swap"] and found["swap"][:2] == ("Swaps models.", "See Doe (ICML 2020).")
    option = found["swap"].options["chance"]
    assert (option.kind, option.default, option.group) == (float, 0.5, "method.swap")
    with pytest.raises(ConfigError, match="chance: expected a number between 0 and 1, got 2"):
        option.check(2.0)
    assert found["swap"].servers == 2 and found["swap"].preset == {"lr": 0.5}
    monkeypatch.setattr(declared, "choices", lambda chooser: found)
    assert preset({"data": "mnist", "model": "mlp", "optimizer": "adam", "method": "swap"})["lr"] == 0.5
    assert depending_on("method") == {"lr"}


ALONE = ("eamsgd", "diloco", "noloco", "gasloc")


def test_the_number_of_servers_is_that_of_the_class() -> None:
    from minidl.comm.methods import METHODS, method

    for name in METHODS:
        choice, kind = declared.choices("method")[name], method(name)
        assert choice.servers == kind.servers == (name in ("ps", "easgd", "sync-easgd", "async-easgd", "eamsgd"))
        assert choice.alone == kind.alone == ("easgd" in name or "hogwild" in name or name in ALONE)


def test_elastic_averaging_has_a_server_only_if_its_center_has_a_rank() -> None:
    from minidl.comm.methods import method

    for name, center, servers in (("easgd", "rank", 1), ("easgd", "beside", 0), ("sync-easgd", "copies", 0)):
        config = resolve({"method": name, "center": center})
        assert declared.servers(name, config.center) == servers
        assert method(name).roles(4, config) == (tuple(range(4 - servers)), tuple(range(4 - servers, 4)))
    assert declared.servers("ps", resolve({"method": "ps"}).center) == 1


def test_a_named_preset_is_a_layer_below_all_others() -> None:
    config = resolve({"preset": "speedrun"})
    assert (config.data, config.model, config.optimizer, config.bias_lr) == ("cifar10", "whitened-cnn", "muon", 106)
    assert resolve({"preset": "speedrun", "lr": 0.1, "data": "cifar10"}).lr == 0.1
    other = resolve({"preset": "speedrun", "optimizer": "sgd"})  # the recipe's rates are for muon
    assert (other.lr, other.bias_lr, other.model, other.epochs) == (0.05, None, "whitened-cnn", config.epochs)
    assert resolve(from_toml(to_toml(config))) == replace(config, preset="none")  # config.toml has the values
    assert resolve({"preset": "none"}) == resolve({})
    assert set(RECIPES) == set(NAMED)
    with pytest.raises(ConfigError, match=r"unknown preset 'speedrum'.*Did you mean 'speedrun'"):
        resolve({"preset": "speedrum"})


def test_every_declared_option_is_used(root: Path) -> None:
    from minidl import optim

    code = "".join(file.read_text() for folder in ("comm", "minidl") for file in (root / folder).rglob("*.py"))
    of_optimizers = {name for own in optim.OPTIONS.values() for name in own}  # comm/replica.py passes all of them
    for name in options(Config).keys() - of_optimizers:
        assert re.search(rf"""config\.{name}\b|given(\.get\(|\[)"{name}"|args\.{name}\b""", code), name


def test_declared_options_are_well_formed() -> None:
    kinds: dict[str, type] = {}
    common = options_of(complete({"method": "local", "optimizer": "adam", "model": "mlp"}))
    for chooser, names in NAMES.items():
        for choice in names:
            own = declared.choices(chooser)[declared.choice_of(chooser, choice)].options
            for name, entry in own.items():
                assert entry.check(entry.default) == entry.default and entry.help and entry.kind is not tuple
                assert kinds.setdefault(name, entry.kind) is entry.kind, f"{name} must have one type everywhere"
                assert name not in common, f"{name} is already an option of all runs"
                assert {*entry.needs, entry.instead_of} - {""} <= own.keys()


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MINIDL_DATA", raising=False)
    assert resolve({}).data_dir == ""
    assert resolve({"data": "mine.npz"}).data == str(tmp_path / "mine.npz")
    assert resolve({"data": "mnist", "data_dir": "x"}).data_dir == str(tmp_path / "x")
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
    (["--augment", "flip,flip"], "augment: flip is given twice"),
    (["--data", "synthetic:3"], "data: 'synthetic:3' is not of the form synthetic:COUNTxHxWxC:CLASSES"),
    (["--topology", "torus:4"], "topology: 'torus:4' is not of the form torus:RxC"),
    (["--shards", "skewed:x"], "shards: 'skewed:x' is not of the form skewed:ALPHA"),
    (["--epoch", "3"], "unknown option --epoch. Did you mean '--epochs'?"),
    (["--batchsize=3"], "unknown option --batchsize. Did you mean '--batch-size'?"),
    (["digits"], "unexpected argument 'digits'"),
    (["--lr"], "--lr: expected a value, but the command line ends: a number above 0"),
    (["--lr", "--json"], "--lr: expected a value, but '--json' follows"),
    (["--json=1"], "--json takes no value, got '1'"),
    (["--resume", ""], "--resume: expected the path of a file or folder, got ''"),
    (["--out="], "--out: expected the path of a file or folder, got ''"),
    (["--steps=--"], "steps: expected a whole number of 0 or more, got '--'"),
    (["--"], "unexpected argument '--'"),
    (["--lr", "fast"], "lr: expected a number above 0, got 'fast'"),
    (["--lr", "0"], "lr: expected a number above 0, got 0.0"),
    (["--lr", "nan"], "lr: expected a number above 0, got nan"),
    (["--lr", "inf"], "lr: expected a number above 0, got inf"),
    (["--batch-size", "0"], "batch-size: expected a whole number of 1 or more, got 0"),
    (["--batch-size", "1.5"], "batch-size: expected a whole number of 1 or more, got '1.5'"),
    (["--epochs", "9" * 30], "epochs: 999999999999999999999999999999 is too large"),
    (["--epochs", "9" * 5000], "epochs: expected a whole number of 1 or more, got '9999"),
    (["--validation", "1"], "validation: expected a number of 0 or more and below 1, got 1.0"),
    (["--seed", "-1"], "seed: expected a whole number between 0 and 4294967295, got -1"),
    (["--out", "a\udcffb"], "out: expected text"),
    (["\u2014lr", "1"], "begins with a dash of another kind: type two hyphens"),
])  # fmt: skip
def test_errors_of_the_command_line(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        command_line(*argv)
    assert message in str(caught.value)


@given(st.text(), st.sampled_from(["model", "lr", "epochs", "augment", "data_dir", "seed"]))
def test_any_text_is_a_value_or_an_error_that_names_the_option(text: str, name: str) -> None:
    entry = options(Config)[name]
    try:
        assert asdict(Config(**{name: entry.parse(text)}))[name] is not None
    except ConfigError as error:
        assert entry.words in str(error)


def test_fit_refuses_an_option_without_effect() -> None:
    from minidl import models
    from minidl.training.fit import fit

    model = models.build("mlp", (8, 8, 1), 10)
    with pytest.raises(ConfigError, match="momentum is an option of the optimizers sgd, nesterov, sgdw, lars"):
        fit(model, "digits", optimizer="adam", momentum=0.5)
    with pytest.raises(ConfigError, match="steps and epochs exclude each other"):
        fit(model, "digits", steps=3, epochs=1)
