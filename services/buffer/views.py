"""The machines' state and instructions as messages. All is pure, but `progress` removes finish times."""

from __future__ import annotations

from collections.abc import Iterator

from seer.common import wire
from seer.common.group_events import GroupClosed, GroupEvent, GroupOpened, RequestProgress
from seer.common.net.stream import page_count, page_of
from seer.common.sleep import SleepState
from seer.services.buffer import sleep
from seer.services.buffer.requests import instructions, state
from seer.services.buffer.requests.machine import RequestMachine
from seer.services.buffer.weights import instructions as weight_instructions


def progress(machine: RequestMachine, rollout: state.RolloutState) -> wire.Progress:
    """Return a rollout's counters. Finish times are removed from the rollout, so each is sent once."""
    finish_times, rollout.finish_times = rollout.finish_times, []
    return wire.Progress(
        rollout_id=rollout.rollout_id,
        requests=rollout.requests,
        finished=rollout.finished,
        groups=rollout.groups,
        groups_finished=rollout.groups_finished,
        tokens=rollout.counters["tokens"],
        chunks=rollout.counters["chunks"],
        migrations=rollout.counters["migrations"],
        preemptions=rollout.counters["preemptions"],
        running=machine.instances.chunks,
        finish_times=finish_times,
        submission=rollout.submission,
    )


def answer(item: instructions.Accept | instructions.Refuse) -> wire.Accepted | wire.Refused:
    """Return the answer to a trainer about prompts that it submitted."""
    if isinstance(item, instructions.Accept):
        return wire.Accepted(
            rollout_id=item.rollout_id,
            prompt_ids=item.prompt_ids,
            submission=item.submission,
            weight_version=item.weight_version,
        )
    return wire.Refused(
        code=item.code,
        message=item.message,
        rollout_id=item.rollout_id,
        prompt_ids=item.prompt_ids,
        submission=item.submission,
        discarded=item.discarded,
    )


def sleep_asked(trainer: str, message: wire.Sleep) -> sleep.SleepAsked:
    """Return a trainer's request that engines sleep, or wake, as an event."""
    tags = tuple(message.tags)
    return sleep.SleepAsked(trainer, message.asleep, message.call_id, message.level, tags, message.wish)


def sleep_order(item: sleep.Order) -> wire.Sleep:
    """Return an order to sleep, or to wake."""
    return wire.Sleep(asleep=item.asleep, level=item.level, tags=list(item.tags), wish=item.wish)


def slept(item: sleep.Tell) -> wire.Slept:
    """Return the answer to a trainer that had engines sleep or wake."""
    state = SleepState.ASLEEP if item.asleep else SleepState.KV_ASLEEP if item.kv_asleep else SleepState.AWAKE
    return wire.Slept(
        asleep=item.asleep, problem=item.problem, call_id=item.call_id, tags=state.tags, wish=item.wish
    )


def snapshot(machine: RequestMachine, incarnation: int, sequence: int) -> Iterator[wire.BufferSnapshot]:
    """Return every open group and its requests' progress, in pages; the state is copied before it returns.

    Trajectories that are away are known under the group of their last turn.
    """
    away = machine.registry.trajectories.away.values()
    groups = [each for each in machine.groups.values() if not each.done and each.held_since is None]
    opened = [*(each.opened for each in away), *(each.opened for each in groups)]
    progress = [RequestProgress(each.group_id, 0, each.generated, False) for each in away]
    progress += [each.progress() for each in machine.requests.values() if each.view.produced]
    pages = page_count(len(opened), len(progress))
    return (
        wire.BufferSnapshot(
            incarnation=incarnation,
            sequence=sequence,
            opened=[_opened(each) for each in page_of(opened, page)],
            progress=[_progress(each) for each in page_of(progress, page)],
            page=page,
            pages=pages,
        )
        for page in range(pages)
    )


def _opened(event: GroupOpened) -> wire.GroupOpened:
    return wire.GroupOpened(
        group_id=event.group_id,
        size=event.size,
        prompt_len=event.prompt_len,
        cap=event.cap,
        shared_id=event.shared_id,
        first=event.first,
    )


def _progress(event: RequestProgress) -> wire.RequestProgress:
    return wire.RequestProgress(
        group_id=event.group_id,
        index=event.index,
        generated=event.generated,
        finished=event.finished,
        drafted=list(event.drafted),
        accepted=list(event.accepted),
    )


def published(item: GroupEvent) -> wire.BufferPublished:
    """Return the message of a group's event for the event stream."""
    match item:
        case GroupOpened():
            return _opened(item)
        case RequestProgress():
            return _progress(item)
        case GroupClosed(group_id):
            return wire.GroupClosed(group_id=group_id)


def order(
    item: weight_instructions.Prepare | weight_instructions.Discard | weight_instructions.Load,
) -> wire.PrepareWeights | wire.DiscardWeights | wire.LoadWeights:
    """Return the message to an engine about weights."""
    if isinstance(item, weight_instructions.Prepare):
        return wire.PrepareWeights(
            version=item.version,
            source=item.source,
            call_id=item.call_id,
            digest=item.digest,
            holders=list(item.holders),
        )
    if isinstance(item, weight_instructions.Discard):
        return wire.DiscardWeights(version=item.version, call_id=item.call_id)
    weights = item.weights
    return wire.LoadWeights(
        version=weights.version,
        digest=weights.digest,
        source=weights.source,
        holders=list(item.holders),
        call_id=item.call_id,
    )


def outcome(
    item: weight_instructions.Report | weight_instructions.Fail | weight_instructions.Receivers,
) -> wire.WeightsLive | wire.WeightsFailed | wire.WeightsLoading:
    """Return the message to a trainer about its update."""
    if isinstance(item, weight_instructions.Receivers):
        return wire.WeightsLoading(version=item.version, engines=list(item.instances), call_id=item.call_id)
    if isinstance(item, weight_instructions.Fail):
        return wire.WeightsFailed(version=item.version, reasons=item.reasons, call_id=item.call_id)
    weights = item.weights
    return wire.WeightsLive(
        version=weights.version, digest=weights.digest, quarantined=item.quarantined, call_id=item.call_id
    )
