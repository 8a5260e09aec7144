"""Rollouts of many turns: an agent generates, its environment answers, and it generates again.

`RolloutClient.trajectories` runs agents of yours; `PrefixTrajectories` serves loops of others that send
the whole context with every turn. docs/turns.md has both.
"""

from seer.client.turns.prefix import PrefixTrajectories
from seer.client.turns.rollout import TrajectoryGroup, TrajectoryRollout
from seer.client.turns.sync import SyncTrajectory, SyncTrajectoryRollout
from seer.client.turns.tool_messages import tool_tokens
from seer.client.turns.trajectory import NoRoom, Trajectory, TrajectoryFailed, Turn
from seer.client.turns.turn_journal import Journal

__all__ = [
    "Journal",
    "NoRoom",
    "PrefixTrajectories",
    "SyncTrajectory",
    "SyncTrajectoryRollout",
    "Trajectory",
    "TrajectoryFailed",
    "TrajectoryGroup",
    "TrajectoryRollout",
    "Turn",
    "tool_tokens",
]
