"""minidl's GPU code on a fake driver: memory, copies, kernels, streams, and what can go wrong with a device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_driver import installed
from fake_driver.driver import FakeDriver, Settings

from minidl.engine import cuda_driver
from minidl.engine.cuda import kernel, launch, launch_with
from minidl.engine.cuda_array import array_at
from minidl.engine.cuda_device import Gpu, open_gpu
from minidl.engine.device import Device
from minidl.errors import ConfigError, MinidlError
from minidl.run.config import resolve
from minidl.training.session import device_of

HANDLES = r"CU(stream|event|function|module|context|graph|graphExec)\b"


@pytest.fixture(params=[False, True], ids=["late", "eager"])
def fake(request: pytest.FixtureRequest) -> Iterator[FakeDriver]:
    with installed(Settings(eager=request.param)) as fake:
        yield fake
        assert not fake.error


def test_prototypes_are_those_of_the_header() -> None:
    import nvidia

    headers = [found for folder in nvidia.__path__ for found in Path(folder).rglob("cuda.h")]
    if not headers:
        pytest.skip("the header cuda.h is not installed")
    text = headers[0].read_text(errors="replace")
    size = {"c_int": 4, "c_uint": 4, "c_ubyte": 1}
    for name, types in cuda_driver.FUNCTIONS.items():
        # The header declares cuMemFree, and a macro replaces the name by cuMemFree_v2, or by another one.
        macros = re.findall(rf"#define (\w+)\s+{name}$", text, re.MULTILINE)
        declared = "|".join([name, name.removesuffix("_v2"), *macros])
        found = re.search(rf"CUresult CUDAAPI (?:{declared})\((.*?)\);", text)
        assert found, name
        parameters = [p.strip() for p in found[1].split(",")]
        assert len(parameters) == len(types), name
        for parameter, kind in zip(parameters, types, strict=True):
            pointer = "*" in parameter or re.match(HANDLES, parameter)
            wide = pointer or re.match(r"(size_t|CUdeviceptr|cuuint64_t|unsigned long long)", parameter)
            narrow = 1 if parameter.startswith("unsigned char") else 4
            assert size.get(kind.__name__, 8) == (8 if wide else narrow), (name, parameter)


def test_copies_and_kernels(fake: FakeDriver) -> None:
    gpu = open_gpu("cuda:0")
    a, b = np.arange(1000, dtype=np.float32), np.ones(1000, np.float32)
    there = [gpu.allocate(4000) for _ in range(3)]
    gpu.send(a, there[0].address)
    gpu.send(b, there[1].address)
    x, y, out = (array_at(memory.address, (1000,), np.float32) for memory in there)
    with gpu.running():
        gpu.kernels("elementwise").add(x, y, out)
        gpu.kernels("elementwise").add(out, y, out)
    result = np.empty(1000, np.float32)
    gpu.fetch(there[2].address, result)
    np.testing.assert_array_equal(result, a + 2)


def test_values_on_the_device_cannot_be_read_from_the_host(fake: FakeDriver) -> None:
    array = array_at(open_gpu("cuda:0").allocate(64).address, (4, 4), np.float32)
    assert array[1:, :].reshape(-1).size == 12
    for read in (lambda: array + 1, lambda: array[0, 0], lambda: np.sum(array), lambda: list(array), array.copy):
        with pytest.raises(MinidlError, match="GPU's memory"):
            read()


def test_memory_is_freed(fake: FakeDriver) -> None:
    gpu = open_gpu("cuda:0")
    before = gpu.free()
    memory = gpu.allocate(1 << 20)
    assert gpu.free() == before - (1 << 20)
    del memory
    assert gpu.free() == before


def test_a_pinned_array_is_read_when_the_copy_is_made() -> None:
    with installed(Settings()) as fake:
        gpu = open_gpu("cuda:0")
        memory, array, result = gpu.allocate(4), gpu.pinned((1,), np.float32), np.zeros(1, np.float32)
        array[0] = 1
        gpu.send(array, memory.address)
        array[0] = 2  # too early: nothing has waited for the copy
        gpu.fetch(memory.address, result)
        assert result[0] == 2
        assert not fake.error


def test_events_order_streams(fake: FakeDriver) -> None:
    gpu = open_gpu("cuda:0")
    memory, array, result = gpu.allocate(4), gpu.pinned((1,), np.float32), np.zeros(1, np.float32)
    array[0] = 7
    gpu.send(array, memory.address, gpu.copies)
    done = gpu.event()
    gpu.record(done, gpu.copies)
    gpu.wait(done, gpu.main)
    gpu.fetch(memory.address, result)
    assert result[0] == 7


def test_copies_on_the_device(fake: FakeDriver) -> None:
    gpu = open_gpu("cuda:0")
    here, there, result = gpu.allocate(12), gpu.allocate(12), np.zeros(3, np.float32)
    gpu.send(np.arange(3, dtype=np.float32), here.address)
    gpu.copy(here.address, there.address, 12)
    gpu.fetch(there.address, result)
    np.testing.assert_array_equal(result, [0, 1, 2])


def test_too_little_memory() -> None:
    message = "2 MiB more are needed, and 1 MiB are free"
    with installed(Settings(memory=1 << 20)), pytest.raises(ConfigError, match=message):
        open_gpu("cuda:0").allocate(2 << 20)


def test_a_lost_device() -> None:
    with installed(Settings(lose_after=1)):
        gpu = open_gpu("cuda:0")
        memory = gpu.allocate(4)
        with pytest.raises(MinidlError, match=r"cuda:0 .emulated GPU. has failed.*CUDA_ERROR_LAUNCH_FAILED"):
            with gpu.running():
                gpu.kernels("elementwise").fill(1.0, array_at(memory.address, (1,), np.float32))
            gpu.synchronize()


@pytest.mark.parametrize(
    ("settings", "name", "message"),
    [
        (Settings(gpus=0), "cuda:0", "finds no GPU"),
        (Settings(gpus=2), "cuda:2", "there is no cuda:2: this machine has cuda:0, cuda:1"),
        (Settings(capability=(7, 5)), "cuda:0", "compute capability 7.5: expected 8.0 or higher"),
        (Settings(version=11080), "cuda:0", "supports CUDA 11.8"),
    ],
)
def test_devices_that_cannot_be_used(settings: Settings, name: str, message: str) -> None:
    with installed(Settings()):
        pass
    with pytest.raises(ConfigError, match=message), installed(settings):
        Gpu(int(name[5:]))


@pytest.mark.parametrize("launcher", [{}, {"OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "4",
                                           "OMPI_COMM_WORLD_LOCAL_RANK": "{local}"},
                                      {"PMI_RANK": "{rank}", "PMI_SIZE": "4", "MPI_LOCALRANKID": "{local}"}],
                         ids=["workers", "Open MPI", "MPICH"])  # fmt: skip
def test_the_ranks_of_a_machine_take_its_gpus_in_turn(launcher: dict[str, str], monkeypatch: Any) -> None:
    """Under mpiexec, ranks 0 and 2 are on one machine, 1 and 3 on another. Without it, all are on one machine."""
    config = resolve({"device": "cuda"})
    found = []
    with installed(Settings(gpus=2)):
        for rank in range(4):
            for name, text in launcher.items():
                monkeypatch.setenv(name, text.format(rank=rank, local=rank // 2))
            found.append(device_of(config, rank))
    expected = (0, 0, 1, 1) if launcher else (0, 1, 0, 1)
    assert found == [f"cuda:{number}" for number in expected]


def test_launches_that_no_gpu_can_make() -> None:
    def fill(out: np.ndarray) -> None:
        pass

    with launch_with(lambda *_: None), pytest.raises(ConfigError, match="needs 1 x 70000 x 1 blocks"):
        launch(kernel()(fill), (1, 70_000), np.zeros(1))


def test_no_driver() -> None:
    cuda_driver.load.cache_clear()
    try:
        cuda_driver.load()
    except ConfigError as error:
        assert "no NVIDIA driver" in str(error) or "no GPU can be used" in str(error)


@pytest.mark.parametrize("offset", [0, 1, 50])
def test_dropout_reads_seed_and_counter_from_memory(offset: int) -> None:
    """The same launch draws the numbers of the CPU at each place, also where the keys change (2**32)."""
    with installed(Settings()) as fake:
        gpu, x = open_gpu("cuda:0"), np.ones(300, np.float32)
        memory, source, target = gpu.allocate(16), gpu.allocate(1200), gpu.allocate(1200)
        gpu.send(x, source.address)
        for seed, start in ((7, 0), (-3, 2**32 - 100), (2**63 + 5, 2**40)):
            gpu.send(np.array([seed % 2**64, start], np.uint64), memory.address)
            place, *vectors = (array_at(m.address, (n,), t) for m, n, t in (
                (memory, 2, np.uint64), (source, 300, np.float32), (target, 300, np.float32)))  # fmt: skip
            with gpu.running():
                gpu.kernels("dropout").dropout(vectors[0], 0.3, place, offset, vectors[1])
            found, expected = np.empty_like(x), np.empty_like(x)
            gpu.fetch(target.address, found)
            Device("cpu").dropout.dropout(x, 0.3, (seed + 2**63) % 2**64 - 2**63, start + offset, expected)
            np.testing.assert_array_equal(found, expected)
        assert not fake.error
