"""A training run, as one of its ranks sees it: one replica, alone or with others, or a server.

A rank is a process. In a simulation, all ranks are in one process (simulated.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from minidl import data, models, nn
from minidl.comm.fabric.base import Column, Fabric, PeerLost
from minidl.comm.launch.job import local_rank, recognise
from minidl.comm.methods import method
from minidl.comm.methods.base import Method
from minidl.comm.methods.local import Local
from minidl.comm.replica import Engine
from minidl.engine.gpus import count_gpus
from minidl.engine.jit import set_threads, threads
from minidl.errors import AbortedError, ConfigError, MinidlError, tell
from minidl.ops.conv import winograd
from minidl.run.config import Config
from minidl.run.display import Display, Position, count, epoch_line, legend, speed
from minidl.run.folder import JournalError
from minidl.run.history import surroundings
from minidl.run.model_file import is_own, short
from minidl.run.options import options
from minidl.run.own_model import build
from minidl.run.shares import parse_devices
from minidl.run.signals import Signals, Stopped
from minidl.run.trained import begin_with
from minidl.training import forecast, local_snapshots, newcomer, regroup
from minidl.training.agreement import agree_at_start, facts_of_run
from minidl.training.epoch_averages import EpochAverages
from minidl.training.output import RunOutput, parameter_count
from minidl.training.resume import make_checkpoint
from minidl.training.shutdown import Reason, serve, shut_down
from minidl.training.startup import begin_together
from minidl.training.trainer import Entry, Trainer
from minidl.training.work import Claimed

LONGEST_REASON = 2000  # characters of an error in history.jsonl
LOG_EVERY = 100  # steps between two lines of metrics.jsonl within an epoch


class Session:
    """One rank's part in a run, from the first step to the result.

    The leader (the first live replica) holds the run's folder, shows the progress, and tests the average of all.
    config: `workers` is the number of replicas. fabric: `replicas` contains them.
    engine: in a simulation, the engine that all ranks share, with their model and data; None: the rank has its own.
    resumed: whether the run was begun before. origin: a note on the saved states that the run continues from, for
        the first printed line; "" if there is nothing to remark.
    """

    def __init__(
        self,
        config: Config,
        signals: Signals,
        fabric: Fabric,
        dataset: data.Dataset,
        model: nn.Module,
        engine: Engine | None = None,
    ) -> None:
        self.config, self.signals, self.fabric = config, signals, fabric
        self.data, self.model = dataset, model
        kind, arena = kind_of(config, fabric.began), self.model.flatten()
        fabric.fail_fast = kind.synchronous and fabric.began > 1 and not fabric.newcomer
        enter = fabric.enter if fabric.newcomer else fabric.join
        enter(kind.buffers(arena.size, config), arena.layout_hash)
        fabric.handle_freezes(kind.on_freeze(config))
        self.trainer = Trainer(self.model, self.data, config, self.check, fabric, engine)
        self.output = self.make_output()
        self.averages = EpochAverages(self.output)
        self.last_epoch: Entry | None = None  # of the last epoch, with a synchronous method: `shut_down` reports it
        self.resumed, self.origin = False, ""
        self.facts: dict[str, object] = {}  # what all ranks have in common
        self.display = Display(quiet=True)
        self.logged = 0  # of the last step with a line in metrics.jsonl: step // LOG_EVERY
        self.began: tuple[int, float] | None = None  # samples and seconds at the first entry: see `_as_leader`

    @classmethod
    def of_process(cls, config: Config, signals: Signals, fabric: Fabric, fresh: bool = True) -> Self:
        """Return the session of this process. It loads the data, and builds the model.

        fresh: whether the weights of --init are needed. A run that has a checkpoint begins with those of the
        checkpoint. Raises ConfigError if the ranks differ in options, data or model, or if memory is short.
        """
        kind, replicas = chosen(config, fabric.began)
        fabric.assign(replicas)
        config = replace(config, workers=len(replicas))
        fabric.transport.interrupted = lambda: signals.deferred and signals.received is not None
        fabric.fail_fast = kind.synchronous and fabric.began > 1 and not fabric.newcomer
        dataset, model = prepare(config, fabric.rank, fresh)
        size = model.flatten().size
        if fabric.newcomer:
            facts = facts_of_run(config, model, dataset)
        else:
            facts = agree_at_start(fabric, config, model, dataset)
            forecast.require_room(fabric, size, config.optimizer, kind.buffers(size, config), config.parts)
        session = cls(config, signals, fabric, dataset, model)
        session.facts = facts
        return session

    def make_output(self) -> RunOutput:
        return RunOutput(self.trainer, self._show_epoch)

    def check(self) -> None:
        """After a signal, a single replica raises Stopped; one of several asks all to stop (`Fabric.begin_step`).

        With an asynchronous method, the leader also admits newcomers.
        """
        if self.fabric.size == 1:
            self.signals.check()
        elif self.signals.received is not None:
            self.fabric.stop_wanted = True
        elif not self.trainer.method.synchronous:
            self._admit()

    def _admit(self) -> list[int]:
        """Let newcomers join; return their ranks. Only the leader's call has an effect."""
        admitted = newcomer.admit(self.trainer, self.output.folder, self.facts)
        for rank in admitted:
            self.display.say(f"replica {rank} has joined")
        return admitted

    def train(self) -> Entry | None:
        """Train, test, and write and return the summary. Replicas other than the leader return None.

        Raises Stopped after a signal, when the state is saved. Raises any MinidlError of the training.
        """
        output = self.output
        self.fabric.set_status(Column.EPOCH, self.trainer.progress.epoch)
        self.announce()
        if self.resumed and output.leads:
            self.averages.resume()
        try:
            self.begin_together()
            output.begun = True
            output.events.begin(output.folder)
            if self.fabric.rank in self.fabric.servers:
                serve(output)
                return None
            if output.leads:
                output.note("begin", **self.about())
                output.note_members()
            reason = self._train()
            summary = self._finish_alone() if output.alone else shut_down(
                output, self.averages, self.signals, reason, self.last_epoch)  # fmt: skip
            output.events.end(summary)
            if summary is not None:
                output.note("finished")
            return summary
        except Stopped as stopped:
            if output.begun:
                stopped.message = f"saved; to continue: {output.command}"
                self._ended("stopped", stopped, str(stopped))
            raise
        except MinidlError as error:
            if output.begun and not isinstance(error, AbortedError):
                self._ended("failed", error, str(error))
            raise
        finally:
            self.display.close()
            output.events.close()

    def _ended(self, event: str, error: Stopped | MinidlError, why: str) -> None:
        """Note that the run has ended without a result. In the leader, the error gets the folder of the run."""
        output = self.output
        if output.leads or event == "failed":
            output.note(event, why=why[:LONGEST_REASON], rank=self.fabric.rank)
        if output.leads:
            error.run = output.folder

    def about(self) -> dict[str, Any]:
        """Return what history.jsonl says when training begins."""
        fabric, trainer = self.fabric, self.trainer
        return surroundings() | {
            "threads": threads(), "replicas": len(fabric.replicas), "servers": len(fabric.servers),
            "nodes": len(set(fabric.nodes)), "images": len(self.data.y_train), "epochs": trainer.epochs,
            "parameters": parameter_count(self.model), "total_steps": trainer.total_steps,
        }  # fmt: skip

    def announce(self) -> None:
        """Print what is trained."""
        trainer, config, output = self.trainer, self.config, self.output
        self.logged = trainer.progress.step // LOG_EVERY
        self.display = Display(config.quiet or not output.leads)
        trainer.engine.gradient.progress = trainer.engine.prediction.progress = self.display.compiling
        if self.resumed:
            self.display.say(self.resumed_at())
        each = "each on average" if isinstance(trainer.work, Claimed) else "each"
        company = "" if output.alone else f" {each}, {config.workers} replicas, {config.method}"
        company += f", in {config.parts} parts" if config.parts > 1 else ""
        self.display.say(f"{self.what()}, {count(trainer.total_steps, 'step')}{company}")
        self.display.say(legend(config.workers))
        trainer.note = self.display.say

    def begin_together(self) -> None:
        """Compile all kernels, or load them. All ranks leave this function together.

        From then on, a signal stops the run after a step.
        """
        quiet = self.config.quiet or not self.output.leads
        if self.signals.shared:
            self.signals.defer(quiet)
        if self.fabric.newcomer:
            self.prepare()
            self.output.folder = newcomer.become_member(self.trainer, self.facts)
        else:
            begin_together(self.fabric, self.prepare)
        self.signals.defer(quiet)

    def prepare(self) -> None:
        """Compile all kernels, or load them."""
        self.trainer.prepare()
        self.output.events.prepare()

    def what(self) -> str:
        """Return the run's folder, model and data, for the first printed line."""
        return (f"{self.output.folder}: {short(self.config.model)} ({parameter_count(self.model):,} parameters) on "
                f"{self.config.data} ({len(self.data.y_train):,} images)")  # fmt: skip

    def resumed_at(self) -> str:
        """Return where a resumed run continues, for a printed line."""
        at, epochs = self.trainer.progress, self.trainer.epochs
        if not at.step:
            return f"resuming {self.output.folder} from the start: it has no checkpoint yet"
        return (f"resuming {self.output.folder} from step {at.step:,} of {self.trainer.total_steps:,} "
                f"(epoch {min(at.epoch + 1, epochs)} of {epochs}){self.origin}")  # fmt: skip

    def _train(self) -> Reason:
        """Train; return the signal or the death that ended training before the last step, or None."""
        output = self.output
        try:
            regroup.train(self.trainer, self._handle, self._admit)
        except (Stopped, JournalError, PeerLost) as reason:
            if isinstance(reason, JournalError) or output.alone:
                output.save()
                raise
            return reason
        return None

    def _handle(self, entry: Entry) -> None:
        entry["seconds"] = round(self.trainer.progress.seconds, 6)
        if entry["event"] == "epoch":
            self.output.events.epoch(entry)
            self._epoch_done(entry)
        elif entry["event"] == "step":
            self.output.events.step(entry)
            self._step_done(entry)
        elif self.output.leads:
            self.output.log(entry)

    def _as_leader(self, entry: Entry) -> None:
        """If several replicas train, and this one leads: show the speed of all, also if another replica led before.

        It is in images/s, since this replica's first step, which may compile kernels.
        """
        if self.output.leads and not self.output.alone:
            self.display.quiet = self.config.quiet
            samples, seconds = entry["samples"], self.trainer.progress.seconds
            self.began = self.began or (samples, seconds)
            entry["images_per_second"] = round((samples - self.began[0]) / (seconds - self.began[1] or 1.0), 1)

    def _step_done(self, entry: Entry) -> None:
        """Show a step, and log some of them. Only the leader does this."""
        if not self.output.leads:
            return
        self._as_leader(entry)
        self.output.note_members()
        trainer, at = self.trainer, self.trainer.progress
        if self.display.due():
            done, batches = trainer.work.within(at)
            part = (entry["epoch"] - 1 + done / batches) / trainer.epochs
            members = [] if self.output.alone else self.fabric.survivors()
            self.display.show(
                Position(part, entry["epoch"], trainer.epochs, (done, batches)), speed(entry["images_per_second"]),
                f"loss {at.loss_sum / at.images:.4f}",
                {rank: float(self.fabric.status[rank, Column.SPEED]) for rank in members},
            )  # fmt: skip
        if at.step // LOG_EVERY > self.logged:  # where work is claimed, `step` may grow by more than 1
            self.logged = at.step // LOG_EVERY
            self.output.log(entry)

    def _show_epoch(self, entry: Entry) -> None:
        self.display.say(epoch_line(entry, f"/{self.trainer.epochs}"))

    def _epoch_done(self, entry: Entry) -> None:
        """Report and save an epoch. With an asynchronous method, replicas do not wait for each other to save."""
        trainer, fabric, output = self.trainer, self.fabric, self.output
        self._as_leader(entry)
        fabric.set_status(Column.IMAGES, entry.pop("images"))
        fabric.set_status(Column.ACCURACY, entry["accuracy"])
        fabric.set_status(Column.LOSS, entry["loss"])
        if output.leads:
            output.note_speeds()
        if output.alone:
            output.report(entry)
            output.save()
        elif trainer.method.synchronous:
            if trainer.finished:
                self.last_epoch = entry  # the shutdown collects the states anyway
                return
            fabric.led_by = fabric.leader
            output.save_all(lambda members: entry)
            if not trainer.regroups:  # else regroup.py does it
                fabric.barrier()  # all wait for the leader, with their timers stopped
        else:
            self.averages.take()
            if output.leads:  # it saves its own state; the states of all are collected at the end of the run
                self.averages.validate()
                output.report(entry)
                trainer.replica.show()
                output.write(make_checkpoint(trainer, [local_snapshots.snapshot(trainer)]))
                dead = [rank for rank in fabric.replicas if not fabric.alive(rank)]
                local_snapshots.remove(output.checkpoints, dead)
            elif not any(map(fabric.alive, fabric.servers)):  # there is no server, which would save the result
                output.save_snapshot()

    def _finish_alone(self) -> Entry:
        score = self.output.test()
        summary = self.output.test_center(score) | self.output.summary(score)
        self.averages.delete()  # of several replicas that trained before a resume
        self.output.write_trace()
        self.output.finish(summary)
        return summary


