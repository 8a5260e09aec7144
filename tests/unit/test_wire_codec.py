import msgspec
import numpy as np
import pytest
from msgspec import inspect

from seer.common import wire
from seer.common.errors import WireError
from seer.common.types import InstanceStats, SamplingParams
from seer.common.wire import (
    AppendBatch,
    ChunkResult,
    ChunksDone,
    EngineStatus,
    EngineToBuffer,
    GroupDone,
    GroupEntry,
    Hello,
    RegisterGroups,
    RunChunk,
    codec,
)
from seer.common.wire.codec import SCHEMA_HASH, Decoder, Limits, encode


def chunks(tokens=(), logprobs=()):
    return ChunksDone(
        weight_version=1,
        results=[],
        tokens=np.asarray(tokens, np.int32),
        logprobs=np.asarray(logprobs, np.float32),
    )


def refuses(frames, says, union=ChunksDone, limits=None):
    with pytest.raises(WireError, match=says):
        Decoder(union, limits or Limits()).decode(frames)


def test_arrays_share_their_memory_both_ways():
    tokens = np.arange(70_000, dtype=np.int32)
    frames = encode(chunks(tokens, np.zeros(70_000)))
    assert len(frames) == 3
    assert len(frames[0]) < 100
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), tokens)
    received = Decoder(ChunksDone).decode(frames)
    assert np.shares_memory(received.tokens, tokens)
    assert received.logprobs.dtype == np.float32


def test_decoded_arrays_are_read_only():
    received = Decoder(ChunksDone).decode([bytearray(frame) for frame in encode(chunks([1], [0.5]))])
    with pytest.raises(ValueError, match="read-only"):
        received.tokens[0] = 2


def test_an_unaligned_frame_becomes_an_aligned_array():
    header, tokens, logprobs = encode(chunks([1, 2], [0.5, 1.5]))
    shifted = memoryview(b"x" + bytes(tokens))[1:]
    received = Decoder(ChunksDone).decode([header, shifted, logprobs])
    assert received.tokens.flags.aligned
    assert received.tokens.tolist() == [1, 2]


def test_a_strided_array_is_sent_as_its_values():
    received = Decoder(ChunksDone).decode(encode(chunks(np.arange(10, dtype=np.int32)[::3])))
    assert received.tokens.tolist() == [0, 3, 6, 9]


def test_empty_arrays_and_messages_without_arrays():
    assert Decoder(ChunksDone).decode(encode(chunks())).tokens.shape == (0,)
    message = RegisterGroups(groups=[GroupEntry(7, 8)], ttl_seconds=1.0)
    assert len(encode(message)) == 1
    assert Decoder(RegisterGroups).decode(encode(message)) == message


@pytest.mark.parametrize(
    "bad", [np.zeros(2), np.zeros(2, np.int64), np.zeros((2, 2), np.int32), "not an array"]
)
def test_what_cannot_be_encoded_is_named(bad):
    message = AppendBatch(appends=[], tokens=bad)
    if isinstance(bad, str):
        refuses(encode(message), "tokens", AppendBatch)
    else:
        with pytest.raises(WireError, match="cannot encode AppendBatch"):
            encode(message)


def test_an_object_without_wire_form_is_named():
    with pytest.raises(WireError, match="cannot encode RegisterGroups: object has no wire form"):
        encode(RegisterGroups(groups=[object()]))


def test_frames_must_be_accounted_for():
    header, tokens, logprobs = encode(chunks([1], [0.5]))
    refuses([], "0 frames")
    refuses([header, tokens], r"\[2, 'f4'\] does not refer to an unread frame of f4 - at `\$.logprobs`")
    refuses([header, tokens, logprobs, b""], r"no array refers to frames \[3\]")
    refuses([header, bytes(tokens)[:3], logprobs], "multiple of 4")
    twice = msgspec.msgpack.decode(header) | {"logprobs": [1, "f4"]}
    refuses([msgspec.msgpack.encode(twice), tokens, logprobs], "does not refer")


