"""The files of `seer rollout`: prompts in, responses out.

Invariants:
- every error about a prompt starts with `FILE:LINE: field`;
- a file that is written here appears complete or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from seer.client.image_uploads import Placed
from seer.client.prompts import MAX_ID_BYTES, Prepared, token_array
from seer.client.results import Group
from seer.client.text import Tokenizer, load_tokenizer
from seer.common.config import Config
from seer.common.errors import NOT_DECODED, InvalidField
from seer.common.receipt import Receipt
from seer.common.weights.digest import problem_of
from seer.common.wire import Tokens
from seer.rollout.image_reader import ImageReader

SLACK_TOKENS = 32
"""Room beyond prompt and output, for drafted tokens that are rejected."""

_FIELDS = ("id", "prompt", "prompt_token_ids", "images")


class PromptLine(msgspec.Struct, frozen=True):
    """A prompt and its place in the file (`FILE:LINE`)."""

    where: str
    prompt: Prepared


class ModelFacts(msgspec.Struct, frozen=True):
    """Limits of a model from its config.json. 0: unknown, the engine will check.

    `context` is the longest sequence, `vocab_size` the bound on token ids.
    """

    context: int = 0
    vocab_size: int = 0


class _Rope(msgspec.Struct):
    rope_type: str | None = None
    type: str | None = None


class _TextConfig(msgspec.Struct):
    max_position_embeddings: Annotated[int, msgspec.Meta(ge=0)] | None = None
    vocab_size: Annotated[int, msgspec.Meta(ge=0)] | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None


class _ModelConfig(_TextConfig):
    text_config: _TextConfig | None = None


def model_json(folder: Path) -> dict[str, Any]:
    """Return what a folder's config.json says. Raises `InvalidField` when there is none."""
    try:
        described = json.loads((folder / "config.json").read_text())
    except OSError as error:
        fix = f"its config.json cannot be read ({error.strerror}); give a Hugging Face model folder"
        raise InvalidField("--model", str(folder), fix) from error
    except (ValueError, RecursionError) as error:
        fix = f"its config.json is not valid JSON ({error}); give a Hugging Face model folder"
        raise InvalidField("--model", str(folder), fix) from error
    if not isinstance(described, dict):
        fix = "its config.json is no model's (no object); give a Hugging Face model folder"
        raise InvalidField("--model", str(folder), fix)
    return described


def model_facts(folder: Path) -> ModelFacts:
    """Read a folder's config.json. Raises `InvalidField` when there is none."""
    try:
        model = msgspec.convert(model_json(folder), _ModelConfig)
    except NOT_DECODED as error:
        fix = f"its config.json is no model's ({error}); give a Hugging Face model folder"
        raise InvalidField("--model", str(folder), fix) from error
    text = model.text_config or model
    rope = text.rope_scaling or text.rope_parameters or _Rope()
    scaled = (rope.rope_type or rope.type or "default") != "default"
    return ModelFacts(
        context=0 if scaled else text.max_position_embeddings or 0, vocab_size=text.vocab_size or 0
    )


def check_weights(folder: Path) -> None:
    """Raise `InvalidField` when weights are missing or truncated: an engine would find out much later."""
    problem = problem_of(folder)
    if problem:
        raise InvalidField("--model", str(folder), f"{problem}; give a complete Hugging Face model folder")


def tokenizer_of(folder: Path | None) -> Tokenizer | None:
    """Return a model folder's tokenizer; None: the folder has none."""
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    return load_tokenizer(folder)


