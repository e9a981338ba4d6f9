"""One run: a replica is trained, alone or with others, and one of them leads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shlex import quote

import numba

from minidl import data, models, nn
from minidl.comm.fabric.base import Column, Fabric, PeerLost, State
from minidl.comm.methods import method
from minidl.comm.methods.local import Local
from minidl.engine.jit import set_threads
from minidl.errors import ConfigError
from minidl.ops.conv import winograd
from minidl.run import checkpoint as files
from minidl.run.config import Config
from minidl.run.display import Display
from minidl.run.evaluation import Score, evaluate
from minidl.run.folder import JournalError, Run
from minidl.run.signals import Signals, Stopped
from minidl.training import local_snapshots as parts
from minidl.training.replica_state import Member, averaged, collect, tell
from minidl.training.shutdown import Ended, end, serve, write_trace
from minidl.training.summary import Snapshots, distance
from minidl.training.trainer import Entry, Trainer

COMPILING = 300.0  # seconds after which replicas say that they still wait for kernels
LOG_EVERY = 100  # steps between two lines of metrics.jsonl within an epoch


class Session:
    """One run in this process: the trainer of a replica, and who watches. One of several replicas leads: it has the
    run's folder, shows how it goes, and tests the average of all."""

    def __init__(self, config: Config, signals: Signals, fabric: Fabric) -> None:
        kind = method(config.method) if fabric.size > 1 else Local
        fabric.replicas = kind.roles(fabric.size).replicas
        if not fabric.replicas:
            raise ConfigError(f"{fabric.size} processes: {config.method} needs {kind.servers} to serve, and others")
        self.config = config = replace(config, workers=len(fabric.replicas))
        self.signals, self.fabric = signals, fabric
        self.data, self.model = prepare(config, fabric.rank)
        arena = self.model.flatten()
        fabric.join(kind.needs(arena.size, config), arena.layout_hash)
        fabric.fail_fast = kind.synchronous and fabric.size > 1
        self.trainer = Trainer(self.model, self.data, config, self.check, fabric)
        self.folder = Path()
        self.run: Run | None = None  # held by the leader
        self.last_epoch: Entry | None = None  # where all end together: not told yet
        self.journal_error: JournalError | None = None
        self.snapshots = Snapshots(self.trainer)
        self.origin = ""  # what it went on from, where there is something to say about that

    @property
    def command(self) -> str:
        """What goes on with this run."""
        return f"python -m minidl.train --resume {quote(str(self.folder))}"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def alone(self) -> bool:
        return self.fabric.size == 1

    @property
    def leads(self) -> bool:
        return self.fabric.rank == self.fabric.leader

    @contextmanager
    def lead(self, open_run: Callable[[], Run]) -> Iterator[None]:
        """Hold the run's folder, at the leader; the others learn where it is."""
        try:
            if self.leads:
                self.run = open_run()
            words = tell(self.fabric, str(self.run.folder) if self.run else "")
            self.folder = Path(words)
            yield
        finally:
            if self.run:
                self.run.__exit__()

    def check(self) -> None:
        """Whether a signal came: alone, stop here; else ask all to stop (Fabric.begin_step says where)."""
        if self.alone:
            self.signals.check()
        elif self.signals.received is not None:
            self.fabric.stop_wanted = True

    def train(self) -> Entry | None:
        """Train to the end, or until a signal or an error; test; return the summary, which is written as well.

        Those that do not lead return nothing.
        """
        trainer, config = self.trainer, self.config
        epochs = -(-trainer.planned // len(trainer.share))
        self.display = Display(config.quiet or not self.leads, len(trainer.share), epochs)
        trainer.engine.gradient.progress = self.display.compiling
        self.display.say(f"{self.folder}: {config.model} ({count(self.model):,} parameters) on {config.data} "
                         f"({len(self.data.y_train):,} images), {trainer.total_steps:,} steps"
                         + self._company() + self.origin)  # fmt: skip
        self.signals.defer(config.quiet or not self.leads)
        try:
            self._compile()
            if self.fabric.rank not in self.fabric.replicas:
                serve(self)
                return None
            reason = self._train()
            return self._finish_alone() if self.alone else end(self, reason)
        except Stopped as stopped:
            stopped.message = f"saved; to go on: {self.command}"
            raise
        finally:
            self.display.close()

    def _company(self) -> str:
        return "" if self.alone else f" each, {self.config.workers} replicas, {self.config.method}"

    def _compile(self) -> None:
        """The first of each node compiles; for the others the kernels are then in the cache."""
        fabric = self.fabric
        first = fabric.nodes.index(fabric.nodes[fabric.rank])
        if fabric.rank != first:
            fabric.wait(
                lambda: fabric.state(first) >= State.READY or None, (first,), "kernels to be compiled", COMPILING
            )
        if not self.alone:
            self.trainer.prepare()
        fabric.announce(Column.STATE, State.TRAINING)
        # Begin together, also where nobody waits from then on; who has died meanwhile is not waited for.
        fabric.wait(lambda: bool(fabric.board[:, Column.STATE].min() >= State.TRAINING) or None, (), "all to begin")

    def _train(self) -> Ended:
        """Train; what has ended it too soon, if anything has."""
        try:
            for entry in self.trainer.run():
                if self.leads and not self.alone:
                    self.display.quiet = self.config.quiet  # the leader before may have died
                    entry["images_per_second"] = round(  # of all, if they are as fast
                        entry["images_per_second"] * len(self.fabric.survivors()), 1
                    )
                if entry["event"] == "epoch":
                    self._epoch_done(entry)
                elif self.leads:
                    self._step_done(entry)
        except (Stopped, JournalError, PeerLost) as reason:
            if isinstance(reason, JournalError) or self.alone:
                self._save()
                raise
            return reason
        return None

    def _step_done(self, entry: Entry) -> None:
        at = self.trainer.progress
        self.display.step(entry, at.batch, at.loss_sum / at.images, at.correct / at.images)
        if at.step % LOG_EVERY == 0:
            self.log(entry)

    def _epoch_done(self, entry: Entry) -> None:
        """Look at the average, and save: at once where all are here; in asynchronous methods nobody is waited for."""
        if self.alone:
            self._report(entry)
            self._save()
        elif self.trainer.method.synchronous:
            if self.trainer.finished:
                self.last_epoch = entry  # the end collects, anyway
                return
            members = collect(self.trainer)
            if members:
                self.keep(members, entry)
            self.fabric.barrier()  # the clock of none goes on before
        else:
            fabric = self.fabric
            self.snapshots.take()
            if self.leads:  # itself: nobody is asked for its state before the end
                self._report(entry)
                self.write(self.trainer.checkpoint([parts.own(self.trainer)]))
                parts.remove(self.checkpoints, [rank for rank in fabric.replicas if not fabric.alive(rank)])
            elif len(fabric.replicas) == fabric.size:  # there is no center
                parts.save(self.checkpoints, self.trainer)

    def keep(self, members: list[Member], entry: Entry | None) -> None:
        """Save all replicas, and their average. entry: of the epoch that ends here: then the average is validated."""
        with averaged(self.trainer, members):
            scores = self.trainer.validate(self.trainer.progress.step) if entry is not None else {}
            checkpoint = self.trainer.checkpoint(members)
        if entry is not None:
            self._report(entry | scores | {"consensus_distance": distance(members)})
        self.write(checkpoint)
        parts.remove(self.checkpoints)

    def _report(self, entry: Entry) -> None:
        if not self.alone:  # of this replica: the others' books come at the end
            books = self.fabric.meter.report()
            entry |= {name: books[name] for name in ("bytes_sent", "messages", "wait_fraction")}
        self.display.epoch(entry)
        self.log(entry)  # before the checkpoint: a line too many is taken back, one too few is lost

    def log(self, entry: Entry) -> None:
        try:
            self._own_run().log(entry)
        except JournalError as error:
            if self.alone:
                raise
            self.journal_error, self.fabric.stop_wanted = error, True  # to be raised when all have stopped

    def _own_run(self) -> Run:
        """The run's folder; where the leader has died, this process leads now, and takes it over."""
        if self.run is None:
            self.run = reopen(self.folder)
        return self.run

    def _save(self) -> None:
        self.write(self.trainer.checkpoint())

    def write(self, checkpoint: files.Checkpoint, step: int = -1) -> None:
        """step: that it belongs to, if not the last one."""
        run, at = self._own_run(), self.trainer.progress
        files.save(run.checkpoints, at.step if step < 0 else step, checkpoint)
        files.prune(run.checkpoints, self.config.keep, at.best_step)

    # -- the result --------------------------------------------------------------------------------------

    def _finish_alone(self) -> Entry:
        summary = self.summary(self.test())
        write_trace(self)
        self.finish(summary)
        return summary

    def finish(self, summary: Entry) -> None:
        run = self._own_run()
        run.finish(files.folder_of(run.checkpoints, self.trainer.progress.result) / files.MODEL, summary)

    def score(self) -> Score:
        prediction = self.trainer.engine.prediction
        return evaluate(self.model, self.data.x_test, self.data.y_test, check=self.check, prediction=prediction)

    def test(self) -> Score:
        self.model.load_state_dict(files.load(files.folder_of(self.checkpoints, self.trainer.progress.result)).weights)
        return self.score()

    def summary(self, score: Score) -> Entry:
        at = self.trainer.progress
        return {
            "test_accuracy": score.accuracy,
            "test_loss": score.loss,
            "train_loss": at.train_loss,
            **at.best,
            "epochs": at.epoch,
            "steps": at.step,
            "images_per_second": round(at.images_per_second, 1),
            "seconds": round(at.seconds, 3),
            "parameters": count(self.model),
            "out": str(self.folder),
        }


def reopen(folder: Path) -> Run:
    """A run that exists, without what a killed process left."""
    run = Run.open(folder)
    files.clean_up(run.checkpoints)
    return run


def prepare(config: Config, rank: int = 0) -> tuple[data.Dataset, nn.Module]:
    """The data set, and the model with its initial weights."""
    if config.threads:
        set_threads(config.threads)
        if numba.get_num_threads() < config.threads and not config.quiet and not rank:
            print(f"minidl: --threads {config.threads} is more than there are cores: using {numba.get_num_threads()}",
                  file=sys.stderr, flush=True)  # fmt: skip
    winograd(config.conv == "auto")
    dataset = data.load(config.data, config.data_dir or None, config.validation, config.seed, config.layout)
    nn.seed(config.seed)
    return dataset, models.build(config.model, dataset.input_shape, dataset.classes)


def count(model: nn.Module) -> int:
    return sum(parameter.size for parameter in model.parameters())
