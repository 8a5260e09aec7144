"""The files of `seer rollout`: what is read, what is refused and how, what is written."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from letters import Letters

from seer.client.results import Group, Response
from seer.common.errors import InvalidField
from seer.rollout.files import (
    ModelFacts,
    check_apart,
    check_fit,
    check_writable,
    encode_group,
    model_facts,
    read_prompts,
    tokenizer_of,
    write_report,
)
from seer.rollout.rollout_journal import Journal


def write(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_prompts_and_their_metadata(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '\ufeff{"id": "a", "prompt": "hi", "answer": [1, {"x": null}], "level": 2.5}',
        "",
        '{"prompt_token_ids": [7, 0], "id": "é"}',
        "  ",
    )
    first, second = read_prompts(path, Letters())
    assert (first.prompt.id, first.prompt.token_ids.tolist()) == ("a", [104, 105])
    assert first.prompt.metadata == {"answer": [1, {"x": None}], "level": 2.5}
    assert (second.prompt.id, second.prompt.token_ids.tolist()) == ("é", [7, 0])
    assert second.where == f"{path}:3"
    assert check_fit([first, second], 10, ModelFacts()) == 2


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"id": "x", "prompt": "a"', "2: line = "),
        ("[1]", "2: line = [1]: give an object"),
        ('{"prompt": "a"}', "2: id = None: give a non-empty string"),
        ('{"id": 3, "prompt": "a"}', "2: id = 3: give a non-empty string"),
        ('{"id": "a", "prompt": "b"}', "2: id = 'a': already used at "),
        ('{"id": "x"}', "2: prompt = 'neither': give either prompt or prompt_token_ids"),
        ('{"id": "x", "prompt": "a", "prompt_token_ids": [1]}', "2: prompt = 'both'"),
        ('{"id": "x", "prompt": ""}', "2: prompt = '': give a non-empty string"),
        ('{"id": "x", "prompt": ["a"]}', "2: prompt = ['a']: give a non-empty string"),
        ('{"id": "x", "prompt_token_ids": []}', "2: prompt_token_ids = []: give a flat, non-empty"),
        ('{"id": "x", "prompt_token_ids": "1 2"}', "2: prompt_token_ids = '1 2': give a list"),
        ('{"id": "x", "prompt_token_ids": [1, true]}', "2: prompt_token_ids = [1, True]: give a list"),
        ('{"id": "x", "prompt_token_ids": [1.0]}', "2: prompt_token_ids = [1.0]: give a list"),
        ('{"id": "x", "prompt_token_ids": [-4]}', "2: prompt_token_ids = -4: token ids must be in"),
        ('{"id": "' + "x" * 401 + '", "prompt": "a"}', "give at most 400 bytes"),
    ],
)
def test_refused_lines_name_file_line_and_field(tmp_path: Path, line: str, told: str) -> None:
    path = write(tmp_path, '{"id": "a", "prompt": "ok"}', line)
    with pytest.raises(InvalidField) as info:
        read_prompts(path, Letters())
    assert str(info.value).startswith(f"{path}:2: ")
    assert told in str(info.value)


def test_refused_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="No such file"):
        read_prompts(tmp_path / "none.jsonl", None)
    with pytest.raises(InvalidField, match="holds no prompts"):
        read_prompts(write(tmp_path, "", " "), None)
    with pytest.raises(InvalidField, match=r"needs --model DIR with a tokenizer\.json"):
        read_prompts(write(tmp_path, '{"id": "a", "prompt": "hi"}'), None)
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": "\xe9", "prompt_token_ids": [1]}')
    with pytest.raises(InvalidField, match=r"latin.jsonl:1: line = .* not valid JSON"):
        read_prompts(tmp_path / "latin.jsonl", None)


def test_prompts_that_the_model_cannot_take(tmp_path: Path) -> None:
    lines = read_prompts(
        write(
            tmp_path, '{"id": "a", "prompt_token_ids": [1]}', '{"id": "b", "prompt_token_ids": [1, 2, 3, 99]}'
        ),
        None,
    )
    assert check_fit(lines, 6, ModelFacts(context=10, vocab_size=100)) == 4
    with pytest.raises(InvalidField, match=r":2: prompt length = 4: with --max-tokens 7 it exceeds .* of 10"):
        check_fit(lines, 7, ModelFacts(context=10))
    with pytest.raises(InvalidField, match=r":2: prompt_token_ids = 99: must be below .* of 99"):
        check_fit(lines, 6, ModelFacts(vocab_size=99))


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({"max_position_embeddings": 4096, "vocab_size": 70}, ModelFacts(4096, 70)),
        ({"text_config": {"max_position_embeddings": 8, "vocab_size": 7}, "vocab_size": 1}, ModelFacts(8, 7)),
        ({"max_position_embeddings": 8, "rope_scaling": {"type": "yarn", "factor": 4}}, ModelFacts()),
        ({"max_position_embeddings": 8, "rope_parameters": {"rope_type": "yarn"}}, ModelFacts()),
        ({"max_position_embeddings": 8, "rope_parameters": {"rope_type": "default"}}, ModelFacts(8)),
        ({"max_position_embeddings": 8, "rope_scaling": None}, ModelFacts(8)),
        ({}, ModelFacts()),
    ],
)
def test_model_facts(tmp_path: Path, config: dict[str, object], facts: ModelFacts) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_facts(tmp_path) == facts
    assert tokenizer_of(tmp_path) is None


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_no_model_there(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidField, match=r"--model = .*give a Hugging Face model folder"):
        model_facts(tmp_path)


def a_group(prompt_id: str) -> Group:
    response = Response(
        index=0,
        token_ids=np.array([5, 6], np.int32),
        logprobs=np.array([-0.25, -1.5], np.float32),
        text="x",
        finish_reason="stop",
        stop_reason="6",
    )
    return Group(
        prompt_id=prompt_id,
        prompt_token_ids=np.array([1], np.int32),
        metadata={"answer": 42},
        weight_version=3,
        weights_digest="d",
        responses=(response,),
        chunks=1,
        migrations=0,
        preemptions=0,
    )


def test_output_lines(tmp_path: Path) -> None:
    line = encode_group(a_group("b"))
    assert line.endswith(b"}\n")
    assert json.loads(line) == {
        "id": "b",
        "prompt_token_ids": [1],
        "weight_version": 3,
        "metadata": {"answer": 42},
        "responses": [
            {"index": 0, "token_ids": [5, 6], "logprobs": [-0.25, -1.5], "text": "x", "finish_reason": "stop"}
        ],
    }


def test_a_report_is_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_report("--report", path, {"tokens": 2})
    with pytest.raises(TypeError):
        write_report("--report", path, {"tokens": object()})
    assert json.loads(path.read_text()) == {"tokens": 2}
    assert list(tmp_path.iterdir()) == [path]


def test_unwritable_output(tmp_path: Path) -> None:
    check_writable("--out", tmp_path / "new.jsonl")
    assert not list(tmp_path.iterdir())
    long = [tmp_path / ("x" * length) for length in (250, 300)]  # what is written first has a longer name
    for bad in (tmp_path, tmp_path / "none" / "out.jsonl", Path("/dev/null"), *long):
        with pytest.raises(InvalidField, match="--out = "):
            check_writable("--out", bad)


def test_no_file_is_written_over_another_option_s(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "loop").symlink_to("loop")
    check_apart({"PROMPTS": tmp_path / "loop", "--out": tmp_path / "a", "--report": None})
    with pytest.raises(InvalidField, match=r"--report = .*link': is what --out names: give another file"):
        check_apart({"--out": tmp_path / "a", "--report": tmp_path / "link"})


def test_a_journal_that_was_cut_off_is_begun_anew_and_another_file_is_left_alone(tmp_path: Path) -> None:
    out, path = tmp_path / "notes", tmp_path / "notes.journal"
    with contextlib.closing(Journal.open(out, {"model": "m"}, resume=False)):
        head = path.read_bytes()
    for cut in range(len(head)):
        path.write_bytes(head[:cut])
        with contextlib.closing(Journal.open(out, {"model": "m"}, resume=False)):
            assert path.read_bytes() == head
    path.write_text("what I did today")
    for resume in (False, True):
        with pytest.raises(InvalidField, match="journal"):
            Journal.open(out, {"model": "m"}, resume=resume)
    assert path.read_text() == "what I did today"
