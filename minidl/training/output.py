"""The output of a run: metrics, checkpoints and the result.

The leader (the first live replica) writes it. With an asynchronous method, the other replicas write local snapshots
(local_snapshots.py). A server (a rank that holds weights and does not train) makes these snapshots unnecessary: it
saves its weights if all replicas have died.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from minidl.comm import trace
from minidl.comm.fabric.base import Column, Fabric
from minidl.comm.launch import join
from minidl.errors import CheckpointError, printable, tell
from minidl.nn import Module
from minidl.run import checkpoint as files
from minidl.run import history
from minidl.run.evaluation import Score, evaluate
from minidl.run.folder import JournalError, RunFolder, is_new, resuming
from minidl.run.progress import BEST
from minidl.training import local_snapshots
from minidl.training.collecting import Replicas, collected, send_state
from minidl.training.replica_state import averaged
from minidl.training.resume import about, finite_weights, make_checkpoint
from minidl.training.tensorboard import TensorBoard
from minidl.training.trainer import Entry, Trainer
from minidl.training.vectors import hand_out_text, led

MOST_SPEEDS = 256  # replicas whose speeds history.jsonl contains
WRITING = 120.0  # seconds that a slow disk may take; until then the leader is not suspected
Members = Mapping[int, dict[str, Any]]  # the numbers of each replica, by rank


def epoch_means(fabric: Fabric) -> dict[str, float]:
    """Return the mean training loss and accuracy over the images of the live replicas, each in its latest epoch.

    They come from the status table, so no replica waits. Empty if no live replica has finished an epoch.
    """
    rows = fabric.status[fabric.survivors()]
    images = rows[:, Column.IMAGES]
    if not images.sum():
        return {}
    return {name: float(images @ rows[:, column] / images.sum())
            for name, column in (("loss", Column.LOSS), ("accuracy", Column.ACCURACY))}  # fmt: skip


class RunOutput:
    """The output of one trainer's run.

    folder         the path of the run's folder
    run            the folder, locked; None except in the process that writes
    journal_error  why metrics could not be written: raised after all replicas have stopped
    show           displays the entry of an epoch
    events         what is written for TensorBoard
    """

    def __init__(self, trainer: Trainer, show: Callable[[Entry], None]) -> None:
        self.trainer, self.fabric, self.show = trainer, trainer.fabric, show
        self.folder = Path()
        self.run: RunFolder | None = None
        self.journal_error: JournalError | None = None
        self.begun = False  # whether training has begun: only then there is something to save
        self._members: list[int] = []  # of the last line about them in history.jsonl
        self.events = TensorBoard(trainer)
        self._warned = False  # whether an error of a local snapshot was reported

    @property
    def command(self) -> str:
        """The command that continues this run."""
        return resuming(self.folder, self.trainer.config.model)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def alone(self) -> bool:
        return self.fabric.size == 1

    @property
    def leads(self) -> bool:
        """Whether this replica is the leader, which writes for all."""
        return self.fabric.rank == self.fabric.leader

    @contextmanager
    def opened(self, open_run: Callable[[], RunFolder]) -> Iterator[None]:
        """Open the run's folder in the leader, send its path to all ranks, and close it after the `with` block.

        A newcomer gets the path later. Meanwhile others may join the job. If the block raises an exception before the
        run has begun, a new folder is removed.
        """
        try:
            if not self.fabric.newcomer:
                self.folder = Path(led(self.fabric, lambda leader: self._open(leader, open_run)))
            if self.run:
                join.invite(self.run.folder)
            yield
        except BaseException:
            alive = self.fabric.alive(self.fabric.rank)  # False: it was killed in a simulation, and can remove nothing
            if self.run and not self.begun and alive:
                self.discard()
            raise
        finally:
            if self.run:
                join.uninvite(self.run.folder)
                self.run.__exit__()

    def discard(self) -> None:
        """Remove a new folder: the run has not begun."""
        if self.run:
            join.uninvite(self.run.folder)
            self.run.discard()

    def _open(self, leader: int, open_run: Callable[[], RunFolder]) -> str:
        if self.fabric.rank == leader:
            self.run = self._left_by_the_dead() or open_run()
        return hand_out_text(self.fabric, str(self.run.folder) if self.run else "", leader)

    def _left_by_the_dead(self) -> RunFolder | None:
        """If an earlier leader has died, return the folder that it may have created for this run. It is still empty."""
        config, first = self.trainer.config, self.fabric.replicas[0]
        if not config.out or self.fabric.alive(first) or not is_new(Path(config.out), config):
            return None
        return RunFolder.open(config.out)

    def held(self) -> RunFolder:
        """Return the run's folder. After the death of the leader, the new leader or a server opens it first.

        Raises JournalError if the folder was removed or replaced.
        """
        if self.run is None:
            self.run = RunFolder.open(self.folder)
            files.clean_up(self.run.checkpoints)
            self._take_over(self.run)
        self.run.require()
        return self.run

    def _take_over(self, run: RunFolder) -> None:
        """Continue the output of a dead leader: its best step; not its lines about an epoch that it has not ended."""
        trainer, at = self.trainer, self.trainer.progress
        if trainer.regroups:
            run.rewind(at.step, at.epoch - (trainer.before_end is not None))
        if made := files.last(run.checkpoints):
            for name, value in files.best(made).items():
                setattr(at, name, value)

    # -- while it trains ---------------------------------------------------------------------------------

    def log(self, entry: Entry) -> None:
        """Append a line to metrics.jsonl. With several replicas, an error stops them all and is raised at the end."""
        self.events.line(entry)
        try:
            self.held().log(entry)
        except JournalError as error:
            if self.alone:
                raise
            self.journal_error, self.fabric.stop_wanted = error, True

    def note(self, event: str, **facts: Any) -> None:
        """Append a line to history.jsonl, at the present position. Nothing depends on it: errors are ignored."""
        at = self.trainer.progress
        history.note(self.folder, event, seconds=round(at.seconds, 4), step=at.step, epoch=at.epoch, **facts)

    def note_members(self) -> None:
        """Append a line to history.jsonl if other replicas train than at the last call."""
        if (members := self.fabric.survivors()) != self._members:
            self._members = members
            self.note("members", members=members)

    def note_speeds(self) -> None:
        """Append the recent speed of each live replica to history.jsonl, in images/s."""
        if (members := self.fabric.survivors())[MOST_SPEEDS:]:
            return
        speeds = self.fabric.status[members, Column.SPEED]
        self.note("speeds", members=members, images_per_second=[round(float(speed), 1) for speed in speeds])

    def report(self, entry: Entry) -> None:
        """Show and log the entry of an epoch. Its loss and accuracy become means of all replicas' latest epochs."""
        if not self.alone:
            entry |= epoch_means(self.fabric)
            statistics = self.fabric.stats.report()  # of this replica; those of all are gathered at the end of the run
            entry |= {name: statistics[name] for name in ("bytes_sent", "messages", "wait_fraction")}
        self.show(entry)
        self.log(entry)  # before the checkpoint: a resume removes a surplus line, but cannot restore a missing one

    def save(self) -> None:
        """Write a checkpoint of this replica alone."""
        self.write(make_checkpoint(self.trainer))

    def save_snapshot(self) -> None:
        """Write a local snapshot of this replica."""
        with self.optional_files():
            local_snapshots.save(self.checkpoints, self.trainer)

    @contextmanager
    def optional_files(self) -> Iterator[None]:
        """Write files of this replica in a `with` block. The first error is reported; the run goes on without them.

        Only the leader's output is needed to complete the run. If the run's folder was removed, the leader reports it.
        """
        try:
            yield
        except (CheckpointError, OSError) as error:
            if not self._warned and (self.folder / "config.toml").exists():
                self._warned = True
                reason = printable(str(error).partition(";")[0])
                tell(f"minidl: replica {self.fabric.rank} writes no local snapshots, and trains on: {reason}")

    def write(self, checkpoint: files.Checkpoint, step: int = -1) -> None:
        """Write a checkpoint for this step (default: the present one), and delete old ones."""
        files.save(self.held().checkpoints, self.trainer.progress.step if step < 0 else step, checkpoint)
        self._prune()

    def save_all(self, entry: Callable[[Members], Entry | None]) -> Replicas | None:
        """Write a checkpoint of all replicas with their average. Every replica calls this.

        `fabric.led_by` must be the leader, which writes; the others send their states to it.
        entry: returns the entry of an epoch if one ends now, and else None; the leader calls it with the numbers of all
        replicas. If there is an entry, the average is validated, and the entry is reported.
        Returns the states of all at the leader, and None elsewhere.
        """
        trainer, fabric = self.trainer, self.fabric
        if fabric.rank != fabric.led_by:
            send_state(trainer)
            return None
        checkpoints, step = self.held().checkpoints, trainer.progress.step
        with fabric.busy(WRITING), files.writing(checkpoints, step) as folder, collected(trainer, folder) as replicas:
            epoch = entry(replicas.members)
            with averaged(trainer, replicas.theta):
                scores = trainer.validate(step) if epoch is not None else {}
                files.write_weights(folder, finite_weights(trainer), about(trainer))
            if epoch is not None:
                self.report(epoch | scores | {"consensus_distance": replicas.distance})
        self._prune()
        local_snapshots.remove(self.checkpoints)
        return replicas

    def rewrite(self) -> None:
        """Write the last checkpoint again, because the best step has changed, which it contains."""
        at = self.trainer.progress
        checkpoint = files.load_step(self.checkpoints, at.step)
        checkpoint.state["progress"] |= {name: getattr(at, name) for name in BEST}
        self.write(checkpoint)

    def _prune(self) -> None:
        files.prune(self.held().checkpoints, self.trainer.config.keep, self.trainer.progress.best_step)

    # -- the result --------------------------------------------------------------------------------------

    def score(self) -> Score:
        """Return the score of the model's present weights on the test images."""
        trainer = self.trainer
        return evaluate(trainer.model, trainer.data.x_test, trainer.data.y_test, check=trainer.check,
                        prediction=trainer.engine.prediction)  # fmt: skip

    def score_of_replica(self) -> Score | None:
        """Return the score of this replica's own weights on the test images. None: it is not tested."""
        self.trainer.replica.show()
        return self.score()

    def test_center(self, tested: Score) -> dict[str, float]:
        """Return the entries of summary.json about the center, if the method has one, after its test.

        tested: the score of the model's present weights. If these are the center, as with `ps`, it is not tested again.
        """
        center = self.trainer.method.center_of_run()
        if center is None:
            return {}
        score = tested
        if not np.array_equal(center, self.trainer.engine.arena.theta):
            with averaged(self.trainer, center):
                score = self.score()
        return {"accuracy_center": score.accuracy, "loss_center": score.loss}

    def test(self) -> Score:
        """Load the best weights by validation score (without validation: the last weights); return their test score."""
        result = files.folder_of(self.checkpoints, self.trainer.progress.result)
        self.trainer.model.load_state_dict(files.load(result).weights)
        return self.score()

    def summary(self, score: Score) -> Entry:
        """Return the entries of summary.json that every run of minidl.train has."""
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
            "parameters": parameter_count(self.trainer.model),
            "out": str(self.folder),
        }

    def finish(self, summary: Entry) -> None:
        """Write model.safetensors and summary.json."""
        run = self.held()
        run.finish(files.folder_of(run.checkpoints, self.trainer.progress.result) / files.MODEL, summary)

    def write_trace(self) -> None:
        """Write RUN/trace.json, a timeline of all replicas, if --trace was given. Every replica must call it."""
        fabric = self.fabric
        if fabric.stats.trace is not None:
            timelines = [trace.from_vector(v) for _, v in fabric.gather(fabric.stats.trace.vector(fabric.rank))]
            if timelines:
                trace.write(self.folder / "trace.json", timelines, fabric.nodes)


def reopen(folder: Path) -> RunFolder:
    """Open the folder of an existing run, and delete what killed processes left in it. No replica may train yet."""
    run = RunFolder.open(folder)
    run.clean_up()
    for checkpoints in (run.checkpoints, *local_snapshots.folders(run.checkpoints)):
        files.clean_up(checkpoints)
    return run


def parameter_count(model: Module) -> int:
    """Return the number of values that are trained."""
    return sum(parameter.size for parameter in model.parameters())
