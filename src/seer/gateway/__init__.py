"""`seer gateway`: HTTP in vLLM's schemas for trainers and agents, on one side of a `RolloutClient`."""
