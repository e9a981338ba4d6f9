"""Command lines with mistakes: exit code 2, exactly one line that says what was expected, no traceback, no files."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl import simulate, train
from minidl.cli.arguments import check
from minidl.errors import ConfigError
from minidl.run.config import Config, resolve
from minidl.run.help import page
from minidl.run.hints import ALIASES, REASONS
from minidl.run.options import HelpWanted, options, parse
from minidl.training.job import Job

# A command line, and a part of the message.
TRAIN = [
    # Names of other tools.
    ("--learning-rate 0.1", "unknown option --learning-rate. Did you mean '--lr'?"),
    ("--learning_rate=0.1", "Did you mean '--lr'?"),
    ("-lr 0.1", "unknown option -lr. Did you mean '--lr'?"),
    ("--LR 0.1", "Did you mean '--lr'?"),
    ("--batch 8", "Did you mean '--batch-size'?"),
    ("--bs 8", "Did you mean '--batch-size'?"),
    ("--batch_size 8", "Did you mean '--batch-size'?"),
    ("-b 8", "unknown option -b"),
    ("--wd 0.1", "Did you mean '--weight-decay'?"),
    ("--l2 0.1", "Did you mean '--weight-decay'?"),
    ("--arch vgg", "Did you mean '--model'?"),
    ("--network vgg", "Did you mean '--model'?"),
    ("--dataset mnist", "Did you mean '--data'?"),
    ("--data-path /tmp", "Did you mean '--data-dir'?"),
    ("--num-epochs 3", "Did you mean '--epochs'?"),
    ("--epoch 3", "Did you mean '--epochs'?"),
    ("--max-steps 3", "Did you mean '--steps'?"),
    ("--iterations 3", "Did you mean '--steps'?"),
    ("--optim sgd", "Did you mean '--optimizer'?"),
    ("--scheduler cosine", "Did you mean '--schedule'?"),
    ("--warmup-steps 3", "Did you mean '--warmup'?"),
    ("--grad-clip 1", "Did you mean '--clip'?"),
    ("--output-dir x", "Did you mean '--out'?"),
    ("--checkpoint x", "Did you mean '--resume' or '--evaluate'?"),
    ("--eval x", "Did you mean '--evaluate'?"),
    ("--val-split 0.1", "Did you mean '--validation'?"),
    ("--world-size 2", "Did you mean '--workers'?"),
    ("--ranks 2", "Did you mean '--workers'?"),
    ("--random-seed 2", "Did you mean '--seed'?"),
    ("--gossip", "Did you mean '--method gossip'?"),
    ("--mnist", "Did you mean '--data mnist'?"),
    ("--ring", "Did you mean '--reduce ring' or '--topology ring'?"),
    ("--adam", "Did you mean '--optimizer adam'?"),
    ("--nesterov", "Did you mean '--optimizer nesterov'?"),
    ("--momentun 0.9", "Did you mean '--momentum'?"),
    # What minidl does not have.
    ("--device gpu", "unknown device 'gpu'"),
    ("--gpu", "Did you mean '--device'?"),
    ("--cuda=0", "Did you mean '--device'?"),
    ("--device cuda:x", "'cuda:x' is not of the form cuda:NUMBER"),
    ("--device cuda:0 --parts 2", "parts 2 needs cores"),
    ("--workers cuda:0,gpu:1", "expected a whole number, or cpu:THREADS"),
    ("--workers cuda:0,cpu:1 --device cuda:0", "exclude each other"),
    ("--workers cuda:0,cpu:1 --method hogwild-sgd", "method hogwild-sgd needs cores"),
    ("--num-workers 4", "a thread of each replica loads the images"),
    ("-j 4", "a thread of each replica loads the images"),
    ("--dropout 0.5", "have no dropout"),
    ("--hidden 100", "have fixed sizes"),
    ("--fp16", "float32"),
    ("--amp", "Did you mean '--precision'?"),
    ("--precision bf16", "precision bf16 needs the tensor cores of a GPU"),
    ("--precision fp8 --device cuda:0", "unknown precision 'fp8'. Known: float32, tf32, bf16"),
    ("--workers cpu:1,cpu:1 --precision tf32", "precision tf32 needs the tensor cores of a GPU"),
    ("--betas 0.9,0.99", "minidl.optim.Adam"),
    ("--num-classes 10", "the data set determines"),
    ("--verbose", "unless --quiet"),
    ("--pretrained", "Did you mean '--init'?"),
    ("--local-rank 0", "mpiexec"),
    ("--version", "python -m minidl.info"),
    # No hint if nothing is near.
    ("--xyzzy", "unknown option --xyzzy; --help lists all options"),
    ("-z", "unknown option -z; --help lists all options"),
    ("--", "unexpected argument '--'"),
    ("-", "unexpected argument '-'"),
    ("''", "unexpected argument ''"),
    ("mnist", "unexpected argument 'mnist': every option begins with --"),
    ("--lr 0.1 0.2", "unexpected argument '0.2'"),
    ("--quiet yes", "unexpected argument 'yes'"),
    ("\u2013\u2013lr 0.1", "type two hyphens"),
    ("'--a\nb'", "unknown option '--a\\nb'"),
    # Values.
    ("--lr", "--lr: expected a value, but the command line ends"),
    ("--lr --json", "--lr: expected a value, but '--json' follows"),
    ("--lr=", "lr: expected a number above 0, got ''"),
    ("--lr 0,1", "lr: expected a number above 0, got '0,1'"),
    ("--lr -0.1", "lr: expected a number above 0, got -0.1"),
    ("--lr 1e999", "got inf"),
    ("--momentum 1", "momentum: expected a number of 0 or more and below 1, got 1.0"),
    ("--momentum 90%", "got '90%'"),
    ("--epochs 0", "epochs: expected a whole number of 1 or more, got 0"),
    ("--epochs ten", "got 'ten'"),
    ("--epochs 1e3", "epochs: expected a whole number of 1 or more, got '1e3'"),
    ("--steps=--", "steps: expected a whole number of 0 or more, got '--'"),
    ("--steps -5", "steps: expected a whole number of 0 or more, got -5"),
    ("--seed 4294967296", "seed: expected a whole number between 0 and 4294967295"),
    ("--json=true", "--json takes no value"),
    ("--threads 100000000000", "threads: expected a whole number between 0 and 4096"),
    ("--lr ' 1'", "lr: expected a number above 0, got ' 1'"),
    ("--lr \u0663", "lr: expected a number above 0, got '\u0663'"),
    ("--epochs 1_000", "epochs: expected a whole number of 1 or more, got '1_000'"),
    ("--overlap=false", "--overlap takes no value"),
    ("--model resnet18", "unknown model 'resnet18'"),
    ("--model LeNet", "unknown model 'LeNet'. Did you mean 'lenet'?"),
    ("--data imagenet", "unknown data 'imagenet'"),
    ("--data my.csv", "unknown data 'my.csv'. Known: digits, mnist, fashion-mnist, cifar10, synthetic"),
    ("--data synthetic:10x8x8", "is not of the form synthetic:COUNTxHxWxC:CLASSES"),
    ("--data synthetic:5x2x2x1:10", "COUNT at least CLASSES"),
    ("--optimizer rmsprop", "unknown optimizer 'rmsprop'"),
    ("--schedule exponential", "unknown schedule 'exponential'"),
    ("--method fedavg", "unknown method 'fedavg'"),
    ("--augment rotate", "unknown augment 'rotate'"),
    ("--augment flip,,cutout", "unknown augment ''"),
    ("--topology mesh", "unknown topology 'mesh'"),
    ("--topology torus:2by3", "'torus:2by3' is not of the form torus:RxC"),
    ("--topology base-x", "'base-x' is not of the form base-K"),
    ("--shards skewed", "unknown shards 'skewed'"),
    ("--shards skewed:", "'skewed:' is not of the form skewed:ALPHA"),
    # Options without effect.
    ("--method dpsgd --mix mass", "mix is an option of the method gossip, not of dpsgd"),
    ("--method allreduce --topology ring", "topology is an option of the methods dpsgd, gossip,"),
    ("--method allreduce --velocity mixed", "velocity is an option of the methods local-sgd, dpsgd, gossip"),
    ("--method gossip --topology ring", "topology has an effect only with peer topology"),
    ("--method gossip --inside 0.5", "inside has an effect only with peer hierarchical"),
    ("--method gossip --period 4 --probability 0.5", "probability and period exclude each other"),
    ("--method hogwild-easgd --compress int8", "compress is an option of the methods"),
    ("--method hogwild-sgd --compress int8", "compress is an option of the methods"),
    ("--method gossip --compress int8", "compress has an effect only with exchange swap"),
    ("--method gossip --exchange swap --compress sign", "compress sign keeps too little of a whole model"),
    ("--method local-sgd --compress int8", "compress is an option of the methods"),
    ("--method allreduce --compress topk:0", "not of the form topk:SHARE, where SHARE is a number above 0"),
    ("--method ps --reduce fast", "reduce is an option of the methods allreduce, local-sgd, sync-easgd,"),
    ("--optimizer adam --momentum 0.5", "momentum is an option of the optimizers sgd, nesterov, sgdw, lars, muon, not"),
    ("--model mlp --conv direct", "conv is an option of the models lenet"),
    ("--layout channels-first", "layout has an effect only with data FILE.npz"),
    ("--method sync-easgd --center rank --on-death continue", "on-death has an effect only with center beside or copi"),
    ("--method gossip --center rank", "center is an option of the methods easgd, sync-easgd, async-easgd, eamsgd, not"),
    ("--method easgd --center copies", "unknown center 'copies'. Known: rank, beside"),
    ("--method easgd --rho -1", "rho: expected a number of 0 or more, got -1"),
    ("--method easgd --center rank --on-death continue", "on-death has an effect only with center beside, and center"),
    ("--method async-easgd --rho nan", "rho: expected a number of 0 or more, got nan"),
    ("--method hogwild-easgd --period 1.5", "period: expected a whole number of 1 or more, got '1.5'"),
    ("--method eamsgd --period -4", "period: expected a whole number of 1 or more, got -4"),
    ("--method hogwild-sgd --max-workers 4", "max-workers has an effect only with method gossip, fast, ps, async-"),
    ("--method easgd --rho none", "rho: expected a number of 0 or more, got 'none'"),
    ("--method sync-easgd --period 0", "period: expected a whole number of 1 or more, got 0"),
    ("--method eamsgd --optimizer adam --workers 1", "--method eamsgd needs --optimizer sgd"),
    ("--epochs 3 --steps 5", "steps and epochs exclude each other"),
    ("--workers 1 --topology ring", "topology has an effect only with several replicas, and there is one"),
    ("--workers 1 --topology torus:2x3", "topology has an effect only with several replicas"),
    ("--workers 1 --shards skewed:0.1", "shards has an effect only with several replicas"),
    ("--workers 1 --stall 5", "stall has an effect only with several replicas"),
    ("--data-dir folder", "data-dir has an effect only with data mnist, fashion-mnist or cifar10, and data is 'dig"),
    ("--data synthetic --data-dir folder", "and data is 'synthetic': leave it out"),
    ("--config flat.toml", "config file 'flat.toml': mix is an option of the method gossip, not of dpsgd"),
    # Files and folders.
    ("--resume ''", "--resume: expected the path of a file or folder, got ''"),
    ("--out ''", "--out: expected the path"),
    ("--config=", "--config: expected the path"),
    ("--evaluate ''", "--evaluate: expected the path"),
    ("--data-dir ''", "--data-dir: expected the path"),
    ("--out file", "--out file is a file: expected a folder"),
    ("--config folder", "config file 'folder'"),
    ("--config fifo", "config file 'fifo'"),
    ("--config /dev/zero", "config file '/dev/zero'"),
    ("--config nowhere.toml", "nowhere.toml"),
    ("--config latin.toml", "not UTF-8"),
    ("--config broken.toml", "config file 'broken.toml'"),
    ("--config section.toml", "unknown section [optimiser]. Did you mean 'optimizer'?"),
    ("--resume nowhere", "the folder nowhere does not exist"),
    ("--resume file", "file is not a folder: give the folder of a run"),
    ("--resume folder", "folder is not the folder of a run: it has no config.toml"),
    ("--resume folder --lr 1", "--lr cannot be given with --resume"),
    ("--resume folder --out new", "give only one of these: --out begins a run, --resume continues a run"),
    ("--evaluate folder --resume folder", "give only one of"),
    ("--evaluate file --lr 1", "--lr cannot be given with --evaluate"),
    ("--evaluate nowhere", "nowhere does not exist"),
    ("--data nowhere.npz", "nowhere.npz"),
    # --help, and a few more of all kinds.
    ("-help", "Did you mean '--help'?"),
    ("'--lr 0.1'", "the option and its value are separate words"),
    ("--optimizer SGD", "unknown optimizer 'SGD'. Did you mean 'sgd'?"),
    ("--shards skewed:0", "'skewed:0' is not of the form skewed:ALPHA"),
    ("--topology torus:0x4", "'torus:0x4' is not of the form torus:RxC"),
    ("--method gossip --mix mass --exchange pull", "--mix mass needs --exchange push or push-pull"),
    ("--help --lr 5", "--help shows one page: leave out '5'"),
    ("--help gossip ring", "--help shows one page: leave out 'ring'"),
    ("--help gosip", "--help: unknown topic 'gosip'. Did you mean 'gossip'?"),
    ("--help=xyzzy", "--help: unknown topic 'xyzzy'. Expected one of model, data"),
    ("-h learning-rate", "--help: unknown topic 'learning-rate'. Did you mean '--lr'?"),
]  # fmt: skip
SIMULATE = [
    ("--gpu", "--threads sets the number of cores"),
    ("--num-workers 4", "unknown option --num-workers; --help lists all options"),
    ("--ranks 1 --method ps", "the parameter server needs a separate rank"),
    ("--workers 4", "unknown option --workers. Did you mean '--ranks'?"),
    ("--world-size 4", "Did you mean '--ranks'?"),
    ("--resume x", "the folder x does not exist"),
    ("--evaluate x", "unknown option --evaluate"),
    ("--method allreduce --reduce fast", "reduce fast: a simulation has no MPI"),
    ("--config fast.toml", "reduce fast: a simulation has no MPI"),
    ("--ranks 1 --topology ring", "topology has an effect only with several replicas"),
    ("--data synthetic --data-dir folder", "data-dir has an effect only with data mnist"),
    ("--ranks 0", "ranks: expected a whole number between 1 and 65536, got 0"),
    ("--ranks -3", "ranks: expected a whole number between 1 and 65536, got -3"),
    ("--ranks many", "ranks: expected a whole number"),
    ("--cluster ''", "--cluster: expected the path"),
    ("--cluster nowhere", "nowhere"),
    ("--method dpsgd --mix mass", "mix is an option of the method gossip, not of dpsgd"),
    ("--optimizer lars --momentum 2", "momentum: expected"),
    ("--optimizer adamw --momentum 0.5", "momentum is an option of the optimizers"),
    ("--out file", "--out file is a file"),
    ("--config flat.toml", "config file 'flat.toml': mix is an option of the method gossip"),
    ("--measure --method gossip", "--method cannot be given with --measure"),
    ("--steps=--", "steps: expected a whole number"),
    ("--help nothing-at-all", "--help: unknown topic"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINIDL_WORKERS", "1")
    Path("file").touch()
    Path("folder").mkdir()
    os.mkfifo("fifo")
    Path("latin.toml").write_bytes(b"model = '\xff'")
    Path("broken.toml").write_text("lr = ")
    Path("flat.toml").write_text("mix = 'mass'")
    Path("fast.toml").write_text("[method]\nmethod = 'allreduce'\nreduce = 'fast'")
    Path("section.toml").write_text("[optimiser]\nlr = 1")


def refuse(argv: list[str], words: str, program: object, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().rglob("*"))
    assert program.main(argv) == 2  # type: ignore[attr-defined]
    out, err = capsys.readouterr()
    assert words in err
    assert out == "" and err.startswith("minidl: error: ") and err.count("\n") == 1 and len(err) < 600
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(("line", "words"), TRAIN)
def test_train(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    refuse(shlex.split(line), words, train, capsys)


@pytest.mark.parametrize(("line", "words"), SIMULATE)
def test_simulate(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    refuse(shlex.split(line), words, simulate, capsys)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_leader_of_a_job_reports_it(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in (["--gpu"], ["--optimizer", "adam", "--momentum", "0.5"], ["--out", "file"]):
        monkeypatch.setattr(train, "find_job", lambda: Job(rank, launched=False))
        assert train.main(argv) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == (rank == 0)


WORDS = st.one_of(
    st.sampled_from(["--" + entry.words for entry in options(Config).values()]),
    st.sampled_from(["--" + name for names in (*ALIASES, *REASONS) for name in names.split()]),
    st.sampled_from([choice for entry in options(Config).values() for choice in entry.choices]),
    st.sampled_from(["0", "1", "-1", "0.5", "1e400", "nan", "--", "-", "", "=", "--=", "9" * 400, "\udcff", "\0"]),
    st.text(max_size=8),
    st.text(max_size=4).map("--{}".format),
)


@given(st.lists(WORDS, max_size=6))
def test_any_words_are_options_or_an_error_of_one_line(words: list[str]) -> None:
    try:
        given_options = parse(Config, words)
        check(given_options)
        resolve(given_options)
    except HelpWanted as wanted:
        with suppress(ConfigError):
            assert max(map(len, page(train.COMMAND, wanted.topic).splitlines())) <= 100
    except ConfigError as error:
        assert len(" ".join(str(error).split())) < 900
