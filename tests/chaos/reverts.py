"""Broken promises, each broken again at run time: what shows that the virtual campaign finds their like.

A revert patches one thing back to what it was, or to its like. `search` runs seeds with it until one
reports a problem, and the same seeds without it. Where drawn plans reach a class seldom, it brings a plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from msgspec import structs

from chaos.plan import Fault, InParts, InTurns, Pause, Plan, Renew, Rest, Roll
from chaos.plan import draw as drawn
from chaos.values import AT_LIMIT, BLOCK_SIZE
from chaos.virtual import draw, run_plan
from seer.client.active_rollouts import ActiveRollouts
from seer.client.open_rollout import PromptInFlight
from seer.client.rollout import Rollout
from seer.client.turns import Journal, PrefixTrajectories
from seer.common import ids, wire
from seer.common.net.channel import Channel
from seer.common.net.hub import Hub
from seer.common.types import Capacity
from seer.services.buffer import submissions, views
from seer.services.buffer.conductor import Conductor
from seer.services.buffer.engines import EngineConnections
from seer.services.buffer.liveness import Liveness
from seer.services.buffer.peers import Peers
from seer.services.buffer.requests import deliveries, instructions
from seer.services.buffer.requests.group_registry import GroupRegistry
from seer.services.buffer.requests.machine import RequestMachine
from seer.services.buffer.requests.trajectories import Trajectories
from seer.services.buffer.server import BufferServer
from seer.services.buffer.sleep import Joined, SleepAnswered, SleepMachine
from seer.services.buffer.store import Store
from seer.services.buffer.weights.machine import WeightsMachine
from seer.services.buffer.weights.spool import Spool
from seer.services.buffer.weights.spool_folder import SpoolFolder
from seer.services.buffer.weights.update import Pending
from seer.services.context import server as context
from seer.services.dgds import past_groups_file
from seer.services.dgds.server import DgdsServer

Patches = Iterator[Any]


@dataclass(frozen=True, slots=True)
class Revert:
    """`patches` break the promise of an `item` again; `plan`, if given, is one that reaches it."""

    name: str
    item: int
    patches: Callable[[], Patches]
    plan: Plan | None = None

    @contextmanager
    def broken(self) -> Iterator[None]:
        """Have the promise broken while this lasts."""
        with ExitStack() as stack:
            for patch in self.patches():
                stack.enter_context(patch)
            yield


def _around(cls: type, name: str, replaced: Callable[..., Any]) -> Any:
    """Patch a method by `replaced(method, self, ...)`."""
    method = getattr(cls, name)
    return mock.patch.object(cls, name, lambda *args, **named: replaced(method, *args, **named))


# --- 1: stalls and losses ------------------------------------------------------------------------


def _stall_is_silence() -> Patches:
    def made(init: Any, self: Any, seconds: float, tick_seconds: float) -> None:
        init(self, seconds, tick_seconds)
        self._max_step = math.inf

    yield _around(Liveness, "__init__", made)


def _losses_count() -> Patches:
    def left(original: Any, self: Any, event: Any, now: float, out: Any) -> None:
        lost = [name for each in event.instances for name in self._running.get(each, ())]
        original(self, event, now, out)
        for request in [self.requests[name] for name in lost if name in self.requests]:
            request.losses += 1
            if request.losses >= self.limits.max_attempts and request.view.request_id in self.requests:
                message = f"response {request.view.index} was lost {request.losses} times in a row"
                self.registry.fail([request.group], "failed", message, out)

    yield _around(RequestMachine, "_engines_left", left)


def _each_hello_admits() -> Patches:
    async def answer(original: Any, self: Any, identity: bytes, peer: Any, hello: wire.Hello) -> None:
        peer.session = 0
        await original(self, identity, peer, hello)

    yield _around(Hub, "_answer", answer)


class _Any(dict[Any, Any]):
    """Of equal values by every key."""

    def get(self, key: Any, default: Any = None) -> Any:
        return mock.ANY


def _each_message_rejoins() -> Patches:
    async def tell(original: Any, self: Any, identity: bytes, peer: Any) -> None:
        peer.refused_at = -math.inf
        await original(self, identity, peer)

    def welcomed(original: Any, self: Any, welcome: wire.Welcome) -> bool:
        unknown = self.peer is None
        return original(self, welcome) or unknown or welcome.lost

    def made(init: Any, self: Any) -> None:  # an engine that was given up is told so at each message
        init(self)
        self.registered = _Any()

    yield _around(Hub, "_refuse_stranger", tell)
    yield _around(Channel, "_welcomed", welcomed)
    yield _around(Peers, "__init__", made)
    yield mock.patch.object(EngineConnections, "require_registration", return_value=None)


# --- 2, 3, 5, 13: weights and their streams ------------------------------------------------------


def _loading_not_told() -> Patches:
    def live(original: Any, self: Any, weights: Any, out: Any) -> None:
        loading = {name: pending for name, pending in self._pending.items() if pending.sent is not None}
        original(self, weights, out)
        for name, pending in loading.items():
            self._pending[name] = Pending(sent=weights, deadline=pending.deadline)

    yield _around(WeightsMachine, "_go_live", live)


def _spool_takes_all() -> Patches:
    root = SpoolFolder.root.fget
    assert root is not None

    def shared(self: Any) -> Path:  # never the folder that this runs in
        return Path(self._configured) if self._configured else root(self)

    yield mock.patch.object(SpoolFolder, "root", property(shared))
    yield mock.patch.object(SpoolFolder, "_lock_root", return_value=None)


def _disk_errors_raised() -> Patches:
    async def disk(original: Any, self: Any, work: Any, *args: Any, **named: Any) -> Any:
        try:
            return await original(self, work, *args, **named)
        except OSError as error:
            raise RuntimeError(str(error)) from error

    yield _around(Spool, "_disk", disk)


def _unnamed_streams_end() -> Patches:
    async def remove(original: Any, self: Any, needed: Any) -> None:
        for each in self._streams.values():
            each.named = True
        await original(self, needed)

    yield _around(Spool, "_remove_unneeded", remove)


# --- 4, 10, 11, 12: submissions ------------------------------------------------------------------


def _refused_is_forgotten() -> Patches:
    def refuse(
        original: Any, self: Any, event: Any, specs: Any, message: str, out: Any, code: str = "refused"
    ) -> None:
        original(self, event, specs, message, out, code)
        out += [instructions.Forget(ids.group_id(event.rollout_id, spec.prompt_id)) for spec in specs]

    yield _around(GroupRegistry, "_refuse", refuse)


def _held_not_counted() -> Patches:
    def admit(original: Any, self: Any, *args: Any) -> Any:
        held = sum(group.size for group in self.held.values())
        self.unfinished_requests -= held
        try:
            return original(self, *args)
        finally:
            self.unfinished_requests += held

    yield _around(GroupRegistry, "_admit", admit)


def _drain_refuses_known() -> Patches:
    def submitted(original: Any, self: Any, event: Any, now: float, out: Any) -> Any:
        if self.draining:
            self._refuse(event, event.groups, "this buffer is shutting down: submit to its successor", out)
            return []
        return original(self, event, now, out)

    yield _around(GroupRegistry, "submitted", submitted)


def _drain_drops_held() -> Patches:
    def drain(original: Any, self: Any, out: Any) -> None:
        self.draining = True
        for group in list(self.held.values()):
            self.remove(group, out)

    yield _around(GroupRegistry, "drain", drain)


def _second_trainer_waits() -> Patches:
    def rollout_of(original: Any, self: Any, event: Any, now: float, out: Any) -> Any:
        known = self.rollouts.get(event.rollout_id)
        others = known is not None and known.trainer != event.trainer
        if others and all(group.held_since is not None for group in known.members.values()):
            return None
        return original(self, event, now, out)

    yield _around(GroupRegistry, "_rollout_of", rollout_of)


# --- 6, 7: lives and uses ------------------------------------------------------------------------


def _unknown_is_cancelled() -> Patches:
    def progressed(original: Any, self: Any, progress: wire.Progress) -> None:
        original(self, progress)
        if progress.rollout_id not in self and progress.finished < progress.requests:
            self._given_up[0] = progress.rollout_id
            self._cancel_again.add(0)

    def tell(original: Any, self: Any, address: bytes, message: Any) -> None:
        self._send_to_trainer(address.decode().split("/")[1], message)

    yield _around(ActiveRollouts, "_progressed", progressed)
    yield _around(BufferServer, "_send_to_address", tell)


def _use_unchecked() -> Patches:
    yield mock.patch.object(Rollout, "matches", return_value=True)
    yield mock.patch.object(Rollout, "_mismatch", return_value="")


def _attempts_restart() -> Patches:
    def dispatch(original: Any, self: Any, request_id: str, *args: Any) -> None:
        self._attempt = self.requests[request_id].attempt
        original(self, request_id, *args)

    yield _around(RequestMachine, "_dispatch", dispatch)


# --- 8, 9, 14, 16 --------------------------------------------------------------------------------


def _one_page() -> Patches:
    for module in (views, context):
        yield mock.patch.object(module, "page_count", return_value=1)
        yield mock.patch.object(module, "page_of", lambda rows, page: rows)


def _no_window() -> Patches:
    def ready(original: Any, self: Any, life: bytes) -> Any:
        with mock.patch.object(deliveries, "WINDOW_BYTES", 2**60):
            return original(self, life)

    yield _around(deliveries.Deliveries, "_ready", ready)


def _clocks_decide() -> Patches:
    async def connected(self: Any, identity: bytes) -> bool:
        return True

    def takes(self: Any, life: Any, holder: Any, first: bool) -> bool:
        return first and ids.not_before(life.incarnation, holder.incarnation)

    yield mock.patch.object(Peers, "_takes", takes)
    yield mock.patch.object(Peers, "holder_may_be_dead", return_value=False)
    yield mock.patch.object(Hub, "is_connected", connected)


def _sleep_before_load() -> Patches:
    def rest(original: Any, self: Any, event: Any, now: float, *, idle: bool, loading: Any = ()) -> Any:
        out = original(self, event, now, idle=idle)
        if isinstance(event, Joined):
            self._advance(now, idle, (), out)
        return out

    def weigh(original: Any, self: Any, event: Any, now: float, *, idle: bool, **_: Any) -> Any:
        return original(self, event, now, idle=idle)

    yield _around(SleepMachine, "apply", rest)
    yield _around(WeightsMachine, "apply", weigh)


def _loading_not_watched() -> Patches:
    def tick(original: Any, self: Any) -> None:
        for name in self._weights.known - self._weights.admitted:
            self._engines.forget(name)
        original(self)

    yield _around(Conductor, "tick", tick)


def _no_leases() -> Patches:
    yield _around(GroupRegistry, "trainer_lost", lambda original, self, life, out: None)


# --- 17: open rollouts ---------------------------------------------------------------------------


def _earlier_uses_answer() -> Patches:
    yield mock.patch.object(PromptInFlight, "answered_by", return_value=True)


def _places_ignored() -> Patches:
    prompts = submissions.prompts

    def placed(submit: wire.Submit) -> Any:
        found = prompts(submit)
        return {name: replace(each, first_index=0) for name, each in found.items()}

    yield mock.patch.object(submissions, "prompts", placed)


# --- 18: trajectories ----------------------------------------------------------------------------


def _next_turns_held() -> Patches:
    def must_hold(original: Any, self: Any, group: Any) -> bool:
        return self.holding or original(self, group)

    yield _around(GroupRegistry, "_must_hold", must_hold)


def _ends_of_the_last_submission() -> Patches:
    def finished(
        original: Any, self: Any, trainer: str, rollout: str, names: Any, number: int, out: Any
    ) -> None:
        known = [self.away.get(ids.group_id(rollout, name)) for name in names]
        meant = [
            each.opened.group_id.partition("/")[2] for each in known if each and each.submission == number
        ]
        original(self, trainer, rollout, meant, number, out)

    yield _around(Trajectories, "finished", finished)


def _acknowledged_turns_are_over() -> Patches:
    over: set[str] = set()

    def acknowledged(original: Any, self: Any, event: Any, out: Any) -> None:
        known = [self.groups.get(ids.group_id(event.rollout_id, name)) for name in event.prompt_ids]
        over.update(group.group_id for group in known if group is not None and group.turn is not None)
        original(self, event, out)

    def problem_of(original: Any, self: Any, group: Any) -> str:
        return "this turn is over" if group.group_id in over else original(self, group)

    yield _around(GroupRegistry, "acknowledged", acknowledged)
    yield _around(GroupRegistry, "_problem_of", problem_of)


def _answers_forgotten() -> Patches:
    yield mock.patch.object(Journal, "__contains__", return_value=False)


def _segments_share_noise() -> Patches:
    def segment(original: Any, self: Any, session: str, prompt: Any, group: str) -> Any:
        found = original(self, session, prompt, group)
        found.group = group
        return found

    yield _around(PrefixTrajectories, "_segment", segment)


def _idle_for_ever() -> Patches:
    yield mock.patch.object(Trajectories, "tick")


# --- 19: images ----------------------------------------------------------------------------------


def _later_chunks_lack_images() -> Patches:
    def chunk(original: Any, self: Any, *args: Any, **named: Any) -> Any:
        order = original(self, *args, **named)
        if len(order.tokens) > order.prompt_len:
            order.media = []
        return order

    yield _around(Store, "chunk", chunk)


# --- 20: values ----------------------------------------------------------------------------------


def _limit_is_below() -> Patches:
    def holds(original: Any, self: Any, context: int, chunk: int, image: int = 0) -> bool:
        return original(self, context, chunk + 1, image)

    yield _around(Capacity, "holds", holds)


def _memory_stops_the_dgds() -> Patches:
    async def load(self: Any, path: Path) -> None:
        for prompt, streams in past_groups_file.load(path, self._shared):
            self.store.restore(prompt, streams)

    yield mock.patch.object(DgdsServer, "_load", load)


def _sleepers_hold_for_ever() -> Patches:
    def answered(original: Any, self: Any, event: Any, *args: Any, **named: Any) -> Any:
        if isinstance(event, SleepAnswered) and not event.asleep:
            return []  # it is not noticed that an engine is awake again
        return original(self, event, *args, **named)

    yield _around(SleepMachine, "apply", answered)


def _wish_dies_with_the_buffer() -> Patches:
    yield _around(
        SleepMachine, "_joined", lambda joined, self, event: joined(self, structs.replace(event, wish=0))
    )
    yield mock.patch.object(SleepMachine, "_learn")


# --- plans that reach what drawn ones seldom do --------------------------------------------------

_CALM = replace(
    drawn(0), engines=2, scripts=(), mean_tokens=24, chunk_size=8, policy="seer", kv_blocks=100,
    step_seconds=0.05, silence_seconds=20.0, update_seconds=3600.0, ttl_seconds=60.0,
    result_bytes=2**28, max_requests=200_000, engine_delay=0.0, load_seconds=0.5, latency=0.0,
    jitter=0.0, queue=1000, clocks=False, same_machine=True, spool=False, rejections=0, poison=False,
    header_bytes=2**24, rogue=False, faults=(), catches=(), media_bytes=0,
    lease_seconds=3600.0,
)  # fmt: skip


def _roll(rollout_id: str = "r", prompts: int = 4, n: int = 4, most: int = 64, **options: Any) -> Roll:
    names = tuple((f"p{each}", 8) for each in range(prompts))
    return Roll(rollout_id, 0, 0, names, n, most, **options)


def _plan(*scripts: Any, faults: tuple[Fault, ...] = (), **options: Any) -> Plan:
    return replace(_CALM, scripts=tuple(scripts), faults=faults, **options)


_STALL = _plan(
    (_roll(prompts=8),),
    chunk_size=100,
    step_seconds=1.0,
    mean_tokens=64,
    faults=(Fault(2.2, "stop buffer", "buffer", 45.0),),
)
_LOSSES = _plan(
    (_roll(prompts=1),), engines=1, chunk_size=100, silence_seconds=6.0, step_seconds=1.0, mean_tokens=64,
    faults=tuple(Fault(1 + 10.0 * each, "stop engine", "e0", 8.0) for each in range(9)),
)  # fmt: skip
_FULL = _plan((Renew(False, "finish"), _roll()), faults=(Fault(0.0, "fill disk", "disk", 5.0),))
_SNAPSHOT = _plan(
    (_roll(prompts=40, most=8),),
    header_bytes=2**11,
    step_seconds=4.0,
    mean_tokens=64,
    faults=(Fault(1.0, "kill context", "context", 0.5),),
)
_STOPPED_READER = _plan(
    (_roll(prompts=60),), ttl_seconds=3600.0, queue=16, step_seconds=0.1,
    faults=(Fault(0.5, "stop trainer", "t0", 30.0),),
)  # fmt: skip
_HELD = _plan((_roll(prompts=4),), (_roll("s", prompts=4),), engine_delay=2.0, max_requests=20)
_TWO = _plan(
    (replace(_roll(), shared=True), Pause(1.0)), (Pause(0.5), replace(_roll(), shared=True)), engine_delay=2.0
)
_GAP = _plan(tuple(Renew(False, "finish") for _ in range(12)), jitter=0.3)
_DRAIN = _plan(
    (_roll(prompts=8),), step_seconds=0.2,
    faults=(Fault(0.5, "drain buffer", "buffer", 1.0), Fault(1.0, "kill trainer", "t0", 0.1)),
)  # fmt: skip
_SLEEPERS = _plan(
    (Renew(False, "finish"), _roll(), Rest(10.0), _roll("s")), load_seconds=3.0,
    faults=(Fault(8.0, "kill engine", "e0", 0.5), Fault(12.0, "join engine", "e1", 0.5)),
)  # fmt: skip
_HUNG = _plan(
    (Pause(1.0), Renew(False, "finish"), _roll()), load_seconds=20.0, silence_seconds=6.0,
    faults=(Fault(5.0, "stop engine", "e0", 600.0),),
)  # fmt: skip
_LATE = _plan(
    (Pause(1.0), Renew(False, "finish"), Renew(False, "finish"), _roll()), engines=2, load_seconds=3.0,
    faults=(Fault(3.0, "kill engine", "e1", 0.5),), latency=0.04,
)  # fmt: skip

_GIVEN_UP = _plan(
    (_roll(prompts=8),), step_seconds=0.5, silence_seconds=6.0,
    faults=(Fault(2.2, "cut engine-buffer", "e0-buffer", 9.5),),
)  # fmt: skip
_GIVEN_BACK = _plan(
    (_roll(prompts=4),), engine_delay=4.0, faults=(Fault(1.0, "drain buffer", "buffer", 6.0),)
)
_LEFT = _plan(
    (_roll(prompts=1), Pause(40.0)), (_roll("s", prompts=8),), step_seconds=1.0, mean_tokens=64, engines=1,
    lease_seconds=10.0, faults=(Fault(2.0, "lose trainer", "t1", 0.0),),
)  # fmt: skip
_REATTACH = _plan(  # a life that is killed while it waits for sleep has others awake before it goes on
    (replace(_roll(prompts=8), aside=True), Rest(1.0)), step_seconds=0.5, chunk_size=4, latency=0.3,
    ttl_seconds=3600.0,
    faults=(Fault(4.0, "kill trainer", "t0", 0.5),),
)  # fmt: skip
_CLOCKS = _plan(
    (_roll(prompts=8),), clocks=True, step_seconds=1.0,
    faults=tuple(Fault(2.05 + 3 * each, "kill trainer", "t0", 0.1) for each in range(8)),
)  # fmt: skip

_CALL = _plan((_roll(prompts=8),), step_seconds=0.3, spool=True)
_AGAIN = _plan(
    (_roll("r", deadline=1.0), replace(_roll("r"), seed=1)), latency=0.3, step_seconds=0.1, chunk_size=4
)
_FEINTS = _plan(
    (replace(_roll(prompts=8), parts=InParts(1, 0.2, 0.05, True, "")),), step_seconds=0.1, latency=0.04
)


def _turns(*waits: float, **options: Any) -> InTurns:
    how = InTurns(waits, idle_seconds=10.0, room=1000, most_open=256, resent=False, rewritten=())
    return replace(how, **options)


_AWAITED = _plan((Pause(1.0), Renew(False, "finish")), (_roll(most=24, turns=_turns(3.0, 3.0)), Pause(20.0)))
_KILLED = _plan(
    (_roll(most=24, turns=_turns(1.0, 1.0, 1.0)),), faults=(Fault(4.0, "kill trainer", "t0", 0.5),)
)
_REWRITTEN = _plan((_roll(most=24, turns=_turns(0.5, 0.5, resent=True, rewritten=(0, 1))),))
_ABANDONED = _plan(
    (Pause(6.0), Renew(False, "finish"), _roll()), (_roll("s", most=24, turns=_turns(9.0)),),
    faults=(Fault(4.0, "lose trainer", "t1", 0.0),),
)  # fmt: skip

_SHOWN = _plan((_roll(images=2),))
_LIMIT = _plan((replace(_roll(most=64), prompts=((AT_LIMIT, BLOCK_SIZE * 4 - 65), ("p1", 1))),), kv_blocks=4)
_SPOILT = _plan(
    (_roll(), Pause(5.0), _roll("s")), memory=True,
    faults=tuple(Fault(3.0 + each, "spoil memory", "dgds", 0.5) for each in range(3)),
)  # fmt: skip
_CUT_OFF = _plan(  # one engine sleeps on while the others wake, and meets the next buffer first
    (_roll(prompts=1), Rest(8.0), _roll("s", prompts=8), _roll("u")), step_seconds=0.2, silence_seconds=6.0,
    latency=0.04,
    faults=(
        Fault(6.0, "cut engine-buffer", "e1-buffer", 18.0), Fault(24.0, "kill buffer", "buffer", 0.5),
        Fault(24.1, "part engine", "e0", 7.0),
    ),
)  # fmt: skip
_AWOKEN = _plan((_roll(), Rest(1.0), _roll("s")))

REVERTS = (
    Revert("stall-is-silence", 1, _stall_is_silence, _STALL),
    Revert("losses-count", 1, _losses_count, _LOSSES),
    Revert("each-hello-admits", 1, _each_hello_admits, _CALL),
    Revert("each-message-rejoins", 1, _each_message_rejoins, _GIVEN_UP),
    Revert("loading-not-told", 2, _loading_not_told, _LATE),
    Revert("spool-takes-all", 3, _spool_takes_all, _CALL),
    Revert("refused-is-forgotten", 4, _refused_is_forgotten, _TWO),
    Revert("disk-errors-raised", 5, _disk_errors_raised, _FULL),
    Revert("unknown-is-cancelled", 6, _unknown_is_cancelled, _REATTACH),
    Revert("use-unchecked", 7, _use_unchecked, _AGAIN),
    Revert("attempts-restart", 7, _attempts_restart, _AGAIN),
    Revert("one-page", 8, _one_page, _SNAPSHOT),
    Revert("no-window", 9, _no_window, _STOPPED_READER),
    Revert("held-not-counted", 10, _held_not_counted, _HELD),
    Revert("drain-refuses-known", 11, _drain_refuses_known, _DRAIN),
    Revert("drain-drops-held", 11, _drain_drops_held, _GIVEN_BACK),
    Revert("second-trainer-waits", 12, _second_trainer_waits, _TWO),
    Revert("unnamed-streams-end", 13, _unnamed_streams_end, _GAP),
    Revert("clocks-decide", 14, _clocks_decide, _CLOCKS),
    Revert("sleep-before-load", 16, _sleep_before_load, _SLEEPERS),
    Revert("no-leases", 16, _no_leases, _LEFT),
    Revert("loading-not-watched", 16, _loading_not_watched, _HUNG),
    Revert("earlier-uses-answer", 17, _earlier_uses_answer, _FEINTS),
    Revert("places-ignored", 17, _places_ignored, _FEINTS),
    Revert("next-turns-held", 18, _next_turns_held, _AWAITED),
    Revert("ends-of-the-last-submission", 18, _ends_of_the_last_submission, _AWAITED),
    Revert("acknowledged-turns-are-over", 18, _acknowledged_turns_are_over, _KILLED),
    Revert("answers-forgotten", 18, _answers_forgotten, _KILLED),
    Revert("segments-share-noise", 18, _segments_share_noise, _REWRITTEN),
    Revert("idle-for-ever", 18, _idle_for_ever, _ABANDONED),
    Revert("later-chunks-lack-images", 19, _later_chunks_lack_images, _SHOWN),
    Revert("limit-is-below", 20, _limit_is_below, _LIMIT),
    Revert("memory-stops-the-dgds", 20, _memory_stops_the_dgds, _SPOILT),
    Revert("wish-dies-with-the-buffer", 20, _wish_dies_with_the_buffer, _CUT_OFF),
    Revert("sleepers-hold-for-ever", 20, _sleepers_hold_for_ever, _AWOKEN),
)


def search(revert: Revert, seconds: float, first: int = 0) -> dict[str, object]:
    """Run a revert's own plan, then drawn seeds from `first`, until one reports a problem or time is over.

    What was run is run without the revert, too: `clean` says whether nothing was reported then.
    """
    end = time.monotonic() + seconds
    report: dict[str, object] = {"class": revert.name, "item": revert.item, "found": False}
    tried: list[Plan] = []
    directed = [revert.plan] if revert.plan is not None else []
    unclean: list[str] = []
    for number in range(-len(directed), 10**9):
        plan = directed[0] if number < 0 else draw(first + number)
        with revert.broken():
            problems = run_plan(plan).problems
        tried.append(plan)
        if problems or time.monotonic() > end:
            break
    report |= {"found": bool(problems), "runs": len(tried), "directed": bool(directed) and len(tried) == 1}
    if problems:
        report |= {"seed": None if report["directed"] else tried[-1].seed, "problem": problems[0][:300]}
    for plan in tried[-20:]:
        unclean += run_plan(plan).problems
    return report | {"clean": not unclean, "without": unclean[:1]}
