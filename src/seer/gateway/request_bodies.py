"""Bodies of requests: what is read, what is refused by name, what is left aside. Pure.

Invariants:
- a field that would change the answer and that Seer does not have is refused with its name and value, unless
  it has the value that changes nothing;
- a field of the wrong type, or out of range, is refused with its name, value and fix;
- other fields that vLLM does not know either, or that change no answer, are left aside, as vLLM does;
- whatever bytes a body has, the outcome is a body or an `HttpError`.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import structs

from seer.common.errors import NOT_DECODED, InvalidField
from seer.common.structured_outputs import StructuredOutputs
from seer.common.types import MAX_TOP_LOGPROBS, LogprobMode, SamplingParams
from seer.common.wire import MAX_GROUP_SIZE
from seer.gateway.errors import HttpError, bad
from seer.gateway.output_constraint import constraint_of, format_constraint

MAX_BODY_PROMPTS = 4096
"""Bound on the prompts of one body: their answers are assembled in memory."""

MAX_VALUES = 3 * 2**20
"""Bound on the commas of a body: so many token ids take up to a second (bench/services/http_bodies.py)."""

MAX_OBJECTS = 2**19
"""Bound on what else a body has that becomes an object of its own: half a million take half a second."""

MAX_TOKENS = 2**24
"""Bound on `max_tokens`, as `SamplingParams` has it."""

_MOST_DIGITS = 10
"""Of a token id."""

_NONE: tuple[object, ...] = (None,)
_OFF: tuple[object, ...] = (None, False)
_EMPTY: tuple[object, ...] = (None, [], {}, "")
_ONE: tuple[object, ...] = (None, 0, 1)

_EXPERTS = "set gateway.routed_experts=true, and ask /inference/v1/generate"

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""Of reasoning; what it does is the template's."""

REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "return_routed_experts": (_OFF, _EXPERTS),
    "routed_experts": (_OFF, _EXPERTS),
    "prompt_logprobs": (_NONE, "this route does not return them"),
    "echo": (_OFF, "this route does not: ask /v1/completions"),
    "top_logprobs": (_ONE, "this route returns the sampled token's logprob alone: give 0, 1 or null"),
    "suffix": (_EMPTY, "text after the completion is not supported"),
    "best_of": (_ONE, "give n, and choose yourself"),
    "use_beam_search": (_OFF, "beam search is not supported"),
    "length_penalty": ((None, 1, 1.0), "beam search is not supported"),
    "bad_words": (_EMPTY, "give their token ids in logit_bias, with -100"),
    "allowed_token_ids": (_EMPTY, "the sampler has no such mask"),
    "logits_processors": (_EMPTY, "the sampler has none"),
    "logprob_token_ids": (_EMPTY, "only the sampled token has a logprob"),
    "prompt_logprob_token_ids": (_EMPTY, "give prompt_logprobs"),
    "prompt_logprob_start": (_NONE, "give prompt_logprobs, and leave out the first"),
    "trace_decode_token_ids": (_EMPTY, "tokens are sampled: give a prompt of them, with prompt_logprobs"),
    "spaces_between_special_tokens": ((None, True), "special tokens are written with spaces between them"),
    "return_prompt_text": (_OFF, "give return_token_ids, and ask /detokenize"),
    "structured_outputs": (_NONE, "this route does not constrain text"),
    "guided_json": (_EMPTY, "give structured_outputs"),
    "guided_regex": (_EMPTY, "give structured_outputs"),
    "guided_choice": (_EMPTY, "give structured_outputs"),
    "guided_grammar": (_EMPTY, "give structured_outputs"),
    "response_format": ((None, {"type": "text"}), "this route does not take it: give structured_outputs"),
    "repetition_detection": (_EMPTY, "the sampler has none"),
    "thinking_token_budget": ((None, -1), "give max_tokens"),
    "watermarking": (_OFF, "the sampler has none"),
    "truncate_prompt_tokens": (_NONE, "shorten the prompt yourself"),
    "prompt_embeds": (_EMPTY, "give token ids or text"),
    "features": (_EMPTY, "give images as image_url in the messages of /v1/chat/completions"),
    "content_parts": (_EMPTY, "give images as image_url in the messages of /v1/chat/completions"),
    "multi_modal_data": (_EMPTY, "give images as image_url in the messages of /v1/chat/completions"),
    "mm_processor_kwargs": (_EMPTY, "images are processed as the model's processor is configured"),
    "media_io_kwargs": (_EMPTY, "images are read in one way: docs/gateway.md says how"),
    "kv_transfer_params": (_EMPTY, "Seer moves KV by itself"),
    "ec_transfer_params": (_EMPTY, "Seer moves images by itself"),
    "continue_final_message": (_OFF, "give the prompt as token ids to /v1/completions"),
    "output_mode": ((None, "tokens"), "give tokens; /v1/completions answers with text"),
    "functions": (_EMPTY, "give tools"),
    "function_call": ((None, "none"), "give tool_choice"),
}
"""Fields that would change the answer: the values that change nothing, and what to do instead."""


