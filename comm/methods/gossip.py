"""Gossip: asynchronous SGD without a center. No replica waits for another.

    each step of replica i:
        for each received model x_s:        x_i <- x_i + weight * (x_s - x_i)       --mix      weighing.py
        x_i <- x_i - eta * g_i(x_i)                                                 --velocity momentum.py
        in some steps, with a peer:         push | pull | push-pull                 --peer     peers.py

        push         i sends x_i. The peer mixes x_i into its model.
        pull         i reads the newest model that the peer has published, and mixes it into x_i.
        push-pull    i sends x_i. The peer replies with its model, then mixes in x_i. i mixes in the reply. If the
                     peer cannot send the reply now, it mixes first and replies in a later step. If both have sent
                     before they receive, each message is also the reply to the other.
        swap         both send, and move by opposite amounts: swap.py

Push with --mix mass is GoSGD (Blot, Picard, Cord, Thome 2016). Georgiev and Gurov (LSSC 2019) compare several ways of
exchange. Quasi-global momentum is from Lin et al. (ICML 2021). A message holds the whole model. With --block layers it
holds one layer, in cyclic order, and each layer has a separate mass. With --adaptive, a block is exchanged when it has
changed enough (adaptive.py). A replica on a GPU sends its model of the step before, so that no step waits for a copy.
"""

from __future__ import annotations

import numpy as np

from minidl.comm.fabric.base import Header
from minidl.comm.methods import adaptive, momentum, peers, swap, weighing
from minidl.comm.methods.base import Batch, BufferSpec, Fabric, Mapping, Message, Replica, View
from minidl.data.seeds import Purpose, generator
from minidl.run.config import Config

OPTIONS = {
    "period": {"default": 1, "min": 1, "help": "steps between two exchanges"},
    "probability": {
        "default": 0.0,
        "min": 0,
        "max": 1,
        "instead_of": "period",
        "help": "probability of an exchange after each step, instead of --period; 0: use --period",
    },
    "exchange": {
        "default": "push",
        "choices": {
            "push": "it sends its model",
            "pull": "it reads the model of the other",
            "push-pull": "it sends its model and receives that of the other",
            "swap": "both send, and move by opposite amounts, so the average of all models does not change",
        },
        "help": "what the replica that begins an exchange does",
    },
    "peer": {"like": "peers"},
    "inside": {"like": "peers"},
    "topology": {"like": "base", "needs": {"peer": "topology"}},
    "compress": {"like": "compression", "needs": {"exchange": "swap"}},
    "mix": {"like": "weighing"},
    "block": {
        "default": "whole",
        "choices": {"whole": "the whole model", "layers": "one layer; the next message holds the next layer"},
        "help": "what a message holds",
    },
    "velocity": {"like": "momentum"},
    "adaptive": {"all_of": "adaptive"},
    "balance": {
        "like": "base",
        "default": "queue",
        "choices": {"equal": "in equal parts, in advance", "queue": "each takes its next batch when it is ready"},
        "used_with": {"shards": ["iid"]},
        "help": "how replicas divide the images of an epoch",
    },
    "weighting": {"like": "base"},
}


