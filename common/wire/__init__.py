"""Every message between Seer's processes: one tagged union per socket direction.

Each pair of peers has a module; import names from here, whichever module they are in.

Evolution rules (tests/unit/test_wire_evolution.py holds old and new readers to them):
- a new field goes last in its Struct and has a default; unknown fields are ignored by readers;
- never reorder the fields of an `array_like` Struct, never change a field's type or meaning,
  never reuse a removed name or tag;
- a new message type is a new tag; a reader that does not know it counts, logs and drops it;
- a new array goes into a new message type: a reader refuses frames that it cannot account for;
- `Hello` and `Refused` keep their meaning whatever the MAJOR, or peers could not refuse each other;
- anything an old peer would misread needs a new MAJOR in `version.py`.

Arrays (`Tokens`, `Logprobs` and `Bytes` fields) travel as frames of their own after the msgpack header; see
`codec.py`. Ragged data is one flat array plus a list of lengths.
"""

from __future__ import annotations

from seer.common.wire.base import MAX_GROUP_SIZE as MAX_GROUP_SIZE
from seer.common.wire.base import MAX_ID as MAX_ID
from seer.common.wire.base import Bytes as Bytes
from seer.common.wire.base import Goodbye as Goodbye
from seer.common.wire.base import Hello as Hello
from seer.common.wire.base import Logprobs as Logprobs
from seer.common.wire.base import Message as Message
from seer.common.wire.base import Refused as Refused
from seer.common.wire.base import Sizes as Sizes
from seer.common.wire.base import Tokens as Tokens
from seer.common.wire.base import Welcome as Welcome
from seer.common.wire.drafts import MAX_APPENDS as MAX_APPENDS
from seer.common.wire.drafts import TOKEN_BYTES as TOKEN_BYTES
from seer.common.wire.drafts import Append as Append
from seer.common.wire.drafts import AppendBatch as AppendBatch
from seer.common.wire.drafts import AppendGaps as AppendGaps
from seer.common.wire.drafts import Delta as Delta
from seer.common.wire.drafts import Deltas as Deltas
from seer.common.wire.drafts import DgdsToEngine as DgdsToEngine
from seer.common.wire.drafts import EngineToDgds as EngineToDgds
from seer.common.wire.drafts import Fetch as Fetch
from seer.common.wire.drafts import FetchGroup as FetchGroup
from seer.common.wire.drafts import Gap as Gap
from seer.common.wire.drafts import GroupEntry as GroupEntry
from seer.common.wire.drafts import MessageRejected as MessageRejected
from seer.common.wire.drafts import RegisterGroups as RegisterGroups
from seer.common.wire.engines import BufferToEngine as BufferToEngine
from seer.common.wire.engines import ChunkFailed as ChunkFailed
from seer.common.wire.engines import ChunkResult as ChunkResult
from seer.common.wire.engines import ChunksDone as ChunksDone
from seer.common.wire.engines import ChunkTokens as ChunkTokens
from seer.common.wire.engines import DropChunk as DropChunk
from seer.common.wire.engines import EndChunks as EndChunks
from seer.common.wire.engines import EngineStatus as EngineStatus
from seer.common.wire.engines import EngineToBuffer as EngineToBuffer
from seer.common.wire.engines import Ping as Ping
from seer.common.wire.engines import Register as Register
from seer.common.wire.engines import RunChunk as RunChunk
from seer.common.wire.events import BufferPublished as BufferPublished
from seer.common.wire.events import BufferSnapshot as BufferSnapshot
from seer.common.wire.events import BufferSnapshotReply as BufferSnapshotReply
from seer.common.wire.events import ContextPublished as ContextPublished
from seer.common.wire.events import ContextSnapshot as ContextSnapshot
from seer.common.wire.events import ContextSnapshotReply as ContextSnapshotReply
from seer.common.wire.events import Estimates as Estimates
from seer.common.wire.events import GroupClosed as GroupClosed
from seer.common.wire.events import GroupOpened as GroupOpened
from seer.common.wire.events import RequestProgress as RequestProgress
from seer.common.wire.events import Sequenced as Sequenced
from seer.common.wire.events import SnapshotAsked as SnapshotAsked
from seer.common.wire.events import SnapshotRequest as SnapshotRequest
from seer.common.wire.figures import Histogram as Histogram
from seer.common.wire.figures import Mismatch as Mismatch
from seer.common.wire.figures import OpenRequest as OpenRequest
from seer.common.wire.figures import ReportMismatch as ReportMismatch
from seer.common.wire.figures import RolloutEnd as RolloutEnd
from seer.common.wire.figures import RolloutStatus as RolloutStatus
from seer.common.wire.figures import ServiceStatus as ServiceStatus
from seer.common.wire.figures import StatusRequest as StatusRequest
from seer.common.wire.figures import Unwritten as Unwritten
from seer.common.wire.images import IMAGE_PART_BYTES as IMAGE_PART_BYTES
from seer.common.wire.images import IMAGE_STALL_SECONDS as IMAGE_STALL_SECONDS
from seer.common.wire.images import IMAGES_AT_ONCE as IMAGES_AT_ONCE
from seer.common.wire.images import ImageData as ImageData
from seer.common.wire.images import ImageState as ImageState
from seer.common.wire.images import OpenImage as OpenImage
from seer.common.wire.images import ReadImage as ReadImage
from seer.common.wire.nodes import CheckWeights as CheckWeights
from seer.common.wire.nodes import JoinNode as JoinNode
from seer.common.wire.nodes import LeaderToNode as LeaderToNode
from seer.common.wire.nodes import NodeToLeader as NodeToLeader
from seer.common.wire.nodes import StartRanks as StartRanks
from seer.common.wire.nodes import WeightsChecked as WeightsChecked
from seer.common.wire.trainers import MAX_LONGEST as MAX_LONGEST
from seer.common.wire.trainers import MAX_PROMPTS as MAX_PROMPTS
from seer.common.wire.trainers import MAX_ROLLOUTS as MAX_ROLLOUTS
from seer.common.wire.trainers import Accepted as Accepted
from seer.common.wire.trainers import Acknowledge as Acknowledge
from seer.common.wire.trainers import BufferToTrainer as BufferToTrainer
from seer.common.wire.trainers import Cancel as Cancel
from seer.common.wire.trainers import GroupDone as GroupDone
from seer.common.wire.trainers import InstanceStatus as InstanceStatus
from seer.common.wire.trainers import NextPrompts as NextPrompts
from seer.common.wire.trainers import Progress as Progress
from seer.common.wire.trainers import Status as Status
from seer.common.wire.trainers import StreamedPart as StreamedPart
from seer.common.wire.trainers import Submit as Submit
from seer.common.wire.trainers import TokensGenerated as TokensGenerated
from seer.common.wire.trainers import TrainerToBuffer as TrainerToBuffer
from seer.common.wire.weights import MAX_HOLDERS as MAX_HOLDERS
from seer.common.wire.weights import SHORT_SPOOL_BYTES as SHORT_SPOOL_BYTES
from seer.common.wire.weights import SPOOL_BYTES as SPOOL_BYTES
from seer.common.wire.weights import SPOOL_PART as SPOOL_PART
from seer.common.wire.weights import SPOOL_SCHEME as SPOOL_SCHEME
from seer.common.wire.weights import SPOOL_STALL_SECONDS as SPOOL_STALL_SECONDS
from seer.common.wire.weights import SPOOL_STALLED as SPOOL_STALLED
from seer.common.wire.weights import SPOOL_WINDOW as SPOOL_WINDOW
from seer.common.wire.weights import SPOOL_WINDOW_BYTES as SPOOL_WINDOW_BYTES
from seer.common.wire.weights import DiscardWeights as DiscardWeights
from seer.common.wire.weights import EngineToHolder as EngineToHolder
from seer.common.wire.weights import HolderToEngine as HolderToEngine
from seer.common.wire.weights import LoadWeights as LoadWeights
from seer.common.wire.weights import OpenSpool as OpenSpool
from seer.common.wire.weights import PrepareWeights as PrepareWeights
from seer.common.wire.weights import ReadSpool as ReadSpool
from seer.common.wire.weights import Sleep as Sleep
from seer.common.wire.weights import Slept as Slept
from seer.common.wire.weights import SpoolData as SpoolData
from seer.common.wire.weights import SpoolState as SpoolState
from seer.common.wire.weights import UpdateWeights as UpdateWeights
from seer.common.wire.weights import WeightsFailed as WeightsFailed
from seer.common.wire.weights import WeightsLive as WeightsLive
from seer.common.wire.weights import WeightsLoaded as WeightsLoaded
from seer.common.wire.weights import WeightsLoading as WeightsLoading
from seer.common.wire.weights import WeightsPrepared as WeightsPrepared
