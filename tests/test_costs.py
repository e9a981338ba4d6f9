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

KERNEL, MIX, UPDATE = 0.5, 3.0, 5.0  # 250 elements: 12 or 20 bytes of each, at 1000 bytes/s
PASS = KERNEL + MIX
PAIR = """
devices.gpu = {flops = 1e12, memory = 1000, kernel = 0.5, additions = true}
nodes = [{name = "node", devices = ["gpu", "gpu"]}]
inside = {alpha = 0.25, beta = 1e-3}
"""  # a message of 1000 bytes takes 1.25 s, its code in bfloat16 0.75 s
HOST = """
devices.gpu = {flops = 1e12, memory = 1000, kernel = 0.5}
devices.cpu = {flops = 1e12, memory = 4000, kernel = 0.125, host = true}
nodes = [{name = "node", devices = ["gpu", "cpu"]}]
inside = {}
host = {alpha = 0.25, beta = 1e-3, shared = true}
"""
TO_HOST = 1.25
ONE_LAYER = Network("one layer", (Layer(250, 1),), 1)  # an image has 4 bytes, and takes 6e-12 s


class Vectors(VectorArithmetic):
    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric


def test_each_operation_is_a_pass_and_no_elements_are_none():
    def work(fabric: Fabric) -> list[float]:
        vectors, x, y, times = Vectors(fabric), ones(), ones(), []
        operations = [
            lambda: vectors.mix_into(x, y, 0.5), lambda: vectors.scale(x, 2.0), lambda: vectors.axpy(1.0, x, y),
            lambda: vectors.elastic(x, y, 0.1), lambda: vectors.copy(x, y),
            lambda: vectors.pull(x, y, 0.1, out=np.empty_like(x)), lambda: vectors.drift(x, y),
            lambda: fabric.elapse("update", 250), lambda: fabric.elapse("mix", 250, passes=2),
            lambda: vectors.mix_into(x[:0], y[:0], 0.5), lambda: fabric.elapse("mix", 250, passes=0),
        ]  # fmt: skip
        for operation in operations:
            began = fabric.now()
            operation()
            times.append(fabric.now() - began)
        return times

    assert simulate(work, 1, parse(PAIR)).results[0] == [PASS] * 7 + [KERNEL + UPDATE, 2 * PASS, 0, 0]


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
        vector = ones()
        codec = build("bf16")
        assert codec
        wire = Coded(Feedback(codec, np.zeros_like(vector)), vector, 0, 0) if code else EXACT
        fabric.group((0, 1)).allreduce(vector, wire, ring)
        return fabric.now(), float(vector[0])

    found = simulate(work, 2, parse(PAIR)).results
    if ring:  # half of the vector in each message; each rank adds its half, and sends it back
        half, message = KERNEL + MIX / 2, 0.25 + (0.25 if code else 0.5)
        time = 2 * message + half + (3 + 3 + 1) * half * code
        assert found == {0: (time, 2.0), 1: (time, 2.0)}
    else:  # up: rank 1 sends, rank 0 adds. down: rank 0 sends
        message = 0.75 if code else 1.25
        sent = message + 3 * PASS * code + PASS + 3 * PASS * code
        assert found == {0: (sent, 2.0), 1: (sent + message + PASS * code, 2.0)}


def test_a_step_of_sync_easgd():
    """Pull, copy, update, apply the pull; the sum: a message, an addition, a message; then the center."""
    found = run("sync-easgd", {"center": "beside", "momentum": 0.0}, 2, parse(PAIR), ONE_LAYER, 1, 1)
    assert found.seconds == pytest.approx(4 * PASS + KERNEL + UPDATE + 1.25 + PASS + 1.25)


def test_a_step_of_easgd_with_a_center_on_the_host():
    """A message; the host copies the center for the reply; while the reply moves, it updates the center."""
    found = run("easgd", {"center": "rank", "momentum": 0.0}, 1, parse(HOST), ONE_LAYER, 1, 1)
    host = 0.125 + MIX / 4
    batch = 0.25 + 4e-3
    assert found.seconds == pytest.approx(TO_HOST + 2 * host + TO_HOST + PASS + batch + KERNEL + UPDATE + PASS)


def test_steps_of_ps_and_hogwild():
    batch, update = 0.25 + 4e-3, KERNEL + UPDATE
    on_host = 0.125 + UPDATE / 4
    found = run("ps", {"momentum": 0.0}, 1, parse(HOST), ONE_LAYER, 1, 1)
    assert found.seconds == pytest.approx(batch + TO_HOST + on_host + TO_HOST)
    code, message = 2 * PASS, 0.25 + 0.5  # add what was lost, encode; the host decodes; its first reply is whole
    found = run("ps", {"momentum": 0.0, "compress": "bf16"}, 1, parse(HOST), ONE_LAYER, 1, 1)
    copy = decode = 0.125 + MIX / 4
    assert found.seconds == pytest.approx(batch + code + message + decode + on_host + copy + TO_HOST)
    found = run("hogwild-sgd", {"momentum": 0.0}, 1, parse(HOST), ONE_LAYER, 1, 1)
    assert found.seconds == pytest.approx(batch + TO_HOST + update + TO_HOST)


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
