"""Sampling of cells that have their own: every parameter at once, or a constraint on the text.

The values of `every_parameter` change what these prompts' responses are.

Invariants (tests/unit/test_verify_cells.py asserts them):
- no parameter is left at the value that does nothing; parameters that the user gave stay as they are;
- stops are texts and tokens that some responses of the reference contain beyond `min_tokens`: some responses
  end by a text, some by a token, and many go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from seer.client import Group
from seer.client.text import Tokenizer
from seer.common.structured_outputs import StructuredOutputs
from seer.common.types import SamplingParams

ENDED_BY_EACH = 0.15
"""Share of responses that each stop is to end, about."""

LENGTHS = (1, 2, 3)
"""Tokens of the texts that are looked for: of several tokens, so that chunks end within them."""

TOP_P, TOP_K, MIN_P = 0.95, 4, 0.05
"""So that each cuts what the others leave: a flat distribution, one of a few likely tokens, a steep one."""

STRUCTURE = "([0-9]{1,3}[-+*]){9,60}[0-9]{1,3}"
"""What it allows changes from token to token, with all that came before, and any model can write it."""

BIASES = (-0.5, 0.5, -1.0)
"""Of the most frequent tokens."""


def every_parameter(
    given: SamplingParams, groups: Sequence[Group], tokenizer: Tokenizer | None
) -> SamplingParams:
    """Return `given` with all other parameters set. `groups` are responses to the same prompts."""
    outputs = [response.token_ids.tolist() for group in groups for response in group.responses]
    median = sorted(map(len, outputs))[len(outputs) // 2]
    least = given.min_tokens or max(1, min(median // 3, given.max_tokens))
    frequent = Counter(token for output in outputs for token in output).most_common(len(BIASES))
    biases = {token: bias for (token, _), bias in zip(frequent, BIASES, strict=False)}
    later = [output[least:-1] for output in outputs]  # the last token may end all texts
    return replace(
        given,
        top_p=min(given.top_p, TOP_P),
        top_k=given.top_k or TOP_K,
        min_p=given.min_p or MIN_P,
        repetition_penalty=1.1 if given.repetition_penalty == 1.0 else given.repetition_penalty,
        frequency_penalty=given.frequency_penalty or 0.2,
        presence_penalty=given.presence_penalty or 0.3,
        logit_bias=given.logit_bias or biases,
        stop=given.stop or tuple(_texts(later, tokenizer)),
        stop_token_ids=given.stop_token_ids or next(_usual(later, 1), ()),
        min_tokens=least,
    )


def structured(given: SamplingParams) -> SamplingParams:
    """Return `given` with the text constrained; the constraint alone says where a response ends."""
    return replace(
        given, structured_outputs=StructuredOutputs(regex=STRUCTURE), ignore_eos=False, min_tokens=0, stop=(),
        stop_token_ids=(),
    )  # fmt: skip


def _texts(outputs: Sequence[list[int]], tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield a text of each of `LENGTHS` that can be searched for."""
    if tokenizer is None:
        return
    for length in LENGTHS:
        texts = (tokenizer.decode(run) for run in _usual(outputs, length))
        if found := next(
            (text for text in texts if text.strip() and "\N{REPLACEMENT CHARACTER}" not in text), ""
        ):
            yield found


def _usual(outputs: Sequence[list[int]], length: int) -> Iterator[tuple[int, ...]]:
    """Yield runs of so many tokens, first those in about `ENDED_BY_EACH` of the outputs."""
    found: Counter[tuple[int, ...]] = Counter()
    for output in outputs:
        found.update({tuple(output[i : i + length]) for i in range(len(output) - length + 1)})
    wanted = max(1.0, ENDED_BY_EACH * len(outputs))
    yield from sorted(found, key=lambda run: (abs(found[run] - wanted), run))
