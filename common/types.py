"""Types that all parts share: sampling parameters, places of images, an instance's capacity and statistics.

Invariants:
- everything here is a frozen value; no IO, no clock, no arrays;
- `SamplingParams.check` accepts exactly what the engine's sampler implements;
- images that `check_placed` accepts stand within the tokens, in order, and none upon another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Literal

import msgspec
from msgspec import structs

from seer.common.bounds import check_whole
from seer.common.errors import InvalidField
from seer.common.structured_outputs import MAX_CHARACTERS, StructuredOutputs

Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""What an engine reports: one that says less than nothing, infinity or NaN is refused where it is read."""

LogprobMode = Literal["scaled", "raw", "processed"]
FinishReason = Literal["stop", "length"]

MAX_STOP_STRINGS = 16
"""Bound on stop strings per request: each is searched for after every token."""

MAX_STOP_CHARACTERS = 2**14
"""Bound on the characters of all stop strings of a request: they are sent with every chunk, and hashed."""

MAX_BIAS_ENTRIES = 1024
"""Bound on logit_bias and stop_token_ids entries: they are sent with every chunk."""

MAX_TOKEN_ID = 2**31 - 1
"""Token ids are int32 everywhere behind the client."""

MAX_TOP_LOGPROBS = 20
"""Most alternatives of a token whose logprobs are returned, as in vLLM."""

MAX_ALTERNATIVES = 2**24
"""Bound on the tokens and alternatives of a prompt and its responses that have logprobs: 128 MiB."""

GREEDY_BELOW = 1e-5
"""Temperatures below are greedy, as in vLLM."""

MAX_LOGIT = 2.0**100
"""Raw logits up to this magnitude can be sampled with all parameters that `SamplingParams.check` accepts.

In float32, which ends at 2^128: (2^100 + 100 of bias) * 100 of repetition + 2 * 2^24 of frequency + 2 of
presence is below 2^107; over a temperature of `GREEDY_BELOW` that is below 2^124, and the difference of
two below 2^125. So parameters make nothing infinite. `top_p`, in float64, and the logarithm of `min_p`
need no bound: the best token always stays.
"""