def test_a_wrong_dtype_is_refused_and_named():
    message = chunks([1], [0.5])
    message.logprobs = message.tokens
    refuses(encode(message), r"unread frame of f4 - at `\$.logprobs`")


@pytest.mark.parametrize(
    "reference", [None, 1, [], [1], [0, "i4"], ["1", "i4"], [1, "i4", 2], {"1": 2}, [1.0, "i4"]]
)
def test_a_reference_of_another_shape_is_refused(reference):
    header, *arrays = encode(chunks([1], [0.5]))
    fields = msgspec.msgpack.decode(header) | {"tokens": reference}
    refuses([msgspec.msgpack.encode(fields), *arrays], "malformed message")


def test_sizes_are_bounded():
    frames = encode(chunks(range(100), [0.0]))
    refuses(frames, "frame 0 of", limits=Limits(max_header_bytes=10))
    refuses(frames, "frame 1 of 400 bytes: at most 399", limits=Limits(max_frame_bytes=399))
    refuses(frames, "3 frames: must have 1 to 2", limits=Limits(max_frames=2))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"\x81\xa4type\xa5Hello",
        b"\x81\xa4type\xa6Hello!",
        b"\x82\xa4type\xa4Hell\xa1\xff\xa2\xff\xff",
        b"\x81\xa4type\xa2\xff\xff",
        b"\x82\xa4type\xaaChunksDone\xa6tokens\xdd\xff\xff\xff\xff",
        b"\x82\xa4type\xaaChunksDone\xa6tokens" + b"\x91" * 100_000,
        b"\x82\xa4type\xaaChunksDone\xa7unknown" + b"\x91" * 100_000,
        b"\xdf\xff\xff\xff\xff",
    ],
)
def test_malformed_headers_are_wire_errors(header):
    refuses([header], "malformed message", EngineToBuffer)


def test_a_bound_on_a_field_names_it():
    hello = Hello(major=1, minor=0, schema_hash="", config_hash="", role="r", name="x" * 513, incarnation=1)
    refuses(encode(hello), r"at `\$.name`", Hello)


@pytest.mark.parametrize("value", [-1, -float("inf"), float("inf"), float("nan")])
@pytest.mark.parametrize("field", [name for name in InstanceStats.__struct_fields__ if name != "pool_away"])
def test_an_engine_cannot_report_less_than_nothing_or_no_number(field, value):
    """Such a figure stopped the buffer as soon as somebody asked for its status."""
    status = EngineStatus(msgspec.structs.replace(InstanceStats(), **{field: value}))
    refuses(encode(status), rf"at `\$.stats.{field}`", EngineToBuffer)


@pytest.mark.parametrize("value", [-1, 2**31])
@pytest.mark.parametrize("reported", [lambda n: {"preemptions": n}, lambda n: {"drafted": [n]}])
def test_a_chunk_cannot_count_what_sums_cannot_hold(reported, value):
    """Such a count stopped the buffer at the next message with their sum."""
    result = msgspec.structs.replace(ChunkResult("r/p#0", 1, 1, "", "", 0), **reported(value))
    message = msgspec.structs.replace(chunks(), results=[result])
    refuses(encode(message), r"at `\$.results\[0\]", EngineToBuffer)


def test_a_decoder_is_usable_after_a_failure():
    decoder = Decoder(EngineToBuffer)
    with pytest.raises(WireError):
        decoder.decode([b"\xc1", b"left over"])
    assert decoder.decode(encode(chunks([7], [0.5]))).tokens.tolist() == [7]


