"""Faults as those of a backend would be, to see whether `seer verify` finds them by name.

Each one is wrong only where a response goes on (`Chunk.tokens` are more than its prompt), where so much is computed
at once that no prompt is as long (`long-...`), or where KV came from the pool: the reference, each response in one
go, is right. All are planted from outside, by replacing functions as
their modules are imported; in engines, and if asked for in the teacher that judges, which then has them wherever an
output is known.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

ONE_CHUNK_IN, ONE_PROMPT_IN = 41, 12
"""How rare the rare ones are."""

LONG = 64
"""More tokens than a prompt has. What is wrong with so many is so in the teacher, too, whatever way it goes."""

Changed = Callable[[Any], dict[str, Any]]
"""From a chunk that goes on: the fields that a fault gives other values."""


@dataclass(frozen=True)
class Fault:
    """A fault of a `kind`, which `cell` is to find. Where it is wrong depends on which of the others it has.

    `chunk`: what is wrong with a chunk that goes on; `output`: with what a step says of one; `row`: added to the
    positions of its rows, given where the chunk began and the positions; `forgets_text`: stop strings are looked
    for in this chunk's text alone; `slots`: in which order KV from the pool is put into blocks; `zeroes`: KV of a
    block is lost; `forgets_drafts`: rows after drafts are sampled as if other tokens had been drafted; `stops_late`:
    of the tokens of a step, a stop string is looked for at the last; `routes`: what is wrong with the expert ids of
    its tokens; `grammar`: with the tokens that its grammar takes to go on. `where` says which chunks are wrong: those
    that go on.
    """

    kind: str
    cell: str
    chunk: Changed | None = None
    output: Callable[[Any, Any], None] | None = None
    row: Callable[[int, int], int] | None = None
    forgets_text: bool = False
    slots: Callable[[list[int]], list[int]] | None = None
    zeroes: bool = False
    forgets_drafts: bool = False
    stops_late: bool = False
    routes: Callable[[Any], None] | None = None
    grammar: Callable[[list[int]], list[int]] | None = None
    where: Callable[[Any], bool] = lambda chunk: len(chunk.tokens) > chunk.counts_from


def _tokens(change: Callable[[list[int], int], list[int]]) -> Changed:
    """`change` gets all tokens, and where the output begins."""
    return lambda chunk: {"tokens": change(list(chunk.tokens), chunk.counts_from)}


def _other(token: int) -> int:
    """Return another token of any vocabulary."""
    return token - 1 if token else 1


def _at(tokens: list[int], place: int) -> list[int]:
    tokens[place] = _other(tokens[place])
    return tokens


def _sampling(**values: Any) -> Changed:
    return lambda chunk: {"sampling": _replaced(chunk.sampling, **values)}


def _replaced(struct: Any, **values: Any) -> Any:
    from msgspec.structs import replace

    return replace(struct, **values)


_seen = {"chunks": 0}


def _rarely(change: Changed) -> Changed:
    def changed(chunk: Any) -> dict[str, Any]:
        _seen["chunks"] += 1
        return change(chunk) if _seen["chunks"] % ONE_CHUNK_IN == 0 else {}

    return changed


def _of_few_prompts(change: Changed) -> Changed:
    def changed(chunk: Any) -> dict[str, Any]:
        prompt = ",".join(map(str, chunk.tokens[: chunk.prompt_len])).encode()
        return change(chunk) if zlib.crc32(prompt) % ONE_PROMPT_IN == 0 else {}

    return changed


_outputs: dict[tuple[int, ...], list[int]] = {}


def _of_a_sibling(chunk: Any) -> dict[str, Any]:
    """Give a chunk the output so far of the response to its prompt that went on before it."""
    tokens, start = list(chunk.tokens), chunk.counts_from
    prompt = tuple(tokens[:start])
    theirs, _outputs[prompt] = _outputs.get(prompt, tokens[start:]), tokens[start:]
    mine = tokens[start:]
    return {"tokens": tokens[:start] + (theirs + mine[len(theirs) :])[: len(mine)]}


def _images(change: Callable[[list[Any]], list[Any]]) -> Changed:
    """`change` gets those images of a chunk that are as long as each other; places stay as they are."""

    def changed(chunk: Any) -> dict[str, Any]:
        images = list(chunk.images)
        for length in {place.length for place, _ in images}:
            alike = [i for i, (place, _) in enumerate(images) if place.length == length]
            for i, image in zip(alike, change([images[i].image for i in alike]), strict=True):
                images[i] = images[i]._replace(image=image)
        return {"images": tuple(images)}

    return changed


def _painted(image: Any) -> Any:
    """Return an image whose pixels are negated, under another name."""
    from seer.common import prepared_image

    tensors = {
        name: -tensor if tensor.dtype.kind == "f" else tensor for name, tensor in image.tensors.items()
    }
    return prepared_image.make(image.modality, tensors)


def _lowered(generated: Any, by: float) -> None:
    generated.logprobs = [value - by for value in generated.logprobs]


def _said_twice(generated: Any) -> None:
    generated.token_ids = [_other(generated.token_ids[0]), *generated.token_ids[1:]]


def _said_rarely(chunk: Any, generated: Any) -> None:
    known = _said.setdefault((chunk.request_id, chunk.attempt, len(chunk.tokens)), len(_said))
    if known % ONE_CHUNK_IN == ONE_CHUNK_IN - 1:
        _said_twice(generated)


_said: dict[tuple[str, int, int], int] = {}
"""Chunks that went on, numbered."""


_LAST = _tokens(lambda tokens, start: _at(tokens, -1))
_KEY = lambda chunk: {"key": (chunk.key + 1) % 2**64}  # noqa: E731
_RESTART = lambda chunk: {"prompt_len": len(chunk.tokens), "sampling": _shorter(chunk)}  # noqa: E731


def _shorter(chunk: Any) -> Any:
    """Return parameters with which so much may still be generated if the output counts from now on."""
    left = chunk.sampling.max_tokens - (len(chunk.tokens) - chunk.counts_from)
    return _replaced(chunk.sampling, max_tokens=left, min_tokens=min(left, chunk.sampling.min_tokens))


def _least_restarts(chunk: Any) -> dict[str, Any]:
    known, sampling = len(chunk.tokens) - chunk.counts_from, chunk.sampling
    least = min(sampling.max_tokens, known + sampling.min_tokens)
    return {"sampling": _replaced(sampling, min_tokens=least)}


def _context(change: Callable[[list[int], int], list[int]], cell: str = "chunk-16") -> Fault:
    return Fault("context", cell, chunk=_tokens(change))


def _lost(kind: str = "history", **values: Any) -> Fault:
    return Fault(kind, "sampling", chunk=_sampling(**values))


FAULTS: dict[str, Fault] = {
    "context-last-token": Fault("context", "chunk-16", chunk=_LAST),
    "context-last-two-exchanged": _context(lambda t, s: [*t[:-2], t[-1], t[-2]]),
    "context-first-output-token": _context(_at),
    "context-middle-token": _context(lambda t, s: _at(t, (s + len(t)) // 2)),
    "context-end-of-prompt": _context(lambda t, s: _at(t, s - 1)),
    "context-begin-of-prompt": _context(lambda t, s: _at(t, 0)),
    "context-shifted-by-one": _context(lambda t, s: [*t[1:], t[-1]]),
    "context-output-shifted": _context(lambda t, s: [*t[:s], *t[s + 1 :], t[-1]]),
    "context-output-reversed": _context(lambda t, s: [*t[:s], *t[s:][::-1]]),
    "context-of-a-sibling": Fault("context", "chunk-16", chunk=_of_a_sibling),
    "context-one-chunk-in-41": Fault("context", "chunk-16", chunk=_rarely(_LAST)),
    "context-one-prompt-in-12": Fault("context", "chunk-16", chunk=_of_few_prompts(_LAST)),
    "long-last-token": Fault("context", "chunk-16", chunk=_LAST, where=lambda c: len(c.tokens) > LONG),
    "long-begin-of-prompt": Fault(
        "context", "chunk-16", chunk=_tokens(lambda t, s: _at(t, 0)), where=lambda c: len(c.tokens) > LONG
    ),
    "long-shifted-by-one": Fault(
        "context",
        "chunk-16",
        chunk=_tokens(lambda t, s: [*t[1:], t[-1]]),
        where=lambda c: len(c.tokens) > LONG,
    ),
    "key-of-the-next": Fault("key", "chunk-16", chunk=_KEY),
    "key-by-length": Fault("key", "chunk-16", chunk=lambda c: {"key": c.key ^ len(c.tokens)}),
    "key-half": Fault("key", "chunk-16", chunk=lambda c: {"key": c.key % 2**32}),
    "key-none": Fault("key", "chunk-16", chunk=lambda c: {"key": 0}),
    "key-one-chunk-in-41": Fault("key", "chunk-16", chunk=_rarely(_KEY)),
    "key-one-prompt-in-12": Fault("key", "chunk-16", chunk=_of_few_prompts(_KEY)),
    "position-from-chunk": Fault("position", "chunk-16", row=lambda begun, at: -begun),
    "position-one-more": Fault("position", "chunk-16", row=lambda begun, at: 1),
    "position-one-less": Fault("position", "chunk-16", row=lambda begun, at: -1),
    "position-first-of-chunk": Fault("position", "chunk-16", row=lambda begun, at: -(at == begun)),
    "position-behind-128": Fault("position", "chunk-16", row=lambda begun, at: at > 128),
    "history-restarts": Fault("history", "sampling", chunk=_RESTART),
    "history-one-chunk-in-41": Fault("history", "sampling", chunk=_rarely(_RESTART)),
    "history-one-prompt-in-12": Fault("history", "sampling", chunk=_of_few_prompts(_RESTART)),
    "min-tokens-restart": Fault("history", "sampling", chunk=_least_restarts),
    "stop-strings-restart": Fault("history", "sampling", forgets_text=True),
    "min-tokens-lost": _lost(min_tokens=0),
    "stop-ids-lost": _lost(stop_token_ids=()),
    "stop-strings-lost": _lost(stop=()),
    "repetition-penalty-lost": _lost(repetition_penalty=1.0),
    "frequency-penalty-lost": _lost(frequency_penalty=0.0),
    "presence-penalty-lost": _lost(presence_penalty=0.0),
    "logit-bias-lost": _lost(logit_bias={}),
    "min-p-lost": _lost(min_p=0.0),
    "top-k-lost": _lost(top_k=0),
    "top-p-lost": _lost(top_p=1.0),
    "temperature-lost": _lost(temperature=1.1),
    "order-logprobs": Fault("order", "chunk-16", output=lambda run, said: _lowered(said, 0.01)),
    "order-other-token-said": Fault("order", "chunk-16", output=lambda run, said: _said_twice(said)),
    "order-one-chunk-in-41": Fault("order", "chunk-16", output=_said_rarely),
    "pool-last-block-lost": Fault("pool", "pool-migrate", slots=lambda s: [*s[:-1], s[0]]),
    "pool-first-block-everywhere": Fault("pool", "pool-migrate", slots=lambda s: [s[0]] * len(s)),
    "pool-one-load-in-5": Fault("pool", "pool-migrate", slots=lambda s: _one_in_five(s)),
    "kv-block-zeroed": Fault("pool", "chunk-16", zeroes=True),
    "draft-history-lost": Fault("draft", "drafts-sampling", forgets_drafts=True),
    "draft-stops-late": Fault("draft", "drafts-sampling", stops_late=True),
    "routes-shifted": Fault("routes", "chunk-16", routes=lambda end: _shift(end)),
    "grammar-begins-anew": Fault("grammar", "structured", grammar=lambda tokens: []),
    "image-of-the-first": Fault("image", "chunk-16", chunk=_images(lambda m: [m[0]] * len(m))),
    "image-exchanged": Fault("image", "chunk-16", chunk=_images(lambda images: images[::-1])),
    "image-negated": Fault("image", "chunk-16", chunk=_images(lambda m: [_painted(each) for each in m])),
}


def _shift(end: Any) -> None:
    """Give each token of one layer the experts of the token before it."""
    end.routes = end.routes.copy()
    end.routes[1:, 1] = end.routes[:-1, 1].copy()


def _one_in_five(slots: list[int]) -> list[int]:
    """Give one load in five its first block everywhere. Blocks in another order would be no fault: keys know their
    positions, and attention adds up all."""
    _seen["loads"] = _seen.get("loads", 0) + 1
    return [slots[0]] * len(slots) if _seen["loads"] % 5 == 0 else slots


# --- planting --------------------------------------------------------------------------------


def named_in(file: str) -> Callable[[], Fault | None]:
    """Return what reads the fault's name in a file."""

    def read() -> Fault | None:
        try:
            return FAULTS.get(Path(file).read_text().strip())
        except OSError:
            return None

    return read