class SamplingFields(msgspec.Struct, kw_only=True):
    """Sampling as vLLM names it; null is the default. What is missing follows `SamplingParams`."""

    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    seed: int | None = None
    structured_outputs: dict[str, Any] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None

    def sampling(self, mode: LogprobMode, where: str = "") -> SamplingParams:
        """Return these parameters; `max_tokens` null is the most that there can be.

        `where` precedes a field's name in errors, as in `sampling_params.`.
        """
        given: dict[str, Any] = {
            name: getattr(self, name) for name in _SAME_NAMES if getattr(self, name) is not None
        }
        if given.get("top_k") == -1:
            given["top_k"] = 0
        stop = self.stop or []
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        given["stop_token_ids"] = tuple(self.stop_token_ids or ())
        given["logit_bias"] = self._biases(where)
        given["structured_outputs"] = self.constraint(where)
        given.setdefault("max_tokens", MAX_TOKENS)
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise bad(f"{where}seed", self.seed, "must be in [-2^63, 2^63)")
        sampling = SamplingParams(logprobs=mode, **given)
        try:
            sampling.check(where.removesuffix(".") or "sampling")
        except InvalidField as error:
            field = error.field if where else error.field.removeprefix("sampling.")
            raise HttpError(
                400, str(error) if where else str(error).removeprefix("sampling."), field
            ) from error
        return sampling

    def constraint(self, where: str = "") -> StructuredOutputs | None:
        """Return what the text must be, if anything is said of it."""
        given = self.structured_outputs
        return None if given is None else constraint_of(given, f"{where}structured_outputs")

    def _biases(self, where: str) -> dict[int, float]:
        biases: dict[int, float] = {}
        for token, bias in (self.logit_bias or {}).items():
            if not (token.isascii() and token.isdecimal() and len(token) <= _MOST_DIGITS):
                raise bad(f"{where}logit_bias", token, "keys must be token ids")
            biases[int(token)] = bias
        return biases

    def group_size(self, where: str = "") -> int:
        """Return n."""
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MAX_GROUP_SIZE:
            raise bad(f"{where}n", n, f"must be in [1, {MAX_GROUP_SIZE}]")
        return n


_SAME_NAMES = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "ignore_eos", "min_tokens",
)  # fmt: skip


class GenerateSampling(SamplingFields, kw_only=True):
    """`sampling_params` of `/inference/v1/generate`."""

    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """`include_usage`: the stream ends with the counts of tokens."""

    include_usage: bool | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """`POST /inference/v1/generate`."""

    token_ids: list[int]
    sampling_params: GenerateSampling
    request_id: str | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class TextFields(SamplingFields, kw_only=True):
    """Bodies whose answer is text: `response_format` says which, as `structured_outputs` does."""

    response_format: dict[str, Any] | None = None
    model: str | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def constraint(self, where: str = "") -> StructuredOutputs | None:
        """Return what the text must be, if anything is said of it."""
        constraint, given = super().constraint(where), self.response_format
        shape = None if given is None else format_constraint(given, f"{where}response_format")
        if constraint and shape:
            raise bad(
                f"{where}response_format", self.response_format, "give it or structured_outputs, not both"
            )
        return constraint or shape


