"""Execute `python -m minidl.simulate`: train all replicas of a virtual cluster in this process.

The replicas share one model, one recorded step and one data set. Each has separate vectors (comm/replica.py), a trainer
(trainer.py) and a place in the cluster (comm/transport/sim.py). Evaluations take no virtual time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from minidl import nn
from minidl.comm import cluster as clusters
from minidl.comm import stats, trace
from minidl.comm.fabric.base import Column, Fabric, PeerLost, State
from minidl.comm.replica import Engine
from minidl.comm.transport.sim import Simulation
from minidl.errors import ConfigError, MinidlError
from minidl.program.replay import Prediction
from minidl.run import checkpoint as files
from minidl.run.config import Config
from minidl.run.display import Display
from minidl.run.evaluation import Score, evaluate
from minidl.run.folder import RunFolder, write
from minidl.run.model_file import short
from minidl.run.progress import BEST, Progress
from minidl.run.signals import Signals, Stopped
from minidl.training import forecast, regroup
from minidl.training.output import parameter_count
from minidl.training.replica_state import ReplicaState, averaged, mean_and_distance
from minidl.training.resume import make_checkpoint
from minidl.training.session import chosen, prepare
from minidl.training.summary import worked
from minidl.training.trainer import Entry, Trainer

HEAD = ("# The options of a simulated run, except the cluster and the number of ranks. To repeat it bit-identically:\n"
        "# `python -m minidl.simulate --cluster {cluster} --ranks {ranks} --config FILE`\n\n"
        )  # fmt: skip
LEGEND = ("loss, accuracy: on training images, means of all replicas; test: accuracy of their average; "
          "distance: consensus distance")  # fmt: skip
TESTED = 32  # at most this many replicas are tested individually
PRINTED = 10  # about so many epochs are printed; metrics.jsonl has all of them
LOG_EVERY = 100  # steps of a replica, on average, between two lines of metrics.jsonl
MEASURED = 20  # gradients that --measure times; the first, which compiles, is not counted


def execute(config: Config, given: Mapping[str, Any], signals: Signals) -> Entry:
    """Train, or with --measure only measure; return the result, ready for JSON.

    given: the options of the command line. Config does not have all of them: it lacks cluster, ranks and measure.
    """
    path = given.get("cluster", "uniform")
    if given.get("measure"):
        return measure(path, config)
    ranks, cluster = given.get("ranks", 8), clusters.read(path)
    simulated = SimulatedRun(config, clusters.parse(cluster, path), ranks, signals)
    with RunFolder.create(simulated.config, HEAD.format(cluster=path, ranks=ranks), cluster) as run:
        return simulated.train(run)


class SimulatedRun:
    """A run of all replicas of a virtual cluster, from the first step to the result."""

    def __init__(self, config: Config, cluster: clusters.Cluster, ranks: int, signals: Signals) -> None:
        kind, replicas = chosen(config, ranks)
        self.config, self.ranks, self.signals = replace(config, workers=len(replicas)), ranks, signals
        self.data, self.model = prepare(self.config)
        self.work = work_of(config)
        forecast.require_memory(ranks, parameter_count(self.model), len(self.data.y_train))
        flops = flops_per_image(self.model, self.data.input_shape)
        self.batch_flops = flops * config.batch_size
        self.simulation = Simulation(cluster, ranks, config.seed, self.work, flops, config.trace)
        self.synchronous = kind.synchronous and ranks > 1
        if self.synchronous and self.simulation.place.joins:
            raise cluster.wrong(f"[[joins]]: with method {config.method} all replicas make each step together, "
                                "from the first")  # fmt: skip
        self.engine = Engine(self.model, self.config)
        arena = self.engine.arena
        buffers = kind.buffers(arena.size, self.config)
        self.fabrics = [Fabric(transport, replicas) for transport in self.simulation.transports]
        self.trainers = []
        for fabric in self.fabrics:
            fabric.fail_fast = self.synchronous
            fabric.join(buffers, arena.layout_hash)
            self.trainers.append(Trainer(self.model, self.data, self.config, fabric=fabric, engine=self.engine))
        self.steps = self.logged = 0  # of all replicas together
        self.epoch = 0
        self.loss = self.correct = self.images = 0.0  # sums since the last line of metrics.jsonl
        self.last_loss = math.nan
        self.best = {name: getattr(Progress, name) for name in BEST}
        self.display = Display(config.quiet)
        self.engine.gradient.progress = self.engine.prediction.progress = self.display.compiling

    def train(self, run: RunFolder) -> Entry:
        """Train to the end of the virtual run; test; write and return the summary."""
        self.run, self.began = run, perf_counter()
        self.total, self.epochs = self.trainers[0].total_steps, self.trainers[0].epochs
        self.display.say(f"{run.folder}: {short(self.config.model)} ({parameter_count(self.model):,} parameters) on "
                         f"{self.config.data} ({len(self.data.y_train):,} images), {self.total:,} steps each, "
                         f"{self.config.workers} simulated replicas, {self.config.method}"
                         f"{forecast.duration(self.config.workers, self.total, self.batch_flops)}")  # fmt: skip
        self.display.say(LEGEND)
        self.signals.defer(self.config.quiet)
        try:
            self.simulation.run({rank: self.main(rank) for rank in range(self.ranks)}, self.check)
        except PeerLost as lost:
            raise MinidlError(f"{lost}, after {self.simulation.time:.6g} virtual s: with {self.config.method} all make "
                              "each step together; asynchronous methods (gossip) continue") from None  # fmt: skip
        finally:
            self.display.close()
        if self.signals.received is not None:
            stopped = Stopped(self.signals.received)
            stopped.message = f"stopped; its metrics are in {run.folder}; a simulation cannot be resumed"
            raise stopped
        return self.finish()

    def check(self) -> None:
        """If a signal has arrived, let all replicas stop after their present step."""
        if self.signals.received is not None and not self.simulation.stop_asked:
            self.simulation.stop()

    # -- a rank ------------------------------------------------------------------------------------------

    def main(self, rank: int) -> Callable[[], None]:
        trainer, fabric = self.trainers[rank], self.fabrics[rank]

        def handle(entry: Entry) -> None:
            if entry["event"] == "step":
                self.step_done(trainer, entry)

        def work() -> None:
            if rank not in fabric.replicas:
                fabric.set_status(Column.STATE, State.TRAINING)
                trainer.method.serve()
                return
            if fabric.now() > 0:
                self.catch_up(trainer, fabric)
            fabric.set_status(Column.STATE, State.TRAINING)
            fabric.stats.start()
            with suppress(Stopped):
                regroup.train(trainer, handle)
            fabric.stats.stop()
            trainer.work.give_back()
            fabric.set_status(Column.STATE, State.PAUSED)
            trainer.method.pause()

        return work

    def catch_up(self, trainer: Trainer, fabric: Fabric) -> None:
        """Copy the weights and the position of another replica to this one, which joins late."""
        others = [rank for rank in fabric.survivors() if rank != fabric.rank]
        if not others:
            return
        other = self.trainers[others[0]]
        theta, at = other.replica.theta.copy(), other.progress
        came: list[bool] = []

        def arrive() -> None:
            came.append(True)
            self.simulation.transport(fabric.rank).wake()

        other.fabric.stats.sent(fabric.rank, theta.nbytes)
        self.simulation.transfer(others[0], fabric.rank, theta.nbytes, arrive)
        fabric.wait(lambda: came or None, others[:1], "its first weights")
        fabric.stats.received(others[0], theta.nbytes)
        trainer.replica.theta[:] = theta
        trainer.progress = Progress(step=at.step, epoch=at.epoch, batch=at.batch)
        trainer.replica.steps = other.replica.steps

    # -- metrics.jsonl -----------------------------------------------------------------------------------

    def step_done(self, trainer: Trainer, entry: Entry) -> None:
        """Count a step of any replica. Log regularly; after each epoch of all replicas together, test the average."""
        replica = trainer.replica
        self.steps += 1
        self.images += trainer.config.batch_size
        self.loss += entry["loss"] * trainer.config.batch_size
        self.correct += entry["accuracy"] * trainer.config.batch_size
        if self.display.due():
            self.display.bar("simulating", self.steps // self.config.workers, self.total,
                             f"{self.simulation.time:.4g} virtual s, loss {self.loss / self.images:.4f}")  # fmt: skip
        epoch = self.steps // trainer.work.batches
        if epoch > self.epoch or self.steps - self.logged >= LOG_EVERY * self.config.workers:
            event = "epoch" if epoch > self.epoch else "step"
            self.epoch, self.logged = epoch, self.steps
            self.log(event, replica.lr)

    def log(self, event: str, lr: float) -> None:
        self.last_loss = self.loss / self.images
        entry: Entry = {
            "event": event,
            "step": self.steps // self.config.workers,  # mean over the replicas
            "epoch": self.epoch + (event == "step"),
            "time": self.simulation.time,
            "loss": self.last_loss,
            "accuracy": self.correct / self.images,
            "lr": lr,
        }
        self.loss = self.correct = self.images = 0.0
        if event == "epoch":
            theta, distance = mean_and_distance(state.vectors["theta"] for state in self.states())
            with averaged(self.first, theta):
                score = self.score()
                # `finish` validates the average after the last step.
                validated = self.validate(entry["step"]) if entry["step"] < self.first.total_steps else {}
            statistics = self.statistics(self.fabrics)
            entry |= {
                "accuracy_average": score.accuracy,
                "loss_average": score.loss,
                **validated,
                "consensus_distance": distance,
                **{name: statistics[name] for name in ("bytes_sent", "messages", "wait_fraction")},
            }
            if self.epoch == 1 or self.epoch % -(-self.epochs // PRINTED) == 0:
                self.display.say(f"epoch {self.epoch:>3}/{self.epochs}  {entry['time']:.4g} virtual s  "
                                 f"loss {entry['loss']:.4f}  accuracy {entry['accuracy']:.2%}  "
                                 f"test {score.accuracy:.2%}  distance {entry['consensus_distance']:.4f}")  # fmt: skip
        self.run.log(entry)

    def states(self) -> list[ReplicaState]:
        """Return the weights of all live replicas."""
        alive = self.fabrics[0].survivors()
        return [ReplicaState(rank, {"theta": self.trainers[rank].replica.theta}, {}) for rank in alive]

    @property
    def first(self) -> Trainer:
        """The trainer of the first live replica."""
        return self.trainers[self.fabrics[0].leader]

    def validate(self, step: int) -> Entry:
        """Return the score of the present weights on the validation images, if there are any; save the best weights."""
        first = self.first
        for name, value in self.best.items():
            setattr(first.progress, name, value)  # they may be from a replica that was the first one until it died
        scores = first.validate(step)
        self.best = {name: getattr(first.progress, name) for name in BEST}
        if self.best["best_step"] == step:
            files.save(self.run.checkpoints, step, make_checkpoint(first))
            files.prune(self.run.checkpoints, 1, step)
        return scores

    def score(self) -> Score:
        return evaluate(self.model, self.data.x_test, self.data.y_test, prediction=self.engine.prediction)

    def statistics(self, fabrics: list[Fabric]) -> stats.Report:
        dead = [fabric.rank for fabric in fabrics if not fabric.alive(fabric.rank)]
        return stats.merge([fabric.stats.report() for fabric in fabrics], self.simulation.place.nodes, dead)

    # -- the end -----------------------------------------------------------------------------------------

    def finish(self) -> Entry:
        """Test the average and each replica; write the weights and the summary."""
        states, simulation, first = self.states(), self.simulation, self.first
        tested = states[:: -(-len(states) // TESTED)]
        images = sum(self.trainers[state.rank].replica.images for state in states)
        accuracies = []
        for state in tested:
            self.trainers[state.rank].replica.show()
            accuracies.append(self.score().accuracy)
        statistics, step = self.statistics(self.fabrics), first.progress.step
        theta, distance = mean_and_distance(state.vectors["theta"] for state in states)
        with averaged(first, theta):
            validated = self.validate(step)
            files.save(self.run.checkpoints, step, make_checkpoint(first))
            result = files.folder_of(self.run.checkpoints, first.progress.result)
            self.model.load_state_dict(files.load(result).weights)
            score = self.score()
        if validated:
            self.run.log({"event": "average", "step": step, "epoch": first.progress.epoch, "time": simulation.time,
                          **validated})  # fmt: skip
        if self.config.trace:
            timelines = [trace.from_vector(f.stats.trace.vector(f.rank)) for f in self.fabrics if f.stats.trace]
            trace.write(self.run.folder / "trace.json", timelines, simulation.place.nodes)
        summary = {
            "time": "virtual",
            "test_accuracy": score.accuracy,
            "test_loss": score.loss,
            **first.progress.best,
            "train_loss": self.last_loss if self.images == 0 else self.loss / self.images,
            "epochs": first.progress.epoch,
            "steps": first.progress.step,
            "seconds": statistics["elapsed"],
            "images_per_second": images / (statistics["elapsed"] or 1.0),
            "workers": self.config.workers,
            "method": self.config.method,
            "cluster": simulation.cluster.file,
            "ranks": self.ranks,
            "replicas_alive": len(states),
            "replicas_tested": len(tested),
            "accuracy_average": score.accuracy,
            "accuracy_best": max(accuracies),
            "accuracy_worst": min(accuracies),
            "consensus_distance": distance,
            **{name: statistics[name] for name in ("bytes_sent", "messages", "bytes_between_nodes", "wait_fraction",
                                              "idle_seconds", "staleness", "sends_skipped", "reads_missed")},
            **worked(first),
            "virtual_seconds_by_kind": statistics["seconds"],
            "parameters": parameter_count(self.model),
            "events": simulation.happened,
            "real_seconds": round(perf_counter() - self.began, 3),
            "out": str(self.run.folder),
        }  # fmt: skip
        self.run.finish(result / files.MODEL, summary)
        return summary


# -- what a gradient costs -------------------------------------------------------------------------------------


def flops_per_image(model: nn.Module, shape: tuple[int, ...]) -> float:
    """Return the FLOPs of one image's gradient.

    In a linear or convolution layer, the output, the gradient of the weights and the gradient of the input take the
    same number. Other layers are negligible.
    """
    found = 0.0

    def note(module: nn.Module, output: Any) -> None:
        nonlocal found
        weight = getattr(module, "weight", None)
        if isinstance(module, (nn.Linear, nn.Conv2d)) and weight is not None:
            places = math.prod(output.shape[1:3]) if isinstance(module, nn.Conv2d) else 1  # (1, H, W, C)
            found += 3 * 2 * weight.size * places

    recorder, batch = Prediction(model).recorder({"x": np.zeros((1, *shape), np.float32)})
    with recorder.active(), nn.watching(note), nn.evaluating(model):  # records, and compiles nothing
        model(recorder.tensor(batch["x"]))
    return found


def work_of(config: Config) -> str:
    """Return the key under [measured] in a cluster's file: "model data"."""
    return f"{Path(config.model).stem} {Path(config.data).stem}"


