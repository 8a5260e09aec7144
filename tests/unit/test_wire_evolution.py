"""The evolution rules of `messages.py`: today's reader against yesterday's and tomorrow's writers."""

import msgspec
import numpy as np
import pytest

from seer.common.errors import WireError
from seer.common.wire import Message, Tokens
from seer.common.wire.codec import Decoder, encode


class Old(Message, tag="Report"):
    name: str
    tokens: Tokens


class New(Message, tag="Report"):
    name: str
    tokens: Tokens
    count: int = 7
    labels: dict[str, int] = {}


class OldRow(msgspec.Struct, array_like=True):
    name: str
    count: int


class NewRow(msgspec.Struct, array_like=True):
    name: str
    count: int
    extra: float = 0.5


class OldRows(Message, tag="Rows"):
    rows: list[OldRow]


class NewRows(Message, tag="Rows"):
    rows: list[NewRow]


class Added(Message, tag=True):
    value: int


class WithArray(Message, tag="Report"):
    name: str
    tokens: Tokens
    more: Tokens


TOKENS = np.array([1, 2, 3], np.int32)


def test_a_new_reader_fills_in_defaults():
    received = Decoder(New).decode(encode(Old(name="x", tokens=TOKENS)))
    assert (received.name, received.count, received.labels) == ("x", 7, {})
    assert received.tokens.tolist() == [1, 2, 3]


def test_an_old_reader_ignores_new_fields():
    received = Decoder(Old).decode(encode(New(name="x", tokens=TOKENS, count=9, labels={"a": 1})))
    assert received.name == "x"
    assert received.tokens.tolist() == [1, 2, 3]


def test_positional_structs_grow_at_the_end():
    new = Decoder(NewRows).decode(encode(OldRows(rows=[OldRow("a", 1)])))
    assert new.rows == [NewRow("a", 1, 0.5)]
    old = Decoder(OldRows).decode(encode(NewRows(rows=[NewRow("a", 1, 0.7)])))
    assert old.rows == [OldRow("a", 1)]


def test_an_unknown_message_is_a_wire_error_that_names_it():
    with pytest.raises(WireError, match="Added"):
        Decoder(Old | OldRows).decode(encode(Added(value=1)))


def test_an_array_added_to_a_known_message_is_refused():
    with pytest.raises(WireError, match="no array refers to frames"):
        Decoder(Old).decode(encode(WithArray(name="x", tokens=TOKENS, more=TOKENS)))
