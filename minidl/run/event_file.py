"""A file of events that TensorBoard reads. Needs tensorboardX (extra `tensorboard`) for the format of an event.

    length | checksum of the length | event | checksum of the event | length | ...

The events are written by the calling thread, so that the time it takes can be measured. tensorboardX's own writer uses
another thread.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

FOLDER = "tensorboard"  # in the folder of a run
MOST_VALUES = 20_000  # of an array that a histogram counts; of more, some are left out at equal distances
BINS = 30
FLUSH = 2.0  # seconds after which what was written can be read by others
SMALLEST = 48  # pixels: smaller images are enlarged


@contextmanager
def _without_torch() -> Iterator[None]:
    """Let imports of PyTorch fail: tensorboardX would import it if it is installed, which takes seconds."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


def _summaries() -> ModuleType:
    """Return the functions of tensorboardX that make summaries, which are the contents of events."""
    with _without_torch():
        from tensorboardX import summary
    return summary


class EventFile:
    """A new file of events in this folder, which is created if necessary. Its functions raise OSError.

    step: events of this step and later ones in older files are void, because the run has been resumed; 0: there are
    none.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        _summaries()
        from tensorboardX.crc32c import crc32c
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._event, self._checksum = Event, crc32c
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = _unused(folder, name).open("wb")
        self._flushed = 0.0
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if step:
            self._write(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, step: int, when: float, *summaries: Any) -> None:
        """Append events. when: Unix time."""
        for each in summaries:
            self._write(self._event(wall_time=when, step=step, summary=each))
        if time.monotonic() - self._flushed > FLUSH:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Any) -> None:
        data = event.SerializeToString()
        size = struct.pack("<Q", len(data))
        self._file.write(b"".join((size, self._masked(size), data, self._masked(data))))

    def _masked(self, data: bytes) -> bytes:
        """Return the checksum of a part of the file, in the form that TensorFlow defines."""
        plain = self._checksum(data)
        return struct.pack("<I", ((plain >> 15 | plain << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _unused(folder: Path, name: str) -> Path:
    """Return the path of a file that does not exist: simulated replicas, for example, have the same process."""
    number = 0
    while (path := folder / f"{name}.{number}").exists():
        number += 1
    return path


# -- the contents of events --------------------------------------------------------------------------------


def scalars(values: Mapping[str, float]) -> Any:
    """Return a summary of numbers by name."""
    summary = _summaries().Summary
    return summary(value=[summary.Value(tag=name, simple_value=value) for name, value in values.items()])


def histogram(name: str, values: np.ndarray) -> Any:
    """Return the histogram of an array's finite values."""
    flat = values.reshape(-1)
    flat = flat[:: -(-flat.size // MOST_VALUES)]
    flat = flat[np.isfinite(flat)].astype(np.float64)
    if not flat.size:
        flat = np.zeros(1)
    counts, edges = np.histogram(flat, BINS)
    return _summaries().histogram_raw(
        name, float(flat.min()), float(flat.max()), flat.size, float(flat.sum()), float(flat @ flat),
        edges[1:].tolist(), counts.tolist(),
    )  # fmt: skip


def text(name: str, words: str) -> Any:
    """Return a text in Markdown."""
    return _summaries().text(name, words)


def options(values: Mapping[str, Any], results: tuple[str, ...]) -> list[Any]:
    """Return summaries of the options of a run ("hyperparameters"). results: the names of its scalars to compare."""
    plain = {name: value if isinstance(value, str | int | float) else ",".join(map(str, value))
             for name, value in values.items() if value is not None}  # fmt: skip
    return list(_summaries().hparams(plain, dict.fromkeys(results, 0.0))[:2])


def end_of_options() -> Any:
    """Return the summary which says that a run with options has ended with success."""
    return _summaries().hparams({}, {})[2]


def images(name: str, pixels: np.ndarray) -> Any:
    """Return images (N, H, W, C), in one picture with as many rows as columns. C: 1 or 3; else the first is shown."""
    count, height, width, channels = pixels.shape
    shown = pixels if channels == 3 else pixels[..., :1]
    low, high = float(shown.min()), float(shown.max())
    grey = np.clip((shown - low) * (255 / ((high - low) or 1.0)), 0, 255).astype(np.uint8)
    side, larger = math.ceil(math.sqrt(count)), -(-SMALLEST // max(height, width))
    picture = np.full((side, side, height + 1, width + 1, shown.shape[3]), 255, np.uint8)
    picture.reshape(side * side, *picture.shape[2:])[:count, :height, :width] = grey
    joined = picture.transpose(0, 2, 1, 3, 4).reshape(side * (height + 1), side * (width + 1), -1)
    joined = joined.repeat(larger, axis=0).repeat(larger, axis=1)
    return _summaries().image(name, np.broadcast_to(joined, (*joined.shape[:2], 3)).copy(), dataformats="HWC")