Now = Callable[[], Fault | None]


def _plant_in_backend(module: ModuleType, now: Now, cls: str) -> None:
    """Chunks that go on, and what steps say of them, in an engine of either backend."""
    backend = getattr(module, cls)
    add, step = backend.add, backend.step
    going_on: dict[tuple[str, int], Any] = {}

    @functools.wraps(add)
    def planted_add(self: Any, chunk: Any, **options: Any) -> None:
        fault = now()
        begun = len(chunk.tokens) if len(chunk.tokens) > chunk.counts_from else 0
        going_on.pop((chunk.request_id, chunk.attempt), None)
        if fault is not None and fault.where(chunk):
            going_on[chunk.request_id, chunk.attempt] = chunk
            if fault.chunk is not None:
                chunk = _replaced(chunk, **fault.chunk(chunk))
        _begun[chunk.key] = begun
        add(self, chunk, **options)

    @functools.wraps(step)
    def planted_step(self: Any) -> Any:
        fault = now()
        if fault is not None and fault.zeroes:
            _zero_a_block(self, going_on)
        out = step(self)
        if fault is not None and fault.output is not None:
            for said in out.generated:
                if (said.request_id, said.attempt) in going_on:
                    fault.output(going_on[said.request_id, said.attempt], said)
        if fault is not None and fault.routes is not None:
            for end in out.ended:
                if (end.request_id, end.attempt) in going_on:
                    fault.routes(end)
        return out

    backend.add, backend.step = planted_add, planted_step


