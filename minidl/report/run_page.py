"""The page of one run: report.html in its folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minidl.errors import MinidlError
from minidl.nn.summary import Row
from minidl.report import data, page, predictions, replicas
from minidl.report.data import RunData, seconds_of, short_name
from minidl.report.figures import Figures, curves, logarithmic, marks, time_axis, whole_numbers
from minidl.report.page import Html
from minidl.report.predictions import MOST_CLASSES, Predictions
from minidl.resources import size
from minidl.run.display import count, speed
from minidl.run.folder import PAGE, resuming, write

MOST_ROWS = 200  # of the table of layers
MOST_CONFUSIONS = 20


def write_page(folder: Path, model: str = "", out: str = "") -> Path:
    """Write the page of a run; return its path. Nothing else in the folder is changed.

    model: the FILE.py:FUNCTION that the user has named, or "". out: another path of the page.
    Raises CheckpointError if the folder is no run, MinidlError if the page cannot be written.
    """
    path = Path(out) if out else folder / PAGE
    save(path, run_page(data.read(folder), model))
    return path


def save(path: Path, content: str) -> None:
    """Write a file completely or not at all. Raises MinidlError if it cannot be written."""
    try:
        write(path, content.encode())
    except OSError as error:
        raise MinidlError(f"cannot write {path}: {error.strerror}: give another --out") from None


def run_page(run: RunData, model: str = "") -> str:
    """Return the page of a run as HTML."""
    drawn, total = Figures(), run.replicas
    answers, layers, reason = predictions.parts(run, model)
    return page.page(
        f"{run.name}: minidl",
        page.heading(1, run.name),
        page.paragraph(what(run), "lead"),
        page.paragraph(ending(run), "lead"),
        page.section("Loss and accuracy", *learning(run, drawn)),
        page.section("Learning rate", *learning_rate(run, drawn)),
        page.section("Answers to the test images", *answered(answers, reason)),
        page.section("Speed", *speeds(run, drawn)),
        page.section("The model", *model_table(run, layers, reason)),
        *(replicas.sections(run, drawn) if total > 1 or run.simulated else ()),
        page.section("How to repeat it", *repeating(run)),
    )


def ratio(value: float) -> str:
    return f"{value:.2%}"


# -- sentences -------------------------------------------------------------------------------------------


def what(run: RunData) -> str:
    """Return what was trained, as a sentence."""
    options, began, result = run.options, run.began, run.result
    parameters = result.get("parameters") or began.get("parameters")
    images = began.get("images")
    sentence = f"{short_name(options.get('model', 'A model'))}"
    sentence += f" ({parameters:,} parameters)" if parameters else ""
    sentence += f" was trained on {short_name(options.get('data', 'a data set'))}"
    sentence += f" ({images:,} images)" if images else ""
    if run.replicas > 1:
        kind = "simulated replicas" if run.simulated else "replicas"
        sentence += f" by {run.replicas:,} {kind} with the method {result.get('method', options.get('method', '?'))}"
    rule = options.get("optimizer")
    return f"{sentence}{f', with the optimizer {rule}' if rule else ''}."


def ending(run: RunData) -> str:
    """Return how the run has ended, as a sentence."""
    result, end = run.result, run.end
    if result and "test_accuracy" in result:
        length = ", ".join(count(result[name], word) for name, word in (("epochs", "epoch"), ("steps", "step"))
                           if name in result)  # fmt: skip
        kind = "virtual s" if run.simulated else "s"
        took = f" in {result['seconds']:,.3g} {kind}" if "seconds" in result else ""
        took += again(run)
        best = f", with the weights of step {result['best_step']:,}, the best on the validation images" if (
            "best_step" in result) else ""  # fmt: skip
        loss = f" and a test loss of {result['test_loss']:.4f}" if "test_loss" in result else ""
        return (f"It finished after {length or 'its last step'}{took}, with a test accuracy of "
                f"{ratio(result['test_accuracy'])}{loss}{best}.")  # fmt: skip
    reached = progress(run)
    if end.get("event") == "failed":
        return f"It failed{reached}: {end.get('why', 'the reason is unknown')}."
    if run.running:
        return f"It is still going{reached}; this page shows what is known now."
    further = f"To continue: {resuming(run.folder)}"
    if end.get("event") == "stopped":
        return f"It was stopped{reached} by {end.get('why') or 'a signal'}. {further}"
    if not run.entries and not run.history:
        return f"It has not begun, or its process died before the first epoch had ended. {further}"
    return f"It has no result{reached}: its process was killed, or died. {further}"


def again(run: RunData) -> str:
    """Return how often the run was continued: " (continued once, at step 82)"; "" if it was not."""
    often = len(run.continued)
    if not often:
        return ""
    words = "once, at" if often == 1 else f"{often} times, last at"
    return f" (continued {words} step {run.continued[-1].get('step', 0):,})"


def progress(run: RunData) -> str:
    """Return how far the run got: " after step 120 (epoch 3 of 10)"."""
    last = run.entries[-1] if run.entries else run.end
    if not last.get("step"):
        return " before the end of its first epoch"
    step = max(last["step"], run.end.get("step", 0))
    epochs = run.began.get("epochs")
    return f" after step {step:,} (epoch {last['epoch']}{f' of {epochs}' if epochs else ''}){again(run)}"


# -- parts -----------------------------------------------------------------------------------------------


def learning(run: RunData, drawn: Figures) -> Iterator[Html]:
    """Draw loss and accuracy, over epochs and over seconds."""
    if not run.curve("loss"):
        yield page.note("There are no curves: no epoch has ended.")
        return
    inside = []
    for by_time in (False, True):
        if by_time and not any(seconds_of(entry) is not None for entry in run.curve("loss")):
            inside.append(page.note("The curves over seconds are left out: runs of earlier versions have no times."))
            continue
        for what, factor in (("loss", 1.0), ("accuracy", 100.0)):
            lines, best = lines_of(run, what, factor, by_time)
            inside.append(draw_learning(run, drawn, what, (lines, best), by_time))
    yield page.figures(*inside)
    if run.curve("validation_loss"):
        yield page.paragraph("The star marks the best validation accuracy.", "small")


def draw_learning(run: RunData, drawn: Figures, what: str, found: Any, by_time: bool) -> Html:
    lines, best = found
    moments: list[tuple[float, str]] = []
    x = "epoch"
    if by_time:
        factor, x = time_axis(run.simulated, [at for points in lines.values() for at, _ in points])
        lines = {name: [(factor * at, value) for at, value in points] for name, points in lines.items()}
        best = (factor * best[0], *best[1:]) if best else ()
        moments = [(factor * line.get("seconds", 0.0), "continued") for line in run.continued[:replicas.MOST_MARKS]]

    def draw(axes: Any) -> None:
        curves(axes, lines, x, what, best, percent=what == "accuracy")
        if what == "loss":
            logarithmic(axes, lines)
        if not by_time:
            whole_numbers(axes)
        marks(axes, moments)

    latest = "; ".join(f"{name}: {points[-1][1]:.4g}{'%' if what == 'accuracy' else ''} at the end"
                       for name, points in lines.items())  # fmt: skip
    caption = f"{what.capitalize()} over {'time' if by_time else 'epochs'}: {', '.join(lines)}."
    return drawn.draw(f"Curves of the {what} over {x}. {latest}", caption, draw)


def lines_of(
    run: RunData, what: str, factor: float = 1.0, by_time: bool = False
) -> tuple[dict[str, list[tuple[float, float]]], tuple[float, ...]]:
    """Return curves of the loss or the accuracy, and the point of the best validation accuracy, or ()."""
    lines: dict[str, list[tuple[float, float]]] = {}
    best: tuple[float, ...] = ()
    tested = "accuracy_average" if what == "accuracy" else "loss_average"
    for name, key in (("train", what), ("validation", f"validation_{what}"), ("test, average of all", tested)):
        entries = [entry for entry in run.curve(key) if not by_time or seconds_of(entry) is not None]
        points = [(float((seconds_of(e) or 0.0) if by_time else e["epoch"]), factor * e[key]) for e in entries]
        if points:
            lines[name] = points
        scored = [n for n, entry in enumerate(entries) if "validation_accuracy" in entry]
        if name == "validation" and scored:
            rank = lambda n: (entries[n]["validation_accuracy"], -entries[n].get("validation_loss", 0.0))  # noqa: B023, E731
            best = points[max(scored, key=rank)]
    return lines, best


def learning_rate(run: RunData, drawn: Figures) -> Iterator[Html]:
    entries = [entry for entry in run.entries if "lr" in entry]
    if not entries:
        yield page.note("The learning rate is unknown: no epoch has ended.")
        return
    points = [(float(entry["step"]), entry["lr"]) for entry in entries]
    caption = f"Learning rate over steps: {entries[0]['lr']:.3g} at step {entries[0]['step']:,}, " + (
        f"{entries[-1]['lr']:.3g} at step {entries[-1]['step']:,}.")  # fmt: skip

    def draw(axes: Any) -> None:
        curves(axes, {"": points}, "step", "learning rate")
        whole_numbers(axes)

    yield page.figures(drawn.draw(caption, caption, draw))


def answered(answers: Predictions | None, reason: str) -> Iterator[Html]:
    """Show the confusion matrix and the images about which the model was most wrong."""
    if answers is None or not len(answers.labels):
        yield page.note(f"Left out: {reason or 'there are no test images'}.")
        return
    asked, confusion = len(answers.labels), answers.confusion
    wrong = asked - int(confusion.trace())
    part = "" if asked == answers.total else f"the first {asked:,} of "
    yield page.paragraph(f"Of {part}{answers.total:,} test images, the saved model gives {wrong:,} a wrong class.")
    if len(confusion) <= MOST_CLASSES:
        names = [str(number) for number in range(len(confusion))]
        yield page.matrix(names, confusion.tolist(), "Confusion matrix: true classes in rows, answers in columns")
    else:
        pairs = [(int(confusion[i, j]), i, j) for i, j in zip(*confusion.nonzero()) if i != j]
        rows = [(true, said, f"{number:,}") for number, true, said in sorted(pairs, reverse=True)[:MOST_CONFUSIONS]]
        yield page.table(("true class", "answer", "images"), rows, f"The {len(rows)} most frequent confusions of "
                         f"{len(confusion)} classes")  # fmt: skip
    worst = answers.worst()
    yield page.heading(3, f"The {len(worst)} test images about which it was most wrong, or least sure")
    if answers.images.shape[1:3] == (1, 1):
        yield page.table(("number in the test set", "answer"), [(n, answers.described(n)) for n in worst],
                         "Inputs that are no images")  # fmt: skip
    else:
        yield page.images((answers.picture(number), answers.described(number)) for number in worst)


def speeds(run: RunData, drawn: Figures) -> Iterator[Html]:
    kind = "virtual " if run.simulated else ""
    if "images_per_second" in run.result:
        rest = f" Simulated in {run.result['real_seconds']:,.1f} real s." if "real_seconds" in run.result else ""
        yield page.paragraph(f"{speed(run.result['images_per_second'])} on average over the run, in {kind}seconds of "
                             f"training.{rest}")  # fmt: skip
    points = [(float(entry["epoch"]), entry["images_per_second"]) for entry in run.curve("images_per_second", "epoch")]
    if points:

        def draw(axes: Any) -> None:
            curves(axes, {"": points}, "epoch", "images/s")
            whole_numbers(axes)
            axes.set_ylim(bottom=0)

        caption = "Speed over epochs: the mean since the run began or continued (the first step is not counted)."
        yield page.figures(drawn.draw(f"Curve of the speed, at last {speed(points[-1][1])}", caption, draw))
    elif "images_per_second" not in run.result:
        yield page.note("The speed is unknown: no epoch has ended.")


def model_table(run: RunData, layers: list[Row], reason: str) -> Iterator[Html]:
    if not layers:
        yield page.note(f"The layers are left out: {reason}.")
        return
    rows = [(name, layer, shape, f"{parameters:,}", f"{flops:,}") for name, layer, shape, parameters, flops in layers]
    more = f" (the first {MOST_ROWS})" if len(rows) > MOST_ROWS else ""
    total, flops = sum(row[3] for row in layers), sum(row[4] for row in layers)
    yield page.paragraph(f"{total:,} parameters, {flops:,} FLOPs for the forward pass of one image.")
    yield page.table(("name", "layer", "output", "parameters", "FLOPs"), rows[:MOST_ROWS], f"Layers{more}")


def repeating(run: RunData) -> Iterator[Html]:
    """Show options, versions, machine, and the command that repeats the run."""
    yield page.code(run.repeat)
    began = run.began
    facts = [(name, version) for name, version in sorted(began.get("versions", {}).items())]
    facts += [(name, began[name]) for name in ("machine", "system", "cores", "threads") if name in began]
    if "memory_available" in began:
        facts.append(("free memory", size(began["memory_available"])))
    facts += [(name, f"{began[name]:,}") for name in ("replicas", "servers", "nodes") if name in began]
    facts.append(("seed", run.options.get("seed", "unknown")))
    yield page.table(("", "value"), facts, "Versions and machine, when the training last began or continued")
    continued = run.continued
    happened = [(("continued" if line in continued else line["event"]) + (f": {line['why']}" if "why" in line else ""),
                 time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(line["when"], 1e11))),
                 f"{line.get('step', 0):,}", f"{line.get('seconds', 0.0):,.3f}")
                for line in run.history if line["event"] in ("begin", "finished", "stopped", "failed")]  # fmt: skip
    if happened:
        yield page.table(("event", "when", "step", "s of training"), happened[-50:], "What happened to the run")
    rows = [(name.replace("_", "-"), ", ".join(value) or "none" if isinstance(value, (list, tuple)) else value)
            for name, value in run.options.items()]  # fmt: skip
    yield page.table(("option", "value"), rows, "Every option")
    for words in run.missing:
        yield page.note(words)
