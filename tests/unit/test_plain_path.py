"""Which of vLLM's paths a step takes, on a made-up runner."""

from types import SimpleNamespace

import pytest

from seer.services.engine.vllm.drafts.plain_path import PlainPath

CONFIG = object()


class Runner:
    """Notes whether it speculates while it executes; `ended` are requests of which the proposer was told."""

    def __init__(self, *, drafts: bool | None) -> None:
        self.speculative_config, self.paths, self.ended = CONFIG, [], []
        self.proposer = None
        if drafts is not None:
            self.proposer = SimpleNamespace(drafts=drafts, learn_ended=self.ended.append)
        PlainPath(self, self.proposer)

    def execute_model(self, scheduled: SimpleNamespace, more: int = 0, *, other: int = 0) -> int:
        assert self.speculative_config in (None, CONFIG)
        self.paths.append(self.speculative_config is CONFIG)
        return more + other

    def step(self, *drafted: str) -> bool:
        scheduled = SimpleNamespace(
            scheduled_spec_decode_tokens={name: [1] for name in drafted}, finished_req_ids={"e"}
        )
        assert self.execute_model(scheduled, 3, other=4) == 7
        return self.paths[-1]


@pytest.mark.parametrize("drafts", [True, False, None])
def test_a_step_that_verifies_drafts_is_speculative_on_every_rank(drafts):
    assert Runner(drafts=drafts).step("a")


@pytest.mark.parametrize(("drafts", "speculative"), [(True, True), (False, False), (None, False)])
def test_another_step_is_only_where_drafts_are_made(drafts, speculative):
    assert Runner(drafts=drafts).step() is speculative


def test_the_switch_counts_from_the_next_step_on():
    runner = Runner(drafts=True)
    taken = []
    for on in (True, False, False, True):
        runner.proposer.drafts = on
        taken.append(runner.step())
    assert taken == [True, False, False, True]
    assert runner.ended == [{"e"}, {"e"}]
