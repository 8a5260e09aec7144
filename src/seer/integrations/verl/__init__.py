"""veRL 0.9: `actor_rollout_ref.rollout.name=seer` has veRL's V1 trainer sample with Seer.

`plugin` registers Seer whenever veRL is imported, `manager.SeerAgentLoopManager` submits groups whole.
`config` and `groups` are pure, `sessions` needs asyncio alone. Nothing here needs vllm.
docs/trainers/verl.md says how to use it.
"""
