"""The engine's side of drafting: opens and feeds the workers' trees, and counts what drafts were worth.

Invariant: workers hold a tree for every group that a running chunk belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from seer.common.config import DraftsConfig
from seer.common.policy.draft_paths import most_paths
from seer.services.dgds.client import StreamDelta
from seer.services.engine.backend import Chunk
from seer.services.engine.vllm.drafts.scratch_blocks import say_single
from seer.services.engine.vllm.drafts.scripted import Kind, Script
from seer.services.engine.vllm.drafts.step_times import step_costs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from seer.services.engine.vllm.backend import VllmBackend

Rpc = Callable[..., list[Any]]


class Drafting:
    """Use `rpc(method, **arguments)` to reach every rank's `SeerWorker`. Counters are totals."""

    def __init__(self, rpc: Rpc, config: DraftsConfig, vocab_size: int) -> None:
        self._rpc = rpc
        self._config = config
        self._vocab_size = vocab_size
        self._open: set[str] = set()
        self.verifications = self.drafted = self.accepted = 0
        self.seconds = 0.0

    def prepare(self, backend: VllmBackend, vllm_config: VllmConfig, scratch: bool) -> None:
        """Find out what drafting costs on this engine, and begin to draft.

        With `scratch` rows and blocks it can verify several paths of a request.
        """
        config = self._config
        if config.source == "random":
            others: tuple[Kind, ...] = ("random",) if scratch else ()
            backend.script_drafts(Script(kind="random", vocab=self._vocab_size, siblings=others))
            return
        costs = step_costs(backend, vllm_config, config.max_draft, config.cache, scratch)
        paths = most_paths(costs, config.max_paths) if scratch else 1
        if scratch and paths == 1:
            say_single(f"another adds {costs.sibling:.2g} s to a step of {costs.seconds(1, 0):.2g} s")
        self._rpc("seer_set_costs", costs=costs, max_paths=paths)
        self.clear()
        self.verifications = self.drafted = self.accepted = 0
        self.seconds = 0.0

    def begin(self, chunk: Chunk) -> str:
        """Return the name of the tree that a chunk drafts from; it is there from now on."""
        if not chunk.group_id:
            return ""
        grouped = self._config.source == "grouped"
        name = chunk.group_id if grouped else f"{chunk.group_id}#{chunk.index}"
        if name not in self._open:
            self._open.add(name)
            self._rpc("seer_open_tree", group=name, prompt=chunk.tokens[: chunk.prompt_len])
        return name

    def learned(self, name: str) -> tuple[list[int], list[int]]:
        """Return tokens of a tree's drafts that were verified, and right, by cell, since last asked.

        Asked when a chunk ends, as every question goes to all ranks: what drafting took comes with it.
        """
        answers = self._rpc("seer_take_learned", group=name)
        self.seconds, drafted, right = max(answers, key=lambda answer: len(answer[1]))  # others learn nothing
        return drafted, right

    def end(self, name: str) -> None:
        """Note that a chunk ended. A response's own tree goes with it: it is soon made again."""
        if name and self._config.source == "own":
            self.forget([name])

    def feed(self, deltas: Iterable[StreamDelta]) -> None:
        """Let the trees learn what siblings said elsewhere."""
        known = [delta for delta in deltas if delta.group_id in self._open and self._sound(delta)]
        if known:
            self._rpc("seer_feed_trees", deltas=known)

    def _sound(self, delta: StreamDelta) -> bool:
        """Say whether these are tokens of this model: a drafted one becomes an index of its embeddings."""
        tokens = delta.tokens
        return not tokens.size or bool(tokens.min() >= 0 and tokens.max() < self._vocab_size)

    def forget(self, names: Iterable[str]) -> None:
        """Drop these trees."""
        gone = self._open.intersection(names)
        self._open -= gone
        if gone:
            self._rpc("seer_forget_trees", groups=sorted(gone))

    def clear(self) -> None:
        """Drop all trees."""
        self.forget(list(self._open))
        self._rpc("seer_share_trees", whole=self._config.source == "grouped")

    def counts(self) -> dict[str, Any]:
        """Return the counters by their name in `InstanceStats`."""
        return {
            "verifications": self.verifications,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "draft_seconds": self.seconds,
        }

    def count(self, sampled: int, drafted: int) -> None:
        """Count a step's tokens of one chunk, for which `drafted` were verified."""
        self.verifications += 1
        self.drafted += drafted
        self.accepted += min(sampled - 1, drafted)
