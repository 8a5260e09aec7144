"""TRL 1.16: `SeerGRPOTrainer`, `SeerRLOOTrainer`, and `SeerRollout` for a plain `GRPOTrainer`.

Invariant: importing this needs none of trl and torch; the trainers need both.
"""

from typing import TYPE_CHECKING

from seer.integrations.trl.rollout_func import SeerRollout

if TYPE_CHECKING:
    from seer.integrations.trl.trainers import SeerGRPOTrainer, SeerRLOOTrainer

__all__ = ["SeerGRPOTrainer", "SeerRLOOTrainer", "SeerRollout"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from seer.integrations.trl import trainers

    return getattr(trainers, name)