def read_prompts(
    path: Path, tokenizer: Tokenizer | None, reader: ImageReader | None = None
) -> list[PromptLine]:
    """Read, check and tokenize `{"id", "prompt" | "prompt_token_ids", ...}` lines.

    A `prompt` may come with `images`, files that `reader` reads; None: they are refused. Other fields
    become the prompt's metadata; blank lines are skipped. Raises `InvalidField` naming the first line and
    field that cannot be accepted.
    """
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise InvalidField("PROMPTS", str(path), f"{error.strerror}; give a readable JSONL file") from error
    prompts: list[PromptLine] = []
    first_seen: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        prompt = _prompt(line, where, tokenizer, reader)
        if prompt.id in first_seen:
            raise InvalidField(f"{where}: id", prompt.id, f"already used at {first_seen[prompt.id]}")
        first_seen[prompt.id] = where
        prompts.append(PromptLine(where, prompt))
    if not prompts:
        raise InvalidField("PROMPTS", str(path), "holds no prompts; give one JSON object per line")
    return prompts


def check_fit(lines: Iterable[PromptLine], max_tokens: int, facts: ModelFacts) -> int:
    """Return the longest prompt's length after checking all against the model.

    Raises `InvalidField` naming the first prompt that the model cannot take.
    """
    longest = 0
    for line in lines:
        tokens = line.prompt.token_ids
        longest = max(longest, tokens.size)
        if facts.context and tokens.size + max_tokens > facts.context:
            fix = f"with --max-tokens {max_tokens} it exceeds the model's context of {facts.context} tokens"
            raise InvalidField(f"{line.where}: prompt length", tokens.size, fix)
        if facts.vocab_size and tokens.max() >= facts.vocab_size:
            fix = f"must be below the model's vocabulary size of {facts.vocab_size}"
            raise InvalidField(f"{line.where}: prompt_token_ids", int(tokens.max()), fix)
    return longest


def with_length(config: Config, tokens: int, facts: ModelFacts) -> Config:
    """Return a configuration whose engines hold sequences of so many tokens, unless it says how long."""
    if config.engine.max_model_len is not None:
        return config
    length = tokens + SLACK_TOKENS
    return replace(config, engine=replace(config.engine, max_model_len=min(length, facts.context or length)))


