"""What the nodes of an engine must agree on before their ranks start.

Ranks that differ in a setting would hang in a collective, or sample different tokens.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata

import msgspec

from seer import __version__
from seer.common.config import Config, EngineConfig
from seer.common.errors import ConfigError
from seer.common.process.devices import visible_devices
from seer.common.weights.mooncake import own_address
from seer.services.engine.nodes.shares import RankReads

OF_ONE_NODE = frozenset(
    {"name", "node_rank", "cpu_cores", "leave_notice", "weights_root", "weights_endpoint"}
)
"""Settings of `[engine]` that may differ from node to node."""

MAX_TEXT = 4000
"""Characters of a setting that are compared."""

_PACKAGES = ("vllm", "torch")


@dataclass(slots=True)
class Meeting:
    """Where the ranks of several nodes meet, and where each of the other nodes has the checked weights.

    `own`: this node's address for the others; `host`, `port`: those of rank 0's store, known once all have
    joined. `folders`: of the nodes from 1 on. `proofs`: what each rank reads of weights, by layouts, the last
    one first; None: that cannot be known. `prove`: the load of what was checked last is to find it out.
    `not_run`: how often in a row that was tried, and could not be.
    """

    own: str
    host: str = ""
    port: int = 0
    folders: list[str] = field(default_factory=list)
    proofs: list[list[RankReads]] | None = field(default_factory=list)
    prove: bool = False
    not_run: int = 0


def check_nodes(engine: EngineConfig) -> None:
    """Raise `ConfigError` for settings of nodes that cannot be."""
    nodes, ranks = engine.nodes, engine.tensor_parallel
    if ranks % nodes:
        fix = f"give a number that divides engine.tensor_parallel = {ranks}: each node has as many ranks"
        raise ConfigError(f"engine.nodes = {nodes}: {fix}")
    if engine.node_rank >= nodes:
        raise ConfigError(f"engine.node_rank = {engine.node_rank}: give 0 to engine.nodes - 1 = {nodes - 1}")
    if nodes > 1 and engine.backend != "vllm":
        raise ConfigError(f"engine.nodes = {nodes}: backend {engine.backend!r} has no ranks; give 1")
    if nodes > 1 and not engine.leader.startswith("tcp://"):
        fix = "give where the nodes meet, tcp://host:port of the node with engine.node_rank = 0"
        raise ConfigError(f"engine.leader = {engine.leader!r}: {fix}")


def meeting(engine: EngineConfig) -> Meeting:
    """Return this node's `Meeting`: its address is the one from which the node reaches the leader.

    Raises `ConfigError`.
    """
    address = engine.leader.removeprefix("tcp://")
    try:
        if engine.node_rank:
            return Meeting(own_address(address))
        own = socket.gethostbyname(address.rpartition(":")[0])
        return Meeting(own, host=own)
    except (OSError, ValueError) as error:
        raise ConfigError(f"engine.leader = {engine.leader!r}: {error}; give tcp://host:port") from error


def settings_of(config: Config) -> dict[str, str]:
    """Return what all nodes must have in common, as texts by the setting's name."""
    engine = {
        f"engine.{name}": value
        for name, value in msgspec.to_builtins(config.engine).items()
        if name not in OF_ONE_NODE
    }
    drafts = {
        f"drafts.{name}": value
        for name, value in msgspec.to_builtins(config.drafts).items()
        if name != "cache"  # a folder of the leader's
    }
    devices = [f"{device.model} {device.total_bytes >> 30} GiB" for device in visible_devices()]
    found = engine | drafts | {"pool.kind": config.pool.kind, "devices": devices, "seer": __version__}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return {name: msgspec.json.encode(value).decode()[:MAX_TEXT] for name, value in found.items()}


def difference(leader: Mapping[str, str], node: Mapping[str, str]) -> str:
    """Return the first setting that a node has otherwise than the leader, and the fix; empty: none."""
    for name in sorted(leader.keys() | node.keys()):
        theirs, ours = node.get(name, "nothing"), leader.get(name, "nothing")
        if theirs != ours:
            fix = "make it equal on every node"
            return f"{name} is {theirs[:200]} on this node, and {ours[:200]} at the engine's leader: {fix}"
    return ""
