"""Who waits for what, and that something goes on: a run that stands still is named, not only late.

A campaign once saw a system that held all work for ever only as a trainer that was late, and such waits that
a deadline ends at last, minutes later, not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from chaos.plan import Roll
from seer.common.config import BufferConfig

if TYPE_CHECKING:
    from chaos.trainers import Trainer
    from chaos.world import World

STILL_SECONDS = 150.0
"""Longest time without progress once nothing disturbs the system, beyond what plans ask for: the silence of a
peer, a spool that stands still and an engine's return are parts of it."""


class Progress:
    """Notes when anything last went on; `check` once a second."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen: object = None
        self._since = 0.0
        self._told = False

    def check(self) -> list[str]:
        """Say once what waits for what, if nothing has gone on for too long."""
        world = self._world
        now, seen = world.loop.time(), _seen(world)
        if seen != self._seen or world.finished.is_set():
            self._seen, self._since = seen, now
        still = now - max(self._since, world.disturbed_until())
        if self._told or still <= _allowed(world):
            return []
        self._told = True
        return [f"nothing has gone on for {still:.0f} s", *waits(world)]


def _seen(world: World) -> object:
    """Return what changes whenever something goes on; questions asked again do not count."""
    buffer = _service(world, "buffer")
    of_buffer = None
    if buffer is not None:
        live, counters = buffer.weights.live, buffer.machine.counters
        of_buffer = counters["tokens"], counters["chunks"], live.version if live else -1
    trainers = [
        (len(each.ended), len(each.parts), len(each.done), each.calls) for each in world.trainers.values()
    ]
    return trainers, of_buffer, world.buffers


def _allowed(world: World) -> float:
    """Return how long nothing may go on: what the plan itself waits for, and deadlines that faults made due."""
    plan, buffer = world.plan, _service(world, "buffer")
    rolls = plan.rolls
    seconds = STILL_SECONDS + plan.chunk_size * plan.step_seconds + 200 * (plan.latency + plan.jitter)
    seconds += max(
        (each.turns.idle_seconds + max(each.turns.waits, default=0.0) for each in rolls if each.turns),
        default=0.0,
    )
    seconds += max((getattr(step, "seconds", 0.0) for script in plan.scripts for step in script), default=0.0)
    if world.may_lack_weights:  # who began under weights that are gone waits for an engine that has them
        seconds += BufferConfig().engine_wait_seconds
    if buffer is not None and buffer.weights.updating:  # it waits for requests of the old version
        seconds += plan.update_seconds
    return seconds


def _service(world: World, name: str) -> Any:
    process = world.processes.get(name)
    return process.service if process is not None else None


def waits(world: World) -> list[str]:
    """Say what each trainer that is not done waits for, and what the buffer, and each engine, does about it."""
    told = [f"stuck: {name} waits: {_of_trainer(world.trainers[name])}" for name in sorted(world._left)]
    return [*told, f"meanwhile: {'; '.join(_of_buffer(world))}; {'; '.join(_of_engines(world))}"]


def _of_trainer(trainer: Trainer) -> str:
    script = trainer.world.script(trainer.name)
    place = next((place for place in range(len(script)) if place not in trainer.done), None)
    if place is None:
        return "all its steps are done"
    step = script[place]
    left = ""
    if isinstance(step, Roll):
        names = [prompt for prompt, _ in step.prompts if (place, prompt) not in trainer.ended]
        left = f" for {', '.join(names)} of {step.rollout_id}"
    state = ", which had all asleep" if trainer.resting else ""
    last = f"; last refused: {list(trainer.retries)[-1]}" if trainer.retries else ""
    return f"in step {place}, {type(step).__name__}{left}{state}{last}"


def _of_buffer(world: World) -> Iterator[str]:
    service = _service(world, "buffer")
    if service is None:
        yield "no buffer is up"
        return
    machine, weights, sleep = service.machine, service.weights, service.conductor.machine.sleep
    running = [name for name, request in machine.requests.items() if request.instance]
    yield f"the buffer has {len(machine.requests)} requests, {len(machine.scheduler.queue)} queued, {len(running)} run"
    if held := machine.registry.held:
        yield f"it holds {', '.join(held)}"
    if sleep.held:
        yield f"{sleep.wanted.name} is wanted of engines {_names(sleep._states)}, not answered: {_names(sleep._ordered)}"
    if weights.updating:
        yield f"it updates weights; live is {weights.live}"
    if away := machine.registry.trajectories.away:
        yield f"{len(away)} trajectories are away"
    yield f"engines at work: {sorted(machine.instances)}, known: {sorted(weights.known)}, quarantined: {weights.quarantined}"


def _names(states: dict[str, Any]) -> str:
    return (
        ", ".join(f"{name} {getattr(state, 'name', '')}".strip() for name, state in states.items()) or "none"
    )


def _of_engines(world: World) -> Iterator[str]:
    for name, process in world.processes.items():
        if name[0] == "e":
            service = process.service
            if service is None:
                yield f"{name} is not up"
            else:
                yield f"{name} runs {len(service.running)}, has weights {service._updater.live.version}{', sleeps' * bool(service._updater.sleeping)}"
