"""slime: `--rollout-function-path seer.integrations.slime.generate_rollout`, and a hook for weights."""

from seer.integrations.slime.rollout import generate_rollout
from seer.integrations.slime.weights import update_weights

__all__ = ["generate_rollout", "update_weights"]
