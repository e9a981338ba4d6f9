"""What passes over vectors cost in a simulation: the times of operations, sums and steps, by hand calculation."""

from __future__ import annotations

import numpy as np
import pytest
from quadratic import SIZE, START, STEPS, Run, gradient
from sim_helper import ones, simulate

from bench.papers.costs import run
from bench.papers.networks import Layer, Network
from minidl.comm.cluster import load, parse
from minidl.comm.codecs import Feedback, build
from minidl.comm.fabric.base import Fabric
from minidl.comm.fabric.wire import EXACT, Coded
from minidl.comm.vectors import VectorArithmetic

N = 256
KERNEL, MIX, UPDATE = 0.5, 12 * N / 1000, 20 * N / 1000  # 12 or 20 bytes of each element, at 1000 bytes/s
PASS = KERNEL + MIX
PAIR = """
devices.gpu = {flops = 1e12, memory = 1000, kernel = 0.5, additions = true}
nodes = [{name = "node", devices = ["gpu", "gpu"]}]
inside = {alpha = 0.25, beta = 1e-3}
"""
MESSAGE, CODE = 0.25 + 4 * N / 1000, 0.25 + 2 * N / 1000  # of N float32, of N bfloat16
HOST = """
devices.gpu = {flops = 1e12, memory = 1000, kernel = 0.5}
devices.cpu = {flops = 1e12, memory = 4000, kernel = 0.125, host = true}
nodes = [{name = "node", devices = ["gpu", "cpu"]}]
inside = {}
host = {alpha = 0.25, beta = 1e-3, shared = true}
"""
ONE_LAYER = Network("one layer", (Layer(N, 1),), 1)  # an image has 4 bytes, and takes 6e-12 s


class Vectors(VectorArithmetic):
    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric


def test_each_operation_is_a_pass_and_no_elements_are_none():
    def work(fabric: Fabric) -> list[float]:
        vectors, x, y, times = Vectors(fabric), ones(N), ones(N), []
        operations = [
            lambda: vectors.mix_into(x, y, 0.5), lambda: vectors.scale(x, 2.0), lambda: vectors.axpy(1.0, x, y),
            lambda: vectors.elastic(x, y, 0.1), lambda: vectors.copy(x, y),
            lambda: vectors.pull(x, y, 0.1, out=np.empty_like(x)), lambda: vectors.drift(x, y),
            lambda: fabric.elapse("update", N), lambda: fabric.elapse("mix", N, passes=2),
            lambda: vectors.mix_into(x[:0], y[:0], 0.5), lambda: fabric.elapse("mix", N, passes=0),
        ]  # fmt: skip
        for operation in operations:
            began = fabric.now()
            operation()
            times.append(fabric.now() - began)
        return times

    times = [PASS] * 7 + [KERNEL + UPDATE, 2 * PASS, 0, 0]
    assert simulate(work, 1, parse(PAIR)).results[0] == pytest.approx(times)


def test_a_copy_copies_and_refuses_another_length():
    def work(fabric: Fabric) -> None:
        x, y = ones(), np.zeros(250, np.float32)
        Vectors(fabric).copy(x, y)
        assert np.array_equal(x, y)
        with pytest.raises(Exception, match="250 and 3 elements"):
            Vectors(fabric).copy(x, y[:3])

    simulate(work, 1)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("code", [False, True])
def test_codes_of_a_sum_are_passes(ring: bool, code: bool):
    """What a rank sends takes 3 passes: add what was lost, encode, decode. To add or decode what comes takes one."""

    def work(fabric: Fabric) -> tuple[float, float]:
        vector = ones(N)
        codec = build("bf16")
        assert codec
        wire = Coded(Feedback(codec, np.zeros_like(vector)), vector, 0, 0) if code else EXACT
        fabric.group((0, 1)).allreduce(vector, wire, ring)
        return fabric.now(), float(vector[0])

    found = simulate(work, 2, parse(PAIR)).results
    message = CODE if code else MESSAGE
    if ring:  # half of the vector in each message; each rank adds its half, and sends it back
        half, message = KERNEL + MIX / 2, (message + 0.25) / 2
        times = [2 * message + half + (3 + 3 + 1) * half * code] * 2
    else:  # up: rank 1 sends, rank 0 adds. down: rank 0 sends
        sent = message + 3 * PASS * code + PASS + 3 * PASS * code
        times = [sent, sent + message + PASS * code]
    assert [found[rank][0] for rank in (0, 1)] == pytest.approx(times) and found[0][1] == found[1][1] == 2.0


def test_a_step_of_sync_easgd():
    """Pull, update, apply the pull; the sum: a message, an addition, a message; then the center."""
    found = run("sync-easgd", {"center": "beside", "momentum": 0.0}, 2, parse(PAIR), ONE_LAYER, 1, 1)
    assert found.seconds == pytest.approx(3 * PASS + KERNEL + UPDATE + MESSAGE + PASS + MESSAGE)


def test_a_step_of_easgd_with_a_center_on_the_host():
    """A message; the host copies the center for the reply, and updates it; the reply."""
    found = run("easgd", {"center": "rank", "momentum": 0.0}, 1, parse(HOST), ONE_LAYER, 1, 1)
    host = 0.125 + MIX / 4
    batch = 0.25 + 4e-3
    assert found.seconds == pytest.approx(MESSAGE + 2 * host + MESSAGE + PASS + batch + KERNEL + UPDATE + PASS)


def test_steps_of_ps_and_hogwild():
    batch, update = 0.25 + 4e-3, KERNEL + UPDATE
    on_host = 0.125 + UPDATE / 4
    found = run("ps", {"momentum": 0.0}, 1, parse(HOST), ONE_LAYER, 1, 1)
    assert found.seconds == pytest.approx(batch + MESSAGE + on_host + MESSAGE)
    encode = 2 * PASS  # add what was lost, encode; the host decodes; its first reply is whole
    found = run("ps", {"momentum": 0.0, "compress": "bf16"}, 1, parse(HOST), ONE_LAYER, 1, 1)
    copy = decode = 0.125 + MIX / 4
    assert found.seconds == pytest.approx(batch + encode + CODE + decode + on_host + copy + MESSAGE)
    found = run("hogwild-sgd", {"momentum": 0.0}, 1, parse(HOST), ONE_LAYER, 1, 1)
    assert found.seconds == pytest.approx(batch + MESSAGE + update + MESSAGE)


def test_all_examples_say_what_a_pass_costs_if_additions_take_time():
    for name in ("gpu-node-8", "gpu-node-4", "knl-aries", "infiniband-fdr", "ethernet-10g"):
        for device in load(name).devices.values():
            assert device.additions and device.kernel, name


@pytest.mark.parametrize("staleness", ["divide", "ignore"])
def test_the_server_of_ps_divides_by_the_age_or_ignores_it(staleness: str):
    found = Run("ps", 4, lr=0.1, momentum=0.0, staleness=staleness)
    c, x, steps, sent, ages = START.copy(), [START] * 3, [0] * 3, [0] * 3, []
    for version, i in enumerate(found.visits):
        ages.append(version - sent[i])
        c = c - 0.1 / (max(1, ages[-1]) if staleness == "divide" else 1) * gradient(x[i], steps[i], i)
        x[i], sent[i] = c, version + 1
        np.testing.assert_allclose(found.x[steps[i], i], c, rtol=0, atol=1e-12)
        steps[i] += 1
    assert steps == [STEPS] * 3 and max(ages) >= 2 and c.size == SIZE
