"""Data in a user's .npz file: what is accepted, and a one-line error for everything else."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl.data import load
from minidl.data.npz import read_npz
from minidl.errors import ConfigError, DataError


def arrays(shape: tuple[int, ...] = (5, 4, 2), dtype: str = "uint8", **changes: np.ndarray) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = [rng.integers(0, 256, (n, *shape)).astype(dtype) for n in (9, 6)]
    return {"x_train": x[0], "y_train": np.arange(9) % 3, "x_test": x[1], "y_test": np.arange(6) % 3, **changes}


def save(path: Path, content: dict[str, np.ndarray]) -> Path:
    np.savez(path, **content)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize(
    ("shape", "layout", "expected"),
    [
        ((5, 4, 2), "channels-last", (5, 4, 2)),
        ((2, 5, 4), "channels-first", (5, 4, 2)),
        ((5, 4), "channels-last", (5, 4, 1)),
        ((5, 4), "channels-first", (5, 4, 1)),
        ((7,), "channels-first", (1, 1, 7)),
    ],
)
def test_layouts(tmp_path: Path, shape: tuple, layout: str, expected: tuple) -> None:
    content = arrays(shape)
    data = load(save(tmp_path / "mine.npz", content), layout=layout)
    assert data.input_shape == expected and data.classes == 3 and data.name == "mine"
    x = content["x_train"]
    if layout == "channels-first" and len(shape) == 3:
        x = np.moveaxis(x, 1, -1)
    np.testing.assert_allclose(data.x_train * data.std + data.mean, x.reshape(9, *expected) / 255, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16", ">f4"])
def test_numbers_other_than_uint8_are_not_scaled(tmp_path: Path, dtype: str) -> None:
    splits = read_npz(save(tmp_path / "a.npz", arrays(dtype=dtype)))
    np.testing.assert_array_equal(splits.x_test, arrays()["x_test"].astype(np.float32))


def test_fortran_order_and_compression(tmp_path: Path) -> None:
    content = arrays()
    content["x_train"] = np.asfortranarray(content["x_train"])
    np.savez_compressed(tmp_path / "a.npz", **content)  # type: ignore[arg-type]
    np.testing.assert_array_equal(read_npz(tmp_path / "a.npz").x_train, content["x_train"])


NAN = np.zeros((9, 5, 4, 2))
NAN[4, 1, 1, 1] = np.nan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": np.array([{}] * 9)}, "x_train holds object"),
        ({"x_train": np.zeros((9, 5, 4), complex)}, "x_train holds complex128"),
        ({"x_train": np.zeros(9)}, r"shape \(9,\), expected images"),
        ({"x_train": np.zeros((9, 1, 5, 4, 2))}, r"shape \(9, 1, 5, 4, 2\)"),
        ({"x_test": np.zeros((0, 5, 4, 2))}, "no size of 0"),
        ({"x_test": np.zeros((6, 5, 4, 3))}, r"x_train are \(5, 4, 2\), of x_test \(5, 4, 3\)"),
        ({"x_train": NAN}, "x_train has NaN or infinity in image 4"),
        ({"x_train": np.full((9, 5, 4, 2), 1e300)}, "x_train has NaN or infinity in image 0"),
        ({"y_train": np.arange(8)}, r"y_train is int64 \(8,\), expected whole numbers \(9,\)"),
        ({"y_train": np.zeros((9, 1), int)}, r"y_train is int64 \(9, 1\)"),
        ({"y_train": np.zeros(9)}, "y_train is float64"),
        ({"y_train": np.arange(9) - 1}, "label -1 in y_train at 0, expected 0 to 8"),
        ({"y_train": np.arange(9) * 1000}, "label 8000 in y_train at 8, expected 0 to 8"),
        ({"y_test": np.array([0, 1, 2, 3, 0, 0])}, "label 3 in y_test at 3, expected 0 to 2"),
    ],
)
def test_wrong_contents(tmp_path: Path, changes: dict, message: str) -> None:
    path = save(tmp_path / "a.npz", arrays(**changes))
    with pytest.raises(DataError, match=message) as info:
        read_npz(path)
    assert str(path) in str(info.value) and "\n" not in str(info.value)


def test_wrong_names(tmp_path: Path) -> None:
    content = arrays()
    content["X_train"] = content.pop("x_train")
    with pytest.raises(DataError, match=r"no array 'x_train'.*found .*Did you mean 'X_train'\?"):
        load(save(tmp_path / "a.npz", content))
    with pytest.raises(DataError, match="does not exist"):
        load(tmp_path / "b.npz")
    with pytest.raises(ConfigError, match="Did you mean 'channels-first'"):
        load(tmp_path / "a.npz", layout="channel-first")


def test_headers_that_claim_more_than_the_file_holds(tmp_path: Path) -> None:
    def write(shape: tuple[int, ...], version: bytes = b"\x01\x00") -> Path:
        header = repr({"descr": "|u1", "fortran_order": False, "shape": shape}).encode() + b"\n"
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            for name, array in arrays().items():
                buffer = io.BytesIO()
                np.save(buffer, array)
                archive.writestr(f"{name}.npy", buffer.getvalue())
            del archive.NameToInfo["x_train.npy"]
            archive.filelist = [info for info in archive.filelist if info.filename != "x_train.npy"]
            content = b"\x93NUMPY" + version + len(header).to_bytes(2, "little") + header + bytes(50)
            archive.writestr("x_train.npy", content)
        return tmp_path / "a.npz"

    for shape in ((10**15,), (10**9, 10**9, 10**9), (51,)):
        with pytest.raises(DataError, match="x_train holds 50 bytes, its header"):
            read_npz(write(shape))
    with pytest.raises(DataError, match="holds more bytes"):
        read_npz(write((49,)))
    for shape in ((-5, -10), (-50,)):
        with pytest.raises(DataError, match="x_train"):
            read_npz(write(shape))
    with pytest.raises(DataError, match=r"format \(3, 0\)"):
        read_npz(write((50,), b"\x03\x00"))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_files_raise_data_errors_only(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays())  # type: ignore[arg-type]
    content = bytearray(buffer.getvalue())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    for _ in range(data.draw(st.integers(1, 4))):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("npz") / "a.npz"
    path.write_bytes(content)
    try:
        splits = read_npz(path)
    except DataError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        assert len(splits.x_train) == len(splits.y_train)


@pytest.mark.parametrize("name", ["x_train", "x_test"])
def test_uint8_in_only_one_of_train_and_test_is_refused(tmp_path: Path, name: str) -> None:
    content = arrays()
    content[name] = content[name].astype(np.float32)
    with pytest.raises(DataError, match=r"only one of x_train and x_test holds uint8.*save both in one type"):
        read_npz(save(tmp_path / "a.npz", content))


def test_one_class_only(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="all training images have the label 1; expected at least two classes"):
        load(save(tmp_path / "a.npz", arrays(y_train=np.ones(9, int), y_test=np.ones(6, int))))


def test_a_message_shows_control_characters_escaped(tmp_path: Path) -> None:
    header = repr({"descr": "\x91i8", "fortran_order": False, "shape": (2,)}).replace("\\x91", "\x91")
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode("latin-1") + bytes(16)
    path = tmp_path / "data.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            archive.writestr(f"{name}.npy", content)
    with pytest.raises(DataError, match="whole or floating-point") as caught:
        read_npz(path)
    assert str(caught.value).isprintable()
