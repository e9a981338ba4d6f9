"""The observer of a simulated run. It sees all replicas at once, and logs means over all of them in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

from minidl.comm import stats
from minidl.comm.transport.sim import Simulation
from minidl.run.display import Display, Position, count
from minidl.run.evaluation import evaluate
from minidl.training import forecast
from minidl.training.replica_state import averaged, mean_and_distance
from minidl.training.session import LOG_EVERY, Session
from minidl.training.summary import traffic, worked
from minidl.training.trainer import Entry
from minidl.training.work import Claimed

LEGEND = ("loss, accuracy: on training images, means of all replicas; test: accuracy of their average; "
          "distance: consensus distance")  # fmt: skip
PRINTED = 10  # about so many epochs are printed; metrics.jsonl has all of them
COUNTED = ("bytes_sent", "messages", "bytes_between_nodes", "wait_fraction", "idle_seconds", "staleness",
           "sends_skipped", "reads_missed", "reads_overlapped", "exchanges", "exchanges_suppressed",
           "bytes_suppressed")  # fmt: skip


class Observer:
    """The lines of metrics.jsonl, the printed lines and the entries of summary.json of a simulated run.

    A line of metrics.jsonl is written after every LOG_EVERY steps of a replica, on average, and after each epoch of all
    replicas together. For an epoch, the average of all replicas is tested. This takes no virtual time.

    flops: of one image's gradient. sessions: by rank. tested: replicas whose own weights were tested.
    """

    def __init__(self, simulation: Simulation, flops: float, quiet: bool) -> None:
        self.simulation, self.flops = simulation, flops
        self.sessions: Mapping[int, Session] = {}
        self.tested: set[int] = set()
        self.display = Display(quiet)
        self.real = perf_counter()  # the real time of the beginning
        self.steps = self.logged = 0  # of all replicas together
        self.epoch = 0
        self.deaths = 0  # of which history.jsonl knows
        self.loss = self.correct = self.images = 0.0  # sums since the last line of metrics.jsonl
        self.last_loss = 0.0  # in the last line of metrics.jsonl

    @property
    def leader(self) -> Session:
        """The session of the first live replica."""
        one = next((each for each in self.sessions.values() if each.fabric.alive(each.fabric.rank)), self.sessions[0])
        return self.sessions[one.fabric.leader]

    def announce(self, session: Session) -> None:
        """Print what is trained. Each session calls this before its first step, and the leader's is the first."""
        trainer = session.trainer
        if session.output.leads:
            if session.resumed:
                self.display.say(session.resumed_at())
            each = "each on average" if isinstance(trainer.work, Claimed) else "each"
            steps = trainer.total_steps - trainer.progress.step
            flops = self.flops * session.config.batch_size
            self.display.say(f"{session.what()}, {count(trainer.total_steps, 'step')} {each}, "
                             f"{session.config.workers} simulated replicas, {session.config.method}"
                             f"{forecast.duration(session.config.workers, steps, flops)}")  # fmt: skip
            self.display.say(LEGEND)
            trainer.note = self.display.say
        rank = session.fabric.rank
        if rank in session.fabric.replicas and not session.fabric.newcomer:
            self.steps += trainer.replica.steps  # of an earlier session
            self.logged, self.epoch = self.steps, self.steps // trainer.work.batches

    def step_done(self, session: Session, entry: Entry) -> None:
        """Count a step of any replica."""
        trainer, batch = session.trainer, session.config.batch_size
        self.steps += 1
        self.images += batch
        self.loss += entry["loss"] * batch
        self.correct += entry["accuracy"] * batch
        replicas = session.config.workers
        if self.simulation.deaths > self.deaths:
            self.deaths = self.simulation.deaths
            self.leader.output.note_members()
        if self.display.due():
            part = min(1.0, self.steps / (replicas * trainer.total_steps))
            epochs, batches = trainer.epochs, trainer.work.batches
            at = Position(part, min(self.epoch + 1, epochs), epochs, (self.steps % batches, batches))
            self.display.show(at, f"{self.simulation.time:.4g} virtual s", f"loss {self.loss / self.images:.4f}")
        epoch = self.steps // trainer.work.batches
        if epoch > self.epoch or self.steps - self.logged >= LOG_EVERY * replicas:
            event = "epoch" if epoch > self.epoch else "step"
            self.epoch, self.logged = epoch, self.steps
            self._log(event, trainer.replica.lr)

    def _log(self, event: str, lr: float) -> None:
        leader = self.leader
        self.last_loss = self.loss / self.images
        entry: Entry = {
            "event": event,
            "step": self.steps // leader.config.workers,  # mean over the replicas
            "epoch": self.epoch + (event == "step"),
            "time": self.simulation.time,
            "loss": self.last_loss,
            "accuracy": self.correct / self.images,
            "lr": lr,
        }
        self.loss = self.correct = self.images = 0.0
        if event == "epoch":
            entry |= self._test_average(leader)
            epochs = leader.trainer.epochs
            if self.epoch == 1 or self.epoch % -(-epochs // PRINTED) == 0:
                self.display.say(
                    f"epoch {self.epoch:>3}/{epochs}  {entry['time']:.4g} virtual s  loss {entry['loss']:.4f}  "
                    f"accuracy {entry['accuracy']:.2%}  test {entry['accuracy_average']:.2%}  "
                    f"distance {entry['consensus_distance']:.4f}"
                )
        leader.output.log(entry)
        leader.output.note_members()
        if event == "epoch":
            leader.output.note_speeds()

    def _test_average(self, leader: Session) -> Entry:
        sessions, alive = self.sessions, leader.fabric.survivors()
        theta, distance = mean_and_distance(sessions[rank].trainer.replica.theta for rank in alive)
        trainer, data = leader.trainer, leader.data
        with averaged(trainer, theta):
            score = evaluate(trainer.model, data.x_test, data.y_test, prediction=trainer.engine.prediction)
        statistics = self.statistics()
        return {
            "accuracy_average": score.accuracy,
            "loss_average": score.loss,
            "consensus_distance": distance,
            **{name: statistics[name] for name in ("bytes_sent", "messages", "wait_fraction")},
        }

    def statistics(self) -> stats.Report:
        """Return the statistics of all ranks, including servers and the dead."""
        transports = self.simulation.transports
        dead = [each.rank for each in transports if not each.alive(each.rank)]
        return stats.merge([each.stats.report() for each in transports], self.simulation.place.nodes, dead)

    def summary(self, found: Entry) -> Entry:
        """Return summary.json of the run. found: its entries for a real run of these replicas."""
        leader, statistics = self.leader, self.statistics()
        alive = leader.fabric.survivors()
        images = sum(self.sessions[rank].trainer.replica.images for rank in alive)
        alone = {"workers": 1, "method": leader.config.method, "replicas_alive": 1, "consensus_distance": 0.0,
                 **dict.fromkeys(("accuracy_average", "accuracy_best", "accuracy_worst"), found["test_accuracy"]),
                 **worked(leader.trainer)}  # fmt: skip
        return {
            "time": "virtual",
            **(alone if leader.output.alone else {}),
            **{name: value for name, value in found.items() if name != "edges"},
            "train_loss": self.loss / self.images if self.images else self.last_loss,
            "seconds": statistics["elapsed"],
            "images_per_second": images / (statistics["elapsed"] or 1.0),
            "cluster": self.simulation.cluster.file,
            "ranks": self.simulation.size,
            "replicas_tested": max(1, len(self.tested)),
            **{name: statistics[name] for name in COUNTED},
            "traffic": traffic(statistics["edges"], self.simulation.size),
            "virtual_seconds_by_kind": statistics["seconds"],
            "links": self.simulation.network.report(),
            "events": self.simulation.happened,
            "real_seconds": round(perf_counter() - self.real, 3),
        }
