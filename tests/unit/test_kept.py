"""Kept chunks, file by file: what is read again is what was written, or nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.common.errors import ConfigError
from seer.services.buffer.events import Weights
from seer.services.buffer.log import kept as kept_module
from seer.services.buffer.log.kept import KeptChunks

WEIGHTS = Weights(3, "d3")
PROMPT = np.arange(7, dtype=np.int32)
ASKED = 77


def chunk(seed, count):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 99, count).astype(np.int32), -rng.random(count).astype(np.float32)


def keep(kept, group, index, arrays, finish=("", "")):
    kept.keep(f"r/{group}", index, *arrays, finish, lambda: (ASKED, PROMPT), WEIGHTS)


def begun(path, *groups, ttl=100.0):
    kept = KeptChunks(str(path), ttl, 0.0)
    for group in groups:
        kept.open("r", group)
    return kept


def written(path):
    """Two chunks of response 0, which goes on, and one of response 2, which ended; and another group."""
    kept = begun(path, "p", "q")
    for index, seed, finish in ((0, 1, ""), (2, 2, "stop"), (0, 3, "")):
        keep(kept, "p", index, chunk(seed, 5 + seed), (finish, "END" if finish else ""))
    keep(kept, "q", 0, chunk(4, 3))
    kept.close()
    (file,) = path.iterdir()
    return file


def test_what_was_kept_is_offered_and_restored(tmp_path):
    written(tmp_path)
    kept = begun(tmp_path, "p")
    offered = kept.offer("r", "p", ASKED, PROMPT)
    assert (offered.version, offered.digest) == (3, "d3")
    assert [(each.index, each.count, each.finish, each.stop_reason) for each in offered.responses] == [
        (0, 6 + 8, "", ""),
        (2, 7, "stop", "END"),
    ]
    restored = kept.restore("r/p")
    for index, seeds in ((0, (1, 3)), (2, (2,))):
        for got, parts in zip(
            restored[index], zip(*(chunk(seed, 5 + seed) for seed in seeds), strict=True), strict=True
        ):
            assert np.array_equal(got, np.concatenate(parts))
            assert got.dtype == parts[0].dtype


def test_it_goes_on_in_the_same_file_life_after_life(tmp_path):
    written(tmp_path)
    for life in range(3):
        kept = begun(tmp_path, "p")
        assert kept.offer("r", "p", ASKED, PROMPT).responses[0].count == 14 + 4 * life
        kept.restore("r/p")
        keep(kept, "p", 0, chunk(9, 4))
        kept.close()


def test_another_question_or_prompt_is_offered_nothing(tmp_path):
    written(tmp_path)
    kept = begun(tmp_path, "p")
    assert kept.offer("r", "p", ASKED + 1, PROMPT) is None
    assert kept.offer("r", "p", ASKED, PROMPT + 1) is None
    assert kept.offer("s", "p", ASKED, PROMPT) is None
    assert kept.offer("r", "x", ASKED, PROMPT) is None


def test_a_group_that_begins_anew_has_nothing_of_before(tmp_path):
    written(tmp_path)
    kept = begun(tmp_path, "p")
    keep(kept, "p", 1, chunk(5, 2))  # as where other weights are live: nothing was restored
    kept.close()
    offered = begun(tmp_path).offer("r", "p", ASKED, PROMPT)
    assert [(each.index, each.count) for each in offered.responses] == [(1, 2)]


def test_a_forgotten_group_is_offered_no_more_and_the_last_takes_the_file_along(tmp_path):
    file = written(tmp_path)
    kept = begun(tmp_path, "p", "q")
    for group in "pq":
        kept.offer("r", group, ASKED, PROMPT)
        kept.restore(f"r/{group}")
    kept.forget("r/p")
    kept.close()
    later = begun(tmp_path, "q")
    assert later.offer("r", "p", ASKED, PROMPT) is None
    later.offer("r", "q", ASKED, PROMPT)
    later.restore("r/q")
    later.forget("r/q")
    assert not file.exists()


def test_what_nobody_asks_for_goes_after_a_while(tmp_path):
    file = written(tmp_path)
    kept = begun(tmp_path)
    kept.tick(99.0)
    assert file.exists()
    kept.tick(100.0)
    assert not file.exists()
    assert kept.offer("r", "p", ASKED, PROMPT) is None


def test_a_full_disk_ends_the_keeping_of_a_rollout_alone(tmp_path, monkeypatch):
    kept = begun(tmp_path, "p")
    keep(kept, "p", 0, chunk(1, 6))
    kept.flush()

    class Full:
        def write(self, data):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    kept._files["r"][-1].out = Full()
    keep(kept, "p", 0, chunk(3, 8))
    kept.flush()
    keep(kept, "p", 0, chunk(3, 8))
    kept.open("r2", "p")
    kept.keep("r2/p", 0, *chunk(1, 6), ("", ""), lambda: (ASKED, PROMPT), WEIGHTS)
    kept.close()
    assert len(list(tmp_path.iterdir())) == 2
    later = begun(tmp_path, "p")
    assert later.offer("r", "p", ASKED, PROMPT).responses[0].count == 6  # what was written stays good
    later.restore("r/p")
    later.forget("r/p")
    assert len(list(tmp_path.iterdir())) == 1


def test_prompts_of_an_endless_rollout_are_kept_again_after_the_disk_was_full(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    kept = begun(tmp_path, "p")
    with monkeypatch.context() as disk:
        disk.setattr(kept_module, "open_private", full)
        keep(kept, "p", 0, chunk(1, 6))
        kept.flush()
    kept.open("r", "q")  # "p" goes on
    keep(kept, "q", 0, chunk(3, 8))
    kept.close()
    later = begun(tmp_path)
    assert later.offer("r", "p", ASKED, PROMPT) is None
    assert later.offer("r", "q", ASKED, PROMPT).responses[0].count == 8


def test_what_was_offered_is_given_whatever_becomes_of_the_file(tmp_path):
    file = written(tmp_path)
    kept = begun(tmp_path)
    assert kept.offer("r", "p", ASKED, PROMPT) is not None
    kept.open("r", "p")
    file.unlink()
    kept.tick(1000.0)
    assert len(kept.restore("r/p")[0][0]) == 14


def test_what_was_offered_and_refused_is_dropped(tmp_path):
    written(tmp_path)
    kept = begun(tmp_path)
    assert kept.offer("r", "p", ASKED, PROMPT) is not None
    kept.tick(1.0)
    assert not kept._files["r"][-1].offered
    assert kept.offer("r", "p", ASKED, PROMPT) is not None  # it may be asked for again


def test_a_file_that_is_gone_offers_nothing(tmp_path):
    file = written(tmp_path)
    kept = begun(tmp_path, "p")
    file.write_bytes(b"")
    assert kept.offer("r", "p", ASKED, PROMPT) is None
    file.unlink()
    assert kept.offer("r", "p", ASKED, PROMPT) is None


def test_without_a_folder_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = KeptChunks("", 1.0, 0.0)
    kept.open("r", "p")
    keep(kept, "p", 0, chunk(1, 6))
    kept.forget("r/p")
    kept.close()
    assert list(tmp_path.iterdir()) == []


@given(st.data())
def test_damage_anywhere_leaves_a_beginning_of_what_was_kept(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("kept")
    file = written(path)
    text = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(text) - 1))
    if data.draw(st.booleans()):
        text = text[:at]
    else:
        text[at] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(text)
    kept = begun(path, "p")
    offered = kept.offer("r", "p", ASKED, PROMPT)
    if offered is None or not offered.responses:
        return
    restored = kept.restore("r/p")
    whole = {0: (chunk(1, 6), chunk(3, 8)), 2: (chunk(2, 7),)}
    for each in offered.responses:
        tokens, logprobs = restored[each.index]
        assert len(tokens) == len(logprobs) == each.count
        expected = [np.concatenate(parts) for parts in zip(*whole[each.index], strict=True)]
        assert np.array_equal(tokens, expected[0][: each.count])
        assert np.array_equal(logprobs, expected[1][: each.count])
    keep(kept, "p", 0, chunk(9, 4))
    kept.close()
    again = begun(path).offer("r", "p", ASKED, PROMPT)  # what follows the damage is read, too
    assert again.responses[0].count == next(e.count for e in offered.responses if e.index == 0) + 4


def test_a_folder_is_one_buffers_at_a_time(tmp_path):
    file = written(tmp_path)
    first = begun(tmp_path, "p")
    with pytest.raises(ConfigError, match="another buffer keeps its chunks in"):
        begun(tmp_path)
    first.close()
    assert file.exists()
    begun(tmp_path).close()


def test_only_its_user_can_read_what_is_kept(tmp_path):
    folder = tmp_path / "chunks"
    folder.mkdir(0o755)
    file = written(folder)
    file.chmod(0o644)  # as an earlier release left it
    kept = begun(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    kept.close()
    made = written(tmp_path / "new")
    assert made.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"buffer\.log: no chunks can be kept there"):
        begun(tmp_path / "file" / "chunks")


def test_what_a_group_is_of_is_asked_once_and_not_at_all_without_a_folder(tmp_path):
    asked = []

    def identity():
        asked.append("p")
        return ASKED, PROMPT

    for folder, times in (("", 0), (tmp_path, 1)):
        kept = begun(folder, "p") if folder else KeptChunks("", 1.0, 0.0)
        kept.open("r", "p")
        for _ in range(3):
            kept.keep("r/p", 0, *chunk(1, 6), ("", ""), identity, WEIGHTS)
        kept.close()
        assert len(asked) == times


def test_a_rollout_that_takes_prompts_for_ever_keeps_what_goes_on_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_module, "FILE_BYTES", 4_000)
    kept = begun(tmp_path, "oldest")
    keep(kept, "oldest", 0, chunk(0, 10))
    largest = 0
    for number in range(200):
        kept.open("r", f"p{number}")
        keep(kept, f"p{number}", 0, chunk(number, 50), ("stop", ""))
        kept.flush()
        if number:
            kept.forget(f"r/p{number - 1}")
        kept.flush()
        largest = max(largest, sum(file.stat().st_size for file in tmp_path.iterdir()))
    assert largest < 4 * 4_000 < 200 * 50 * 8
    kept.close()
    again = begun(tmp_path, "oldest", "p199")
    assert again.offer("r", "p3", ASKED, PROMPT) is None
    for prompt, arrays in (("oldest", chunk(0, 10)), ("p199", chunk(199, 50))):
        assert again.offer("r", prompt, ASKED, PROMPT) is not None
        (restored,) = again.restore(f"r/{prompt}").values()
        assert np.array_equal(restored[0], arrays[0])
    keep(again, "oldest", 0, chunk(7, 4))
    for prompt in ("oldest", "p199"):
        again.forget(f"r/{prompt}")
    assert not list(tmp_path.iterdir())


def test_a_group_that_begins_anew_in_another_file_leaves_none_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_module, "FILE_BYTES", 1)
    written(tmp_path)
    kept = begun(tmp_path, "p", "q")
    for group in ("p", "q"):
        keep(kept, group, 0, chunk(5, 6))
    kept.flush()
    assert len(list(tmp_path.iterdir())) == 1
    assert kept.offer("r", "p", ASKED, PROMPT) is None
    kept.close()
    assert begun(tmp_path).offer("r", "p", ASKED, PROMPT).responses[0].count == 6
