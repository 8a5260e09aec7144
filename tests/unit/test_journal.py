"""The journal's invariants: whole lines, its own run only, OUT whole and in order or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from seer.client.groups import Group, Response
from seer.client.prompts import Prepared, token_array
from seer.common.errors import InvalidField
from seer.rollout import journal as journal_module
from seer.rollout.files import PromptLine, encode_group
from seer.rollout.journal import Journal, model_digest, prompts_digest

RUN = {"model": "m", "seed": "0"}


def group(prompt_id: str, weight_version: int = 0) -> Group:
    tokens, logprobs = token_array([5, 6], "x"), token_array([1, 2], "x").astype("float32")
    response = Response(0, tokens, logprobs, "é\n", "stop", "")
    return Group(prompt_id, tokens, {"k": [1]}, weight_version, "", (response,), 1, 0, 0)


def kept(out: Path, *prompt_ids: str) -> Path:
    journal = Journal.open(out, RUN, resume=False)
    for prompt_id in prompt_ids:
        journal.add(group(prompt_id))
    journal.close()
    return journal.path


def test_out_appears_whole_in_order_and_the_journal_goes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    journal = Journal.open(out, RUN, resume=False)
    for prompt_id in ("b", "c", "a"):
        journal.add(group(prompt_id))
        assert not out.exists()
    journal.publish(["a", "b", "c"])
    journal.close()
    assert out.read_bytes() == b"".join(encode_group(group(i)) for i in "abc")
    assert list(tmp_path.iterdir()) == [out]


def test_a_run_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    out = tmp_path / "out"
    path = kept(out, "a", "b")
    whole = path.read_bytes()
    last = len(encode_group(group("b")))
    for cut in range(len(whole) - last, len(whole)):
        path.write_bytes(whole[:cut])
        journal = Journal.open(out, RUN, resume=True)
        assert journal.done == {"a"}
        journal.add(group("b"))
        journal.close()
        assert path.read_bytes() == whole


@pytest.mark.parametrize("cut", [0, 1, 20])
def test_a_torn_head_held_nothing(tmp_path: Path, cut: int) -> None:
    path = kept(tmp_path / "out", "a")
    path.write_bytes(path.read_bytes()[:cut])
    journal = Journal.open(tmp_path / "out", RUN, resume=True)
    assert not journal.done
    journal.close()
    assert not path.exists()


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    path = kept(tmp_path / "out", "a")
    before = path.read_bytes()
    with pytest.raises(InvalidField, match="give --resume to continue it, or delete it"):
        Journal.open(tmp_path / "out", RUN, resume=False)
    with pytest.raises(InvalidField, match=r"another run \(seed 1, there 0\)"):
        Journal.open(tmp_path / "out", RUN | {"seed": "1"}, resume=True)
    assert path.read_bytes() == before


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "out", RUN, resume=False)
    with pytest.raises(InvalidField, match="another run is writing it"):
        Journal.open(tmp_path / "out", RUN, resume=True)
    journal.close()


@pytest.mark.parametrize("content", [b"{}\n", b"\xff\n", b'{"journal": 1}\n', b'[1]\n{"id": "a"}\n'])
def test_what_is_no_journal_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out.journal"
    path.write_bytes(content)
    with pytest.raises(InvalidField, match="not a journal"):
        Journal.open(tmp_path / "out", RUN, resume=True)
    assert path.read_bytes() == content


def test_a_damaged_line_is_said(tmp_path: Path) -> None:
    path = kept(tmp_path / "out", "a", "b")
    path.write_bytes(path.read_bytes().replace(b'"weight_version":0', b'"weight_version":x', 1))
    with pytest.raises(InvalidField, match="is damaged"):
        Journal.open(tmp_path / "out", RUN, resume=True)


def test_groups_of_other_weights_do_not_mix(tmp_path: Path) -> None:
    kept(tmp_path / "out", "a")
    journal = Journal.open(tmp_path / "out", RUN, resume=True)
    with pytest.raises(InvalidField, match="weight version of b = 1"):
        journal.add(group("b", weight_version=1))
    journal.close()


def test_a_full_disk_is_said_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    journal = Journal.open(out, RUN, resume=False)
    journal.add(group("a"))

    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(journal_module.os, "fsync", full)
    with pytest.raises(InvalidField, match=r"--out = .*No space left on device; all groups are in"):
        journal.publish(["a"])
    journal.close()
    assert list(tmp_path.iterdir()) == [journal.path]
    monkeypatch.undo()
    journal = Journal.open(out, RUN, resume=True)
    journal.publish(["a"])
    journal.close()
    assert out.read_bytes() == encode_group(group("a"))


def test_digests_follow_content(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"12")
    before = model_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("no part of the model")
    assert model_digest(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"13")
    assert model_digest(tmp_path) != before

    lines = [PromptLine("f:1", Prepared(i, token_array([1], "x"), {"k": i})) for i in "ab"]
    assert prompts_digest(lines) == prompts_digest(list(lines))
    changed = msgspec.structs.replace(lines[1], prompt=Prepared("b", token_array([2], "x"), {"k": "b"}))
    assert len({prompts_digest(x) for x in (lines, lines[::-1], lines[:1], [lines[0], changed])}) == 4
