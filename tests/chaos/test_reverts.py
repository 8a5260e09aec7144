"""That the campaign finds broken promises: each is broken on purpose, and kept."""

import pytest

from chaos.reverts import REVERTS
from chaos.virtual import quiet, run_plan

BY_NAME = {revert.name: revert for revert in REVERTS}


LONG = {"one-page"}


@pytest.mark.parametrize(
    "name", [name for name, revert in BY_NAME.items() if revert.plan is not None and name not in LONG]
)
def test_the_campaign_finds_a_promise_that_is_broken_again(name):
    revert = BY_NAME[name]
    with quiet():
        with revert.broken():
            assert run_plan(revert.plan).problems
        assert run_plan(revert.plan).problems == []