def test_headers_stay_small_for_large_groups():
    n, length = 64, 1000
    done = GroupDone(
        rollout_id="r",
        prompt_id="p",
        weight_version=0,
        finish_reasons=["stop"] * n,
        stop_reasons=[""] * n,
        lengths=[length] * n,
        tokens=np.zeros(n * length, np.int32),
        logprobs=np.zeros(n * length, np.float32),
    )
    assert len(encode(done)[0]) < 1000
    chunk = RunChunk(
        request_id="r/p#0",
        group_id="r/p",
        attempt=0,
        key=2**64 - 1,
        prompt_len=1,
        max_new_tokens=8,
        sampling=SamplingParams(),
        tokens=np.zeros(1, np.int32),
    )
    assert Decoder(RunChunk).decode(encode(chunk)).key == 2**64 - 1


def test_the_schema_hash_ignores_docstrings_and_sees_fields():
    def schema(doc, extra):
        cls = msgspec.defstruct("Thing", [("a", int), *extra], tag=True, namespace={"__doc__": doc})
        return codec._without_descriptions(msgspec.json.schema(cls))

    assert len(SCHEMA_HASH) == 16
    assert schema("one", []) == schema("two", [])
    assert schema("one", []) != schema("one", [("b", int, 0)])


@pytest.mark.parametrize("count", [0, 1, 4, 5, 8, 9, 25])
def test_a_large_array_travels_in_several_frames(count, monkeypatch):
    monkeypatch.setattr(codec, "SPLIT_BYTES", 16)
    tokens = np.arange(count, dtype=np.int32)
    message = ChunksDone(weight_version=0, results=[], tokens=tokens, logprobs=np.ones(3, np.float32))
    frames = encode(message)
    assert all(len(frame) <= 16 for frame in frames[1:])
    assert len(frames) == 2 + max(1, -(-count // 4))
    received = Decoder(ChunksDone).decode(frames)
    assert received.tokens.tolist() == tokens.tolist()
    assert received.logprobs.tolist() == [1.0] * 3
    if len(frames) > 3:
        with pytest.raises(WireError):
            Decoder(ChunksDone).decode(frames[:-1])


@pytest.mark.parametrize(
    "reference", [[1, "i4", 0], [1, "i4", -1], [1, "i4", 10**9], [2, "i4", 2], [1, "f4", 2]]
)
def test_a_reference_to_frames_that_are_not_there_is_refused(reference):
    head = msgspec.msgpack.decode(
        encode(ChunksDone(weight_version=0, results=[], tokens=np.arange(2, dtype=np.int32),
                          logprobs=np.ones(2, np.float32)))[0]
    )  # fmt: skip
    head["tokens"] = reference
    with pytest.raises(WireError):
        Decoder(ChunksDone).decode([msgspec.msgpack.encode(head), bytes(8), bytes(8)])


def without_bound(kind, where=""):
    """Yield the paths of a type's lists and maps that may have any length."""
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            for field in fields:
                yield from without_bound(field.type, f"{where or cls.__name__}.{field.name}")
        case inspect.UnionType(types=types) | inspect.TupleType(item_types=types):
            for each in types:
                yield from without_bound(each, where)
        case inspect.ListType(max_length=most) | inspect.VarTupleType(max_length=most):
            yield from [where] if most is None else without_bound(kind.item_type, f"{where}[]")
        case inspect.DictType(max_length=most):
            yield from [where] if most is None else without_bound(kind.value_type, f"{where}[]")


@pytest.mark.parametrize(
    "union",
    [wire.TrainerToBuffer, wire.EngineToBuffer, wire.SnapshotAsked, wire.EngineToDgds, wire.EngineToHolder,
     wire.NodeToLeader],
)  # fmt: skip
def test_every_list_that_a_service_reads_has_a_bound(union):
    assert not list(without_bound(inspect.type_info(union)))


def test_a_list_beyond_its_bound_is_refused_before_it_is_read():
    many = wire.Cancel(rollout_id="r", prompt_ids=[""] * 2**20)
    with pytest.raises(WireError, match=r"length <= 262144 - at `\$.prompt_ids`"):
        Decoder(wire.TrainerToBuffer).decode(encode(many))
