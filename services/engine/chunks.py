"""Chunks between the wire and the backend: the buffer's order, the running chunk, the result.

Invariant: the backend is given the chunk's `serial`, a number that this process never reuses, as its attempt.
The buffer's attempt would not do: a restarted buffer counts from 1 again, and late output of a dropped chunk
could be mistaken for the new one's.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

import numpy as np

from seer.common import beside, wire
from seer.common.errors import InvalidField
from seer.common.policy.draft_costs import from_percent
from seer.common.prepared_image import PreparedImage
from seer.common.types import check_placed
from seer.services.engine.backend import Chunk, ChunkEnd, Generated, PlacedImage, Routes

MESSAGE_BYTES = 2**24
"""Most bytes of several chunks' results in one message: its bounds are the wire's (`codec.Limits`)."""

Place = tuple[str, int]
"""A group in which drafts are shared, and a response's index there."""


@dataclass(slots=True)
class RunningChunk:
    """A running chunk; `length` counts the response's tokens after its prompt, this chunk's included.

    `group_id` is the group in which drafts are shared, `index` the response's index there. `parks`: another
    turn of the response may follow. Of `tokens` the first `sent` were streamed to the buffer, and the first
    `shared` given to the dgds. `extras`: what comes beside the others, by word. `routes_from`: see `Chunk`.
    `told`: it was told to end where it stands. `ahead`: see `wire.RunChunk`.
    """

    group_id: str
    index: int
    attempt: int
    serial: int
    length: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    parks: bool = False
    stream: bool = False
    sent: int = 0
    shared: int = 0
    routes_from: int | None = None
    told: bool = False
    ahead: bool = False
    extras: dict[str, list[beside.Array]] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        """Its group and its index there."""
        return self.group_id, self.index

    def add(self, generated: Generated) -> None:
        """Add what a step has generated."""
        self.tokens += generated.token_ids
        self.logprobs += generated.logprobs
        self.length += len(generated.token_ids)
        for word, array in generated.beside.items():
            self.extras.setdefault(word, []).append(array)

    def take_beside(self, routes: Routes | None = None) -> dict[str, wire.Bytes]:
        """Return what comes beside the tokens that were not sent, by kind; it counts as sent."""
        arrays, self.extras = {word: np.concatenate(parts) for word, parts in self.extras.items()}, {}
        if routes is not None:
            arrays[beside.ROUTED_EXPERTS] = routes
        return beside.packed(arrays)


def start_chunk(order: wire.RunChunk, serial: int, taken: Container[Place] = ()) -> RunningChunk:
    """Check an order and return its chunk, which has generated nothing yet. Raises `InvalidField`.

    Trainers choose places, so two responses may have the same. One whose place is `taken` here drafts alone:
    a group's tree has one stream for each place, and two that are written in turn would spoil every draft.
    """
    group_id, _, index = order.request_id.rpartition("#")
    if group_id != order.group_id or not index.isdecimal():
        raise InvalidField("request_id", order.request_id, f"must be {order.group_id}#<index>")
    if not 1 <= order.prompt_len <= len(order.tokens):
        raise InvalidField("prompt_len", order.prompt_len, f"must be in [1, {len(order.tokens)}] (tokens)")
    order.sampling.check()
    check_placed(order.images, len(order.tokens))
    place = (order.draft_group, order.draft_index) if order.draft_group else (group_id, int(index))
    if place in taken:
        place = (order.request_id, 0)
    length = len(order.tokens) - order.prompt_len
    run = RunningChunk(
        *place, order.attempt, serial, length, parks=order.parks, stream=order.stream, ahead=order.ahead
    )
    first = order.sampling.routed_experts_from
    if first is not None:
        run.routes_from = min(first, order.turn_start or order.prompt_len) + _had(order)
    return run


def _had(order: wire.RunChunk) -> int:
    """Return of how many tokens the buffer has the expert ids. Raises `InvalidField`."""
    try:
        return beside.entries(beside.ROUTED_EXPERTS, order.have)
    except (TypeError, ValueError) as error:
        raise InvalidField("have", order.have, f"must be kinds of `common/beside.py`: {error}") from error


