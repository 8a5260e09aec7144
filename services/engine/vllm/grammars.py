"""Structured outputs: vLLM's manager of grammars, which says in each step what tokens may come next.

vLLM makes the logits of what a grammar forbids -inf before our sampler sees them, and the sampler's noise
depends on key and position alone: so a mask changes no other token.

Invariants (tests/e2e/test_structured_outputs.py):
- a grammar's state follows from the response's tokens alone: at a chunk's beginning, it takes those before;
- nothing is compiled in the thread that steps: requests wait meanwhile, others go on;
- a constraint that cannot be compiled, or not in time, fails the requests that have it, by name.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import xgrammar
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import (
    XgrammarBackend,
    XgrammarGrammar,
    has_xgrammar_unsupported_json_features,
)
from vllm.v1.structured_output.request import get_structured_output_key
from vllm.v1.structured_output.utils import grammar_is_likely_lark

from seer.services.engine.vllm.requests import EXTRA, ExtraArgs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.request import Request

COMPILE_SECONDS = 20.0
"""Longest that a constraint may take to be compiled; those of usual schemas take milliseconds."""

THREADS = 16
"""How many grammars are made at once: their threads mostly wait, so that one that takes long holds up few."""

MOST_REMEMBERED = 64
"""Bound on the constraints that took too long, which are refused at once when they come again."""

_WHERE = re.compile(r"^\[[^\]]*\] \S+:\d+: ")  # the time and source that xgrammar's messages begin with


class Grammars(StructuredOutputManager):  # type: ignore[misc]
    """See the module's docstring. All grammars are xgrammar's."""

    backend: Any  # vLLM's: None until it is needed

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.executor = ThreadPoolExecutor(THREADS, "grammars")
        self._lock = threading.Lock()
        self._too_slow: OrderedDict[tuple[StructuredOutputOptions, str], None] = OrderedDict()

    def grammar_init(self, request: Request) -> None:
        """Begin to compile a request's grammar, if it has one."""
        if request.structured_output_request is not None:
            request.structured_output_request.grammar = self.executor.submit(self._create_grammar, request)

    def _create_grammar(self, request: Request) -> XgrammarGrammar:
        """Return a request's grammar after the response's tokens. Raises `ValueError`, saying why."""
        params = request.sampling_params
        grammar = self._new(params.structured_outputs, params.stop_token_ids)
        if not grammar.accept_tokens(request.request_id, self._so_far(request)):
            raise ValueError("the response so far does not match it")
        return grammar

    def _so_far(self, request: Request) -> list[int]:
        """Return the response's tokens of earlier chunks."""
        extra: ExtraArgs = request.sampling_params.extra_args[EXTRA]
        tokens: list[int] = request.prompt_token_ids[extra.counts_from :]
        return tokens

    def _new(self, params: StructuredOutputsParams, stop_ids: Sequence[int]) -> XgrammarGrammar:
        compiled = self._compiled(*get_structured_output_key(params))
        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stop_ids))
        vocab = self.vllm_config.model_config.get_vocab_size()
        return XgrammarGrammar(vocab_size=vocab, matcher=matcher, ctx=compiled)

    def allowed(
        self, params: StructuredOutputsParams, tokens: list[int], stop_ids: Sequence[int]
    ) -> npt.NDArray[np.bool_]:
        """Return which tokens may follow a response's `tokens`: bool [vocab]. For `seer verify`."""
        grammar = self._new(params, stop_ids)
        if not grammar.accept_tokens("", tokens):
            return np.zeros(grammar.vocab_size, bool)
        bitmask = xgrammar.allocate_token_bitmask(1, grammar.vocab_size)
        grammar.fill_bitmask(bitmask, 0)
        bits = np.unpackbits(bitmask.numpy().view(np.uint8), bitorder="little")
        return bits[: grammar.vocab_size].astype(bool)

    def _compiled(self, kind: StructuredOutputOptions, text: str) -> xgrammar.CompiledGrammar:
        """Compile on a thread of its own: one that takes too long cannot be ended, only left alone."""
        too_long = f"takes more than {COMPILE_SECONDS:g} s to compile: simplify it"
        if (kind, text) in self._too_slow:
            raise ValueError(too_long)
        found: Future[xgrammar.CompiledGrammar] = Future()

        def run() -> None:
            try:
                found.set_result(self._compile(kind, text))
            except Exception as error:  # noqa: BLE001 - whatever a text provokes in xgrammar
                found.set_exception(ValueError(_WHERE.sub("", str(error)).strip()))

        threading.Thread(target=run, daemon=True).start()
        try:
            return found.result(COMPILE_SECONDS)
        except TimeoutError:
            self._too_slow[kind, text] = None
            if len(self._too_slow) > MOST_REMEMBERED:
                self._too_slow.popitem(last=False)
            raise ValueError(too_long) from None

    def _compile(self, kind: StructuredOutputOptions, text: str) -> xgrammar.CompiledGrammar:
        with self._lock:
            if self.backend is None:  # it reads the whole vocabulary, which may take a second
                vocab = self.vllm_config.model_config.get_vocab_size()
                self.backend = XgrammarBackend(self.vllm_config, tokenizer=self.tokenizer, vocab_size=vocab)
        compiler = self.backend.compiler  # the compiler keeps compiled grammars
        compile_text: Callable[[str], xgrammar.CompiledGrammar] = compiler.compile_grammar
        if kind == StructuredOutputOptions.REGEX:
            compile_text = compiler.compile_regex
        elif kind == StructuredOutputOptions.JSON:
            schema = msgspec.json.decode(text)
            if isinstance(schema, dict) and has_xgrammar_unsupported_json_features(schema):
                raise ValueError(
                    "has a keyword that xgrammar would leave aside, such as multipleOf or uniqueItems"
                )
            compile_text = compiler.compile_json_schema
        elif grammar_is_likely_lark(text):
            compile_text = compiler.compile_lark
        return compile_text(text)
