"""Turns of a trajectory as one response: it has the tokens of all turns, and was away between turns.

Invariants (tests/unit/test_report_trajectories.py):
- every turn is in one trajectory, once, however often the turn was submitted; other responses are left alone;
- chunks, tokens and times of a rollout are the same before and after.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from seer.report.records import Response, Rollout


def join_turns(rollout: Rollout) -> None:
    """Replace the turns of a rollout by trajectories, in the order in which these began."""
    turns: dict[tuple[str, int], list[Response]] = defaultdict(list)
    for response in rollout.responses:
        if response.trajectory:
            turns[response.trajectory, response.index].append(response)
    if not turns:
        return
    rollout.prompts = {}
    rollout.responses = [each for each in rollout.responses if not each.trajectory]
    rollout.responses += [_joined(rollout, each) for each in turns.values()]
    for response in rollout.responses:
        response.prompt = rollout.prompts.setdefault(response.prompt_id, len(rollout.prompts))


def away(response: Response) -> Iterator[tuple[float, float]]:
    """Yield from when to when a trajectory was away, between turns that have finished and the next ones."""
    for before, after in zip(response.turns, response.turns[1:], strict=False):
        if before.finished is not None and after.submitted > before.finished:
            yield before.finished, after.submitted


def _joined(rollout: Rollout, turns: Sequence[Response]) -> Response:
    last = turns[-1]
    whole = Response(
        rollout, last.trajectory, 0, last.index, turns[0].prompt_len, submitted=turns[0].submitted,
        trajectory=last.trajectory, turns=list(turns), generated=sum(each.generated for each in turns),
        finish=last.finish, finished=last.finished,
        chunks=sorted((chunk for each in turns for chunk in each.chunks), key=lambda chunk: chunk.start),
    )  # fmt: skip
    for chunk in whole.chunks:
        chunk.response = whole
    for before, after in zip(whole.chunks, whole.chunks[1:], strict=False):
        after.moved = before.engine != after.engine
    return whole
