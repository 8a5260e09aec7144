"""That the campaign finds broken promises: each is broken on purpose, and kept."""

import pytest

from chaos.reverts import REVERTS
from chaos.virtual import quiet, run_plan

BY_NAME = {revert.name: revert for revert in REVERTS}


SLOW = ("each-hello-admits",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.breadth] * (name in SLOW)) for name in BY_NAME]
)
def test_the_campaign_finds_a_promise_that_is_broken_again(name):
    revert = BY_NAME[name]
    with quiet():
        with revert.broken():
            assert run_plan(revert.plan).problems
        assert run_plan(revert.plan).problems == []