class CompletionBody(TextFields, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, all as text or all as token ids."""
        given: list[Any] = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        kinds = set(map(type, given))
        if kinds == {int}:
            given, kinds = [given], {list}
        if len(kinds) != 1 or int in kinds or not all(given):
            raise bad(
                "prompt", self.prompt, "give text, token ids, or a list of one of these, none of them empty"
            )
        if len(given) > MAX_BODY_PROMPTS:
            raise bad("prompt", f"{len(given)} prompts", f"give at most {MAX_BODY_PROMPTS}")
        return given


class ChatBody(TextFields, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def template_arguments(self) -> dict[str, Any] | None:
        """Return what the template gets: as in vLLM an effort also says whether to think."""
        effort, given = self.reasoning_effort, self.chat_template_kwargs
        if effort is None:
            return given
        return {"enable_thinking": effort != "none", **(given or {}), "reasoning_effort": effort}


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a prompt, or messages."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    model: str | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


class UpdateBody(msgspec.Struct, kw_only=True):
    """`POST /update_weights`. `weight_dir` null: the trainer would send the weights by NCCL."""

    weight_dir: str | None = None


class LoadAdapterBody(msgspec.Struct, kw_only=True):
    """`POST /v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadAdapterBody(msgspec.Struct, kw_only=True):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str


class ArealUpdateBody(msgspec.Struct, kw_only=True):
    """`POST /areal_update_weights`."""

    model_path: str


def alternatives(
    sampling: SamplingParams, top: int | None, of_prompt: int | None, names: tuple[str, str], *, stream: bool
) -> SamplingParams:
    """Return parameters with so many alternatives of tokens. Raises `HttpError` by the fields' `names`."""
    given = {"top_logprobs": top or None, "prompt_logprobs": of_prompt}
    for name, value in zip(names, given.values(), strict=True):
        if value is not None and not 0 <= value <= MAX_TOP_LOGPROBS:
            raise bad(name, value, f"give 0 to {MAX_TOP_LOGPROBS}")
    if sampling.logprobs == "processed":
        if (top or 0) > 1:
            raise bad(names[0], top, "needs gateway.logprobs scaled or raw")
        given["top_logprobs"] = None
    if stream and of_prompt is not None:
        raise bad(names[1], of_prompt, "comes with whole answers alone: leave out stream")
    return structs.replace(sampling, **given)


B = TypeVar("B", bound=msgspec.Struct)


def read_body(kind: type[B], body: bytes) -> B:
    """Return a body. Raises `HttpError` for whatever cannot be read or must be refused."""
    _check_size(body)
    with _no_collection():
        return _read(kind, body)


def _check_size(body: bytes) -> None:
    """Refuse a body of very many values: reading it would hold up all other requests."""
    for signs, most, what in ((",", MAX_VALUES, "values"), ("[{:", MAX_OBJECTS, "arrays, objects and keys")):
        if (found := sum(body.count(sign.encode()) for sign in signs)) > most:
            fix = f"give at most {most}, counted by the signs {' '.join(signs)}: send several requests"
            raise bad("body", f"{found} {what}", fix)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector off, which would look through all new objects again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _read(kind: type[B], body: bytes) -> B:
    try:
        raw = msgspec.json.decode(body)
    except NOT_DECODED as error:
        raise HttpError(400, f"the body is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise bad("body", raw, "give a JSON object")
    refuse(raw, has=kind.__struct_fields__)
    sampling = raw.get("sampling_params")
    if isinstance(sampling, dict):
        refuse(sampling, "sampling_params.", GenerateSampling.__struct_fields__)
    try:
        return msgspec.convert(raw, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _misfit(raw, str(error)) from error


def refuse(fields: Mapping[str, object], where: str = "", has: Collection[str] = ()) -> None:
    """Raise `HttpError` naming the first field that would change the answer and that a body has not."""
    for name in (fields.keys() & REFUSED.keys()) - set(has):
        neutral, fix = REFUSED[name]
        if fields[name] not in neutral:
            raise bad(where + name, fields[name], fix)


def _misfit(raw: dict[str, Any], problem: str) -> HttpError:
    """Turn msgspec's `Expected int, got str - at `$.a.b`` into an error that names field and value."""
    what, _, path = problem.partition(" - at ")
    field = path.strip("`").removeprefix("$").removeprefix(".")
    value: Any = raw
    for part in field.replace("[...]", "").split("."):
        value = value.get(part) if isinstance(value, dict) else value
    if "missing required field" in what:
        return HttpError(400, f"{what}: give it", what.split("`")[1])
    return HttpError(400, str(InvalidField(field or "body", value, what)), field or None)
