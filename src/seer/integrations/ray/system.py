"""Places a system on a Ray cluster: an actor per engine by placement group, the head beside the driver.

No token and no tensor goes through Ray: trainers, services and engines talk over sockets of their own, with
keys made for this system. Ray starts an actor again that ended, and with it the service.
"""

from __future__ import annotations

import contextlib
import random
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
import ray
from msgspec.structs import replace
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from seer.cli.keys import add, init
from seer.common.config import Config, Endpoints, SecurityConfig
from seer.common.errors import ConfigError, InvalidField
from seer.common.process.scratch import Scratch, sweep
from seer.integrations.ray.process import DRAIN_SECONDS, STOP_SECONDS, KeyTexts, ServiceProcess
from seer.local.child import LaunchError
from seer.local.system import ENGINE_START_SLACK_SECONDS, SERVICE_START_SECONDS, SERVICES

PLACE_SECONDS = 60.0
"""Longest wait for room; a cluster that grows by itself may need more."""

STOP_WAIT_SECONDS = DRAIN_SECONDS + 2 * STOP_SECONDS

_PORTS = range(20_000, 32_000)
"""Below those that the kernel gives to outgoing connections."""


class Connection(msgspec.Struct, frozen=True):
    """What a trainer needs, on any node: `with connection.security() as security: RolloutClient(...)`.

    It holds a secret: hand it to actors of the trainer, and write it nowhere.
    """

    endpoint: str
    keys: KeyTexts

    @contextlib.contextmanager
    def security(self) -> Iterator[SecurityConfig]:
        """Yield the client's settings, with the key in a file that is gone afterwards."""
        with _private_folder() as folder:
            yield self.keys.write(folder)


class System:
    """What `start` started; `with start(...) as system` stops it at the end.

    Should this process end before, Ray ends the actors, and they their services.
    """

    def __init__(self, connection: Connection, actors: dict[str, Any], group: PlacementGroup) -> None:
        self.connection = connection
        self.actors = actors
        self._group = group

    @property
    def endpoint(self) -> str:
        """Where trainers connect."""
        return self.connection.endpoint

    def stop(self) -> None:
        """Drain the engines, then the head's services; end all actors, and give their resources back."""
        heads = [actor for name, actor in self.actors.items() if name in SERVICES]
        engines = [actor for name, actor in self.actors.items() if name not in SERVICES]
        for actors in (engines, heads):
            told = [actor.stop.remote() for actor in actors]
            if told:
                ray.wait(told, num_returns=len(told), timeout=STOP_WAIT_SECONDS)
            for actor in actors:
                ray.kill(actor, no_restart=True)
        remove_placement_group(self._group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop()


def start(
    engines: int,
    gpus_per_engine: float = 0,
    config: Config | None = None,
    *,
    cpus_per_engine: float = 1,
    place_seconds: float = PLACE_SECONDS,
) -> System:
    """Start a system on the cluster that `ray.init` connected to, and wait until all of it is ready.

    `config`: all but endpoints and keys, which are made here. An engine's GPUs lie on one node: as many as
    it has ranks, or a share of one.
    Raises `ConfigError`, or `LaunchError` where there is no room or a service cannot start.
    """
    config = config or Config()
    _check(engines, gpus_per_engine, config)
    with _private_folder() as folder:
        keys = _make_keys(folder / "keys")
    here = ray.get_runtime_context().get_node_id()
    (host,) = (node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)
    config = replace(config, endpoints=_endpoints(host), security=SecurityConfig())
    bundle = {"CPU": cpus_per_engine} | ({"GPU": gpus_per_engine} if gpus_per_engine else {})
    group = placement_group([bundle] * engines, strategy="PACK")
    system = System(Connection(config.endpoints.trainers, keys["trainer"]), {}, group)
    try:
        if not group.wait(place_seconds):
            raise LaunchError(
                f"no room for {engines} engines of {bundle} within {place_seconds:g} s;"
                f" the cluster has {ray.cluster_resources()}, of which {ray.available_resources()} are free"
            )
        beside = NodeAffinitySchedulingStrategy(here, soft=False)
        for name in SERVICES:
            system.actors[name] = _actor(name, config, keys["server"], beside, num_cpus=0)
        for index in range(engines):
            own = replace(config, engine=replace(config.engine, name=f"ray-{index}"))
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            resources = {"num_cpus": cpus_per_engine, "num_gpus": gpus_per_engine}
            system.actors[own.engine.name] = _actor("engine", own, keys["engine"], place, **resources)
        _wait(system.actors, config.engine.load_seconds + ENGINE_START_SLACK_SECONDS)
    except BaseException:
        system.stop()
        raise
    return system


def _check(engines: int, gpus: float, config: Config) -> None:
    if not ray.is_initialized():
        raise ConfigError("Ray is not initialized: call ray.init() first")
    if engines < 1:
        raise InvalidField("engines", engines, "give at least 1")
    ranks = config.engine.tensor_parallel * config.engine.vllm.data_parallel_size
    if gpus and gpus != ranks and not (ranks == 1 and 0 < gpus < 1):
        fix = f"give one for each of its {ranks} ranks, or for one rank a share of a GPU below 1"
        raise InvalidField("gpus_per_engine", gpus, fix)
    if config.engine.nodes != 1:
        raise InvalidField("engine.nodes", config.engine.nodes, "an engine's bundle lies on one node: give 1")
    if config.security != SecurityConfig():
        raise ConfigError("[security]: keys are made for each system on Ray; leave the section out")


def _actor(service: str, config: Config, keys: KeyTexts, place: object, **resources: float) -> Any:  # noqa: ANN401
    remote = ray.remote(ServiceProcess).options(max_restarts=-1, scheduling_strategy=place, **resources)
    return remote.remote(service, config, keys)


def _wait(actors: dict[str, Any], seconds: float) -> None:
    asked = {
        actor.ready.remote(SERVICE_START_SECONDS if name in SERVICES else seconds): name
        for name, actor in actors.items()
    }
    for answer, name in asked.items():
        try:
            problem = ray.get(answer, timeout=seconds + SERVICE_START_SECONDS)
        except ray.exceptions.RayError as error:
            problem = f"its actor failed: {error}"
        if problem:
            raise LaunchError(f"{name} cannot start: {problem}")


def _make_keys(folder: Path) -> dict[str, KeyTexts]:
    """Return what each role is given, of keys made for this system alone."""
    secrets = [*init(folder)[:1], *add(folder, ["engine:*", "trainer:ray"], "")]
    server, peers = ((folder / "public" / name).read_text() for name in ("server.pub", "peers"))
    texts = dict(zip(("server", "engine", "trainer"), (path.read_text() for path in secrets), strict=True))
    return {
        role: KeyTexts(secret, server.strip(), "" if role == "trainer" else peers)
        for role, secret in texts.items()
    }


def _endpoints(host: str) -> Endpoints:
    """Return endpoints at ports of this node that are free now; a restarted service keeps its endpoint."""
    names = [name for name in Endpoints.__struct_fields__ if name != "bind_host"]
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            found.append(port)
        if len(found) == len(names):
            break
    return Endpoints(**{name: f"tcp://{host}:{port}" for name, port in zip(names, found, strict=True)})


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    sweep(tempfile.gettempdir())
    with Scratch("ray", tempfile.gettempdir()) as scratch:
        yield scratch.path