_begun: dict[int, int] = {}
"""By key: where a chunk that goes on began; 0 for others."""


def _zero_a_block(backend: Any, going_on: dict[tuple[str, int], Any]) -> None:
    """Lose the KV of the first block of each chunk that goes on, from its second step on."""
    manager = backend.core.engine_core.scheduler.kv_cache_manager
    for run_id, run in backend._runs.items():
        if (run.chunk.request_id, run.chunk.attempt) in going_on and run.request.num_computed_tokens:
            backend.core.rpc("seer_zero_blocks", blocks=[manager.get_block_ids(run_id)[0][0]])


def _plant_in_rows(module: ModuleType, now: Now, cls: str, name: str) -> None:
    """The parameters that rows are sampled with, on CPUs."""
    table = getattr(module, cls)
    rows = getattr(table, name)

    @functools.wraps(rows)
    def planted(*given: Any, **named: Any) -> Any:
        fault = now()
        params = rows(*given, **named)
        if fault is not None and fault.row is not None:
            for record in params.records:
                if begun := _begun.get(int(record["key"]), 0):
                    record["position"] += int(fault.row(begun, int(record["position"])))
        if fault is not None and fault.forgets_drafts:
            params = dataclasses.replace(params, extra=np.zeros_like(params.extra))
        return params

    setattr(table, name, planted)


