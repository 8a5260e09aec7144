"""The trainer's side: submit prompts to a buffer, iterate over finished groups.

Needs neither torch nor vllm. `RolloutClient` is asyncio's, `SyncRolloutClient` the plain face.
"""

from seer.client.client import RolloutClient
from seer.client.prompts import Prompt
from seer.client.rollout import BufferLost, Group, Response, Rollout
from seer.client.sync import SyncRollout, SyncRolloutClient
from seer.common.errors import (
    DeadlineExceeded,
    InvalidField,
    RequestRefused,
    RolloutCancelled,
    RolloutFailed,
    SeerError,
    Unreachable,
    WeightsRefused,
)
from seer.common.types import SamplingParams
from seer.common.wire.messages import Progress, Status, WeightsLive

__all__ = [
    "BufferLost",
    "DeadlineExceeded",
    "Group",
    "InvalidField",
    "Progress",
    "Prompt",
    "RequestRefused",
    "Response",
    "Rollout",
    "RolloutCancelled",
    "RolloutClient",
    "RolloutFailed",
    "SamplingParams",
    "SeerError",
    "Status",
    "SyncRollout",
    "SyncRolloutClient",
    "Unreachable",
    "WeightsLive",
    "WeightsRefused",
]
