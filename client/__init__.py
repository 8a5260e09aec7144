"""The trainer's client: submit prompts, iterate over finished groups, update weights.

Needs neither torch nor vllm. `RolloutClient` is for asyncio, `SyncRolloutClient` for plain Python.
"""

from seer.client.client import RolloutClient
from seer.client.dynamic import DynamicSampling, mixed
from seer.client.image_uploads import Placed, prepared_image
from seer.client.in_place import Broadcast, SharedTensors
from seer.client.lora_adapter import LoraAdapter
from seer.client.mooncake_source import MooncakeSource
from seer.client.open_rollout import Delta, OpenRollout, PromptInFlight
from seer.client.prompts import Prompt
from seer.client.results import Group, Response
from seer.client.reward_calls import Reward, RewardMetrics, per_response
from seer.client.rewards import RewardFailed, Scored, Scores
from seer.client.rollout import BufferLost, Rollout
from seer.client.sent_weights import SentWeights
from seer.client.sharded_tensors import ShardedTensors, TorchRanks
from seer.client.sync import (
    SyncDynamicSampling,
    SyncOpenRollout,
    SyncPromptInFlight,
    SyncRollout,
    SyncRolloutClient,
    SyncScores,
)
from seer.client.vllm_transfer import VllmTransfer
from seer.common.beside import TopLogprobs
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
from seer.common.receipt import Receipt
from seer.common.structured_outputs import StructuredOutputs
from seer.common.types import SamplingParams
from seer.common.wire import Mismatch, Progress, Status, WeightsLive

__all__ = [
    "Broadcast",
    "BufferLost",
    "DeadlineExceeded",
    "Delta",
    "DynamicSampling",
    "Group",
    "InvalidField",
    "LoraAdapter",
    "Mismatch",
    "MooncakeSource",
    "OpenRollout",
    "Placed",
    "Progress",
    "Prompt",
    "PromptInFlight",
    "Receipt",
    "RequestRefused",
    "Response",
    "Reward",
    "RewardFailed",
    "RewardMetrics",
    "Rollout",
    "RolloutCancelled",
    "RolloutClient",
    "RolloutFailed",
    "SamplingParams",
    "Scored",
    "Scores",
    "SeerError",
    "SentWeights",
    "ShardedTensors",
    "SharedTensors",
    "Status",
    "StructuredOutputs",
    "SyncDynamicSampling",
    "SyncOpenRollout",
    "SyncPromptInFlight",
    "SyncRollout",
    "SyncRolloutClient",
    "SyncScores",
    "TopLogprobs",
    "TorchRanks",
    "Unreachable",
    "VllmTransfer",
    "WeightsLive",
    "WeightsRefused",
    "mixed",
    "per_response",
    "prepared_image",
]