def chosen(config: Config, ranks: int) -> tuple[type[Method], tuple[int, ...]]:
    """Return the class with which the ranks train, and those that train; the others are servers.

    Raises ConfigError for contradictory options, also with one rank, and if the method needs more ranks.
    """
    kind = method(config.method)
    kind.buffers(1, config)
    replicas, servers = kind.roles(ranks, config)
    if not replicas:
        raise ConfigError(f"{ranks} ranks: {config.method} needs {len(servers)} as servers, and replicas")
    return kind_of(config, ranks), replicas


def kind_of(config: Config, ranks: int) -> type[Method]:
    """Return the class with which the ranks train: Local for a single one, unless the method is also for one."""
    found = method(config.method)
    return found if ranks > 1 or found.alone else Local


def device_of(config: Config, rank: int) -> str:
    """Return the name of the device on which a rank computes. Servers compute on the CPU."""
    workers = parse_devices(config.devices)
    if workers:
        return workers[rank].device if rank < len(workers) else "cpu"
    if config.device == "cuda":  # the ranks of a machine take its GPUs in turn
        return f"cuda:{(local_rank() if recognise() else rank) % count_gpus()}"
    return config.device


def prepare(config: Config, rank: int = 0, fresh: bool = True) -> tuple[data.Dataset, nn.Module]:
    """Set the threads and the convolution; return the data set, and the model with its initial weights.

    fresh: whether the initial weights are needed; if not, the weights of --init are not read.
    """
    if config.threads:
        set_threads(config.threads)
        if threads() < config.threads and not config.quiet and not rank:
            tell(f"minidl: --threads {config.threads} is more than there are cores: using {threads()}")
    winograd(config.conv == "auto")
    dataset = data.load(config.data, config.data_dir or None, config.validation, config.seed, config.layout)
    for name in ("augment", "layout", "views"):
        if getattr(config, name) not in (None, options(Config)[name].default) and dataset.input_shape[:2] == (1, 1):
            raise ConfigError(f"{name} has an effect only on images, and {config.data} holds features (N, D): "
                              "leave it out")  # fmt: skip
    nn.seed(config.seed)
    shape, classes = dataset.input_shape, dataset.classes
    if is_own(config.model):
        model = build(config.model, config.model_hash, shape, classes)
    else:
        model = models.build(config.model, shape, classes)
    if fresh:
        nn.fit_whitening(model, dataset.x_train)
    if config.init and fresh:
        note = begin_with(model, config.init, classes)
        if note and not config.quiet and not rank:
            tell(f"minidl: {note}")
    if (device := device_of(config, rank)) != "cpu":
        model.to(device, config.precision)
    return dataset, model
