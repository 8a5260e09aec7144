"""Whose rollout an id means: a trainer's own, always the same one, and never another's."""

import numpy as np
import pytest

from seer.common import wire
from seer.common.errors import InvalidField
from seer.common.types import SamplingParams
from seer.services.buffer import rollout_ids
from seer.services.buffer.requests.state import RolloutState
from seer.services.buffer.rollout_ids import RolloutIds, given


def submit(rollout_id):
    nothing = np.zeros(0, np.int32)
    return wire.Submit(rollout_id, 0, 0, 1, SamplingParams(), [], [], nothing)


def of(trainer, rollout_id="r"):
    return {rollout_id: RolloutState(rollout_id, trainer, b"", 0, 0, 0.0)}


def test_who_comes_second_has_a_rollout_of_its_own_for_as_long_as_the_buffer_runs():
    rollouts = {}
    ids = RolloutIds(rollouts, {})
    assert ids.here("one", submit("r")).rollout_id == "r"
    rollouts |= of("one")
    assert ids.here("one", submit("r")).rollout_id == "r"
    assert ids.here("two/3", wire.Cancel(rollout_id="r")).rollout_id == "r", "it has none yet"
    assert ids.here("two/3", submit("r")).rollout_id == "r¦two_3"
    rollouts.clear()
    assert ids.here("two/3", submit("r")).rollout_id == "r¦two_3", "also when the first has ended"
    assert ids.here("two/3", wire.Cancel(rollout_id="r")).rollout_id == "r¦two_3"
    assert ids.here("one", submit("r")).rollout_id == "r"


def test_an_id_stays_anothers_while_a_trajectory_of_it_is_away():
    class Away:
        key = ("one", "r/g", 0)

    ids = RolloutIds({}, {"r/p": Away()})
    assert ids.here("two", submit("r")).rollout_id == "r¦two"
    assert ids.here("one", submit("r")).rollout_id == "r"
    assert ids.here("two", submit("rx")).rollout_id == "rx"


def test_an_id_that_looks_like_one_inside_is_refused_and_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(rollout_ids, "MAX_KNOWN", 3)
    rollouts = {}
    ids = RolloutIds(rollouts, {})
    with pytest.raises(InvalidField, match="give one without '¦'"):
        ids.here("two", submit("r¦one"))
    for number in range(10):
        rollouts |= of("one", f"r{number}")
        assert "¦" in ids.here("two", submit(f"r{number}")).rollout_id
    assert len(ids._apart) == 3


def test_no_id_inside_is_too_long_for_the_log_to_be_read_again():
    longest = "r" * (wire.MAX_ID - rollout_ids.MAX_NAME - 1)
    ids = RolloutIds(of("one", longest) | of("one", f"{longest}r"), {})
    assert len(ids.here("n" * 100, submit(longest)).rollout_id) == wire.MAX_ID
    with pytest.raises(InvalidField, match="give at most 447 characters"):
        ids.here("n" * 100, submit(f"{longest}r"))
    assert len(ids.here("n" * 100, wire.Cancel(rollout_id=f"{longest}r")).rollout_id) <= wire.MAX_ID


def test_a_trainer_hears_the_id_that_it_gave():
    nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
    part = wire.StreamedPart("r¦two", "p", 0, 0, 1)
    for message in (
        wire.Accepted(rollout_id="r¦two", prompt_ids=[]),
        wire.Refused(code="x", message="", rollout_id="r¦two"),
        wire.GroupDone("r¦two", "p", 0, [], [], [], *nothing),
        wire.Progress("r¦two", *[0] * 9),
    ):
        assert given(message).rollout_id == "r"
    streamed = given(wire.TokensGenerated([part], *nothing))
    assert [each.rollout_id for each in streamed.parts] == ["r"]
    same = wire.Slept(asleep=False)
    assert given(same) is same


def test_what_is_away_is_looked_at_once_for_each_use_of_an_id():
    class Looked(dict):
        times = 0

        def items(self):
            self.times += 1
            return super().items()

    away = Looked()
    ids = RolloutIds({}, away)
    for _ in range(5):
        assert ids.here("one", submit("r")).rollout_id == "r"
    assert away.times == 1
    assert ids.here("two", submit("r")).rollout_id == "r", "nobody has it now"
    assert ids.here("one", submit("r")).rollout_id == "r"
    assert away.times == 3
