"""The machine's state and news as messages; every function is pure but for drained finish times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from seer.common.channel import Identity
from seer.common.stream import page_count, page_of
from seer.common.types import InstanceStats
from seer.common.wire import messages as m
from seer.services.buffer import events as e
from seer.services.buffer import weight_events as w
from seer.services.buffer.machine import Machine
from seer.services.buffer.weights import WeightsMachine


def progress(machine: Machine, rollout: e.RolloutState) -> m.Progress:
    """Return a rollout's counters; its finish times are handed over, so each is sent once."""
    finish_times, rollout.finish_times = rollout.finish_times, []
    return m.Progress(
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
        use=rollout.use,
    )


def answer(item: e.Accept | e.Refuse) -> m.Accepted | m.Refused:
    """Return what a trainer hears of prompts that it submitted."""
    if isinstance(item, e.Accept):
        return m.Accepted(
            rollout_id=item.rollout_id,
            prompt_ids=item.prompt_ids,
            use=item.use,
            weight_version=item.weight_version,
        )
    return m.Refused(
        code=item.code,
        message=item.message,
        rollout_id=item.rollout_id,
        prompt_ids=item.prompt_ids,
        use=item.use,
    )


def snapshot(machine: Machine, incarnation: int, sequence: int) -> Iterator[m.BufferSnapshot]:
    """Return every open group and how far its requests are, by pages; the state is copied at once."""
    opened = [
        (group.group_id, group.size, group.prompt_len, group.max_tokens)
        for group in machine.groups.values()
        if not group.done and group.held_since is None
    ]
    progress = [
        (request.group.group_id, request.view.index, request.view.generated, bool(request.finish))
        for request in machine.requests.values()
        if request.view.generated
    ]
    pages = page_count(len(opened), len(progress))
    return (
        m.BufferSnapshot(
            incarnation=incarnation,
            sequence=sequence,
            opened=[
                m.GroupOpened(group_id=group_id, size=size, prompt_len=prompt_len, cap=cap)
                for group_id, size, prompt_len, cap in page_of(opened, page)
            ],
            progress=[
                m.RequestProgress(group_id=group_id, index=index, generated=generated, finished=finished)
                for group_id, index, generated, finished in page_of(progress, page)
            ],
            page=page,
            pages=pages,
        )
        for page in range(pages)
    )


def published(item: e.PublishOpened | e.PublishProgress | e.PublishClosed) -> m.BufferPublished:
    """Return one piece of news for the event stream."""
    match item:
        case e.PublishOpened(group_id, size, prompt_len, cap):
            return m.GroupOpened(group_id=group_id, size=size, prompt_len=prompt_len, cap=cap)
        case e.PublishProgress():
            return m.RequestProgress(
                group_id=item.group_id,
                index=item.index,
                generated=item.generated,
                finished=item.finished,
                drafted=list(item.drafted),
                accepted=list(item.accepted),
            )
        case e.PublishClosed(group_id):
            return m.GroupClosed(group_id=group_id)


def order(item: w.Prepare | w.Discard | w.Load) -> m.PrepareWeights | m.DiscardWeights | m.LoadWeights:
    """Return what an engine is to do with weights."""
    if isinstance(item, w.Prepare):
        return m.PrepareWeights(version=item.version, source=item.source, ask=item.ask)
    if isinstance(item, w.Discard):
        return m.DiscardWeights(version=item.version, ask=item.ask)
    weights = item.weights
    return m.LoadWeights(version=weights.version, digest=weights.digest, source=weights.source)


def outcome(item: w.Report | w.Fail) -> m.WeightsLive | m.WeightsFailed:
    """Return what a trainer hears of its update."""
    if isinstance(item, w.Fail):
        return m.WeightsFailed(version=item.version, reasons=item.reasons, ask=item.ask)
    weights = item.weights
    return m.WeightsLive(
        version=weights.version, digest=weights.digest, quarantined=item.quarantined, ask=item.ask
    )


def status(
    machine: Machine,
    weights: WeightsMachine,
    me: Identity,
    registered: Mapping[str, m.Register],
    stats: Mapping[str, InstanceStats],
    lives: Mapping[str, int],
    uptime_seconds: float,
    services: dict[str, str],
    asleep: bool,
) -> m.Status:
    """Return the answer to `StatusRequest`. `lives` counts incarnations by engine name."""
    return m.Status(
        name=me.name,
        incarnation=me.incarnation,
        policy=machine.policy.name,
        instances=[
            m.InstanceStatus(
                name=view.name,
                capacity=view.capacity,
                stats=stats.get(view.name, InstanceStats()),
                chunks=view.chunks,
                reserved_blocks=view.reserved_blocks,
                versions=registered[view.name].versions,
                restarts=lives[view.name] - 1,
            )
            for view in machine.instances.values()
        ],
        rollouts=len(machine.rollouts),
        requests_waiting=machine.waiting,
        requests_running=machine.instances.chunks,
        counters=machine.counters,
        uptime_seconds=uptime_seconds,
        weight_version=weights.live.version if weights.live else 0,
        weights_digest=weights.live.digest if weights.live else "",
        quarantined=weights.quarantined,
        services=services,
        asleep=asleep,
        requests_held=sum(group.size for group in machine.desk.held.values()),
    )
