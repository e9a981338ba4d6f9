"""Execute `python -m minidl.simulate`: train all replicas of a virtual cluster in this process.

Each rank of the cluster runs a session (session.py) as in a real job, on the simulated transport
(comm/transport/sim.py): in virtual time, and in a greenlet, so that the ordinary code waits. Different from a real job:

    model, data, engine    all ranks share them (`Parts`). Each replica has separate vectors (comm/replica.py)
    metrics.jsonl          an observer sees all replicas (observer.py). It logs means over all of them
    start                  all ranks begin at once. They neither compare their options nor tell each other the folder
    checkpoints            only at the end and at a stop, and if others join a synchronous run. Evaluations and the
                           collection of states take no virtual time

With `full`, the start and the checkpoints are those of a real job, too. Replicas that join get their state from the
leader as in a real job (newcomer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from minidl.comm import cluster as clusters
from minidl.comm.fabric.base import Column, Fabric, PeerLost, State
from minidl.comm.replica import Engine
from minidl.comm.transport.sim import Simulation
from minidl.data import Dataset
from minidl.errors import MinidlError
from minidl.nn import Module, random_state, set_random_state
from minidl.run import checkpoint as files
from minidl.run import declared
from minidl.run.config import JOINABLE, Config, joinable
from minidl.run.evaluation import Score
from minidl.run.folder import CLUSTER, RunFolder, resuming
from minidl.run.signals import Signals, Stopped
from minidl.training import forecast, newcomer
from minidl.training.agreement import agree_at_start, facts_of_run
from minidl.training.continuing import Saved, earlier_result, go_on, last_saved
from minidl.training.gradient_cost import flops_per_image, measure, work_of
from minidl.training.observer import Observer
from minidl.training.output import RunOutput, parameter_count, reopen
from minidl.training.session import Session, chosen, prepare
from minidl.training.startup import begin_together
from minidl.training.tensorboard import Budget
from minidl.training.trainer import Entry

HEAD = ("# The options of a simulated run, except the cluster and the number of ranks. To repeat it bit-identically:\n"
        "# `python -m minidl.simulate --cluster {cluster} --ranks {ranks} --config FILE`\n\n"
        )  # fmt: skip
TESTED = 32  # at most this many replicas are tested individually


def execute(config: Config, given: Mapping[str, Any], signals: Signals) -> Entry:
    """Train, or with --measure only measure; return the result, ready for JSON.

    config: the options of the run. given: the options of the command line. Config does not have all of them: it lacks
    cluster, ranks and measure.
    """
    if folder := given.get("resume"):
        return resume(config, given, Path(folder), signals)
    path = given.get("cluster", "uniform")
    if given.get("measure"):
        return measure(path, config)
    ranks, cluster = given.get("ranks", 8), clusters.read(path)
    simulated = SimulatedRun(config, clusters.parse(cluster, path), ranks, signals)
    head = HEAD.format(cluster=path, ranks=ranks)
    return simulated.begin(lambda: RunFolder.create(simulated.config, head, cluster))


def resume(config: Config, given: Mapping[str, Any], folder: Path, signals: Signals) -> Entry:
    """Continue a simulated run. A finished run is not trained again, unless it becomes longer."""
    if result := earlier_result(config, given):
        return result
    path = folder / CLUSTER
    simulated = SimulatedRun(config, clusters.load(path), ranks_of(config), signals, resume=folder)
    return simulated.go_on(given)


def ranks_of(config: Config) -> int:
    """Return the number of ranks of a run: its replicas, and the servers of its method."""
    return config.workers + declared.servers(config.method, config.center)


class Parts:
    """What all ranks of a simulated run share. It serves several runs, one after the other.

    These runs must have the same data set, model, seed, batch size, and optimizer with its options. The recorded step
    and the compiled kernels then serve all of them.
    fresh: whether the weights of --init are needed. built: the data and the model; the default is those of the config.
    flops: of one image's gradient.
    """

    def __init__(
        self, config: Config, fresh: bool = True, built: tuple[Dataset, Module] | None = None
    ) -> None:  # fmt: skip
        self.data, self.model = built or prepare(config, fresh=fresh)
        self.flops = flops_per_image(self.model, self.data.input_shape)
        self.engine = engine = Engine(self.model, config)
        self.theta, self.random = engine.arena.theta.copy(), random_state()
        self.statistics = engine.statistics and engine.statistics.theta.copy()
        self.prepared = False

    def reset(self) -> None:
        """Give the model its initial weights again."""
        engine = self.engine
        engine.arena.theta[:] = self.theta
        engine.arena.touch()
        if engine.statistics is not None:
            engine.statistics.theta[:] = self.statistics
            engine.statistics.touch()
        engine.bound = None
        set_random_state(self.random)


class SimulatedRun:
    """A run of all replicas of a virtual cluster, from the first step to the result.

    ranks: their number, with those that join later. parts: of an earlier run; see Parts. full: whether the start and
    the checkpoints are those of a real job, and take virtual time. resume: the folder of a run to continue.

        simulated = SimulatedRun(config, cluster, ranks, signals)
        simulated.simulation.at(3.0, ...)                  what else happens at a virtual time
        summary = simulated.begin(lambda: RunFolder.create(simulated.config))

    simulation: the clock and the network. replicas: the ranks that train from the beginning. sessions: of each rank
    that has begun, also of the dead; `created` is called with that of a newcomer. results: of each rank that has not
    died: the summary, None, or Stopped.
    """

    def __init__(
        self,
        config: Config,
        cluster: clusters.Cluster,
        ranks: int,
        signals: Signals,
        parts: Parts | None = None,
        full: bool = False,
        resume: Path | None = None,
    ) -> None:
        self.config = config = replace(config, workers=len(chosen(config, ranks)[1]), device="cpu", devices="", parts=1)
        self.signals, self.full, self.folder = signals, full, resume or Path()
        self.saved: Saved | None = None
        if resume:
            with reopen(resume) as run:
                self.saved = last_saved(run.checkpoints)
        self.parts = parts or Parts(config, fresh=self.saved is None)
        self.parts.reset()
        forecast.require_memory(ranks, parameter_count(self.parts.model), len(self.parts.data.y_train))
        self.simulation = Simulation(
            cluster, ranks, config.seed, work_of(config), self.parts.flops, config.trace,
            begin=self.saved.seconds() if self.saved else 0.0, stall=config.stall,
        )  # fmt: skip
        self.simulation.free_saves = not full
        self.simulation.arrivals.invited = False  # until the folder is open
        self.others_join = self.simulation.began < ranks
        if cluster.joins and not joinable(config):
            raise cluster.wrong(f"[[joins]]: expected one of the methods {', '.join(JOINABLE)}, with --shards iid, got "
                                f"{config.method}")  # fmt: skip
        kind, self.replicas = chosen(config, self.simulation.began)
        self.synchronous = kind.synchronous
        self.budget = Budget()  # of all replicas together
        self.observer = Observer(self.simulation, self.parts.flops, config.quiet)
        self.created: Callable[[SimulatedSession], None] = lambda session: None
        self.sessions = {rank: SimulatedSession(self, rank) for rank in range(self.simulation.began)}
        self.observer.sessions = self.sessions
        self.results: dict[int, Entry | Stopped | None] = {}

    def begin(self, open_run: Callable[[], RunFolder]) -> Entry:
        """Train in a new folder, which `open_run` creates; return the summary.

        Raises Stopped after a signal, when the states are saved, and any MinidlError of a rank.
        """

        def work(session: SimulatedSession) -> Entry | None:
            with session.output.opened(open_run):
                return session.train()

        return self._run(work)

    def go_on(self, given: Mapping[str, Any]) -> Entry:
        """Continue the run in `folder`; return the summary. given: options of the command line; see continuing.py."""
        return self._run(lambda session: go_on(session, self.folder, given, lambda checkpoints: self.saved))

    def _run(self, work: Callable[[SimulatedSession], Entry | None]) -> Entry:
        self.signals.defer(self.config.quiet)
        self._prepare()
        try:
            ranks = range(self.simulation.size)
            self.results = self.simulation.run({rank: partial(self._main, rank, work) for rank in ranks})
        finally:
            self.observer.display.close()
        for result in self.results.values():
            if isinstance(result, Stopped):
                raise result
            if result is not None:
                return result
        again = f"; to continue: {resuming(self.folder, self.config.model)}" if files.last(self.checkpoints) else ""
        raise MinidlError(f"all replicas have died, after {self.simulation.time:.6g} virtual s{again}")

    @cached_property
    def facts(self) -> dict[str, object]:
        """What all ranks of a full run have in common. It is computed once for all of them."""
        return facts_of_run(self.sessions[0].config, self.parts.model, self.parts.data) if self.full else {}

    @cached_property
    def curvature(self) -> float:
        """The curvature of the loss at the beginning. It is estimated once, because all begin with equal weights."""
        return self.sessions[self.replicas[0]].trainer.estimate_curvature()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def _prepare(self) -> None:
        """Record the step and compile all kernels, before the clock starts."""
        trainer = self.sessions[0].trainer
        trainer.engine.gradient.progress = trainer.engine.prediction.progress = self.observer.display.compiling
        if not self.parts.prepared or self.sessions[0].output.alone:  # a single replica has its own engine
            trainer.prepare()
        self.parts.prepared = True

    def _main(self, rank: int, work: Callable[[SimulatedSession], Entry | None]) -> Entry | Stopped | None:
        """The work of a rank."""
        try:
            if self.simulation.transport(rank).newcomer:
                return self._join(rank)
            if self.full:
                self.sessions[rank].agree()
            return work(self.sessions[rank])
        except Stopped as stopped:
            return stopped.with_traceback(None)
        except MinidlError as error:
            if self.synchronous and self.simulation.deaths and type(error) in (MinidlError, PeerLost):
                raise MinidlError(f"after {self.simulation.time:.6g} virtual s: with {self.config.method} all make "
                                  f"each step together; asynchronous methods continue: {error}") from None  # fmt: skip
            raise

    def _join(self, rank: int) -> Entry | None:
        """The work of a rank that joins."""
        session = self.sessions[rank] = SimulatedSession(self, rank)
        session.facts = self.facts
        self.created(session)
        try:
            with session.output.opened(lambda: RunFolder.open(self.folder)):
                return session.train()
        except MinidlError as error:
            if not session.fabric.newcomer:
                raise
            self.observer.display.say(f"replica {rank} has not joined: {error}")
            return None


class SimulatedSession(Session):
    """The session of one rank of a simulation."""

    def __init__(self, simulated: SimulatedRun, rank: int) -> None:
        self.simulated, parts = simulated, simulated.parts
        transport = simulated.simulation.transport(rank)
        super().__init__(
            replace(simulated.config, workers=len(simulated.replicas)), simulated.signals,
            Fabric(transport, simulated.replicas), parts.data, parts.model,
            parts.engine if transport.size > 1 else None,
        )  # fmt: skip
        self.trainer.curvature = lambda: simulated.curvature

    def agree(self) -> None:
        """Compare the options with those of the other ranks, as `Session.of_process` does."""
        transport, model = self.fabric.transport, self.model
        service = transport.service  # of the method, which exists already
        self.facts = agree_at_start(Fabric(transport), self.config, model, self.data, self.simulated.facts)
        transport.join(self.trainer.method.buffers(model.flatten().size, self.config), model.flatten().layout_hash)
        transport.service = service

    def make_output(self) -> RunOutput:
        return SimulatedOutput(self)

    def announce(self) -> None:
        self.simulated.observer.announce(self)

    def begin_together(self) -> None:
        """Begin, in the order of the ranks. `SimulatedRun` has compiled the kernels for all of them."""
        self.output.events.prepare()
        if self.fabric.newcomer:
            self.output.folder = newcomer.become_member(self.trainer, self.facts)
        elif self.simulated.full:
            begin_together(self.fabric, lambda: None)
        else:
            self.fabric.set_status(Column.STATE, State.TRAINING)

    def _step_done(self, entry: Entry) -> None:
        self.simulated.observer.step_done(self, entry)

    def _epoch_done(self, entry: Entry) -> None:
        """Do as in a real job if all replicas meet now. Else save nothing before the last epoch."""
        simulated = self.simulated
        together = self.trainer.method.synchronous and (self.data.x_validation is not None or simulated.others_join)
        if simulated.full or self.output.alone or together:
            super()._epoch_done(entry)
        else:
            self.averages.take()


class SimulatedOutput(RunOutput):
    """The output of one rank of a simulation. The leader writes, as in a real job."""

    def __init__(self, session: SimulatedSession) -> None:
        super().__init__(session.trainer, lambda entry: None)
        self.simulated = session.simulated
        self.events.budget = session.simulated.budget

    @contextmanager
    def opened(self, open_run: Callable[[], RunFolder]) -> Iterator[None]:
        """Open the run's folder in the leader, which begins first, and close it after the `with` block."""
        if self.simulated.full or self.fabric.newcomer:
            with super().opened(open_run):
                self._invite()
                yield
            return
        try:
            if self.leads:
                self.run = open_run()
                self.folder = self.run.folder
                self._invite()
            self.folder = self.simulated.folder
            yield
        finally:
            if self.run:
                self.run.__exit__()

    def _invite(self) -> None:
        """Let others join, as `launch.join.invite` does, if this rank has opened the folder."""
        if self.run:
            self.simulated.folder = self.run.folder
            self.simulated.simulation.arrivals.invited = True

    def discard(self) -> None:
        """Do nothing in a rank that is killed."""
        if self.fabric.alive(self.fabric.rank):
            super().discard()

    def log(self, entry: Entry) -> None:
        super().log({"time": entry.get("seconds", self.simulated.simulation.time), **entry})

    def report(self, entry: Entry) -> None:
        """Log the validation of an average. The observer logs the rest."""
        names = ("step", "epoch", "validation_loss", "validation_accuracy", "consensus_distance")
        if "validation_loss" in entry:
            self.log({"event": "average", **{name: entry[name] for name in names if name in entry}})

    def save_snapshot(self) -> None:
        if self.simulated.full:
            super().save_snapshot()

    def score_of_replica(self) -> Score | None:
        alive = self.fabric.survivors()
        if alive.index(self.fabric.rank) % -(-len(alive) // TESTED):
            return None
        self.simulated.observer.tested.add(self.fabric.rank)
        return super().score_of_replica()

    def finish(self, summary: Entry) -> None:
        """Replace the summary by that of the observer, and write it."""
        virtual = self.simulated.observer.summary(summary)
        summary.clear()
        summary.update(virtual)
        super().finish(summary)
