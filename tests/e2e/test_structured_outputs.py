"""Structured outputs on the real engine: what is asked for is what comes, and only bad constraints fail.

That tokens are those of one go however requests are cut, preempted, drafted for or scheduled ahead, the tests
that run all of `ways.WAYS` assert: some of their requests have a grammar.
"""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from draft_plans import script
from engine_cases import chunk, clear, engine_of, in_chunks, one_go, run
from shared_engines import MODEL

from seer.common.config import DraftsConfig
from seer.common.structured_outputs import StructuredOutputs
from seer.common.types import SamplingParams
from seer.services.engine.vllm.backend import VllmBackend

PIECES = {
    token: piece
    for piece, token in json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"].items()
}
PROMPT = [1, *(4 + 5 * i % 56 for i in range(20))]
SUM = "([0-9]{1,2}[-+*]){3,9}[0-9]{1,2}=ans"


def sampling(max_tokens: int = 60, **constraint: object) -> SamplingParams:
    structure = StructuredOutputs(**constraint)
    return SamplingParams(max_tokens=max_tokens, temperature=1.5, structured_outputs=structure)


def text(tokens: list[int]) -> str:
    return "".join(PIECES[token] for token in tokens if PIECES[token] != "<eos>")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmBackend]:
    drafts = DraftsConfig(max_draft=5, cache=str(tmp_path_factory.mktemp("profiles")))
    with engine_of(Path(MODEL), drafts) as backend:
        yield backend


@pytest.fixture(autouse=True)
def cleared(engine: VllmBackend) -> None:
    clear(engine)


@pytest.mark.parametrize(
    ("constraint", "wanted"),
    [
        ({"regex": SUM}, SUM),
        ({"choice": ("ans:12", "none!", "none")}, "ans:12|none!|none"),
        ({"grammar": 'root ::= "ans" pair pair? "!"\npair ::= [1-9] ","'}, "ans([1-9],){1,2}!"),
        ({"json": '{"type": "integer", "minimum": 100, "maximum": 4000}'}, "[1-9][0-9]{2,3}"),
    ],
)  # fmt: skip
def test_the_text_is_what_its_constraint_says_and_ends_there(
    engine: VllmBackend, constraint: dict[str, object], wanted: str
) -> None:
    chunks = [chunk(f"r{key}", sampling(**constraint), key=key, prompt=PROMPT) for key in range(6)]
    for response in run(engine, chunks).values():
        assert re.fullmatch(wanted, text(response.tokens))
        assert response.finish == ("stop", "2")
        assert all(value <= 0 for value in response.logprobs)


def test_tokens_that_are_forbidden_have_no_probability(engine: VllmBackend) -> None:
    """Where one token may come, its logprob is 0: under the distribution that was sampled, as in vLLM."""
    response = one_go(engine, sampling(choice=("ans=!x",)), prompt=PROMPT)
    assert text(response.tokens) == "ans=!x"
    assert response.logprobs == pytest.approx([0.0] * 5, abs=1e-6)


@pytest.mark.parametrize("kind", ["random", "right", "truncated"])
def test_no_draft_changes_a_token(engine: VllmBackend, kind: str) -> None:
    whole = [one_go(engine, sampling(regex=SUM), key=key, prompt=PROMPT) for key in range(4)]
    known = {key: response.tokens for key, response in enumerate(whole)}
    script(engine, kind, known)
    before = engine.stats().drafted_tokens
    chunks = [chunk(f"r{key}", sampling(regex=SUM), key=key, index=key, prompt=PROMPT) for key in range(4)]
    found = run(engine, chunks)
    assert [found[f"r{key}"].tokens for key in range(4)] == [response.tokens for response in whole]
    assert kind == "random" or engine.stats().drafted_tokens > before


def test_max_tokens_cut_a_constraint_wherever_it_is(engine: VllmBackend) -> None:
    whole = one_go(engine, sampling(regex=SUM), prompt=PROMPT)
    short = one_go(engine, sampling(5, regex=SUM), prompt=PROMPT)
    assert short.tokens == whole.tokens[:5]
    assert short.finish == ("length", "")


def test_chunks_go_on_where_the_last_one_ended(engine: VllmBackend) -> None:
    whole = one_go(engine, sampling(regex=SUM), prompt=PROMPT)
    for response in in_chunks(engine, [[1], [3], [7]], sampling(regex=SUM), PROMPT):
        assert response.tokens == whole.tokens
        assert response.finish == whole.finish
        assert response.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("constraint", "problem"),
    [
        ({"regex": "(1"}, r"sampling.structured_outputs.regex = '\(1': .*parenthesis"),
        ({"regex": "(?=1)1"}, "sampling.structured_outputs.regex = .*Lookahead"),
        ({"grammar": 'root ::= "1" rest'}, "sampling.structured_outputs.grammar = .*not defined"),
        ({"json": "false"}, "sampling.structured_outputs.json = .*cannot accept any value"),
        ({"json": '{"type": "integer", "multipleOf": 3}'}, "sampling.structured_outputs.json = .*multipleOf"),
        ({"grammar": "root ::= root"}, "outputs.grammar = .*no token can be sampled at position 21: .*spell"),
        ({"regex": "1abc"}, "outputs.regex = .*no token can be sampled at position 22: .*spell"),
    ],
)  # fmt: skip
def test_a_constraint_that_cannot_be_met_fails_alone(
    engine: VllmBackend, constraint: dict[str, object], problem: str
) -> None:
    """Letters that the model's vocabulary lacks leave no token once nothing else may come."""
    alone = one_go(engine, sampling(regex=SUM), prompt=PROMPT)
    bad = sampling(**constraint)
    found = run(engine, [
        chunk("good", sampling(regex=SUM), prompt=PROMPT),
        chunk("bad", bad, key=5, prompt=PROMPT), chunk("worse", bad, key=6, prompt=PROMPT),
    ])  # fmt: skip
    assert found["good"].tokens == alone.tokens
    for name in ("bad", "worse"):
        assert re.search(problem, found[name].failures[0], re.DOTALL)
    assert engine.stats().free_blocks == engine.capacity.kv_blocks


def test_nobody_waits_for_what_takes_long_to_compile(
    engine: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither other requests, nor, beyond a deadline, those that have it: not even one when it comes again."""
    from seer.services.engine.vllm import grammars

    go_on, begun, ended, ours = threading.Event(), [], [], grammars.Grammars._compile

    def compile_(self: grammars.Grammars, kind: object, given: str) -> object:
        if given != SUM:
            begun.append(given)
            go_on.wait(60)
        return ours(self, kind, given)

    monkeypatch.setattr(grammars.Grammars, "_compile", compile_)
    engine.add(chunk("slow", sampling(regex="1{1,3}"), prompt=PROMPT))
    engine.add(chunk("other", sampling(regex=SUM), prompt=PROMPT))
    while engine.has_work():
        output = engine.step()
        ended += [end.request_id for end in output.ended] + [str(each.error) for each in output.failed]
        if ended:
            go_on.set()
    assert ended == ["other", "slow"]
    go_on.clear()
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 0.1)
    endless = chunk("endless", sampling(regex="1{1,4}"), prompt=PROMPT)
    for _ in range(2):
        (problem,) = run(engine, [endless])["endless"].failures
        assert problem.startswith("sampling.structured_outputs.regex = '1{1,4}': takes more than 0.1 s")
    assert begun == ["1{1,3}", "1{1,4}"]
    go_on.set()
