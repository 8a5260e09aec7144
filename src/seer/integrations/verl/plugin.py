"""Registers Seer with veRL; veRL loads this module, an entry point of group `verl.plugins`, in every process.

Invariant: an error here never keeps veRL from starting. As veRL hides such errors, a warning names the error.
"""

from __future__ import annotations

import logging

PACKAGE = "seer.integrations.verl"
SUPPORTED = "0.9"


def register() -> None:
    """Make `actor_rollout_ref.rollout.name=seer` known to veRL."""
    from verl.workers.rollout import base, replica

    def load() -> type:
        from seer.integrations.verl.server import SeerReplica

        return SeerReplica

    replica.RolloutReplicaRegistry.register("seer", load)
    base._ROLLOUT_REGISTRY["seer", "async"] = f"{PACKAGE}.weights.SeerRollout"


try:
    register()
except (ImportError, AttributeError, TypeError) as error:
    logging.getLogger(__name__).warning("Seer is for veRL %s and could not register: %r", SUPPORTED, error)
