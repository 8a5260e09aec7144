"""What must hold of a system while it is disturbed, and once everything is over."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import invariants

from chaos.census import leftovers
from chaos.plan import NOISE, Renew, Roll
from chaos.world import FOREIGN, HOUR, TWIN
from seer.common.net.transport.zmq import GONE_SECONDS
from seer.common.weights.lora import inner_source
from seer.services.buffer.requests import deliveries

if TYPE_CHECKING:
    from chaos.plan import Fault, Plan
    from chaos.trainers import Trainer
    from chaos.world import World

TOKEN_BYTES = 8

HARMLESS = ("stop buffer", "kill trainer", "stop trainer", "lose trainer", "kill context", "stop context")
"""Faults that no engine notices, other than as a buffer that is slow."""


STEP_SECONDS = 60.0
"""Longest time that the context service may need for a snapshot once no fault is left."""

LEASE_SLACK_SECONDS = 5.0
"""What a lease may take longer: ticks of a loop that is busy."""


COSTLY = r"aborted by|sent nothing|client was closed|no sign of life|times in a row|ran on|hold over"
"""Why prompts that had begun may end, and begin anew."""


def check_now(world: World) -> None:
    """Note what is wrong at any time: books that disagree, bounds that do not bound."""
    process = world.processes.get("buffer")
    if process is None or process.service is None:
        return
    _follows(world)
    service = process.service
    try:
        invariants.check(service.machine)
    except AssertionError as error:
        world.problem(f"at {world.loop.time():.3f}: the buffer's books: {error!r}")
    if service.machine.counters["lost"] and calm_for_engines(world.plan):
        lost = service.machine.counters["lost"]
        world.problem(f"{lost} chunks were lost, and no engine was away")
    for name, why in service.weights.quarantined.items():
        if "it sleeps" in why:  # it tries again, and so is well in the end
            world.problem(f"{name} was told to load weights while asleep")
    _rejoins(world)
    _leases(world)
    _idle(world)
    for address, waiting in queued_bytes(service).items():
        largest = max(step.n * step.max_tokens for step in world.plan.rolls) * TOKEN_BYTES
        if waiting > deliveries.WINDOW_BYTES + largest:
            world.problem(f"{waiting} bytes wait for {address!r}, the window has {deliveries.WINDOW_BYTES}")


def _follows(world: World) -> None:
    """Note a context service that cannot synchronise, though nothing disturbs it."""
    context = world.processes.get("context")
    now, over = world.loop.time(), world.disturbed_until()
    if context is None or context.service is None or context.service._events._synced:
        world.in_step_at = now
    elif now - max(over, world.in_step_at) > STEP_SECONDS:
        world.problem(f"context is out of step since {world.in_step_at:.1f}")
        world.in_step_at = now


def _rejoins(world: World) -> None:
    """Note an engine that registers again though neither its connection nor a buffer was lost, nor it given up."""
    shown = any(roll.images for roll in world.plan.rolls)
    if world.noisy or (shown and world.plan.queue < 1000):  # parts of images may find no room, and be lost
        return
    now = world.loop.time()
    twins = {fault.target for fault in world.plan.faults if fault.kind == "twin engine"}
    for name, process in world.processes.items():
        if name[0] != "e" or process.service is None or name.removesuffix(TWIN) in twins:
            continue  # those that share a name take it from each other as their messages come
        breaks = sum(_losses(world, each, name) for each in world.inflicted if each.at <= now)
        buffers = world.buffers - process.buffers
        given_up = world.given_up[process.service._buffer._me.address()]
        waited = int(world.plan.clocks)  # for its name, in vain heard meanwhile: it seemed earlier
        if process.service._updater._rejoins > breaks + buffers + given_up + waited:
            world.problem(
                f"{process.incarnation} registered {process.service._updater._rejoins} times more than once:"
                f" its road broke {breaks} times, {buffers} buffers were new, and it was given up {given_up} times"
            )


def _losses(world: World, fault: Fault, engine: str) -> int:
    """Return how many losses between an engine and the buffer a fault may reveal, each by a `Welcome`.

    What is lost either way is revealed at once, by the answer to the next `Hello`. But where the buffer stands
    still meanwhile, it has a `Hello` unread from before the engine lost anything: the answer to it reveals what
    the buffer has lost, and that to a later one, sent before the engine knew, what the engine has.
    """
    still = any(
        each.kind.split()[0] == "stop" and each.target == "buffer"
        and each.at <= fault.at + fault.seconds and fault.at <= each.at + each.seconds
        for each in world.inflicted
    )  # fmt: skip
    return _breaks(world.plan, fault, engine) * (2 if still else 1)


def _breaks(plan: Plan, fault: Fault, engine: str) -> bool:
    """Say whether a fault may take messages from the road between an engine and the buffer."""
    what, targets = fault.kind.split()[0], set(fault.target.split("-"))
    short = plan.queue < 1000 and what in ("part", "cut", "hole", "stop")  # it overflows meanwhile
    broken = what == "reset" or short or (what in ("part", "cut", "hole") and fault.seconds > GONE_SECONDS)
    return broken and targets <= {engine, "buffer"}


def _leases(world: World) -> None:
    """Note unfinished work of a trainer that has been gone for longer than its lease."""
    now = world.loop.time()
    away = sum(each.seconds + 1.0 for each in world.inflicted if each.target == "buffer")
    for group in world.processes["buffer"].service.machine.groups.values():
        lost = world.lost_at.get(group.rollout.trainer, now)
        if not group.done and now - lost > world.plan.lease_seconds + away + LEASE_SLACK_SECONDS:
            world.problem(f"{group.group_id} runs on, and its trainer is lost since {lost:.1f}")


def _idle(world: World) -> None:
    """Note a trajectory that updates and sleep wait for longer than they may."""
    now = world.loop.time()
    away = sum(each.seconds + 1.0 for each in world.inflicted if each.target == "buffer")
    for each in world.processes["buffer"].service.machine.registry.trajectories.away.values():
        if now - each.since > each.idle_seconds + away + LEASE_SLACK_SECONDS:
            world.problem(f"{each.group_id} is away since {each.since:.1f}, and awaited still")


def made_again(world: World) -> list[str]:
    """Say how many tokens were made and kept more than once, though nothing that happened costs any."""
    trainers = [trainer for trainer in world.trainers.values() if trainer.incarnations]
    whys = [why for trainer in trainers for why in trainer.retries]
    whys += [ended.why for trainer in trainers for ended in trainer.ended.values()]
    expired = sum(service.machine.counters["expired"] for service in world.served)
    if expired or not keeps_all(world.plan, world.inflicted) or any(re.search(COSTLY, why) for why in whys):
        return []
    kept = sum(service.machine.counters["tokens"] for service in world.served)
    most = sum(_most_tokens(trainer) for trainer in trainers)
    return [f"{kept} tokens were made for {most} at most"] if kept > most else []


def _most_tokens(trainer: Trainer) -> int:
    """Return how many tokens are enough for all that a trainer asked for: those it got, or might have got."""
    most = 0
    for place, step in enumerate(trainer.world.script(trainer.name)):
        if isinstance(step, Roll) and step.turns is not None:  # turns that were acknowledged are made again
            most += 2 * step.most_tokens * trainer.begun[place]
            continue
        for prompt in [prompt for prompt, _ in step.prompts] if isinstance(step, Roll) else ():
            ended = trainer.ended.get((place, prompt))
            group = ended.group if ended is not None else None
            whole = sum(len(each.token_ids) for each in group.responses) if group is not None else None
            most += step.n * step.max_tokens if whole is None else whole
            if step.parts is not None and step.parts.feint is not None:
                most += step.n * step.max_tokens
    return most


def keeps_all(plan: Plan, faults: Sequence[Fault]) -> bool:
    """Say whether nothing in a plan may cost a token that a buffer has kept, other than what it says is `COSTLY`."""
    kinds = {each.kind for each in faults}
    away = sum(each.seconds for each in faults if any(end[0] in "tb" for end in each.target.split("-")))
    killed = any(each.kind.startswith("kill") and each.target == "buffer" for each in faults)
    # A buffer that drains keeps results for trainers that are away, but not for long.
    drained = "drain buffer" in kinds and away > 0
    aborts = any(isinstance(step, Renew) and step.in_flight != "finish" for step in plan.scripts[0])
    ended = plan.lease_seconds < away + LEASE_SLACK_SECONDS
    # A trainer killed as it acknowledges has not used what the buffer then forgets, and asks for it again.
    unused = "kill caught" in kinds and any(
        catch.what == "kill source" and catch.way[-1] == "Acknowledge" for catch in plan.catches
    )
    return not (drained or ended or aborts or killed or unused or kinds & set(NOISE))


def calm_for_engines(plan: Plan) -> bool:
    """Say whether nothing in a plan may cost a chunk: what it does to the buffer leaves connections up."""
    harmless = all(fault.kind in HARMLESS for fault in plan.faults)
    return harmless and not (plan.catches or plan.poison or plan.rejections or plan.rogue)


def queued_bytes(service: Any) -> dict[bytes, int]:
    """Return the bytes of arrays that wait for each trainer, headers apart."""
    return {
        address: sum(len(frame) for _, frames, _ in line.messages for frame in frames[1:])
        for address, line in service._out.to_trainers._queues.items()
    }


def missing(world: World) -> list[str]:
    """Say what is not as it should be, once all faults are over and all trainers are done."""
    wrong = [f"{name} does not run" for name in ("buffer", "context", "dgds") if name not in world.processes]
    wrong += [
        f"e{each} does not run" for each in range(world.plan.engines) if f"e{each}" not in world.processes
    ]
    starting = [name for name, process in world.processes.items() if process.service is None]
    if wrong or any(name not in world.trainers for name in starting):
        return wrong or [f"{name} is not up" for name in starting]
    return [
        *_fleet(world),
        *_buffer(world),
        *_engines(world),
        *_context(world),
        *_files(world),
        *_images(world),
        *_links(world),
    ]


def tables(world: World) -> list[str]:
    """Say which tables hold more than the processes that are there, once nothing is under way."""
    if world.plan.ttl_seconds >= HOUR:
        return []  # results that nobody collected are kept, with all that belongs to them
    names = len(world.plan.trainers) + world.plan.engines + 4
    return [
        f"{name} still holds {left}"
        for name, process in world.processes.items()
        if process.service is not None and (left := leftovers(process.service, names))
    ]


def _fleet(world: World) -> Iterator[str]:
    service = world.processes["buffer"].service
    living = {name for name in world.processes if name[0] == "e"}
    weights, machine = service.weights, service.machine
    excused = {name for name, why in weights.quarantined.items() if world.excuses_quarantine(why)}
    living -= excused
    if weights.quarantined.keys() - excused:
        yield f"quarantined: {weights.quarantined}"
    if set(machine.instances) != living:
        yield f"engines {sorted(machine.instances)} may get work, {sorted(living)} live"
    if weights.known - weights.admitted - weights.quarantined.keys() or weights.updating:
        yield f"known {sorted(weights.known)}, at work {sorted(weights.admitted)}, updating: {weights.updating}"
    if service.conductor.machine.sleep.held or machine.registry.holding:
        yield "submissions are held back"
    live = weights.live
    if live is not None and (live.version, live.digest) != (live.version, world.digest(live.version)):
        yield f"version {live.version} is live with digest {live.digest}"
    for name in sorted(living):
        engine = world.processes[name].service
        if live is not None and engine._updater.live.version != live.version:
            yield f"{name} has weights {engine._updater.live.version}, {live.version} is live"
        if engine._updater.sleeping:
            yield f"{name} sleeps"


def _buffer(world: World) -> Iterator[str]:
    service = world.processes["buffer"].service
    machine = service.machine
    lasting = world.plan.ttl_seconds >= HOUR
    for group in machine.groups.values():
        if not group.done:
            yield f"the buffer still runs {group.group_id} of {group.rollout.trainer}"
        elif not lasting:
            yield f"the buffer still keeps {group.group_id} of {group.rollout.trainer}"
    tables = {
        "held groups": machine.registry.held,
        "requests": machine.requests,
        "parked requests": machine.scheduler.parked,
        "estimates": machine.estimates,
    }
    yield from (f"the buffer has {len(table)} {name}" for name, table in tables.items() if table)
    trajectories = machine.registry.trajectories
    for what in ("away", "latest", "returning"):
        if left := getattr(trajectories, what):
            yield f"the buffer has trajectories {what}: {sorted(map(str, left))}"
    if len(machine.scheduler.queue):
        yield f"{len(machine.scheduler.queue)} requests are queued"
    if {group.rollout.rollout_id for group in machine.groups.values()} != set(machine.rollouts):
        yield f"the buffer has rollouts {sorted(machine.rollouts)}"
    if set(service.store._groups) != set(machine.groups):
        yield f"the store has {sorted(set(service.store._groups) ^ set(machine.groups))} more or less"
    if machine.instances.chunks:
        yield f"{machine.instances.chunks} chunks are on the books"
    for name, box in (("trainers", service._out.to_trainers), ("engines", service._out.to_engines)):
        if box._queues:
            yield f"messages wait for {name}"


def _engines(world: World) -> Iterator[str]:
    for name, process in world.processes.items():
        if name[0] != "e":
            continue
        engine = process.service
        for what in ("running", "_ended", "_failed", "_answers"):
            if getattr(engine, what):
                yield f"{name} has {len(getattr(engine, what))} in {what}"
        if not engine._updater._orders.empty():
            yield f"{name} has orders left"
        if engine._updater.fetcher._copy is not None:
            yield f"{name} keeps a copy of weights"


def _context(world: World) -> Iterator[str]:
    groups = world.processes["context"].service.machine._groups
    buffered = {
        group.group_id
        for group in world.processes["buffer"].service.machine.groups.values()
        if not group.done
    }
    if set(groups) != buffered:
        yield f"context knows {sorted(set(groups) ^ buffered)} more or less than the buffer"


def _files(world: World) -> Iterator[str]:
    service = world.processes["buffer"].service
    spool = service._spool
    needed = {inner_source(source).removeprefix("spool:") for source in service.weights.sources}
    needed |= {f"{name}.delta" for name in needed}  # an engine that failed to load may still have the base
    if extra := set(spool._streams) - needed:
        yield f"the spool keeps {sorted(extra)}"
    if world.plan.spool:
        gone = [name for name in FOREIGN if not (world.spool / name / "work").exists()]
        if gone:
            yield f"the spool's folder lost {gone}"


def _images(world: World) -> Iterator[str]:
    images = world.processes["buffer"].service._images
    machine, most = images.machine, world.plan.image_bytes
    groups = world.processes["buffer"].service.machine.groups
    if extra := set(machine._groups) - set(groups):
        yield f"images are kept for groups {sorted(extra)}"
    for what in ("_waiting", *(() if groups else ("_users", "_groups"))):
        if left := getattr(machine, what):
            yield f"the buffer's images have {len(left)} in {what}"
    if machine.bytes != sum(kept.size for kept in machine._kept.values()) or 0 < most < machine.bytes:
        yield f"the buffer counts {machine.bytes} bytes of images"
    for name, process in world.processes.items():
        if name[0] != "e":
            continue
        kept = process.service._images
        for what in ("_chunks", "_line", "_users"):
            if left := getattr(kept, what):
                yield f"the images of {name} have {len(left)} in {what}"
        if (
            kept._bytes != sum(len(each.data) for each in kept._kept.values() if each.data is not None)
            or 0 < most < kept._bytes
        ):
            yield f"{name} counts {kept._bytes} bytes of images"


def _links(world: World) -> Iterator[str]:
    engines = sum(name[0] == "e" for name in world.processes)
    for endpoint, dealers in world.network.dealers.items():
        if len(dealers) > engines:
            yield f"{len(dealers)} connections to {endpoint}"