def chunk_of(order: wire.RunChunk, run: RunningChunk, image: Callable[[str], PreparedImage]) -> Chunk:
    """Return the chunk as the backend takes it; `image` returns its images by their names."""
    return Chunk(
        request_id=order.request_id,
        group_id=run.group_id,
        index=run.index,
        attempt=run.serial,
        key=order.key,
        prompt_len=order.prompt_len,
        max_new_tokens=order.max_new_tokens,
        sampling=order.sampling,
        tokens=order.tokens.tolist(),
        wait_for_room=order.wait_for_room,
        acceptance=from_percent(order.acceptance),
        probe=order.probe,
        turn_start=order.turn_start,
        parks=order.parks,
        images=tuple(PlacedImage(place, image(place.name)) for place in order.images),
        routes_from=run.routes_from,
    )


def tell_to_end(
    running: Mapping[str, RunningChunk], asked: wire.EndChunks, end: Callable[[str, int], None]
) -> None:
    """Have chunks `end` where they stand; for those without a token that is to be said again."""
    for request_id, attempt in zip(asked.request_ids, asked.attempts, strict=False):
        run = running.get(request_id)
        if run is not None and run.attempt == attempt:
            run.told = True
            end(request_id, run.serial)


def _take_fitting(
    ended: list[tuple[ChunkEnd, RunningChunk]], streaming: dict[str, RunningChunk]
) -> tuple[list[tuple[ChunkEnd, RunningChunk]], dict[str, RunningChunk]]:
    """Take the first chunks of these, as many as one message has room for, one at least."""
    total = fit = 0
    for run, end in [*((run, end) for end, run in ended), *((run, None) for run in streaming.values())]:
        total += 2**13 + 8 * (len(run.tokens) - run.sent)  # ids, kinds and counts by cell take less
        total += sum(each.nbytes for parts in run.extras.values() for each in parts)
        if end is not None:
            total += 4 * len(end.stop_reason) + (0 if end.routes is None else end.routes.nbytes)
        if total > MESSAGE_BYTES:
            break
        fit += 1
    fit = max(1, fit)
    taken, ended[:] = ended[:fit], ended[fit:]
    return taken, {name: streaming.pop(name) for name in list(streaming)[: fit - len(taken)]}


def done_message(
    all_ended: list[tuple[ChunkEnd, RunningChunk]], weight_version: int, streaming: dict[str, RunningChunk]
) -> wire.ChunksDone:
    """Take results, then what chunks that go on have to stream, and return the message that carries them.

    What they stream counts as sent from then on: if the message is lost, the buffer runs these chunks again.
    """
    ended, going_on = _take_fitting(all_ended, streaming)
    runs = [run for _, run in ended] + list(going_on.values())
    extras = [run.take_beside(end.routes) for end, run in ended]
    extras += [run.take_beside() for run in going_on.values()]
    message = wire.ChunksDone(
        weight_version=weight_version,
        results=[
            wire.ChunkResult(
                end.request_id,
                run.attempt,
                len(run.tokens) - run.sent,
                end.finish,
                end.stop_reason,
                end.preemptions,
                end.drafted,
                end.accepted,
                run.sent,
                beside.sizes(extra),
                end.verified,
            )
            for (end, run), extra in zip(ended, extras, strict=False)
        ],
        tokens=np.fromiter((token for run in runs for token in run.tokens[run.sent :]), dtype=np.int32),
        logprobs=np.fromiter((value for run in runs for value in run.logprobs[run.sent :]), dtype=np.float32),
        going_on=[
            wire.ChunkTokens(name, run.attempt, len(run.tokens) - run.sent, run.sent, beside.sizes(extra))
            for (name, run), extra in zip(going_on.items(), extras[len(ended) :], strict=True)
        ],
        beside=beside.flat(extras),
    )
    for run in going_on.values():
        run.sent = len(run.tokens)
    return message
