"""Where prompts of a submission belong: what is malformed is refused by the field, before any machine sees it."""

import numpy as np
import pytest

from seer.common import ids, wire
from seer.common.errors import InvalidField
from seer.common.types import SamplingParams
from seer.services.buffer import submissions


def submit(**more):
    fields = {
        "rollout_id": "r", "rollout_number": 0, "seed": 0, "n": 4, "sampling": SamplingParams(max_tokens=8),
        "prompt_ids": ["a", "b"], "lengths": [1, 2], "tokens": np.array([1, 2, 3], np.int32),
    }  # fmt: skip
    return wire.Submit(**{**fields, **more})


def test_prompts_have_groups_of_their_own_unless_they_are_named():
    plain = submissions.prompts(submit())
    assert [(each.group, each.shared_id, each.first_index) for each in plain.values()] == [
        ("a", "", 0),
        ("b", "", 0),
    ]
    named = submissions.prompts(submit(groups=["", "g"], first_indices=[4, 8]))
    assert [(each.group, each.shared_id, each.first_index) for each in named.values()] == [
        ("a", "", 4),
        ("g", "r/g", 8),
    ]
    assert [each.tokens.tolist() for each in named.values()] == [[1], [2, 3]]
    (everywhere, _) = submissions.prompts(submit(groups=["/g", ""])).values()
    assert everywhere.shared_id == "/g"


def test_each_has_the_digest_of_its_own_parameters_and_place():
    asked = submit(groups=["", "g"], first_indices=[0, 2])
    usual, placed = (each.params_digest for each in submissions.prompts(asked).values())
    params = (asked.seed, asked.rollout_number, asked.n, asked.sampling)
    assert usual == ids.params_digest(*params)
    assert placed == ids.params_digest(*params, "g", 2) != usual


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("groups", {"groups": ["g"]}),
        ("first_indices", {"first_indices": [1, 2, 3]}),
        ("first_indices", {"first_indices": [0, wire.MAX_GROUP_SIZE - 3]}),
        ("groups", {"groups": ["", "g" * wire.MAX_ID]}),
    ],
)
def test_a_place_that_cannot_be_is_refused_by_its_field(field, given):
    with pytest.raises(InvalidField, match=f"^{field} = "):
        submissions.prompts(submit(**given))


def test_the_last_place_of_a_group_can_be_taken():
    given = [0, wire.MAX_GROUP_SIZE - 4]
    assert len(submissions.prompts(submit(first_indices=given, groups=["", "/" + "g" * 500]))) == 2
