"""The part of a run's page about several replicas: who sent what to whom, where the time went, deaths and joins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from minidl.comm import cluster as clusters
from minidl.comm import staleness
from minidl.errors import ConfigError
from minidl.report import page
from minidl.report.data import RunData, seconds_of
from minidl.report.figures import Figures, bars, curves, dots, graph, heat, marks, spans, stacked, time_axis, unit
from minidl.report.page import Html
from minidl.resources import size
from minidl.run.display import count

MOST_BARS = 40  # replicas with a bar of their own; of more, some are drawn
MOST_NODES = 32  # in the drawing of the topology
MOST_MARKS = 20  # deaths and joins that are named
MOST_CELLS = 64  # rows of the traffic matrix
KINDS = {"gradient": "gradient", "update": "update", "mix": "mix", "waiting": "waiting", "idle": "idle at the end",
         "data": "data", "other": "other"}  # fmt: skip


def sections(run: RunData, drawn: Figures) -> Iterator[Html]:
    """Yield the sections about several replicas, and about the cluster of a simulation."""
    if run.replicas > 1:
        yield page.section("Replicas", *accuracies(run, drawn))
        yield page.section("Traffic", *traffic(run, drawn))
        yield page.section("Where the time went", *times(run, drawn))
        yield page.section("Deaths, joins and speeds", *lives(run, drawn))
    if run.simulated:
        yield page.section("The cluster", *cluster(run))


def accuracies(run: RunData, drawn: Figures) -> Iterator[Html]:
    """Show the accuracy of the average, the best and the worst replica, and the consensus distance over time."""
    result = run.result
    names = {"accuracy_average": "average of all", "accuracy_best": "best replica", "accuracy_worst": "worst replica",
             "accuracy_center": "center"}  # fmt: skip
    rows = [(words, f"{result[name]:.2%}") for name, words in names.items() if name in result]
    tested = [(one["rank"], one["accuracy"]) for one in result.get("replicas", []) if one["accuracy"] is not None]
    some = f"{len(tested)} of the {run.replicas:,} replicas" if len(tested) < run.replicas else "each replica"
    if rows:
        yield page.table(("weights", "test accuracy"), rows, f"Test accuracy, also of {some} alone")
    else:
        yield page.note("The test accuracies are left out: the run has no result.")
    inside = []
    if len(tested) > 1:
        points = [(float(rank), 100 * accuracy) for rank, accuracy in tested]
        inside.append(drawn.draw(
            f"Test accuracy of {len(tested)} replicas", f"Test accuracy of {some} alone.",
            lambda axes: dots(axes, points, "replica", "accuracy", percent=True)))  # fmt: skip
    distances = [entry for entry in run.curve("consensus_distance") if seconds_of(entry) is not None]
    if distances:
        factor, label = time_axis(run.simulated, [seconds_of(entry) or 0.0 for entry in distances])
        line = [(factor * (seconds_of(entry) or 0.0), 100 * entry["consensus_distance"]) for entry in distances]
        inside.append(drawn.draw(
            f"Curve of the consensus distance, at last {line[-1][1]:.3g}%",
            "Consensus distance over time: how far the replicas' weights are from their average.",
            lambda axes: curves(axes, {"": line}, label, "distance", percent=True)))  # fmt: skip
    else:
        inside.append(page.note("The consensus distance over time is left out: the replicas of this run were not "
                                "compared while they trained."))  # fmt: skip
    yield page.figures(*inside)


# -- traffic ---------------------------------------------------------------------------------------------


def matrix_of(run: RunData) -> tuple[np.ndarray, int] | None:
    """Return the bytes from each group of ranks (row) to each, and the number of ranks in a group; None: unknown."""
    result = run.result
    if "traffic" in result:
        return np.array(result["traffic"]["bytes"], float), result["traffic"]["ranks_per_cell"]
    edges = [edge for edge in result.get("edges", []) if max(edge[:2]) < 1 << 16]
    if not edges:
        return None
    ranks = 1 + max(max(edge[:2]) for edge in edges)
    together = -(-ranks // MOST_CELLS)
    found = np.zeros((-(-ranks // together),) * 2)
    for sender, receiver, amount, _ in edges:
        found[sender // together, receiver // together] += amount
    return found, together


def traffic(run: RunData, drawn: Figures) -> Iterator[Html]:
    """Show the traffic matrix, the topology, the staleness, and what was left out or compressed."""
    result = run.result
    if "bytes_sent" in result:
        messages = count(result.get("messages", 0), "message")
        between = result.get("bytes_between_nodes", 0)
        where = f"{size(between)} of it between nodes" if between else "none of it between nodes"
        yield page.paragraph(f"{size(result['bytes_sent'])} in {messages}, {where}.")
    known = matrix_of(run)
    inside = []
    if known is None:
        inside.append(page.note("The traffic matrix and the topology are left out: the run has no result that says who "
                                "sent what to whom."))  # fmt: skip
    else:
        inside += drawn_traffic(known, drawn)
    inside += list(ages(run, drawn))
    yield page.figures(*inside)
    yield from left_out(run)


def drawn_traffic(known: tuple[np.ndarray, int], drawn: Figures) -> Iterator[Html]:
    matrix, together = known
    factor, name = unit(matrix.ravel().tolist(), "bytes")
    cell = "rank" if together == 1 else f"group of {together} ranks"
    sender, receiver = (int(place) for place in np.unravel_index(int(matrix.argmax()), matrix.shape))
    most = (f"Most was sent from {ranks_in(sender, together)} to {ranks_in(receiver, together)}: "
            f"{factor * matrix[sender, receiver]:.3g} {name}")  # fmt: skip
    caption = f"Traffic matrix: bytes from each {cell} (row) to each other (column). {most}."
    yield drawn.draw(f"Traffic matrix. {most}", caption,
                     lambda axes: heat(axes, matrix * factor, together, "receiver (rank)", "sender", name), (5.0, 3.6))
    fold = -(-len(matrix) // MOST_NODES)
    nodes = -(-len(matrix) // fold)
    padded = np.zeros((nodes * fold,) * 2)
    padded[: len(matrix), : len(matrix)] = matrix
    folded = padded.reshape(nodes, fold, nodes, fold).sum(axis=(1, 3))
    many = together * fold
    first = [node * many for node in range(nodes)]
    lines = int((np.triu(folded + folded.T, 1) > 0).sum())
    what = "replicas (and servers)" if many == 1 else f"groups of {many} ranks, each named by its first one"
    yield drawn.draw(f"Topology: {nodes} {what} on a circle, joined by {lines} lines",
                     f"Topology: {what}. A line is as wide as the traffic between its ends.",
                     lambda axes: graph(axes, folded, [str(rank) for rank in first]), (5.0, 3.6))  # fmt: skip


def ranks_in(group: int, together: int) -> str:
    """Name the ranks of a group."""
    return f"rank {group}" if together == 1 else f"ranks {group * together}–{(group + 1) * together - 1}"


def ages(run: RunData, drawn: Figures) -> Iterator[Html]:
    """Draw the histogram of the staleness."""
    old = run.result.get("staleness")
    if not old or not old["histogram"]:
        yield page.note("The staleness is left out: no vector was mixed in that could be stale (as with synchronous "
                        "methods), or the run has no result.")  # fmt: skip
        return
    known = [staleness.label(number) for number in range(staleness.BINS)]
    found = [label for label in known if label in old["histogram"]]
    labels = known[: known.index(found[-1]) + 1] if found else []
    values = [old["histogram"].get(label, 0) for label in labels]
    words = f"mean {old['mean']:.2f}, at most {old['max']:g} steps"
    yield drawn.draw(f"Histogram of the staleness: {words}",
                     f"Staleness of what was mixed in, in steps of the sender: {words}.",
                     lambda axes: bars(axes, labels, values, "steps", "vectors"))  # fmt: skip


def left_out(run: RunData) -> Iterator[Html]:
    """Say what was suppressed, skipped or compressed."""
    result, options = run.result, run.options
    rows = []
    if result.get("exchanges_suppressed"):
        rows.append(("exchanges left out by --adaptive", f"{result['exchanges_suppressed']:,} of "
                     f"{result.get('exchanges', 0) + result['exchanges_suppressed']:,}"))  # fmt: skip
        rows.append(("their bytes", size(result.get("bytes_suppressed", 0))))
    for name, words in (("sends_skipped", "sends skipped: the edge was busy"), ("reads_missed", "reads missed"),
                        ("reads_overlapped", "reads overlapped by a write"),
                        ("batches_repeated", "batches repeated after deaths")):  # fmt: skip
        if result.get(name):
            rows.append((words, f"{result[name]:,}"))
    if options.get("compress", "none") != "none" and result.get("messages") and result.get("parameters"):
        share = result.get("bytes_sent", 0) / (4 * result["parameters"] * result["messages"])
        rows.append((f"mean size of a message, with --compress {options['compress']}", f"{share:.1%} of the weights"))
    if rows:
        yield page.table(("", "amount"), rows, "Left out, skipped or compressed")
    elif result:
        yield page.paragraph("Nothing was left out, skipped or compressed.")


# -- time ------------------------------------------------------------------------------------------------


def times(run: RunData, drawn: Figures) -> Iterator[Html]:
    """Draw where the time of each replica went."""
    each = run.result.get("replicas", [])
    if not each:
        total = run.result.get("virtual_seconds_by_kind", {})
        if total:
            yield page.table(("kind", "seconds"), [(kind, f"{value:.4g}") for kind, value in total.items()],
                             "Seconds of all replicas together")  # fmt: skip
        else:
            yield page.note("Left out: the run has no result that says where the time of each replica went.")
        return
    chosen = each[:: -(-len(each) // MOST_BARS)]
    factor, name = unit([sum(one["seconds"].values()) for one in chosen], "seconds")
    name = f"virtual {name}" if run.simulated else name
    parts = {words: [factor * one["seconds"].get(kind, 0.0) for one in chosen] for kind, words in KINDS.items()}
    parts = {words: values for words, values in parts.items() if any(values)}
    sums = {words: sum(one["seconds"].get(kind, 0.0) for one in each) for kind, words in KINDS.items()}
    whole = sum(sums.values()) or 1.0
    shares = ", ".join(f"{words} {value / whole:.1%}" for words, value in sums.items() if value)
    some = f" {len(chosen)} of {len(each):,} replicas are drawn." if len(chosen) < len(each) else ""
    height = 1.2 + 0.13 * max(len(chosen), 3)
    yield page.figures(drawn.draw(
        f"Bars of the time of {len(chosen)} replicas. Of all time: {shares}",
        f"Time of each replica. Of all time: {shares}.{some}",
        lambda axes: stacked(axes, [str(one["rank"]) for one in chosen], parts, name), (5.0, height)))  # fmt: skip
    if "wait_fraction" in run.result:
        factor, name = unit([run.result.get("idle_seconds", 0.0)], "seconds")
        yield page.paragraph(f"{run.result['wait_fraction']:.1%} of the time was spent waiting for other replicas; "
                             f"all together were idle for {factor * run.result.get('idle_seconds', 0.0):.3g} {name} "
                             "after their last steps.")  # fmt: skip


def lives(run: RunData, drawn: Figures) -> Iterator[Html]:
    """Draw which replicas trained when, with deaths and joins, and their speeds."""
    changes = [line for line in run.history if line["event"] == "members" and "members" in line and "seconds" in line]
    if not changes:
        yield page.note("Left out: history.jsonl does not say which replicas trained when.")
        return
    last = max([line.get("seconds", 0.0) for line in run.history] + [seconds_of(e) or 0.0 for e in run.entries[-1:]])
    every = sorted({rank for line in changes for rank in line["members"]})
    moments, before = [(line.get("seconds", 0.0), "continued") for line in run.continued], set(changes[0]["members"])
    present: dict[int, list[tuple[float, float]]] = {rank: [] for rank in every}
    changed: set[int] = set()
    for number, line in enumerate(changes):
        now, ends = set(line["members"]), changes[number + 1]["seconds"] if number + 1 < len(changes) else last
        for rank in now:
            present[rank].append((line["seconds"], max(ends, line["seconds"])))
        moments += [(line["seconds"], f"{rank} left") for rank in sorted(before - now)]
        moments += [(line["seconds"], f"{rank} joined") for rank in sorted(now - before)]
        changed |= before ^ now
        before = now
    inside = [drawn_lives(run, drawn, present, changed, moments)] if changed else []
    if not changed:
        yield page.paragraph(f"{len(every):,} replicas trained; none died or joined.")
    yield page.figures(*inside, *speed_curves(run, drawn, moments))


def drawn_lives(
    run: RunData, drawn: Figures, present: dict[int, list[tuple[float, float]]], changed: set[int],
    moments: list[tuple[float, str]],
) -> Html:  # fmt: skip
    """Draw when each replica trained: of many replicas, those that left or joined, and some of the others."""
    others = [rank for rank in present if rank not in changed]
    room = max(4, MOST_BARS - len(changed))
    shown = sorted([*sorted(changed)[:MOST_BARS], *others[:: -(-len(others) // room) or 1]])
    factor, label = time_axis(run.simulated, [stop for spells in present.values() for _, stop in spells])
    named = marked(moments, factor)
    said = ", ".join(f"replica {word} after {moment:.3g} s" for moment, word in moments[:MOST_MARKS]
                     if word != "continued")  # fmt: skip
    more = f" {len(changed)} replicas left or joined." if len(moments) > MOST_MARKS else ""
    some = f" {len(shown)} of {len(present)} replicas are drawn." if len(shown) < len(present) else ""

    def draw(axes: Any) -> None:
        spells = [[(factor * start, factor * stop) for start, stop in present[rank]] for rank in shown]
        spans(axes, [str(rank) for rank in shown], spells, label)
        marks(axes, named)

    return drawn.draw(f"Bars: when each of {len(shown)} replicas trained. {said}",
                      f"When each replica trained: {said}.{more}{some}", draw,
                      (5.0, 1.2 + 0.13 * max(len(shown), 3)))  # fmt: skip


def marked(moments: list[tuple[float, str]], factor: float) -> list[tuple[float, str]]:
    return [(factor * moment, word) for moment, word in moments[:MOST_MARKS]]


def speed_curves(run: RunData, drawn: Figures, moments: list[tuple[float, str]]) -> Iterator[Html]:
    """Draw the recent speeds of replicas over time; without them, the mean speed of each replica."""
    lines: dict[int, list[tuple[float, float]]] = {}
    for line in run.history:
        if line["event"] == "speeds" and "seconds" in line:
            for rank, value in zip(line.get("members", []), line.get("images_per_second", [])):
                if value:  # 0: not measured yet
                    lines.setdefault(rank, []).append((line["seconds"], value))
    if not lines:
        yield from mean_speeds(run, drawn)
        return
    mean = {rank: sum(value for _, value in points) / len(points) for rank, points in lines.items()}
    order = sorted(lines, key=lambda rank: mean[rank])
    chosen = order if len(order) <= 8 else [order[0], order[len(order) // 2], order[-1]]
    words = {} if len(order) <= 8 else dict(zip(chosen, ("slowest", "median", "fastest")))
    factor, label = time_axis(run.simulated, [moment for points in lines.values() for moment, _ in points])
    named = {f"{words[rank]}: {rank}" if words else f"replica {rank}":
             [(factor * moment, value) for moment, value in lines[rank]] for rank in sorted(chosen)}  # fmt: skip

    def draw(axes: Any) -> None:
        curves(axes, named, label, "images/s")
        axes.set_ylim(bottom=0)
        marks(axes, marked(moments, factor))

    caption = "Recent speed of replicas, after each epoch" + (" (slowest, median, fastest)." if words else ".")
    yield drawn.draw(f"Curves of the recent speeds of {len(chosen)} of {len(order)} replicas", caption, draw)


def mean_speeds(run: RunData, drawn: Figures) -> Iterator[Html]:
    """Draw the mean speed of each replica over the run."""
    points = [(float(one["rank"]), one["images_per_second"]) for one in run.result.get("replicas", [])
              if one["images_per_second"]]  # fmt: skip
    if points:
        values = sorted(value for _, value in points)
        words = f"slowest {values[0]:,.0f}, median {values[len(values) // 2]:,.0f}, fastest {values[-1]:,.0f} images/s"
        yield drawn.draw(f"Mean speeds of {len(points)} replicas: {words}", f"Mean speed of each replica: {words}.",
                         lambda axes: dots(axes, points, "replica", "images/s"))  # fmt: skip
    else:
        yield page.note("The speeds of the replicas are left out: the run's files do not contain them.")


# -- the cluster of a simulation -------------------------------------------------------------------------


def cluster(run: RunData) -> Iterator[Html]:
    try:
        known = clusters.parse(run.cluster, clusters_file(run))
        rows = [(one.name, f"{one.count:,}", ", ".join(one.devices)) for one in known.groups]
        yield page.table(("nodes", "number", "devices of each"), rows, f"The nodes of {known.file}")
        ranks = run.result.get("ranks", 0)
        if known.repeat and ranks > known.size:
            yield page.paragraph(f"The list of nodes repeats: there are {ranks:,} ranks, and {known.size:,} devices in "
                                 "the list.")  # fmt: skip
    except ConfigError as error:
        yield page.note(f"The cluster is not described: {error}.")
    links: dict[str, Any] = run.result.get("links", {})
    if links:
        sums = [(name, f"{int(link.get('messages', 0)):,}", size(int(link.get("bytes", 0))),
                 f"{link.get('transfer', 0):,.4g} s", f"{link.get('queue', 0):,.4g} s")
                for name, link in links.items()]  # fmt: skip
        yield page.table(("link", "messages", "bytes", "transfer", "waiting for the link"), sums,
                         "Links: sums over all messages, in virtual seconds")  # fmt: skip
    yield page.heading(3, "Its description")
    yield page.code(run.cluster.strip())


def clusters_file(run: RunData) -> str:
    return str(run.result.get("cluster", "cluster.toml"))
