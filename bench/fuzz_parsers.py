"""Every parser of files in minidl, with valid inputs and ways to change them: the table PARSERS.

Each entry is a function that takes a folder and returns `case`. `case(rng)` writes a changed input into the folder and
returns a function that reads it. That function may raise only the errors in ALLOWED. Modules that import Numba are
imported where they are used.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import random
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save as to_bytes

from bench.fuzz_inputs import RAW, mutated, mutated_json
from minidl import reading
from minidl.errors import MinidlError
from minidl.schema import Mismatch

Case = Callable[[random.Random], Callable[[], object]]
ALLOWED = (MinidlError, reading.Unreadable, Mismatch)
METADATA = ("input_shape", "classes", "mean", "std")  # JSON in the metadata of weights
NPY_HEADERS = ("{'descr': '|O', 'fortran_order': False, 'shape': (9,), }", "{'descr': [('a', '<f4')]}", "(" * 500,
               "{'descr': '<f4', 'fortran_order': False, 'shape': (9, -1), }", "{" * 90 + "}" * 90,
               "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999, 99999999999), }", "'" * 3, "9" * 5000,
               "{'descr': '<U9', 'fortran_order': True, 'shape': (), }", "{'shape': (1,), 'shape': (2,)}",
               "{'descr': '<f16', 'fortran_order': False, 'shape': (9, 5, 4, 2), }", "\0" * 20)  # fmt: skip
TOML_TOKENS = (*RAW, "inf", "-nan", "true", '"x"', "'''x", "[[[", "{a = {a = 1}}", "0x" + "f" * 3000, "1979-05-27",
               ".".join(["a"] * 2000) + " = 1", "[" + ".".join(["a"] * 50) + "]", '"\\U00110000"', "1_0")  # fmt: skip


def _file(path: Path, make: Callable[[random.Random], bytes], read: Callable[[Path], object]) -> Case:
    """Return a case that writes `make(rng)` to a file, and reads it."""

    def case(rng: random.Random) -> Callable[[], object]:
        path.write_bytes(make(rng))
        return lambda: read(path)

    return case


def _lines(rng: random.Random, text: str, tokens: tuple[str, ...]) -> bytes:
    """Return a text after changes of values, lines or bytes."""
    lines = text.splitlines()
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(lines))
        key, equals, _ = lines[at].partition("=")
        kind = rng.randrange(5)
        if kind == 0:
            lines[at] = f"{key}{equals} {rng.choice(tokens)}"
        elif kind == 1:
            lines.insert(at, rng.choice((lines[at], rng.choice(tokens), "[" + rng.choice(tokens)[:20] + "]")))
        elif kind == 2:
            del lines[at]
            lines = lines or [""]
    content = "\n".join(lines).encode("utf-8", "surrogatepass")
    return mutated(rng, content) if rng.random() < 0.4 else content


# JSON and TOML.


def json_text(folder: Path) -> Case:
    value = {"a": [1, 2.5, "x", None, {"b": True}], "c": {"d": "e", "f": [[1], [2]]}}

    def case(rng: random.Random) -> Callable[[], object]:
        return partial(reading.json_value, mutated_json(rng, value))

    return case


def config_toml(folder: Path) -> Case:
    from minidl.run.config import resolve
    from minidl.run.folder import read_options, to_toml

    text = to_toml(resolve({}))
    return _file(folder / "config.toml", lambda rng: _lines(rng, text, TOML_TOKENS), read_options)


def cluster_toml(folder: Path) -> Case:
    from minidl.comm.cluster import EXAMPLES, load

    texts = [path.read_text() for path in sorted(EXAMPLES.glob("*.toml"))]
    return _file(folder / "cluster.toml", lambda rng: _lines(rng, rng.choice(texts), TOML_TOKENS),
                 lambda path: load(path).place(8))  # fmt: skip


def metrics(folder: Path) -> Case:
    from minidl.run.folder import RunFolder

    run = RunFolder(folder)
    entry = {"event": "epoch", "step": 5, "epoch": 1, "loss": 0.5, "lr": 0.1}

    def make(rng: random.Random) -> bytes:
        lines = [mutated_json(rng, entry) if rng.random() < 0.5 else json.dumps(entry) for _ in range(4)]
        return "\n".join(lines).encode("utf-8", "surrogatepass")

    return _file(run.metrics, make, lambda path: run.rewind(5, 1))


def summary(folder: Path) -> Case:
    from minidl.run.folder import result_of
    from minidl.train import _text

    alone = {"test_accuracy": 0.9, "test_loss": 0.3, "epochs": 2, "steps": 10, "seconds": 1.5, "out": "runs/x",
             "images_per_second": 100.0, "best_step": 5}  # fmt: skip
    together = alone | {"workers": 2, "replicas_alive": 2, "method": "dpsgd", "accuracy_best": 0.9, "messages": 7,
                        "accuracy_worst": 0.8, "consensus_distance": 0.1, "bytes_sent": 100,
                        "wait_fraction": 0.2}  # fmt: skip

    def read(path: Path) -> None:
        if result := result_of(path.parent):
            _text(result)
            json.dumps(result)

    return _file(folder / "summary.json", lambda rng: mutated_json(rng, rng.choice((alone, together))).encode(
        "utf-8", "surrogatepass"), read)  # fmt: skip


def report(folder: Path) -> Case:
    from minidl.report import data, replicas, run_page

    values: dict[str, object] = {
        "history.jsonl": {"event": "members", "when": 1.0, "members": [0, 1], "versions": {"numba": "1"}},
        "metrics.jsonl": {"event": "epoch", "step": 5, "epoch": 1, "loss": 0.5, "seconds": 1.0},
        "summary.json": {"edges": [[0, 1, 9, 1]], "traffic": {"ranks_per_cell": 1, "bytes": [[1]]}},
    }  # fmt: skip

    def case(rng: random.Random) -> Callable[[], object]:
        (folder / "config.toml").write_text("seed = 1")
        for name, value in values.items():
            (folder / name).write_bytes(mutated_json(rng, value).encode("utf-8", "surrogatepass"))
        return lambda: (run_page.ending(run := data.read(folder)), replicas.matrix_of(run), run.repeat)

    return case


def invitation(folder: Path) -> Case:
    from minidl.comm.launch.join import read

    known = {"host": "here", "pid": 123, "started": 4567, "fd": 3, "places": 4}
    return _file(folder / "job.json", lambda rng: mutated_json(rng, known).encode("utf-8", "surrogatepass"), read)


# Graphs.


def edge_list(folder: Path) -> Case:
    from minidl.comm.topology import build

    text = "# a ring\n0 1\n1 2 {}\n2 3\n3 0\n"
    tokens = ("9999999 0", "99999999", "-1 0", "0 0", "x y", "0 1 2", "٣ 1", "1e3 2", "65536 0")
    return _file(folder / "graph.txt", lambda rng: _lines(rng, text, tokens), lambda path: build(f"file:{path}", 0))


def graph_json(folder: Path) -> Case:
    from minidl.comm.topology import build

    value = {"directed": False, "multigraph": False, "graph": {}, "nodes": [{"id": 0}, {"id": 1}, {"id": 2}],
             "edges": [{"source": 0, "target": 1}, {"source": 1, "target": 2}]}  # fmt: skip
    return _file(folder / "graph.json", lambda rng: mutated_json(rng, value).encode("utf-8", "surrogatepass"),
                 lambda path: build(f"file:{path}", 0))  # fmt: skip


def graph_xml(folder: Path) -> Case:
    import networkx

    from minidl.comm.topology import build

    text = "\n".join(networkx.generate_graphml(networkx.cycle_graph(4)))
    tokens = ('<!DOCTYPE a [<!ENTITY b "c">]>', "<node/>", "&b;", "<edge source='0' target='9'/>", "<a" * 500)
    return _file(folder / "graph.graphml", lambda rng: _lines(rng, text, tokens), lambda path: build(f"file:{path}", 0))


# Data.


def npy_header(folder: Path) -> Case:
    content = _npy(np.zeros((3, 4), np.float32))[:128]

    def case(rng: random.Random) -> Callable[[], object]:
        return partial(reading.npy_header, io.BytesIO(_changed_npy(rng, content)))

    return case


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _changed_npy(rng: random.Random, content: bytes) -> bytes:
    if rng.random() < 0.3:
        header = rng.choice(NPY_HEADERS).encode()
        return content[:8] + len(header).to_bytes(2, "little") + header + content[128:]
    return mutated(rng, content[:128]) + content[128:]


def npz(folder: Path) -> Case:
    from minidl.data import load

    y = np.arange(9) % 3
    arrays = {"x_train": np.zeros((9, 5, 4, 2), np.uint8), "y_train": y, "x_test": np.ones((6, 5, 4, 2), np.uint8),
              "y_test": y[:6]}  # fmt: skip
    members = {f"{name}.npy": _npy(array) for name, array in arrays.items()}

    def make(rng: random.Random) -> bytes:
        content = dict(members)
        if rng.random() < 0.5:
            name = rng.choice(list(content))
            content[name] = _changed_npy(rng, content[name])
        buffer = io.BytesIO()
        kind = rng.choice((0, 0, 8, 8, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
        with zipfile.ZipFile(buffer, "w", kind) as archive:
            for name, data in content.items():
                archive.writestr(name if rng.random() < 0.98 else "x", data)
        return mutated(rng, buffer.getvalue()) if content == members or rng.random() < 0.3 else buffer.getvalue()

    return _file(folder / "data.npz", make, lambda path: load(path))


def idx(folder: Path) -> Case:
    from minidl.data.idx import read_idx

    content = bytes([0, 0, 8, 3, 0, 0, 0, 4, 0, 0, 0, 5, 0, 0, 0, 6]) + bytes(120)
    return _packed(folder / "images", content, lambda path: read_idx(path, 3))


def cifar(folder: Path) -> Case:
    from minidl.data.cifar import RECORD, read_batch

    return _packed(folder / "batch.bin", bytes(3 * RECORD), read_batch)


def _packed(path: Path, content: bytes, read: Callable[[Path], object]) -> Case:
    """Return a case for content that is raw, .gz or .xz. The content is changed before or after packing."""
    pack: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": lambda data: gzip.compress(data, 1, mtime=0),
                                                 ".xz": lambda data: lzma.compress(data, preset=0)}  # fmt: skip

    def case(rng: random.Random) -> Callable[[], object]:
        suffix = rng.choice(list(pack))
        file = path.with_name(path.name + suffix)
        if rng.random() < 0.5:
            file.write_bytes(pack[suffix](mutated(rng, content)))
        else:
            file.write_bytes(mutated(rng, pack[suffix](content)))
        return lambda: read(file)

    return case


# Weights and checkpoints.


def safetensors(folder: Path) -> Case:
    from minidl.run.checkpoint import header

    content = to_bytes({"a": np.zeros((2, 3), np.float32), "b": np.array(1.5)}, {"format": "pt", "x": "[1]"})
    return _file(folder / "a.safetensors", lambda rng: _changed_header(rng, content),
                 lambda path: header(path).values())  # fmt: skip


def _changed_header(rng: random.Random, content: bytes) -> bytes:
    """Return a safetensors file with changed bytes, or with a changed header whose stated length is right."""
    if rng.random() < 0.3:
        return mutated(rng, content)
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    about = header.get("__metadata__", {})
    if rng.random() < 0.5 and "classes" in about:
        name = rng.choice(METADATA)
        about[name] = mutated_json(rng, [json.loads(about[name])])
        about[name] = about[name].removeprefix("[").removesuffix("]")
        text = json.dumps(header)
    else:
        text = mutated_json(rng, header)
    data = text.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(8, "little") + data + content[end:]


def weights(folder: Path) -> Case:
    from minidl import models
    from minidl.run.trained import load

    about = {"format": "pt", "model": "resnet20", "input_shape": "[8, 8, 1]", "classes": "3", "mean": "[0.5]",
             "std": "[1.0]"}  # fmt: skip
    content = to_bytes(models.build("resnet20", (8, 8, 1), 3).state_dict(), about)
    return _file(folder / "model.safetensors", lambda rng: _changed_header(rng, content), load)


def epoch_weights(folder: Path) -> Case:
    from minidl.training.epoch_averages import read_about, read_weights, write_weights

    file, theta = folder / "0.safetensors", np.zeros(7, np.float32)
    write_weights(file, theta, {"step": 5, "seconds": 0.5, "workers": 2})
    content = file.read_bytes()

    def read(path: Path) -> None:
        read_about(path)
        read_weights(path, theta)

    return _file(file, lambda rng: _changed_header(rng, content), read)


def checkpoint(folder: Path) -> Case:
    """Return a case for changed checkpoints with right checksums. A trainer restores each checkpoint and continues."""
    from minidl import data, nn
    from minidl.run import checkpoint as files
    from minidl.run.config import Config
    from minidl.training.replica_state import own_state
    from minidl.training.resume import make_checkpoint, restore
    from minidl.training.trainer import Trainer

    config = Config(data="synthetic:44x2x2x1:3", model="mlp", batch_size=16, epochs=2, workers=1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    trainer = Trainer(model, data.load(config.data), config)
    own = own_state(trainer)
    own.stats = trainer.fabric.stats.vector()
    good = [make_checkpoint(trainer), make_checkpoint(trainer, [own])]
    weights = to_bytes(good[0].weights, {"format": "pt", **good[0].about})

    def case(rng: random.Random) -> Callable[[], object]:
        chosen = rng.choice(good)
        vectors, text = dict(chosen.vectors), json.dumps(chosen.state)
        if rng.random() < 0.8:
            text = mutated_json(rng, chosen.state)
        elif vectors:
            name = rng.choice(list(vectors))
            vectors[name] = _changed_vector(rng, vectors[name])
        metadata = {"format": files.FORMAT, "state": text.encode("utf-8", "replace").decode()}
        state = to_bytes(vectors, metadata)
        contents = {files.MODEL: weights, files.STATE: mutated(rng, state) if rng.random() < 0.1 else state}
        sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in contents.items())
        for name, content in (contents | {files.SUMS: sums.encode()}).items():
            (folder / name).write_bytes(content)
        return attempt

    def attempt() -> None:
        restore(trainer, files.load(folder))
        json.dumps(next(trainer.run(), None))

    return case


def _changed_vector(rng: random.Random, vector: np.ndarray) -> np.ndarray:
    kind = rng.randrange(5)
    if kind == 0:
        return vector.astype(rng.choice((np.float64, np.int64, np.uint8, np.float16)))
    if kind == 1:
        return np.resize(vector, rng.choice((1, vector.size + 1, 10 * vector.size)))
    if kind == 2:
        return vector.reshape(1, -1)
    changed = vector.copy()
    if changed.size:
        changed[rng.randrange(changed.size)] = rng.choice((np.nan, np.inf, 1e30, -1e30, 2.0**62))
    return changed


PARSERS: dict[str, Callable[[Path], Case]] = {
    "json": json_text,
    "config.toml": config_toml,
    "cluster.toml": cluster_toml,
    "metrics.jsonl": metrics,
    "summary.json": summary,
    "report": report,
    "job.json": invitation,
    "edge list": edge_list,
    "graph.json": graph_json,
    "graph.graphml": graph_xml,
    "npy header": npy_header,
    "npz": npz,
    "idx": idx,
    "cifar": cifar,
    "safetensors": safetensors,
    "weights": weights,
    "epoch weights": epoch_weights,
    "checkpoint": checkpoint,
}


def attempt(case: Case, seed: int, name: str) -> Exception | None:
    """Read the input of a seed. Return the error if it is not in ALLOWED, or if its message has several lines."""
    read = case(random.Random(f"{name} {seed}"))
    try:
        read()
    except ALLOWED as error:
        return None if "\n" not in str(error) else error
    except Exception as error:
        return error
    return None
