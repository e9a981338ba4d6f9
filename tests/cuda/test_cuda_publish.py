"""Gossip of a replica on a GPU: it sends and mixes without a copy of its weights that a step waits for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from fake_driver import installed
from fake_driver.by_definition import by_definition
from fake_driver.driver import FakeDriver, Settings

from minidl import nn
from minidl.comm.fabric.base import Fabric
from minidl.comm.replica import Engine, Replica
from minidl.comm.transport.loopback import LoopbackTransport
from minidl.run.config import resolve

STEPS = 5


@pytest.fixture(params=[False, True], ids=["late", "eager"])
def fake(request: pytest.FixtureRequest) -> Iterator[FakeDriver]:
    with installed(Settings(eager=request.param)) as fake, by_definition(fake):
        yield fake
        assert not fake.error


def replica(device: str) -> Replica:
    nn.seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 10)).to(device)
    return Replica(Engine(model, resolve({"method": "gossip", "workers": 1})), Fabric(LoopbackTransport()))


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((6, 5, 4, 1)).astype(np.float32), rng.integers(0, 10, 6)) for _ in range(STEPS)]


def test_what_is_sent_is_one_step_old_and_what_arrives_is_mixed(fake: FakeDriver) -> None:
    mine, reference, sent, expected = replica("cuda:0"), replica("cpu"), [], []
    other = np.linspace(-1, 1, reference.theta.size, dtype=np.float32)
    before = reference.theta.copy()
    for number, batch in enumerate(batches()):
        for one in (mine, reference):
            one.mix(other[:100], 0.25, 7)
            one.gradient(batch)
            one.update()
        other[:] += number  # the call before has copied it
        sent.append(mine.outgoing().copy())
        expected.append(reference.theta.copy() if number == 0 else before)
        before = reference.theta.copy()
    for number, (found, wanted) in enumerate(zip(sent, expected, strict=True)):
        np.testing.assert_allclose(found, wanted, atol=1e-5, err_msg=str(number))
    np.testing.assert_allclose(mine.theta, reference.theta, atol=1e-5)


def test_no_step_waits_for_the_weights(fake: FakeDriver) -> None:
    """Per step: losses come to the host, batches and the other's model go to the GPU; the weights stay there."""
    mine, other = replica("cuda:0"), np.zeros(replica("cpu").theta.size, np.float32)
    mine.outgoing()
    for number, batch in enumerate(batches()):
        if number == STEPS - 1:
            before = dict(fake.counts)
        mine.mix(other, 0.5)
        mine.gradient(batch)
        mine.update()
        waits = fake.counts["cuStreamSynchronize"]
        mine.outgoing()
        assert fake.counts["cuStreamSynchronize"] == waits, "only the event of an earlier copy is waited for"
    made = {name: fake.counts[name] - before[name] for name in before}
    assert made["cuMemcpyDtoHAsync_v2"] == 3, "the loss, the number of correct answers, and a slot"
    assert made["cuMemcpyHtoDAsync_v2"] == 2, "a batch, and the other's model"
    assert made["cuMemcpyDtoDAsync_v2"] == 1 and made["cuMemAlloc_v2"] == made["cuMemHostAlloc"] == 0


def test_a_replica_on_a_cpu_sends_its_vector_itself() -> None:
    one = replica("cpu")
    assert one.outgoing() is one.theta and one.publisher() is None