def measure(path: str, config: Config) -> Entry:
    """Time gradients on this machine, and write the seconds per image under [measured] in the cluster's file."""
    cluster = clusters.load(path)
    if not Path(path).is_file():
        raise ConfigError(f"--measure writes to the cluster's file, and {path!r} is an example that comes with minidl: "
                          f"copy {clusters.EXAMPLES / path}.toml and give the copy")  # fmt: skip
    dataset, model = prepare(config)
    engine = Engine(model, config)
    model.train()
    x, y = dataset.x_train[: config.batch_size], dataset.y_train[: config.batch_size]
    times = []
    for _ in range(MEASURED):
        began = perf_counter()
        engine.gradient(x, y)
        times.append((perf_counter() - began) / len(y))
    seconds = float(np.median(times[1:]))  # the first one compiles
    work = work_of(config)
    text = with_measured(Path(path).read_text(encoding="utf-8"), work, seconds)
    clusters.parse(text, path)  # may raise, so it comes before the write
    write(Path(path), text.encode())
    return {"work": work, "seconds_per_image": seconds, "cluster": cluster.file}


def with_measured(text: str, work: str, seconds: float) -> str:
    """Return the text of a cluster file with this entry added or replaced under [measured]."""
    line = f'"{work}" = {seconds:.4e}'
    lines = [each for each in text.splitlines() if not re.match(rf'\s*"{re.escape(work)}"\s*=', each)]
    heads = [number for number, each in enumerate(lines) if re.match(r"\s*\[measured\]", each)]
    if heads:
        lines.insert(heads[0] + 1, line)
    else:
        lines += ["", "[measured]  # seconds for an image's gradient, at speed 1", line]
    return "\n".join(lines) + "\n"
