"""The tokens behind the machine's counts: prompts, outputs so far, finished groups.

Invariants:
- a request's output is the concatenation of the chunks the machine kept, each with its logprobs;
- one prompt array is shared by all requests of its group, and freed with the group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from seer.common import ids
from seer.common.types import SamplingParams
from seer.common.wire import messages as m
from seer.services.buffer.events import Dispatch, GroupState
from seer.services.buffer.weights import Weights


@dataclass(slots=True)
class _Output:
    tokens: list[m.Tokens] = field(default_factory=list)
    logprobs: list[m.Logprobs] = field(default_factory=list)


@dataclass(slots=True)
class _Group:
    prompt: m.Tokens
    prompt_id: str
    sampling: SamplingParams
    seed: int
    rollout_number: int
    outputs: list[_Output]
    weights: Weights | None = None


class Store:
    """Arrays by group and request."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._groups

    def open(self, submit: m.Submit, prompt_id: str, prompt: m.Tokens) -> None:
        """Keep one prompt of a submission; a known one is left as it is."""
        self._groups.setdefault(
            ids.group_id(submit.rollout_id, prompt_id),
            _Group(
                prompt,
                prompt_id,
                submit.sampling,
                submit.seed,
                submit.rollout_number,
                [_Output() for _ in range(submit.n)],
            ),
        )

    def same(self, submit: m.Submit, prompt_id: str, prompt: m.Tokens) -> bool:
        """Say whether a resubmitted prompt would give the same responses as the known one."""
        known = self._groups[ids.group_id(submit.rollout_id, prompt_id)]
        return (
            np.array_equal(known.prompt, prompt)
            and known.sampling == submit.sampling
            and (known.seed, known.rollout_number) == (submit.seed, submit.rollout_number)
            and len(known.outputs) == submit.n
        )

    def keep(self, group_id: str, index: int, tokens: m.Tokens, logprobs: m.Logprobs) -> None:
        """Append an ended chunk. Copied: the arrays are views of a whole engine message."""
        output = self._groups[group_id].outputs[index]
        output.tokens.append(tokens.copy())
        output.logprobs.append(logprobs.copy())

    def chunk(self, dispatch: Dispatch, group_id: str, index: int, *, wait_for_room: bool) -> m.RunChunk:
        """Return the message that runs a request's next chunk."""
        group = self._groups[group_id]
        return m.RunChunk(
            request_id=dispatch.request_id,
            group_id=group_id,
            attempt=dispatch.attempt,
            key=ids.request_key(group.seed, group.rollout_number, group.prompt_id, index),
            prompt_len=len(group.prompt),
            max_new_tokens=dispatch.max_new_tokens,
            sampling=group.sampling,
            tokens=np.concatenate([group.prompt, *group.outputs[index].tokens]),
            wait_for_room=wait_for_room,
            acceptance=dispatch.acceptance,
            probe=dispatch.probe,
        )

    def result(self, state: GroupState, live: Weights) -> m.GroupDone:
        """Return the message that delivers a finished group; `live` were its weights if it just finished."""
        group = self._groups[state.group_id]
        group.weights = weights = group.weights or live
        outputs = group.outputs
        tokens = [array for output in outputs for array in output.tokens]
        logprobs = [array for output in outputs for array in output.logprobs]
        return m.GroupDone(
            rollout_id=state.rollout.rollout_id,
            prompt_id=state.prompt_id,
            weight_version=weights.version,
            weights_digest=weights.digest,
            finish_reasons=["stop" if request.finish == "stop" else "length" for request in state.results],
            stop_reasons=[request.stop_reason for request in state.results],
            lengths=[sum(map(len, output.tokens)) for output in outputs],
            tokens=np.concatenate(tokens),
            logprobs=np.concatenate(logprobs),
            chunks=state.counters["chunks"],
            migrations=state.counters["migrations"],
            preemptions=state.counters["preemptions"],
        )

    def forget(self, group_id: str) -> None:
        """Free a group."""
        self._groups.pop(group_id, None)
