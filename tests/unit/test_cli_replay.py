"""`seer replay`: what it prints, and its exit codes."""

import re

import pytest
from click.testing import CliRunner
from logged_buffer import LoggedBuffer

import seer
from seer.cli.main import main
from seer.services.buffer.log import log_folder, writer


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setattr(writer.Folder, "limit", 4000)
    for incarnation in (1, 2):
        buffer = LoggedBuffer(tmp_path / "log", incarnation)
        for number in range(incarnation):
            buffer.roll(number)
        buffer.log.close()
    return tmp_path / "log"


def replay(path):
    return CliRunner().invoke(main, ["replay", str(path)])


def test_a_folder_is_replayed_incarnation_by_incarnation(log):
    result = replay(log)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert len(lines) == 6
    assert re.fullmatch(
        rf"incarnation {1:016x}: 20..-..-.. ..:..:.. UTC, by version {seer.__version__}, policy seer",
        lines[0],
    )
    assert re.fullmatch(r"  1 rollouts, \d+ rows, \d+\.\d s, 2 engines", lines[1])
    assert lines[2] == lines[5] == "  the same answers"
    assert lines[4].startswith("  2 rollouts, ")


def test_a_segment_whose_header_was_cut_off_is_left_out(log):
    last = log_folder.segments(log)[-1]
    cut = last.with_name(f"{3:016x}-{last.name.partition('-')[2]}")
    cut.write_bytes(last.read_bytes()[:100])
    result = replay(log)
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) == 6


def test_one_segment_is_replayed_alone(log):
    path = log_folder.segments(log)[-1]
    result = replay(path)
    assert result.exit_code == 0, result.output
    assert "2 engines" in result.output
    assert "the same answers" in result.output


def test_the_first_row_that_is_answered_otherwise_is_shown(log):
    path = log_folder.segments(log)[0]
    text = path.read_bytes()
    changed = text.replace(b'["Dispatch","a"', b'["Dispatch","b"', 1)
    assert changed != text
    path.write_bytes(changed)
    result = replay(log)
    assert result.exit_code == 1
    number = next(n for n, line in enumerate(text.split(b"\n"), 1) if b'["Dispatch","a"' in line)
    assert f"  {path.name}: line {number}: GroupsSubmitted(" in result.output
    assert "is answered by Dispatch(instance='a'" in result.output
    assert "in the log by Dispatch(instance='b'" in result.output
    assert result.output.count("the same answers") == 1  # the other incarnation's
    assert "replay it with that" not in result.output


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (b'"policy":"seer"', b'"policy":"newest"', "policy = 'newest'"),
        (b'"_requested":', b'"_eager":[],"_requested":"yes","_x":', "cannot read the machines' state"),
        (b'["ChunkEnded",', b'["ChunkOver",', "line "),
        (b'["Dispatch","a"', b'["Dispatch","b"', "line "),
    ],
)
def test_what_needs_another_version_says_which(log, old, new, told):
    path = log_folder.segments(log)[0]
    text = path.read_bytes().replace(f'"version":"{seer.__version__}"'.encode(), b'"version":"9.9"')
    assert old in text
    path.write_bytes(text.replace(old, new))
    result = replay(path)
    assert result.exit_code == 1
    assert told in result.output
    assert f"version 9.9 wrote it, this is {seer.__version__}: replay it with that" in result.output


def test_a_log_of_before_protocol_3_is_refused_with_its_version(log):
    path = log_folder.segments(log)[0]
    path.write_bytes(
        path.read_bytes().replace(b'"format":2', b'"format":1').replace(seer.__version__.encode(), b"0.3.0")
    )
    result = replay(path)
    assert result.exit_code == 1
    told = " ".join(result.output.split())
    assert "has format 1 of version 0.3.0, this one reads 2: read it with the version that wrote it" in told


def test_a_folder_without_logs_is_bad_input(tmp_path):
    result = replay(tmp_path)
    assert result.exit_code == 2
    assert "LOG" in result.output
    assert "holds no log of a buffer" in result.output
    assert replay(tmp_path / "none").exit_code == 2
