"""Cluster files in TOML: how they are interpreted, and a one-line error for each mistake."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl.comm.cluster import EXAMPLES, Cluster, load, parse
from minidl.errors import ConfigError

GOOD = """
[devices.cpu]
flops = 1e9
[devices.gpu]
flops = 1e12
jitter = 0.1
[[nodes]]
name = "left"
count = 2
devices = ["cpu", "gpu"]
[[nodes]]
name = "right"
devices = ["gpu"]
[inside]
alpha = 1e-6
rate = 8e9
[between]
alpha = 1e-4
beta = 1e-8
drop = 0.1
"""


def test_a_file_with_two_groups_of_nodes():
    cluster = parse(GOOD)
    assert cluster.size == 5
    place = cluster.place(5)
    assert place.nodes == (0, 0, 1, 1, 2)
    assert place.names == ("left-0", "left-1", "right")
    assert [device.flops for device in place.devices] == [1e9, 1e12, 1e9, 1e12, 1e12]
    assert cluster.inside.beta == 1e-9 and cluster.link("left", "right").drop == 0.1
    assert cluster.place(3).nodes == (0, 0, 1)
    assert cluster.seconds_per_image(place.devices[0], "", 2e9) == 2.0


def test_links_between_given_groups():
    text = GOOD.replace("[between]", '[[links]]\ngroups = ["left", "left"]\n[[links]]\ngroups = ["right", "left"]')
    cluster = parse(text)
    assert cluster.between is None
    assert cluster.link("left", "right").beta == 1e-8 and cluster.link("left", "left").beta == 0


def test_repeat_starts_the_list_of_nodes_again():
    place = parse("repeat = true\n" + GOOD).place(12)
    assert place.names == ("left-0", "left-1", "right-0", "left-2", "left-3", "right-1", "left-4")
    assert place.nodes[-3:] == (5, 6, 6)


def test_events_affect_a_rank_a_node_or_a_group():
    events = "[[deaths]]\nnode = 'left'\ntime = 2\n[[deaths]]\nrank = 4\ntime = 1.5\n[[joins]]\nnode = 'left-1'\n"
    place = parse(GOOD + events).place(5)
    assert place.deaths == ((1.5, 4), (2.0, 0), (2.0, 1), (2.0, 2), (2.0, 3))
    assert place.joins == ((0.0, 2), (0.0, 3))


def test_measured_seconds_are_divided_by_the_speed():
    text = GOOD.replace("flops = 1e9", "speed = 0.5") + "[measured]\n'mlp digits' = 1e-3\n"
    cluster = parse(text)
    assert cluster.seconds_per_image(cluster.devices["cpu"], "mlp digits", 1.0) == 2e-3
    with pytest.raises(ConfigError, match="no 'vgg cifar10', but a device with `speed` needs this time"):
        cluster.seconds_per_image(cluster.devices["cpu"], "vgg cifar10", 1.0)


@pytest.mark.parametrize("change, words", [
    (("flops = 1e9", "flop = 1e9"), r"\[devices.cpu\] unknown key 'flop'. Did you mean 'flops'\?"),
    (("flops = 1e9", "flops = -1e9"), r"\[devices.cpu\] flops: expected a number above 0, got -1000000000.0"),
    (("flops = 1e9", "flops = true"), r"\[devices.cpu\] flops: expected a number"),
    (("flops = 1e9", "flops = inf"), r"\[devices.cpu\] flops: expected a number"),
    (("flops = 1e9", "memory = 1e9"), r"\[devices.cpu\] expected flops or speed, got neither"),
    (("flops = 1e9", "flops = 1e9\nspeed = 1"), r"\[devices.cpu\] expected flops or speed, not both"),
    (("jitter = 0.1", "jitter = 1e308"), r"\[devices.gpu\] jitter: expected a number between 0 and 10, got 1e\+308"),
    (("alpha = 1e-6", "alpha = -1"), r"\[inside\] alpha: expected a number of 0 or more"),
    (("rate = 8e9", "rate = 0"), r"\[inside\] rate: expected a number above 0"),
    (("rate = 8e9", "rate = 8e9\nbeta = 1"), r"\[inside\] expected beta or rate, not both"),
    (("drop = 0.1", "drop = 1.0"), r"\[between\] drop: expected a number of 0 or more and below 1"),
    (("[between]", "[betwen]"), r"unknown key 'betwen'. Did you mean 'between'\?"),
    (("count = 2", "count = 0"), r"\[\[nodes\]\] count: expected a whole number between 1 and 1000000, got 0"),
    (('["gpu"]', '["gpo"]'), r"\[\[nodes\]\] 'right' devices: there is no \[devices.gpo\]. Did you mean 'gpu'\?"),
    (('["gpu"]', "[]"), r"\[\[nodes\]\] 'right' devices: expected a list of kinds of devices, got \[\]"),
    (('"right"', '"left"'), r"\[\[nodes\]\] name: 'left' is used twice"),
    (('name = "right"\n', ""), r"\[\[nodes\]\] name: expected a name"),
    (("[inside]", "[[deaths]]\ntime = 1\n[inside]"), r"\[\[deaths\]\] expected a rank or a node"),
    (("[between]", "[[links]]\ngroups = ['left', 'rigth']"), r"there are no nodes 'rigth'. Did you mean 'right'\?"),
    (("[between]", "[[links]]\ngroups = ['left', 'left']"), "nodes 'right' cannot be reached from 'left'"),
    (("[between]", "[stragglers]\nprobability = 2\n[between]"), r"\[stragglers\] probability: expected a number"),
    (("[between]", "[measured]\nx = 0\n[between]"), r"\[measured\] 'x': expected seconds per image above 0, got 0"),
    (("[devices.cpu]", "repeat = 1\n[devices.cpu]"), "repeat: expected true or false, got 1"),
    (("[inside]", "[inside"), "not readable as TOML"),
    (("jitter", "host = true\njitter"), r"\[devices.gpu\] host: without a table \[host\] all devices are hosts"),
    (("jitter", "batch = -1\njitter"), r"\[devices.gpu\] batch: expected a number of 0 or more"),
    (("[inside]", "[host]\nshared = 1\n[inside]"), r"\[host\] shared: expected true or false"),
    ((GOOD, ""), r"no replicas: it has no \[\[nodes\]\]"),
    ((GOOD, "nodes = 3"), r"nodes: expected tables \[\[nodes\]\]"),
    ((GOOD, "devices = 3"), r"devices: expected a table \[devices\], got 3"),
    ((GOOD, "devices.cpu = 3"), r"\[devices.cpu\] expected a table, got 3"),
])  # fmt: skip
def test_mistakes_are_reported_in_one_line(change, words):
    text = GOOD.replace(*change)
    assert text != GOOD
    with pytest.raises(ConfigError, match="^cluster file 'my.toml': .*" + words) as caught:
        parse(text, "my.toml")
    assert "\n" not in str(caught.value)


def test_ranks_that_do_not_fit():
    with pytest.raises(ConfigError, match=r"6 ranks on 5 devices: .* or repeat = true"):
        parse(GOOD).place(6)
    with pytest.raises(ConfigError, match=r"\[\[deaths\]\] node 'lefft': there is no such node .* Did you mean 'left"):
        parse(GOOD + "[[deaths]]\nnode = 'lefft'").place(5)
    with pytest.raises(ConfigError, match=r"\[\[joins\]\] rank 9: there is no such rank among 5 ranks"):
        parse(GOOD + "[[joins]]\nrank = 9").place(5)


def test_the_examples(tmp_path):
    names = sorted(file.stem for file in EXAMPLES.glob("*.toml"))
    assert names == ["ethernet-10g", "gpu-node-4", "gpu-node-8", "infiniband-fdr", "knl-aries", "stragglers",
                     "two-offices", "two-racks", "uniform", "workstation"]  # fmt: skip
    for name in names:
        assert load(name).place(4).nodes
    assert load(EXAMPLES / "uniform.toml").place(1000).nodes[-1] == 999
    with pytest.raises(ConfigError, match=r"no cluster file 'unifrom'. Did you mean 'uniform'\? Examples .*two-racks"):
        load("unifrom")
    (tmp_path / "x.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"x.toml': it is not UTF-8 text"):
        load(tmp_path / "x.toml")
    with pytest.raises(ConfigError, match="it is a folder; expected a regular file"):
        load(tmp_path)


values = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2), max_leaves=3,
)  # fmt: skip
keys = st.sampled_from(["devices", "nodes", "inside", "between", "links", "deaths", "flops", "name", "groups", "alpha"])


tables = st.dictionaries(keys, values, max_size=3)


@settings(max_examples=50)
@given(st.dictionaries(keys, values | tables | st.lists(tables, max_size=2), max_size=4))
def test_any_table_is_a_cluster_or_an_error(top):
    from minidl.comm.cluster import _Reader
    from minidl.comm.cluster_tables import Wrong

    try:
        assert isinstance(_Reader(top, "x").cluster(), Cluster)
    except Wrong as error:
        assert str(error)


@given(st.text())
def test_arbitrary_text_is_refused(text):
    with pytest.raises(ConfigError, match="cluster file"):  # Hypothesis draws no text with nodes and devices
        parse(text)


numbers = st.floats(0, 1e9)


@given(numbers, st.floats(1e-9, 1e12), st.integers(1, 50), st.integers(1, 4), st.booleans(), st.data())
def test_every_rank_has_a_place(alpha, flops, count, cores, repeat, draw):
    text = f"""
    repeat = {str(repeat).lower()}
    [devices.core]
    flops = {flops!r}
    [[nodes]]
    name = "n"
    count = {count}
    devices = {["core"] * cores!r}
    [between]
    alpha = {alpha!r}
    """
    cluster = parse(text)
    ranks = draw.draw(st.integers(1, 300 if repeat else count * cores))
    place = cluster.place(ranks)
    assert len(place.nodes) == len(place.devices) == ranks and cluster.between.alpha == alpha
    assert [place.nodes.count(node) for node in range(len(place.names))] == [
        min(cores, ranks - node * cores) for node in range(-(-ranks // cores))
    ]
