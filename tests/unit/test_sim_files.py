"""Workloads and traces from files: what they become, and what is said of those that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from seer.common.errors import ConfigError, InvalidField
from seer.sim.files import load_workload, read_trace
from seer.sim.workload import WORKLOADS

WHOLE = """
instances = 2
groups = 3
group_size = 4
cap = 100
mean = 20
[model]
step = 0.01
request = 0.0001
kv = 0
attend = 0
row = 0
weights = 0
prefill = 0
pull = 0
kv_tokens = 2000
"""


def write(folder: Path, text: str, name: str = "my.toml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_name_is_the_papers_workload() -> None:
    assert load_workload("kimi-k2") == WORKLOADS["kimi-k2"]()


def test_a_file_describes_a_workload_whole(tmp_path: Path) -> None:
    load = load_workload(write(tmp_path, WHOLE))
    assert (load.name, load.instances, load.mean, load.model.kv_tokens) == ("my.toml", 2, 20.0, 2000)
    assert [len(group) for group in load.draw(0)] == [4, 4, 4]


def test_what_a_file_leaves_out_is_as_in_the_workload_it_is_like(tmp_path: Path) -> None:
    load = load_workload(write(tmp_path, 'like = "moonlight"\ninstances = 5\n[model]\nkv_tokens = 100_000\n'))
    known = WORKLOADS["moonlight"]()
    assert (load.name, load.instances, load.model.kv_tokens) == ("my.toml", 5, 100_000)
    assert (load.mean, load.model.step) == (known.mean, known.model.step)


def test_a_file_with_a_trace_needs_no_distribution(tmp_path: Path) -> None:
    write(tmp_path, '{"id": "a", "length": 9}\n', "trace.jsonl")
    text = WHOLE.replace("mean = 20", 'trace = "trace.jsonl"').replace("groups = 3", "")
    assert load_workload(write(tmp_path, text.replace("group_size = 4", ""))).draw(0) == [[9]]


def test_all_kinds_of_lines_are_lengths_by_prompt(tmp_path: Path) -> None:
    trace = write(
        tmp_path,
        '{"id": "b", "length": 7}\n'
        '{"id": "a", "token_ids": [1, 2, 3], "index": 4, "logprobs": [0, 0, 0]}\n\n'
        '{"id": "b", "length": 5, "index": 9}\n'
        '{"id": "c", "prompt_token_ids": [1], "metadata": {}, "responses": '
        '[{"index": 0, "token_ids": [1], "text": "x"}, {"index": 1, "token_ids": [1, 2]}]}\n',
        "trace.jsonl",
    )
    assert read_trace(Path(trace)) == ((7, 5), (3,), (1, 2))
    load = load_workload(trace, "moonlight")
    assert (load.groups, load.group_size, load.draw(3)) == (3, 2, [[7, 5], [3], [1, 2]])
    assert load.instances == WORKLOADS["moonlight"]().instances
    file = write(tmp_path, 'like = "moonlight"\ntrace = "trace.jsonl"\n')
    assert load_workload(file).draw(0) == load.draw(0)
    assert load_workload(trace, file).draw(0) == load.draw(0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "missing required field"),
        ("instances = [", "not valid TOML"),
        (WHOLE.replace("mean", "maen"), r"unknown key maen; did you mean mean\?"),
        (
            WHOLE.replace("kv = 0", "kv_token = 0"),
            r"unknown key model.kv_token; did you mean model.kv_tokens\?",
        ),
        (WHOLE.replace("[model]", "[[model]]"), r"model = \[.*: give a table"),
        (WHOLE.replace("instances = 2", 'instances = "2"'), r"Expected `int`, got `str` - at `\$.instances`"),
        (WHOLE.replace("mean = 20", "mean = 200"), r"workload.mean = 200.0: must be in \[1, cap = 100\)"),
        (WHOLE.replace("kv_tokens = 2000", "kv_tokens = 200"), "model.kv_tokens = 200: cannot hold one"),
        ('like = "sunlight"', "like = 'sunlight': choose from moonlight, "),
        ("like = 3", "like = 3: give a string"),
        ("xyz = 1", "unknown key xyz; valid: instances, groups, "),
        ('name = "moonlight"', "unknown key name; "),
        ('like = "moonlight"\ntrace = "none.jsonl"', "none.jsonl: No such file"),
    ],
)
def test_a_description_that_cannot_be_used_is_named(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_workload(write(tmp_path, text))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("nonsense", "trace.jsonl:2: JSON is malformed"),
        ("[]", "trace.jsonl:2: Expected `object`"),
        ('{"length": 3}', "trace.jsonl:2: id = '': give the prompt's id"),
        ('{"id": "a"}', "trace.jsonl:2: length = 'neither': give length, token_ids or responses"),
        ('{"id": "a", "length": 1, "token_ids": [1]}', "trace.jsonl:2: length = 'both'"),
        ('{"id": "a", "length": 0}', "trace.jsonl:2: length = 0: must be 1 or more"),
        ('{"id": "a", "token_ids": []}', "trace.jsonl:2: length = 0: must be 1 or more"),
        ('{"id": "a", "length": 2.5}', "trace.jsonl:2: Expected `int"),
        ('{"id": "a", "length": 2, "index": 0}', "trace.jsonl:2: index = 0: prompt a has had it before"),
        ('{"id": "a", "responses": [{"index": 3}]}', "trace.jsonl:2: length = 'neither'"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: str, told: str) -> None:
    trace = write(tmp_path, f'{{"id": "a", "length": 1}}\n{line}\n', "trace.jsonl")
    with pytest.raises((ConfigError, InvalidField), match=told):
        read_trace(Path(trace))


@pytest.mark.parametrize("text", ["", '{"id": "a", "responses": []}\n'])
def test_a_trace_without_responses_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidField, match="holds no responses"):
        read_trace(Path(write(tmp_path, text, "trace.jsonl")))


def test_a_trace_needs_a_cluster_that_lets_it_end(tmp_path: Path) -> None:
    trace = write(tmp_path, '{"id": "a", "length": 101}\n', "trace.jsonl")
    with pytest.raises(InvalidField, match="a trace needs --cluster WORKLOAD: moonlight, "):
        load_workload(trace)
    with pytest.raises(InvalidField, match=r"workload.cap = 100: trace.jsonl has a response of 101 tokens"):
        load_workload(trace, write(tmp_path, WHOLE))


def test_nothing_else_is_a_workload(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidField, match=r"--workload = 'sunlight': choose from moonlight, .* or give a file"
    ):
        load_workload("sunlight")
    with pytest.raises(InvalidField, match="--cluster = 'moonlight': is for traces"):
        load_workload("kimi-k2", "moonlight")
    with pytest.raises(ConfigError, match=r"none\.toml: No such file or directory; give a readable file"):
        load_workload(str(tmp_path / "none.toml"))
