"""The codec under hypothesis: every message survives, no bytes do harm."""

from typing import get_args, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from seer.common import wire
from seer.common.errors import WireError
from seer.common.wire.codec import Decoder, Limits, encode

UNIONS = {
    name: union
    for name, union in vars(wire).items()
    if name.endswith(
        ("Buffer", "Trainer", "Engine", "Published", "Asked", "Reply", "Dgds", "Holder", "ToNode", "ToLeader")
    )
}
MESSAGES = {
    cls.__name__: cls
    for cls in vars(wire).values()
    if isinstance(cls, type) and issubclass(cls, wire.Message) and cls is not wire.Message
}
TEXT = st.text(max_size=20)


def examples(count):
    return settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow])


DTYPES = {wire.Tokens: np.int32, wire.Logprobs: np.float32, wire.Bytes: np.uint8}


def arrays(dtype):
    return st.binary(max_size=64).map(lambda data: np.frombuffer(data[: len(data) // 4 * 4], dtype))


def values(kind):
    """Return a strategy for one msgspec type."""
    match kind:
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType(ge=low, le=high, lt=above):
            if above is not None:
                high = above - 1
            return st.integers(-(2**63) if low is None else low, 2**64 - 1 if high is None else high)
        case inspect.FloatType(ge=low, le=high):
            return st.floats(low, high, allow_nan=False)
        case inspect.StrType():
            return TEXT
        case inspect.LiteralType(values=choices):
            return st.sampled_from(choices)
        case inspect.NoneType():
            return st.none()
    return of_several(kind)


def of_several(kind):
    """Return a strategy for a type that is made of others."""
    match kind:
        case inspect.ListType(item_type=item, max_length=most):
            return st.lists(values(item), max_size=min(4, 4 if most is None else most))
        case inspect.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=4).map(tuple)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(values, items))
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=4)
        case inspect.StructType(cls=cls):
            return structs(cls)
        case inspect.UnionType(types=types):
            return st.one_of(*map(values, types))
    raise AssertionError(f"no strategy for {kind}")


def structs(cls):
    fields, hints = {}, get_type_hints(cls)
    for field in inspect.type_info(cls).fields:
        hint = hints[field.name]
        if isinstance(field.type, inspect.CustomType):
            fields[field.name] = arrays(DTYPES[hint])
        elif optional := [DTYPES[each] for each in get_args(hint) if each in DTYPES]:
            fields[field.name] = st.none() | arrays(*optional)
        else:
            fields[field.name] = values(field.type)
    return st.builds(cls, **fields)


ANY_MESSAGE = st.sampled_from(sorted(MESSAGES)).flatmap(lambda name: structs(MESSAGES[name]))


def plain(message):
    """Return a form that compares by value, arrays bit by bit."""
    return msgspec.to_builtins(message, enc_hook=lambda array: [array.dtype.str, array.tobytes().hex()])


def test_every_message_travels_in_some_direction():
    travelling = {arg.__name__ for union in UNIONS.values() for arg in getattr(union, "__args__", (union,))}
    parts = {"Sequenced", "InstanceStatus"}
    assert travelling | parts == set(MESSAGES)
    assert len(UNIONS) == 15


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_every_message_survives(name):
    @examples(30)
    @given(structs(MESSAGES[name]))
    def survives(message):
        unions = [u for u in UNIONS.values() if MESSAGES[name] in getattr(u, "__args__", (u,))]
        for union in unions or [MESSAGES[name]]:
            frames = [bytes(frame) for frame in encode(message)]
            assert plain(Decoder(union).decode(frames)) == plain(message)

    survives()


DECODERS = [Decoder(union) for union in UNIONS.values()]


def refused_or_decoded(frames):
    for decoder in DECODERS:
        try:
            message = decoder.decode(frames)
        except WireError:
            continue
        assert isinstance(message, wire.Message)


@examples(200)
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_bytes_raise_nothing_but_wire_errors(frames):
    refused_or_decoded(frames)


@examples(300)
@given(ANY_MESSAGE, st.data())
def test_mutated_messages_raise_nothing_but_wire_errors(message, data):
    frames = [bytearray(frame) for frame in encode(message)]
    for _ in range(data.draw(st.integers(1, 3))):
        frame = data.draw(st.sampled_from(frames)) if frames else bytearray()
        at = data.draw(st.integers(0, len(frame)))
        match data.draw(st.sampled_from(["cut", "put", "flip", "drop", "double", "swap"])):
            case "cut":
                del frame[at:]
            case "put":
                frame[at:at] = data.draw(st.binary(max_size=8))
            case "flip" if at < len(frame):
                frame[at] = data.draw(st.integers(0, 255))
            case "drop" if frames:
                frames.pop(at % len(frames))
            case "double" if frames:
                frames.append(frames[at % len(frames)])
            case "swap":
                frames.reverse()
    refused_or_decoded([bytes(frame) for frame in frames])


@examples(100)
@given(ANY_MESSAGE)
def test_what_is_cut_short_or_too_large_is_refused_by_every_union(message):
    header, *arrays = [bytes(frame) for frame in encode(message)]
    small = Limits(max_header_bytes=len(header) - 1, max_frames=len(arrays) + 1)
    few = Limits(max_frames=len(arrays) + 1)
    for union in UNIONS.values():
        for length in range(len(header)):
            refused(Decoder(union), [header[:length], *arrays])
        refused(Decoder(union, small), [header, *arrays])
        refused(Decoder(union, few), [header, *arrays, b""])
        if arrays:
            refused(Decoder(union), [header, *arrays[:-1]])


def refused(decoder, frames):
    with pytest.raises(WireError) as info:
        decoder.decode(frames)
    assert len(str(info.value)) < 300


LONG = "x" * 10**6


@pytest.mark.parametrize(
    "fields",
    [
        {"type": LONG},
        {"type": "Submit", "sampling": {"logprobs": LONG}},
        {"type": "Submit", "sampling": {LONG: 1}},
    ],
)
def test_what_is_quoted_of_a_message_is_short(fields):
    refused(Decoder(wire.TrainerToBuffer), [msgspec.msgpack.encode(fields)])
