"""What the buffer's machines get from engines and trainers, and tell them, in one line each."""

from seer.common import wire
from seer.common.sleep import SleepState
from seer.common.types import Capacity
from seer.services.buffer.events import (
    FromEngine,
    FromTrainer,
    Joined,
    ToEngine,
    ToIncarnation,
    ToTrainer,
    Weights,
)
from seer.services.buffer.requests.events import ChunkEnded, TokensArrived


def pick(out, kind):
    """Return the instructions of a kind, or the messages of a kind that instructions send."""
    said = [item.message if isinstance(item, ToEngine | ToTrainer | ToIncarnation) else item for item in out]
    return [item for item in said if isinstance(item, kind)]


def receivers(out, kind):
    """Return the engines that are sent a message of a kind."""
    return [item.instance for item in out if isinstance(item, ToEngine) and isinstance(item.message, kind)]


def kinds(out):
    """Return the names of instructions, or of the messages that they send."""
    said = [item.message if isinstance(item, ToEngine | ToTrainer | ToIncarnation) else item for item in out]
    return [type(item).__name__ for item in said]


# --- chunks and groups ---------------------------------------------------------------------


def ended(
    instance, request_id, attempt, count, finish="", stop_reason="", preemptions=0, drafted=(), accepted=(),
    start=0,
):  # fmt: skip
    result = wire.ChunkResult(
        request_id, attempt, count, finish, stop_reason, preemptions, list(drafted), list(accepted), start
    )
    return ChunkEnded(instance, result)


def streamed(instance, request_id, attempt, count, start=0):
    return TokensArrived(instance, wire.ChunkTokens(request_id, attempt, count, start))


def rejected(instance, request_id, attempt, fatal, message):
    failed = wire.ChunkFailed(request_id=request_id, attempt=attempt, code="", message=message, fatal=fatal)
    return FromEngine(instance, failed)


def cancelled(trainer, rollout_id, prompt_ids, submission=0):
    return FromTrainer(
        trainer, wire.Cancel(rollout_id=rollout_id, prompt_ids=prompt_ids, submission=submission)
    )


def acknowledged(trainer, rollout_id, prompt_ids, submission=0):
    return FromTrainer(
        trainer, wire.Acknowledge(rollout_id=rollout_id, prompt_ids=prompt_ids, submission=submission)
    )


def dropped_chunk(instance, request_id, attempt):
    return ToEngine(instance, wire.DropChunk(request_id=request_id, attempt=attempt))


def refused(address, rollout_id, prompt_ids, code, message, submission=0):
    answer = wire.Refused(
        code=code, message=message, rollout_id=rollout_id, prompt_ids=prompt_ids, submission=submission
    )
    return ToIncarnation(address, answer)


def opened(group_id, size, prompt_len, cap, shared_id="", first=0):
    return wire.GroupOpened(
        group_id=group_id, size=size, prompt_len=prompt_len, cap=cap, shared_id=shared_id, first=first
    )


def progress(group_id, index, generated, finished, drafted=(), accepted=()):
    return wire.RequestProgress(
        group_id=group_id, index=index, generated=generated, finished=finished, drafted=list(drafted),
        accepted=list(accepted),
    )  # fmt: skip


def closed(group_id):
    return wire.GroupClosed(group_id=group_id)


# --- engines -------------------------------------------------------------------------------

NO_ROOM = Capacity(kv_blocks=0, block_size=1, max_num_seqs=0, max_model_len=0)
OF_START = Weights(0, "")


def joined(
    instance, capacity=NO_ROOM, incarnation=0, weights=OF_START, node="", weights_endpoint="", sleeping=(),
    dropped=False, wish=0,
):  # fmt: skip
    register = wire.Register(
        capacity=capacity, weight_version=-1 if dropped else weights.version, weights_digest=weights.digest,
        weights_source=weights.source, node=node, weights_endpoint=weights_endpoint, sleeping=list(sleeping),
        dropped_version=weights.version if dropped else -1, wish=wish,
    )  # fmt: skip
    return Joined(instance, register, incarnation)


# --- weights -------------------------------------------------------------------------------


def update(trainer, version, source, digest="", in_flight="finish", call_id=0):
    asked = wire.UpdateWeights(
        version=version, source=source, digest=digest, in_flight=in_flight, call_id=call_id
    )
    return FromTrainer(trainer, asked)


def prepared(instance, version, digest, problem="", call_id=1):
    answer = wire.WeightsPrepared(version=version, digest=digest, problem=problem, call_id=call_id)
    return FromEngine(instance, answer)


def loaded(instance, version, problem="", call_id=0):
    return FromEngine(instance, wire.WeightsLoaded(version=version, problem=problem, call_id=call_id))


def lost_weights(instance):
    return FromEngine(instance, wire.Slept(asleep=True, dropped=True))


def prepare(instance, version, source, call_id=1, digest="", holders=()):
    order = wire.PrepareWeights(
        version=version, source=source, call_id=call_id, digest=digest, holders=list(holders)
    )
    return ToEngine(instance, order)


def discard(instance, version, call_id):
    return ToEngine(instance, wire.DiscardWeights(version=version, call_id=call_id))


def load(instance, weights, holders=(), call_id=0):
    order = wire.LoadWeights(
        version=weights.version, digest=weights.digest, source=weights.source, holders=list(holders),
        call_id=call_id,
    )  # fmt: skip
    return ToEngine(instance, order)


def loading(trainer, version, engines, call_id=0):
    return ToTrainer(trainer, wire.WeightsLoading(version=version, engines=engines, call_id=call_id))


def live(trainer, weights, quarantined, call_id=0):
    answer = wire.WeightsLive(
        version=weights.version, digest=weights.digest, quarantined=quarantined, call_id=call_id
    )
    return ToTrainer(trainer, answer)


def failed(trainer, version, reasons, call_id=0):
    return ToTrainer(trainer, wire.WeightsFailed(version=version, reasons=reasons, call_id=call_id))


# --- sleep ---------------------------------------------------------------------------------


def sleep(trainer, asleep, call_id=0, level=1, tags=(), wish=0):
    asked = wire.Sleep(asleep=asleep, call_id=call_id, level=level, tags=list(tags), wish=wish)
    return FromTrainer(trainer, asked)


def slept(instance, asleep, tags=(), dropped=False):
    return FromEngine(instance, wire.Slept(asleep=asleep, tags=list(tags), dropped=dropped))


def rest(instance, asleep, level=1, tags=(), wish=0):
    return ToEngine(instance, wire.Sleep(asleep=asleep, level=level, tags=list(tags), wish=wish))


def rests(trainer, asleep, problem="", call_id=0, kv_asleep=False, wish=0):
    state = SleepState.ASLEEP if asleep else SleepState.KV_ASLEEP if kv_asleep else SleepState.AWAKE
    answer = wire.Slept(asleep=asleep, problem=problem, call_id=call_id, tags=state.tags, wish=wish)
    return ToTrainer(trainer, answer)