def _prompt(line: bytes, where: str, tokenizer: Tokenizer | None, reader: ImageReader | None) -> Prepared:
    try:
        record = msgspec.json.decode(line)
    except NOT_DECODED as error:
        shown = line[:60].decode(errors="replace")
        raise InvalidField(f"{where}: line", shown, f"not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise InvalidField(f"{where}: line", record, 'give an object: {"id": ..., "prompt": ...}')
    prompt_id = record.get("id")
    if not isinstance(prompt_id, str) or not prompt_id:
        raise InvalidField(f"{where}: id", prompt_id, "give a non-empty string")
    if len(prompt_id.encode()) > MAX_ID_BYTES:
        raise InvalidField(f"{where}: id", prompt_id, f"give at most {MAX_ID_BYTES} bytes")
    metadata = {key: value for key, value in record.items() if key not in _FIELDS}
    if "images" in record:
        tokens, placed = _with_images(record, where, reader)
        return Prepared(prompt_id, tokens, metadata, placed)
    return Prepared(prompt_id, _tokens(record, where, tokenizer), metadata)


def _with_images(
    record: dict[str, object], where: str, reader: ImageReader | None
) -> tuple[Tokens, tuple[Placed, ...]]:
    field, text = f"{where}: images", record.get("prompt")
    if reader is None:
        raise InvalidField(field, record["images"], "this command takes prompts of text alone")
    if not isinstance(text, str) or not text:
        raise InvalidField(f"{where}: prompt", text, "give a text with a placeholder for each image")
    if "prompt_token_ids" in record:
        raise InvalidField(f"{where}: prompt_token_ids", "given", "give the prompt of images as text")
    found = reader.prompt(text, record["images"], field)
    return token_array(found.token_ids, f"{where}: prompt"), tuple(found.images)


def _tokens(record: dict[str, object], where: str, tokenizer: Tokenizer | None) -> Tokens:
    if ("prompt" in record) == ("prompt_token_ids" in record):
        found = "both" if "prompt" in record else "neither"
        raise InvalidField(f"{where}: prompt", found, "give either prompt or prompt_token_ids")
    field = f"{where}: {'prompt' if 'prompt' in record else 'prompt_token_ids'}"
    ids = record.get("prompt_token_ids")
    if "prompt" in record:
        text = record["prompt"]
        if not isinstance(text, str) or not text:
            raise InvalidField(field, text, "give a non-empty string")
        if tokenizer is None:
            fix = "text needs --model DIR with a tokenizer.json; or give prompt_token_ids"
            raise InvalidField(field, text, fix)
        return token_array(tokenizer.encode(text), field)
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        raise InvalidField(field, ids, "give a list of integers")
    return token_array(ids, field)


def encode_group(group: Group) -> bytes:
    """Return the output line of a group, with its line feed."""
    record = {
        "id": group.prompt_id,
        "prompt_token_ids": group.prompt_token_ids.tolist(),
        "weight_version": group.weight_version,
        "metadata": group.metadata,
        "responses": [
            {
                "index": response.index,
                "token_ids": response.token_ids.tolist(),
                "logprobs": response.logprobs.tolist(),
                "text": response.text,
                "finish_reason": response.finish_reason,
                **({} if response.receipt is None else {"receipt": _beside_response(response.receipt)}),
            }
            for response in group.responses
        ],
    }
    return msgspec.json.encode(record) + b"\n"


_OF_GROUP = {"prompt_token_ids": "prompt_token_ids", "group": "id"}
_OF_RESPONSE = ("index", "token_ids", "logprobs", "finish_reason")


def _beside_response(receipt: Receipt) -> dict[str, Any]:
    """Return a receipt without what its response's line says anyway: what is changed there is found, too."""
    said = {*_OF_GROUP, *_OF_RESPONSE}
    return {name: value for name, value in msgspec.structs.asdict(receipt).items() if name not in said}


def receipts_of(record: dict[str, Any]) -> list[Receipt]:
    """Return the receipts of a decoded line: of a group as `encode_group` writes it, or one alone.

    Raises `LookupError`, `TypeError` or `msgspec.ValidationError` for what is neither.
    """
    if "responses" not in record:
        return [msgspec.convert(record, Receipt, str_keys=True)]
    group = {name: record[there] for name, there in _OF_GROUP.items()}
    found = [
        {**each["receipt"], **group, **{name: each[name] for name in _OF_RESPONSE}}
        for each in record["responses"]
    ]
    return msgspec.convert(found, list[Receipt], str_keys=True)


def write_report(option: str, path: Path, report: dict[str, object]) -> None:
    """Write a report as indented JSON, as `write_whole` does."""
    write_whole(option, path, (json.dumps(report, indent=2) + "\n").encode())


def write_whole(option: str, path: Path, data: bytes) -> None:
    """Write the file that an option names, atomically. Raises `InvalidField` when it cannot be written."""
    try:
        with replacing(path) as partial:
            partial.write_bytes(data)
    except OSError as error:
        fix = f"cannot be written: {error.strerror}; give a file on a disk with room"
        raise InvalidField(option, str(path), fix) from error


def check_writable(option: str, path: Path | None) -> None:
    """Raise `InvalidField` if a file is given and cannot be written; called before the work starts."""
    if path is None:
        return
    fix = "give a file in an existing folder that can be written to"
    if os.path.exists(path) and not path.is_file():  # noqa: PTH110 - `Path.exists` may raise
        raise InvalidField(option, str(path), fix)
    partial = _beside(path)
    try:
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise InvalidField(option, str(path), f"{error.strerror}; {fix}") from error


def check_apart(files: Mapping[str, Path | None]) -> None:
    """Raise `InvalidField` if two options name the same file, as one file would replace the other."""
    named: dict[str, str] = {}
    for option, path in files.items():
        if path is not None and (other := named.setdefault(os.path.realpath(path), option)) != option:
            raise InvalidField(option, str(path), f"is what {other} names: give another file")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file beside `path` that replaces it when the block succeeds."""
    partial = _beside(path)
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")