_SOON_READ = msgspec.Meta(max_length=MAX_CHARACTERS)
"""Bound on what readers decode before `SamplingParams.check` has its own bounds, which are tighter."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How each response is sampled; names and meaning follow vLLM's `SamplingParams`.

    `logprobs` says under which distribution the sampled token's logprob is returned: `scaled`
    (temperature-scaled, untruncated: what trainers recompute), `raw` (temperature 1) or
    `processed` (after penalties and truncation). `min_tokens` masks every stop token id and
    defers stop strings until that many tokens are out. `routed_experts_from`: return which experts each token
    went to, from this position of the prompt on; None: do not. `top_logprobs` and `prompt_logprobs`: return
    the rank of each token of the response, or of the prompt, and so many likeliest tokens in its place with
    their logprobs; None: do not. The prompt's, and its tokens' own logprobs, are `raw`.
    `structured_outputs` constrains the text: tokens that it forbids have no probability, also in logprobs.
    `receipt`: return a `Receipt` with each response (`common/receipt.py`). If left out, nothing is sent of
    it: peers before protocol 3.7 refuse a parameter that they do not know.
    """

    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Annotated[dict[int, float], _SOON_READ] = {}
    stop: Annotated[tuple[str, ...], _SOON_READ] = ()
    stop_token_ids: Annotated[tuple[int, ...], _SOON_READ] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: LogprobMode = "scaled"
    routed_experts_from: int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    receipt: bool | msgspec.UnsetType = msgspec.UNSET

    def check(self, field: str = "sampling") -> None:
        """Raise `InvalidField` naming the first field that cannot be accepted."""
        self._check_types(field)
        for name, low, high, low_open in _RANGES:
            value = getattr(self, name)
            if not (low < value <= high if low_open else low <= value <= high):  # NaN is in no range
                bracket = "(" if low_open else "["
                raise InvalidField(f"{field}.{name}", value, f"must be in {bracket}{low}, {high}]")
        if self.min_tokens > self.max_tokens:
            raise InvalidField(
                f"{field}.min_tokens", self.min_tokens, f"must not exceed max_tokens ({self.max_tokens})"
            )
        self._check_beside(field)
        self._check_lists(field)
        if self.structured_outputs is not None:
            self._check_structure(self.structured_outputs, f"{field}.")

    def _check_structure(self, structure: StructuredOutputs, where: str) -> None:
        structure.check(f"{where}structured_outputs")
        fix = "structured_outputs end the response where their constraint ends: leave it out"
        for name in ("min_tokens", "ignore_eos"):
            if getattr(self, name):
                raise InvalidField(where + name, getattr(self, name), fix)

    def check_alternatives(self, n: int, prompt: int, field: str = "sampling") -> None:
        """Raise `InvalidField` if n responses to a prompt of such a length may have too many alternatives."""
        asked = {"top_logprobs": n * self.max_tokens, "prompt_logprobs": prompt}
        for name, tokens in asked.items():
            top = getattr(self, name)
            if top is not None and tokens * (1 + top) > MAX_ALTERNATIVES:
                fix = (
                    f"makes up to {tokens * (1 + top)} logprobs: have at most {MAX_ALTERNATIVES} for a prompt"
                )
                raise InvalidField(f"{field}.{name}", top, f"{fix}, by fewer or shorter responses")

    def _check_types(self, field: str) -> None:
        """Types are those of the wire: in a process of Python, fields may be anything."""
        try:
            msgspec.convert(_fields(self), SamplingParams)
        except msgspec.ValidationError as error:
            why, _, where = str(error).rpartition("`$.")
            name = re.split(r"\W", where)[0]
            give = "fewer" if " of length " in why else "plain Python values"
            fix = f"{why.removesuffix(' - at ').removesuffix(' in ')}: give {give}"
            raise InvalidField(f"{field}.{name}", getattr(self, name), fix) from error
        for name in self.__struct_fields__:
            value = getattr(self, name)
            for each in value.values() if isinstance(value, dict) else (value,):
                if isinstance(each, Decimal):  # which `convert` takes for a float, and the wire for a string
                    raise InvalidField(f"{field}.{name}", value, "give a float instead of a Decimal")

    def _check_beside(self, field: str) -> None:
        for name, most in _BESIDE.items():
            value = getattr(self, name)
            if value is not None and not 0 <= value <= most:
                raise InvalidField(f"{field}.{name}", value, f"give a whole number from 0 to {most}, or None")
        if self.top_logprobs is not None and self.logprobs == "processed":
            raise InvalidField(f"{field}.top_logprobs", self.top_logprobs, "needs logprobs scaled or raw")

    def _check_lists(self, field: str) -> None:
        short = len(self.stop) <= MAX_STOP_STRINGS and sum(map(len, self.stop)) <= MAX_STOP_CHARACTERS
        if not short or not all(map(_is_text, self.stop)):
            fix = f"give at most {MAX_STOP_STRINGS} non-empty strings of Unicode"
            raise InvalidField(
                f"{field}.stop", self.stop, f"{fix}, of {MAX_STOP_CHARACTERS} characters in all"
            )
        for name in ("logit_bias", "stop_token_ids"):
            ids = getattr(self, name)
            if len(ids) > MAX_BIAS_ENTRIES or not all(0 <= token <= MAX_TOKEN_ID for token in ids):
                fix = f"give at most {MAX_BIAS_ENTRIES} token ids from 0 to {MAX_TOKEN_ID}"
                raise InvalidField(f"{field}.{name}", ids, fix)
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise InvalidField(f"{field}.logit_bias[{token}]", bias, "must be in [-100, 100]")