def _plant_in_texts(module: ModuleType, now: Now) -> None:
    """Stop strings: what is known of the output counts as what is before it."""
    whole = module.StopStrings

    def planted(detokenizer: Any, stops: Any, least: int, before: list[int], output: list[int]) -> Any:
        fault = now()
        if fault is not None and fault.stops_late:
            return _late(whole(detokenizer, stops, least, before, output))
        if fault is None or not fault.forgets_text or not output:
            return whole(detokenizer, stops, least, before, output)
        return whole(detokenizer, stops, max(0, least - len(output)), [*before, *output], [])

    module.StopStrings = planted


def _plant_in_grammars(module: ModuleType, now: Now) -> None:
    so_far = module.Grammars._so_far

    @functools.wraps(so_far)
    def planted(self: Any, request: Any) -> list[int]:
        fault, tokens = now(), so_far(self, request)
        return tokens if fault is None or fault.grammar is None else fault.grammar(tokens)

    module.Grammars._so_far = planted


def _late(stops: Any) -> Any:
    def cut(tokens: list[int], *, ends_by_id: bool) -> tuple[list[int], str | None]:
        found = [stops._feed(token) for token in (tokens[:-1] if ends_by_id else tokens)]
        return tokens, None if ends_by_id or not found else found[-1]

    stops.cut = cut
    return stops


def _plant_in_copies(module: ModuleType, now: Now) -> None:
    for cls in (module.HostCopies, module.DeviceCopies):
        cls.to_blocks = _other_order(cls.to_blocks, now)


def _other_order(to_blocks: Callable[..., None], now: Now) -> Callable[..., None]:
    @functools.wraps(to_blocks)
    def planted(self: Any, slots: list[int], blocks: Any) -> None:
        fault = now()
        other = list(slots) if fault is None or fault.slots is None else fault.slots(list(slots))
        to_blocks(self, other, blocks)

    return planted


_PLANTS: dict[str, tuple[Callable[..., None], ...]] = {
    "seer.services.engine.vllm.backend": (
        functools.partial(_plant_in_backend, cls="VllmBackend"),
        _plant_in_texts,
    ),
    "seer.services.engine.replay.backend": (functools.partial(_plant_in_backend, cls="ReplayBackend"),),
    "seer.services.engine.vllm.grammars": (_plant_in_grammars,),
    "seer.services.engine.vllm.sampling.rows": (
        functools.partial(_plant_in_rows, cls="SamplingTable", name="step"),
    ),
    "seer.services.engine.vllm.sampling.slot_rows": (
        functools.partial(_plant_in_rows, cls="SlotRows", name="rows"),
    ),
    "seer.services.engine.vllm.kv_pool.block_copies": (_plant_in_copies,),
}


class _Finder:
    """Finds the modules in `_PLANTS`, and plants in them once they were imported."""

    def __init__(self, now: Now) -> None:
        self._now, self._finding = now, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _PLANTS or self._finding:
            return None
        self._finding = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                _plant(module, self._now)

            spec.loader.exec_module = executed
        return spec


def _plant(module: ModuleType, now: Now) -> None:
    for plant in _PLANTS[module.__name__]:
        plant(module, now)


def install(now: Now) -> None:
    """Plant what `now` returns, from now on, in modules that are there and in those to come."""
    for name in _PLANTS:
        if name in sys.modules:
            _plant(sys.modules[name], now)
    sys.meta_path.insert(0, _Finder(now))
