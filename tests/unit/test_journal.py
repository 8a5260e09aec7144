"""What environments said, on disk: given again for the same context alone, whatever happened to the file."""

import shutil

import pytest

from seer.client import InvalidField, RolloutFailed
from seer.client.turns import Journal


def test_answers_are_there_again_under_the_same_run(tmp_path):
    path = tmp_path / "new" / "journal"
    with Journal(path, "asked") as journal:
        run = journal.run
        journal.write("a/0", "context", {"tokens": [1, 2], "score": 0.5})
        assert "a/0" in journal
        assert "a/1" not in journal
    with Journal(path, "asked") as journal:
        assert (journal.run, len(journal)) == (run, 1)
        assert journal.read("a/0", "context") == {"tokens": [1, 2], "score": 0.5}
        with pytest.raises(RolloutFailed, match=r"a/0 cannot be used again: the context is not what it was"):
            journal.read("a/0", "other")


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_line_that_was_cut_off_is_overwritten(tmp_path, cut):
    path = tmp_path / "journal"
    with Journal(path, "asked") as journal:
        journal.write("a/0", "context", 1)
        whole = path.read_bytes()
        journal.write("a/1", "context", "a long answer of many words")
    path.write_bytes(path.read_bytes()[:-cut])
    with Journal(path, "asked") as journal:
        assert path.read_bytes() == whole
        assert "a/1" not in journal
        journal.write("a/1", "context", 2)
    with Journal(path, "asked") as journal:
        assert (journal.read("a/0", "context"), journal.read("a/1", "context")) == (1, 2)


def test_files_that_are_something_else_are_refused_and_left_alone(tmp_path):
    path = tmp_path / "journal"
    with Journal(path, "asked"):
        pass
    with pytest.raises(InvalidField, match=r"journal = .*is of a run with asked, and this one has other"):
        Journal(path, "other")
    whole = path.read_bytes()
    for other in (b"a poem\nof two lines\n", b"weights \x00 of a model", whole + b"{}\nand more"):
        path.write_bytes(other)
        with pytest.raises(InvalidField, match=r"is no journal"):
            Journal(path, "asked")
        assert path.read_bytes() == other
    with pytest.raises(InvalidField, match=r"journal = .*cannot be written: Is a directory"):
        Journal(tmp_path, "asked")


def test_one_run_at_a_time_writes_a_file(tmp_path):
    path = tmp_path / "journal"
    with Journal(path, "asked") as journal:
        with pytest.raises(InvalidField, match=r"journal = .*another run writes it: end that first"):
            Journal(path, "asked")
        journal.write("a/0", "context", 1)
    with Journal(path, "asked") as journal:
        assert "a/0" in journal


def test_a_file_of_which_only_a_part_of_the_first_line_was_written_is_begun_anew(tmp_path):
    path = tmp_path / "journal"
    with Journal(path, "asked"):
        whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with Journal(path, "asked") as journal:
            journal.write("a/0", "context", 1)
        with Journal(path, "asked") as journal:
            assert journal.read("a/0", "context") == 1


def test_an_answer_is_in_the_file_before_it_is_known(tmp_path, monkeypatch):
    with Journal(tmp_path / "journal", "asked") as journal:

        def full(line):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(journal, "_write", full)
        with pytest.raises(OSError, match="No space"):
            journal.write("a/0", "context", 1)
        assert "a/0" not in journal
        monkeypatch.undo()
        journal.write("a/0", "context", (1, {2: "x"}))
        assert journal.read("a/0", "context") == [1, {"2": "x"}]
        shutil.copy(tmp_path / "journal", tmp_path / "now")
    with Journal(tmp_path / "now", "asked") as again:
        assert again.read("a/0", "context") == [1, {"2": "x"}]


def test_what_json_cannot_hold_is_refused_before_it_is_written(tmp_path):
    path = tmp_path / "journal"
    with Journal(path, "asked") as journal:
        before = path.read_bytes()
        with pytest.raises(InvalidField, match=r"once = 'object': a journal keeps what JSON can hold"):
            journal.write("a/0", "context", object())
        assert "a/0" not in journal
        assert path.read_bytes() == before
