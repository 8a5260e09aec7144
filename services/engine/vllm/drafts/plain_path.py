"""Steps that neither verify nor make drafts take vLLM's plain path, as in an engine without drafts.

Invariants (tests/unit/test_plain_path.py asserts them):
- a step that verifies drafts takes vLLM's speculative path on every rank, whatever the switch says;
- every other step takes the plain path, with no proposer and no rows to verify, on ranks that make no drafts,
  and on the rank that makes them while the switch is off;
- the switch may be turned between any two steps, and changes no token: both paths draw the same rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from seer.services.engine.vllm.drafts.proposer import GroupProposer


class PlainPath:
    """Wraps a model runner. `proposer`: the one of the rank that makes drafts, None on others.

    vLLM's runner asks in every step whether it has a `speculative_config`; all buffers are made before.
    """

    def __init__(self, runner: GPUModelRunner, proposer: GroupProposer | None) -> None:
        self._runner = runner
        self._proposer = proposer
        self._config = runner.speculative_config
        self._execute_model, runner.execute_model = runner.execute_model, self._execute

    def _execute(self, scheduled: SchedulerOutput, *args: object, **kwargs: object) -> object:
        proposer = self._proposer
        drafts = proposer is not None and proposer.drafts
        if proposer is not None and not drafts:
            proposer.learn_ended(scheduled.finished_req_ids)
        speculates = drafts or bool(scheduled.scheduled_spec_decode_tokens)
        self._runner.speculative_config = self._config if speculates else None
        return self._execute_model(scheduled, *args, **kwargs)
