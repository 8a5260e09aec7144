"""The tokens behind the machine's counts: prompts, outputs so far, finished groups.

Invariants:
- a request's output is the concatenation of the chunks the machine kept, each with its logprobs;
- one prompt array is shared by all requests of its group, and freed with the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from seer.common import ids, wire
from seer.common.types import SamplingParams
from seer.services.buffer.events import Weights
from seer.services.buffer.requests.instructions import Dispatch
from seer.services.buffer.requests.state import GroupState

TOKEN_BYTES = 8
"""A kept token: int32 id and float32 logprob."""


_NONE = Weights(0, "")


@dataclass(slots=True)
class _Output:
    tokens: list[wire.Tokens] = field(default_factory=list)
    logprobs: list[wire.Logprobs] = field(default_factory=list)


@dataclass(slots=True)
class _Group:
    prompt: wire.Tokens
    prompt_id: str
    sampling: SamplingParams
    seed: int
    rollout_number: int
    outputs: dict[int, _Output]
    size: int
    weights: Weights = _NONE


class Store:
    """Arrays by group and request."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._groups

    def open(self, submit: wire.Submit, prompt_id: str, prompt: wire.Tokens) -> None:
        """Keep one prompt of a submission. Copied: the tokens are a view of all of them."""
        self._groups[ids.group_id(submit.rollout_id, prompt_id)] = _Group(
            prompt.copy(), prompt_id, submit.sampling, submit.seed, submit.rollout_number, {}, submit.n
        )

    def same(self, group_id: str, prompt: wire.Tokens) -> bool:
        """Say whether a prompt is the one that is known under its id, if any is."""
        known = self._groups.get(group_id)
        return known is None or np.array_equal(known.prompt, prompt)

    def keep(
        self,
        group_id: str,
        index: int,
        tokens: wire.Tokens,
        logprobs: wire.Logprobs,
        weights: Weights,
    ) -> None:
        """Append an ended chunk made by `weights`. Copied: the arrays are views of a whole engine message."""
        group = self._groups[group_id]
        group.weights = weights  # they change only while no request is unfinished
        output = group.outputs.setdefault(index, _Output())
        output.tokens.append(tokens.copy())
        output.logprobs.append(logprobs.copy())

    def restore(
        self, group_id: str, outputs: Mapping[int, tuple[wire.Tokens, wire.Logprobs]], weights: Weights
    ) -> None:
        """Begin the outputs of a group with what an earlier life of the buffer kept of them."""
        group = self._groups[group_id]
        group.weights = weights
        group.outputs = {
            index: _Output([tokens], [logprobs]) for index, (tokens, logprobs) in outputs.items()
        }

    def identity(self, group_id: str) -> tuple[int, wire.Tokens]:
        """Return the digest of what was asked for each prompt of a group's submission, and its prompt."""
        group = self._groups[group_id]
        return ids.params_digest(group.seed, group.rollout_number, group.size, group.sampling), group.prompt

    def chunk(self, dispatch: Dispatch, group_id: str, index: int, *, wait_for_room: bool) -> wire.RunChunk:
        """Return the message that runs a request's next chunk."""
        group = self._groups[group_id]
        output = group.outputs.get(index)
        return wire.RunChunk(
            request_id=dispatch.request_id,
            group_id=group_id,
            attempt=dispatch.attempt,
            key=ids.request_key(group.seed, group.rollout_number, group.prompt_id, index),
            prompt_len=len(group.prompt),
            max_new_tokens=dispatch.max_new_tokens,
            sampling=group.sampling,
            tokens=np.concatenate([group.prompt, *(output.tokens if output else ())]),
            wait_for_room=wait_for_room,
            acceptance=dispatch.acceptance,
            probe=dispatch.probe,
        )

    def result(self, state: GroupState) -> wire.GroupDone:
        """Return the message that delivers a finished group, whatever weights are live by now."""
        group = self._groups[state.group_id]
        outputs = [group.outputs[index] for index in range(group.size)]
        tokens = [array for output in outputs for array in output.tokens]
        logprobs = [array for output in outputs for array in output.logprobs]
        return wire.GroupDone(
            rollout_id=state.rollout.rollout_id,
            prompt_id=state.prompt_id,
            weight_version=group.weights.version,
            weights_digest=group.weights.digest,
            finish_reasons=["stop" if request.finish == "stop" else "length" for request in state.results],
            stop_reasons=[request.stop_reason for request in state.results],
            lengths=[sum(map(len, output.tokens)) for output in outputs],
            tokens=np.concatenate(tokens),
            logprobs=np.concatenate(logprobs),
            chunks=state.counters["chunks"],
            migrations=state.counters["migrations"],
            preemptions=state.counters["preemptions"],
            submission=state.submission,
            params_digest=ids.params_digest(group.seed, group.rollout_number, group.size, group.sampling),
        )

    def forget(self, group_id: str) -> None:
        """Free a group."""
        self._groups.pop(group_id, None)