class Gossip(adaptive.Adaptive):
    synchronous = False

    def __init__(self, replica: Replica, fabric: Fabric, config: Config) -> None:
        super().__init__(replica, fabric, config)
        self.momentum = momentum.kind(config)(replica, config)
        self.blocks = replica.layers() if config.block == "layers" else [(0, replica.theta.size)]
        self.block_at = {start: block for block, (start, _) in enumerate(self.blocks)}
        self.weighing = weighing.kind(config)(replica, len(self.blocks))
        self.trigger = adaptive.build(replica, config, self.blocks)
        topology = self.topology_or_ring if fabric.newcomer else self.topology
        self.choose, self.replicas = peers.chooser(fabric, config, topology), fabric.replicas
        self.begun = 0  # number of exchanges that this replica has begun
        self.asked: set[int] = set()  # peers whose model this replica expects
        self.owed: dict[int, int] = {}  # replies that could not be sent yet: peer -> block
        self.swaps: swap.Swaps | None = None
        if config.exchange == "swap":
            self.swaps = swap.Swaps(fabric, self.momentum, self.send_whole, swap.checked(config))

    @classmethod
    def buffers(cls, size: int, config: Config) -> BufferSpec:
        weighing.kind(config)
        adaptive.checked(config)
        codec, size = swap.checked(config), size * momentum.kind(config).vectors
        mail = {"push": 2, "pull": 1, "push-pull": 3, "swap": 3}[config.exchange]
        return BufferSpec(codec.nbytes(size) if codec else 4 * size, mail, publish=config.exchange == "pull")

    def local(self, batch: Batch) -> float:
        """Mix in the models that have arrived, then train."""
        self.momentum.begin()
        self.receive()
        return super().local(batch)

    def exchange(self) -> None:
        """Send the delayed replies. Begin exchanges if --period or --probability, and --adaptive, select this step."""
        config, replica = self.config, self.replica
        chance = generator(Purpose.GOSSIP, config.seed, self.fabric.rank, replica.steps)
        fires = chance.random() < config.probability if config.probability else replica.steps % config.period == 0
        for asker, block in tuple(self.owed.items()):
            if self.push(asker, block, reply=True):
                del self.owed[asker]
        if self.swaps:
            self.swaps.send_owed()
            fires = fires and not self.swaps.unfinished()  # else --adaptive would count an exchange as suppressed
        if fires:
            for block in self.due_blocks():
                self.begin(chance, block)
        self.momentum.end()

    def due_blocks(self) -> list[int]:
        """Return the blocks to exchange in this step. A pull is for one block, because a peer reads only the newest."""
        if self.trigger is None:
            return [self.begun % len(self.blocks)]
        due = self.trigger.due(self.momentum.vectors)
        return due[:1] if self.config.exchange == "pull" else due

    def begin(self, chance: np.random.Generator, block: int) -> None:
        """Begin an exchange of a block with a peer."""
        config, peer = self.config, self.choose(chance)
        if config.exchange == "pull":
            self.fabric.publish(self.momentum.outgoing(*self.blocks[block]), self.header(block))
        elif peer is None or not (self.swaps.begin(peer) if self.swaps else self.request(peer, block)):
            return  # nothing was sent: the next exchange uses the same block
        self.begun += 1
        if self.trigger:
            self.trigger.exchanged(block)
        if peer is not None and config.exchange in ("pull", "push-pull"):
            self.asked.add(peer)

    def request(self, peer: int, block: int) -> bool:
        """Send a block to a peer to which no reply is owed. Return whether that was possible."""
        return peer not in self.owed and self.push(peer, block)

    def on_membership(self, view: View) -> None:
        """Owe no reply to a peer that is dead or left out, and expect none. A newcomer may change the neighbours."""
        self.owed = {asker: block for asker, block in self.owed.items() if asker in view.members}
        self.asked.clear()
        if self.swaps:
            self.swaps.on_membership()
        if self.fabric.replicas != self.replicas:
            self.replicas = self.fabric.replicas
            self.choose = peers.chooser(self.fabric, self.config, self.topology_or_ring)

    def header(self, block: int, share: float = 1.0, reply: bool = False) -> Header:
        return Header(self.blocks[block][0], share, float(self.replica.images), self.replica.steps, reply)

    def push(self, peer: int, block: int, reply: bool = False) -> bool:
        """Send a block of x_i with a share of its mass. If this fails, keep the mass and return False."""
        share = self.weighing.share(block)
        if not share or not self.fabric.send(
            peer, *self.momentum.outgoing(*self.blocks[block]), header=self.header(block, share, reply)
        ):
            return False
        self.weighing.sent(block, share)
        return True

    def send_whole(self, peer: int, model: np.ndarray, reply: bool) -> bool:
        """Send a model, or its code, for a swap, which moves no mass. Return whether that was possible."""
        return self.fabric.send(peer, model, header=self.header(0, reply=reply))

    def receive(self) -> None:
        """Mix in the models that have arrived."""
        for message in self.fabric.poll():
            if self.swaps:
                if message.vector.size:
                    self.stale(message)
                self.swaps.receive(message)
                continue
            if self.config.exchange == "push-pull":
                self.answer(message)
            self.mix(message)
        if self.config.exchange == "pull":
            for peer in sorted(self.asked):
                published = self.fabric.latest(peer)
                if published is not None:  # None: the peer's model is not new, or cannot be read yet
                    self.asked.remove(peer)
                    with published:
                        self.mix(published)

    def answer(self, message: Message) -> None:
        """Reply to a received model with x_i, before mixing. If sending fails, `exchange` replies later.

        A reply is not answered, nor is a model from a peer whose reply this replica expects: it is that reply.
        """
        peer, block = message.sender, self.block_at[message.header.start]
        if message.header.marker or peer in self.asked:
            self.asked.discard(peer)
        elif not self.push(peer, block, reply=True):
            self.owed[peer] = block

    def mix(self, message: Message) -> None:
        self.stale(message)
        self.momentum.mix(message, self.weighing.weight(message.header, self.block_at[message.header.start]))

    def pause(self) -> None:
        """Mix in the models that are still in flight, with their mass. Forget expected and delayed replies."""
        self.fabric.drain(self.swaps.end if self.swaps else self.mix)
        self.asked, self.owed = set(), {}
        if self.swaps:
            self.swaps.drop()

    def offer(self) -> tuple[dict[str, np.ndarray], dict[str, int | float]] | None:
        """Offer half of the mass, as for a message: then the mass of all and the weighted average stay the same."""
        shares = np.array([self.weighing.share(block) for block in range(len(self.blocks))])
        return ({**self.vectors(), "mass": shares}, self.numbers()) if shares.all() else None

    def accepted(self, vectors: Mapping[str, np.ndarray]) -> None:
        for block, share in enumerate(vectors["mass"]):
            self.weighing.sent(block, float(share))

    def vectors(self) -> dict[str, np.ndarray]:
        return {**super().vectors(), "mass": self.weighing.mass}

    def numbers(self) -> dict[str, int | float]:
        return {"begun": self.begun}

    def restore(self, vectors: Mapping[str, np.ndarray], numbers: Mapping[str, int | float]) -> None:
        if not (vectors["mass"] > 0).all():
            raise ValueError(f"a mass is {vectors['mass'].min():g}; expected masses above 0")
        super().restore(vectors, numbers)
        self.begun = int(numbers["begun"])