def _fields(sampling: SamplingParams) -> dict[str, object]:
    """Return what a value has, and what its constraint has: `convert` does not look into a Struct."""
    fields = {name: value for name, value in structs.asdict(sampling).items() if value is not msgspec.UNSET}
    structure = fields["structured_outputs"]
    if isinstance(structure, StructuredOutputs):
        fields["structured_outputs"] = structs.asdict(structure)
    return fields


def _is_text(stop: str) -> bool:
    """Return whether a stop string can be searched for, and sent: half of a surrogate pair cannot."""
    try:
        return bool(stop.encode())
    except UnicodeEncodeError:
        return False


_RANGES: tuple[tuple[str, float, float, bool], ...] = (
    ("max_tokens", 1, 2**24, False),
    ("temperature", 0.0, 100.0, False),
    ("top_p", 0.0, 1.0, True),
    ("top_k", 0, 2**31 - 1, False),
    ("min_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.01, 100.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
    ("presence_penalty", -2.0, 2.0, False),
    ("min_tokens", 0, 2**24, False),
)
_BESIDE = {
    "routed_experts_from": MAX_TOKEN_ID,
    "top_logprobs": MAX_TOP_LOGPROBS,
    "prompt_logprobs": MAX_TOP_LOGPROBS,
}


MAX_IMAGES = 64
"""Bound on the images of a prompt: they are named with every chunk."""

MAX_IMAGE_BYTES = 64 * 2**20
"""Bound on an image: engines keep all images of a running request in memory."""

IMAGE_NAME = re.compile(r"[0-9a-f]{64}")
"""What the name of an image looks like (`common/prepared_image.py`); it is a file's name, too."""


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """Where an image stands in a prompt: for `length` tokens, placeholders, from position `offset` on."""

    name: Annotated[str, msgspec.Meta(max_length=64)]
    offset: int
    length: int


def check_placed(images: Sequence[Placed], tokens: int, field: str = "images") -> None:
    """Raise `InvalidField` unless images stand within so many tokens, in order and apart."""
    if len(images) > MAX_IMAGES:
        raise InvalidField(field, len(images), f"give at most {MAX_IMAGES} for a prompt")
    end = 0
    for place, each in enumerate(images):
        if not IMAGE_NAME.fullmatch(each.name):
            raise InvalidField(f"{field}[{place}].name", each.name, "give 64 hexadecimal digits")
        if each.offset < end:
            fix = f"the image before it ends at {end}: give images in order, and apart"
            raise InvalidField(f"{field}[{place}].offset", each.offset, fix if place else "must be 0 or more")
        if each.offset >= tokens:
            fix = f"must be below {tokens}: the prompt has {tokens} tokens"
            raise InvalidField(f"{field}[{place}].offset", each.offset, fix)
        end = each.offset + each.length
        if each.length < 1 or end > tokens:
            fix = f"must be from 1 to {tokens - each.offset}: the prompt has {tokens} tokens"
            raise InvalidField(f"{field}[{place}].length", each.length, fix)


MAX_CONTEXT = 2**24
"""Longest that a trajectory may be, in tokens."""

MAX_IDLE_SECONDS = 86_400.0
"""Longest that a trajectory may wait for its next turn."""


class TurnSpec(msgspec.Struct, frozen=True, array_like=True):
    """Makes a prompt one turn of a trajectory: its tokens are the trajectory's context so far.

    The first `prompt_len` of them are the trajectory's own prompt, and `generated` of the others were
    generated in earlier turns; an environment added the rest. All turns together may generate `cap` tokens.
    Updates of weights wait up to `idle_seconds` for the next turn; 0: nothing waits for it. `trajectory`
    names the trajectory where each turn is of another group, which the buffer finds; empty: the group and the
    index in it do.
    """

    prompt_len: int
    generated: int = 0
    cap: int = MAX_CONTEXT
    idle_seconds: float = 600.0
    trajectory: Annotated[str, msgspec.Meta(max_length=256)] = ""

    def check(self, context: int) -> None:
        """Raise `InvalidField` if this cannot be a turn that begins after `context` tokens."""
        check_whole("turns.prompt_len", self.prompt_len, 1, context)
        check_whole("turns.generated", self.generated, 0, context - self.prompt_len)
        check_whole("turns.cap", self.cap, self.generated + 1, MAX_CONTEXT)
        if not 0 <= self.idle_seconds <= MAX_IDLE_SECONDS:
            raise InvalidField(
                "turns.idle_seconds", self.idle_seconds, f"must be in [0, {MAX_IDLE_SECONDS:g}]"
            )


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance can hold.

    `kv_blocks` counts blocks that requests can use, without vLLM's null block; `draft_tokens` is K_max, the
    most tokens that one step may draft for a request. `image_tokens`: the most that one image may take; 0:
    its model, or its release, has no images. `parts`: how many data-parallel ranks have the blocks, as many
    each; a chunk takes those of one.
    """

    kv_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    draft_tokens: int = 0
    image_tokens: int = 0
    parts: int = 1

    def blocks_for(self, context: int, chunk: int) -> int:
        """Return the most blocks that a chunk can need: ceil((context + chunk + K_max + 1) / block_size)."""
        return -(-(context + chunk + self.draft_tokens + 1) // self.block_size)

    def holds(self, context: int, chunk: int, image_tokens: int = 0) -> bool:
        """Return whether a chunk fits an empty instance. `image_tokens`: of its largest image; 0: none."""
        return (
            image_tokens <= self.image_tokens
            and context + chunk <= self.max_model_len  # drafts never reach beyond the chunk
            and self.blocks_for(context, chunk) <= self.kv_blocks // self.parts
        )

    def room(self, context: int) -> int:
        """Return the longest chunk that fits an empty instance; below 1: none."""
        in_blocks = self.kv_blocks // self.parts * self.block_size - self.draft_tokens - 1
        return min(self.max_model_len, in_blocks) - context


class InstanceStats(msgspec.Struct, frozen=True, kw_only=True):
    """An instance's own statistics. Counters are totals since it started.

    `free_blocks` include cached blocks that no request references; `pinned_blocks` are held by saves to the
    KV pool after their request ended, and cannot be allocated. Of `prompt_tokens`, `cached_tokens` were not
    computed, and `pool_tokens` of these came from the KV pool. `pool_failures` are calls into the pool that
    failed or took too long, `pool_corrupt` blocks with a wrong checksum; in both cases KV is computed
    instead. `pool_away`: after such failures the pool is not used for a while. `verifications` counts
    request-steps, each of which generates one token and may verify drafts; of `drafted_tokens`,
    `accepted_tokens` were accepted. `draft_seconds` of `step_seconds` were spent drafting. `best_rate` is the
    highest tokens/s over a second of steps, `token_seconds_alone` the least seconds per token of a request
    that ran alone; 0: not measured yet; the buffer tells the best of all incarnations of an instance.
    `encoder_runs` counts images that the vision encoder computed. `dummy_steps`: those that data-parallel
    ranks ran without a request, over all ranks, each of which runs every step. `ahead_tokens`: those
    generated for coming submissions, for drafts alone. `head_behind`: updates that were loaded since the one
    that the draft head is of.
    """

    steps: Count = 0
    running: Count = 0
    waiting: Count = 0
    free_blocks: Count = 0
    pinned_blocks: Count = 0
    preemptions: Count = 0
    generated_tokens: Count = 0
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    pool_tokens: Count = 0
    pool_saved_blocks: Count = 0
    pool_dropped_blocks: Count = 0
    pool_failures: Count = 0
    pool_corrupt: Count = 0
    pool_away: bool = False
    verifications: Count = 0
    drafted_tokens: Count = 0
    accepted_tokens: Count = 0
    draft_seconds: Amount = 0.0
    step_seconds: Amount = 0.0
    best_rate: Amount = 0.0
    token_seconds_alone: Amount = 0.0
    encoder_runs: Count = 0
    dummy_steps: Count = 0
    ahead_tokens: Count = 0
    head_behind: Count = 0
