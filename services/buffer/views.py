"""The machines' state as messages. All is pure, but `progress` removes finish times."""

from __future__ import annotations

from collections.abc import Iterator

from seer.common import wire
from seer.common.net.stream import page_count, page_of
from seer.services.buffer.requests import state
from seer.services.buffer.requests.request_machine import RequestMachine
from seer.services.buffer.requests.turn_placement import progress_of_turns


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
        draining=machine.registry.draining,
    )


def snapshot(machine: RequestMachine, incarnation: int, sequence: int) -> Iterator[wire.BufferSnapshot]:
    """Return every open group and its requests' progress, in pages; the state is copied before it returns.

    Trajectories that are away are known under the group of their last turn.
    """
    away = machine.registry.trajectories.away.values()
    groups = [each for each in machine.groups.values() if not each.done and each.held_since is None]
    opened = [*(each.opened for each in away), *(each.opened for each in groups)]
    progress = [progress_of_turns(each.group_id, each.generated) for each in away]
    progress += [each.progress() for each in machine.requests.values() if each.view.produced]
    pages = page_count(len(opened), len(progress))
    return (
        wire.BufferSnapshot(
            incarnation=incarnation,
            sequence=sequence,
            opened=list(page_of(opened, page)),
            progress=list(page_of(progress, page)),
            page=page,
            pages=pages,
        )
        for page in range(pages)
    )
