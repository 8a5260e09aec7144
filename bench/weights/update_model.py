"""How long an update of weights takes: a plain model. Pure; `predicted.py` measures its constants.

A stream passes stages at once: the trainer's ranks, the buffer, and the nodes, each of which feeds `FAN_OUT`
others, as the buffer does. The slowest stage bounds all of them, and each further level of the tree adds the
time of one message. Around the stream lie phases that begin when the one before ends: the trainer compares
and hashes, engines make the result of a delta, check it, and load it. Left out: rollouts that an update
waits for, `full_tensor` of sharded trainers, the write of a folder, keys, disks slower than memory, and
other work on the network and on the cores.

Costs are seconds of one core; those of bytes are per GB (10^9 bytes). What a stage does one after the other
(a sender, the writes of a file, which the kernel lets one thread do at a time, an event loop, the IO thread
of a connection) uses no more than one core, however many there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seer.common.blobs import part_bytes, window
from seer.common.net.transport.zmq import IO_THREADS
from seer.services.buffer.weights.fan_out import FAN_OUT

MOST_THREADS = 32
"""Of a ThreadPoolExecutor without a number: that, or four more than there are cores."""


@dataclass(frozen=True)
class Costs:
    """`keep`: a copy in memory. `check`: an engine's look for what is not finite, and its hash, from a file.

    `compare` and `apply`: of the whole model's bytes, by the kind of delta. In threads: `make` a message of
    tensors, `store` one in a file, `give` one from a file; `handover`: seconds, not of a core, until a thread
    has begun and the event loop heard of its end. On event loops, seconds per message: a trainer `sends`, the
    buffer or a node `takes` and `serves`. On IO threads: `into`, `out`.
    """

    hash: float
    keep: float
    check: float
    compare: Mapping[str, float]
    apply: Mapping[str, float]
    make: float
    store: float
    give: float
    handover: float
    sends: float
    takes: float
    serves: float
    into: float
    out: float


@dataclass(frozen=True)
class Cluster:
    """`cores` of each node, or, if `one_machine`, of all of them together. Links in GB/s each way.

    `ranks` of the trainer send side by side; each has the link and the cores of a node, unless the trainer is
    `beside_buffer`. `gpus` of a node load its weights, a share each.
    """

    nodes: int
    link: float
    cores: float
    ranks: int = 1
    beside_buffer: bool = False
    one_machine: bool = False
    gpus: int = 1
    trip: float = 1e-4
    """Seconds there and back."""

    @property
    def depth(self) -> int:
        """Levels of the tree, the buffer's apart."""
        return level(self.nodes - 1)

    @property
    def fed(self) -> int:
        """How many nodes the buffer feeds."""
        return min(FAN_OUT, self.nodes)

    def threads(self, of: int = 1) -> float:
        """Return the cores that a pool of threads has on each of so many nodes at once."""
        cores = self.cores / of if self.one_machine else self.cores
        return min(cores, MOST_THREADS)


@dataclass(frozen=True)
class Update:
    """A model of `gb`, or a delta of a `kind` to it with a share of its `bytes`, that changes `tensors`."""

    gb: float
    kind: str = ""
    bytes: float = 1.0
    tensors: float = 1.0
    keeps: bool = True
    """The trainer keeps a copy for later deltas."""


def level(number: int) -> int:
    """Return how many nodes pass a stream on until a node, by its place in the tree, has it."""
    return 1 if number < FAN_OUT else 1 + level(number // FAN_OUT - 1)


def part_of(gb: float) -> float:
    """Return the GB of a message of a stream of so many GB."""
    return part_bytes(int(gb * 1e9)) / 1e9


def bounds(gb: float, costs: Costs, cluster: Cluster) -> dict[str, float]:
    """Return seconds per GB of a stream of `gb` by what each stage would allow alone.

    The buffer feeds as many as any node, so what bounds it bounds the nodes, too.
    """
    ranks, fed, part = cluster.ranks, cluster.fed, part_of(gb)
    hand = costs.handover / part
    found = {
        "a sender": (costs.make + hand + costs.sends / part) / ranks,
        "a sender's IO thread": costs.out / ranks,
        "the writes of a file": costs.store,
        "an event loop": (costs.takes + fed * costs.serves) / part,
        "IO threads": max(costs.into, costs.out, (costs.into + fed * costs.out) / IO_THREADS),
        "links": fed / cluster.link,
        "windows": (costs.give + costs.store + hand + cluster.trip / part) / window(round(part * 1e9)),
    }
    if not cluster.beside_buffer:
        found["links of ranks"] = 1 / (ranks * cluster.link)
    if cluster.one_machine:
        found["all cores"] = work(part, costs, cluster) / cluster.cores
    return found


def work(part: float, costs: Costs, cluster: Cluster) -> float:
    """Return the seconds of cores that a GB, in messages of `part` GB, takes on all nodes together."""
    sent = costs.make + costs.out + costs.sends / part
    taken = costs.into + costs.store + costs.takes / part
    served = costs.give + costs.out + costs.serves / part
    return sent + taken + cluster.nodes * (taken + served)


def streamed(gb: float, costs: Costs, cluster: Cluster) -> tuple[float, str]:
    """Return how long a stream takes to be on all nodes, and what bounds it."""
    found = bounds(gb, costs, cluster)
    slowest = max(found, key=lambda each: found[each])
    each_level = min(gb, part_of(gb)) * (cluster.fed / cluster.link + costs.give + costs.store)
    return gb * found[slowest] + (cluster.depth - 1) * each_level, slowest


def phases(update: Update, costs: Costs, cluster: Cluster) -> tuple[dict[str, float], str]:
    """Return the seconds of each phase of an update by a stream, and what bounds the stream."""
    trainer, node = cluster.threads(), cluster.threads(cluster.nodes)
    looks = update.tensors * costs.hash + (costs.compare[update.kind] if update.kind else 0.0)
    if not update.kind and update.keeps:
        looks += costs.keep
    seconds, bound = streamed(update.gb * update.bytes, costs, cluster)
    # On one machine the buffer makes the same result meanwhile, with the same cores.
    makes = costs.apply[update.kind] if update.kind else 0.0
    makes *= (cluster.nodes + 1) / cluster.nodes if cluster.one_machine else 1
    return {
        "the trainer compares and hashes": update.gb * looks / cluster.ranks / trainer,
        "the stream": seconds,
        "engines apply the delta": update.gb * makes / node,
        "engines check": update.gb * update.tensors * costs.check / node,
        "engines load": 0.0 if cluster.one_machine else update.gb / cluster.gpus * costs.keep,
    }, bound


def from_folder(gb: float, disk: float, costs: Costs, cluster: Cluster) -> dict[str, float]:
    """Return the phases of an update from a folder that each node reads once, with `disk` GB/s."""
    return {
        "engines check": gb * max(1 / disk, costs.check / cluster.threads()),
        "engines load": gb / cluster.gpus * costs.keep,
    }
