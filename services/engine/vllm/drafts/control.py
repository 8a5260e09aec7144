"""The engine process's side of drafting: opens and feeds the workers' trees, counts accepted drafts.

Invariants (tests/unit/test_draft_control.py asserts them):
- in every step, workers hold a tree for every group that a running chunk belongs to;
- what is to be done to trees, and whether to draft, goes to the ranks with the next step, in order, and
  nothing waits for it: a call that waits costs every rank a round trip. Only the end of chunks whose trees
  verified drafts waits, once a step;
- an engine that only is fed does not gather more than `MAX_QUEUED` changes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from seer.common.config import DraftsConfig
from seer.common.policy.draft_costs import StepCosts
from seer.common.policy.draft_paths import Entries, most_paths
from seer.common.policy.draft_shape import DraftShape
from seer.common.policy.draft_switch import DraftSwitch
from seer.common.policy.profile_check import ProfileCheck
from seer.services.dgds.client import StreamDelta
from seer.services.engine.backend import Chunk
from seer.services.engine.vllm.drafts.draft_script import DraftScript, Kind
from seer.services.engine.vllm.drafts.scratch_blocks import MAX_PATH_ROWS, log_single_path
from seer.services.engine.vllm.drafts.step_times import give_up

Rpc = Callable[..., list[Any]]

MAX_QUEUED = 256
"""Changes of trees that wait for a step."""

STALL_SECONDS = 0.005
"""How late drafts come at most where they are to come late."""

CHOICE_STEPS = 8
"""Steps for which a length of all drafts holds: to choose one takes 50 us."""

GOOD_DRAFT = 0.7
"""Drafts are tried first where a token a request pays if it is right this often; measured drafts are 0.5 to
0.8 right."""


class Drafting:
    """`rpc(method, **arguments)` calls every rank's `SeerWorker`; counters are totals.

    `send` is `rpc` that returns a future at once. vLLM's queues take few of them: only one at a time is open.
    Where steps are scheduled ahead, `draft_next` is told before each how many tokens all draft after it:
    those that are `wanted` here, or, among data-parallel ranks, those that these have `agreed` on.
    """

    def __init__(
        self,
        rpc: Rpc,
        send: Callable[..., Future[Any]],
        config: DraftsConfig,
        vocab_size: int,
        draft_next: Callable[[int], None] | None = None,
    ) -> None:
        self._rpc = rpc
        self._send = send
        self._queued: list[tuple[str, dict[str, Any]]] = []
        self._sent: Future[Any] | None = None
        self._ends = False  # whether drafts of chunks that ended since the last send took time
        self._config = config
        self._vocab_size = vocab_size
        self._open: set[str] = set()
        self._verified: set[str] = set()  # trees whose drafts were verified since `take_acceptance`
        self._switch: DraftSwitch | None = None  # None: every step drafts
        self._profile: tuple[ProfileCheck, Path] | None = None  # and where it is kept
        self._drafted_before = 0  # `drafted` when the last step ended
        self._on = True
        self._draft_next = draft_next
        self.wanted = 0
        self.agreed: int | None = None
        self._length: DraftShape | None = None  # None: any length at random, on so many paths at most
        self._random_paths = 1
        self._chosen = self._chosen_for = self._chosen_steps = 0
        # Drafts of a step, by paths, tokens of each, and how many of one were right.
        self._learnt: Counter[tuple[int, int, int]] = Counter()
        self.verifications = self.drafted = self.accepted = 0
        self.seconds = 0.0

    def start_random(self, paths: bool) -> None:
        """Draft random tokens, on two paths of a request if `paths`: they are accepted by chance only."""
        others: tuple[Kind, ...] = ("random",) if paths else ()
        self._random_paths = 1 + len(others)
        script = DraftScript(kind="random", vocab=self._vocab_size, others=others)
        self._rpc("seer_script_drafts", script=script)

    def start(self, costs: StepCosts, paths: bool, kept: Path) -> None:
        """Draft from trees what pays, given this engine's step times, which are kept in a file.

        `paths` says whether it can verify several draft paths of a request.
        """
        self._profile = ProfileCheck(costs), kept
        most = most_paths(costs, self._config.max_paths) if paths else 1
        if paths and most == 1:
            log_single_path(
                f"a second path adds {costs.sibling:.2g} s to a step of {costs.seconds(1, 0):.2g} s"
            )
        self._rpc("seer_set_costs", costs=costs, max_paths=most)
        if self._config.source == "late":
            self._rpc("seer_stall_drafts", seconds=STALL_SECONDS)
        if self._draft_next is not None:  # else ranks choose, and learn
            self._length = DraftShape(costs, self._config.max_draft, most, MAX_PATH_ROWS)
        self._switch = DraftSwitch(
            lambda requests: costs.seconds(requests, 1) < (1 + GOOD_DRAFT) * costs.seconds(requests, 0),
            ahead=self._draft_next is not None,
        )
        self.clear()

    def start_always(self) -> None:
        """Draft in every step from now on, whatever it brings: for measuring drafts, and for tests."""
        self._switch, self._on = None, True
        self._queue("switch", on=True, always=True)

    def begin_step(
        self, requests: int, tokens: Callable[[], float], context: Callable[[], float] = float
    ) -> None:
        """Decide what the next step drafts, and send what is queued; see `DraftSwitch.begin`.

        `context()`: tokens of these requests on average, if they count.
        """
        if self._switch is not None and requests:
            on = self._switch.begin(requests, tokens)
            if on != self._on:
                self._on = on
                if self._draft_next is None:
                    self._queue("switch", on=on)
        if self._draft_next is not None:
            self.wanted = self._choose(requests, context) if self._on else 0
            self._draft_next(self.wanted if self.agreed is None else self.agreed)
        self.flush()

    def _choose(self, requests: int, context: Callable[[], float]) -> int:
        """Return the length of all drafts; it is chosen anew every few steps, and as requests come or go."""
        if self._length is None:
            shapes = [
                Entries(paths * each - 1, paths)
                for paths in range(1, self._random_paths + 1)
                for each in range(2, (self._config.max_draft + 1) // paths + 1)
            ]
            return random.choice([0, *shapes])  # noqa: S311 - for verification: any will do
        self._chosen_steps -= 1
        if self._chosen_steps < 0 or not 0.8 <= (requests + 1) / (self._chosen_for + 1) <= 1.25:
            self._chosen = self._length.choose(requests, context())
            self._chosen_for, self._chosen_steps = requests, CHOICE_STEPS
        return self._chosen

    def end_step(self, tokens: int, seconds: float, *, usual: bool, prefilled: int) -> None:
        """Count what a step brought; see `DraftSwitch.end`."""
        as_wanted = self.agreed is None or bool(self.agreed) == bool(self.wanted)
        if self._switch is not None and as_wanted:
            self._switch.end(tokens, seconds, usual=usual, prefilled=prefilled)
        if self._length is not None and self._learnt:
            for (forks, drafted, accepted), times in self._learnt.items():
                self._length.learn(forks, drafted, accepted, times)
            self._learnt.clear()

    def check_profile(self, requests: int, context: Callable[[], float], seconds: float) -> None:
        """Compare a step in which all requests only decoded with the profile; give it up once it is off.

        `context()`: tokens of these requests on average.
        """
        drafted, self._drafted_before = self.drafted > self._drafted_before, self.drafted
        if self._profile is None or drafted or not self._profile[0].looks():
            return
        check, kept = self._profile
        check.add(requests, context(), seconds)
        if check.off:
            self._profile = None
            give_up(kept, check.off)

    def begin(self, chunk: Chunk) -> str:
        """Open the tree that a chunk drafts from, if it is not open yet; return its name."""
        if not chunk.group_id:
            return ""
        name = chunk.group_id if self._config.source != "own" else f"{chunk.group_id}#{chunk.index}"
        if name not in self._open:
            self._open.add(name)
            self._queue("open", group=name, prompt=chunk.tokens[: chunk.prompt_len])
        return name

    def take_acceptance(self, names: Iterable[str]) -> dict[str, tuple[list[int], list[int]]]:
        """Return how many draft tokens were verified and accepted since the last call, by tree and cell.

        Called when chunks end: it is a call to every rank. The time that drafting took comes with it.
        """
        asked = self._verified.intersection(names)
        self._verified -= asked
        if not asked or self._draft_next is not None:  # ahead, ranks choose nothing, and are not waited for
            self._ends |= bool(asked)
            return {}
        answers = self._rpc("seer_take_acceptance", groups=sorted(asked))
        # Only the rank that drafts has any.
        self.seconds, learned = max(answers, key=lambda answer: len(answer[1]))
        found: dict[str, tuple[list[int], list[int]]] = learned
        return found

    def end(self, name: str) -> None:
        """Note that a chunk ended. A tree of one response is dropped: the next chunk builds it again."""
        if name and self._config.source == "own":
            self.forget([name])

    def feed(self, deltas: Iterable[StreamDelta]) -> None:
        """Add tokens of other responses, from the dgds, to the trees."""
        known = [delta for delta in deltas if delta.group_id in self._open and self._valid(delta)]
        if known:
            self._queue("feed", deltas=known)
        if len(self._queued) >= MAX_QUEUED:
            self.flush()

    def _valid(self, delta: StreamDelta) -> bool:
        """Whether all are tokens of this model: drafts index its embeddings."""
        tokens = delta.tokens
        return not tokens.size or bool(tokens.min() >= 0 and tokens.max() < self._vocab_size)

    def forget(self, names: Iterable[str]) -> None:
        """Drop these trees."""
        gone = self._open.intersection(names)
        self._open -= gone
        self._verified -= gone
        if gone and self._queued and self._queued[-1][0] == "forget":  # ends come together
            self._queued[-1][1]["groups"].extend(sorted(gone))
        elif gone:
            self._queue("forget", groups=sorted(gone))

    def clear(self) -> None:
        """Drop all trees, at once."""
        self.forget(list(self._open))
        self.flush()
        self._rpc("seer_use_common_tree", enabled=self._config.source != "own")

    def flush(self) -> None:
        """Send what is queued; a step that follows comes after it. Raises what failed the last time.

        The time that drafting took comes back, some steps late.
        """
        sent, self._sent = self._sent, None
        if sent is not None:
            self.seconds = max(self.seconds, *sent.result())
        if self._queued or self._ends:
            queued, self._queued, self._ends = self._queued, [], False
            self._sent = self._send("seer_change_drafting", changes=queued)

    def _queue(self, method: str, **arguments: Any) -> None:  # noqa: ANN401 - of a `TreeSpeculator`
        self._queued.append((method, arguments))

    def counts(self) -> dict[str, Any]:
        """Return the counters by their name in `InstanceStats`."""
        return {
            "verifications": self.verifications,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "draft_seconds": self.seconds,
        }

    def count(self, name: str, sampled: int, drafted: int, paths: int = 1) -> int:
        """Count a step of one chunk: `sampled` tokens, after `drafted` on `paths` of its tree's.

        Return how many of the drafted tokens were right.
        """
        self.verifications += 1
        accepted = max(0, min(sampled - 1, drafted))
        if drafted:
            self.drafted += drafted
            self.accepted += accepted
            if self._length is not None:
                each = -(-drafted // paths)
                self._learnt[paths, each, min(accepted, each)] += 1
            self._verified.add(name)
        return accepted
