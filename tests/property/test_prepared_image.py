"""Images under hypothesis: one content, one name; and no bytes do harm."""

import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from seer.common.errors import InvalidField
from seer.common.prepared_image import MAX_DIMENSIONS, make, name_of, read
from seer.common.types import IMAGE_NAME, MAX_IMAGE_BYTES

SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
TENSORS = st.sampled_from((np.float32, np.int64)).flatmap(lambda dtype: arrays.arrays(dtype, SHAPES))
SOME = st.dictionaries(st.text(max_size=8), TENSORS, min_size=1, max_size=4)


def equal(one, two):
    return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()


def bytes_of(header, values=b""):
    """Return an image's bytes with any header, right or wrong."""
    text = header if isinstance(header, bytes) else msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return np.frombuffer(struct.pack("<Q", len(text)) + text + values, np.uint8)


@given(SOME)
@settings(max_examples=60)
def test_an_image_is_read_as_it_was_made(tensors):
    image = make("image", tensors)
    assert IMAGE_NAME.fullmatch(image.name)
    again = read(image.name, image.data.copy())
    assert (again.name, again.modality) == (image.name, "image")
    assert again.tensors.keys() == tensors.keys()
    assert all(equal(again.tensors[name], tensor) for name, tensor in tensors.items())
    assert all(tensor.flags.aligned and not tensor.flags.writeable for tensor in again.tensors.values())


@given(SOME, st.randoms())
@settings(max_examples=60)
def test_one_content_has_one_name(tensors, rng):
    names = list(tensors)
    rng.shuffle(names)
    spread = {}
    for name in names:
        tensor = tensors[name]
        if tensor.ndim:  # the same values, in memory that has others between them
            wide = np.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), tensor.dtype)
            wide[..., ::2] = tensor
            tensor = wide[..., ::2]
        spread[name] = tensor.astype(tensor.dtype.newbyteorder(">"))
    assert make("image", spread).name == make("image", tensors).name


@given(SOME, st.data())
@settings(max_examples=60)
def test_any_damaged_byte_is_noticed(tensors, data):
    image = make("image", tensors)
    damaged = image.data.copy()
    damaged[data.draw(st.integers(0, image.size - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(InvalidField, match="is not the name of these bytes"):
        read(image.name, damaged)
    with pytest.raises(InvalidField, match="is not the name of these bytes"):
        read(image.name, image.data[:-1] if image.size > 9 else damaged)
    try:  # under its own name it is another image, or none
        other = read(name_of(damaged), damaged)
    except InvalidField:
        return
    assert other.name != image.name


def test_values_types_shapes_and_names_make_another_image():
    values = np.zeros((3, 2), np.float32)
    variants = [
        ("image", {"a": values}),
        ("video", {"a": values}),
        ("image", {"b": values}),
        ("image", {"a": values.reshape(2, 3)}),
        ("image", {"a": values.reshape(6)}),
        ("image", {"a": values.view(np.int64)}),
        ("image", {"a": values + 1}),
        ("image", {"a": values, "b": values[:0]}),
    ]
    assert len({make(*variant).name for variant in variants}) == len(variants)


@given(st.binary(max_size=200))
@settings(max_examples=60)
def test_arbitrary_bytes_are_refused(text):
    data = np.frombuffer(text, np.uint8)
    with pytest.raises(InvalidField):
        read(name_of(data), data)


FLOAT = np.zeros(2, np.float32).tobytes()


@pytest.mark.parametrize(
    ("header", "values", "says"),
    [
        (["image", [["a", "F32", [2]]]], FLOAT + b"x", "another number of bytes"),
        (["image", [["a", "F32", [3]]]], FLOAT, "another number of bytes"),
        (["image", [["a", "F32", [2**40]]]], FLOAT, "describe 1 to"),
        (["image", [["a", "F32", [0, 2**62]]]], b"", "describe 1 to"),
        (["image", [["a", "F32", [0, 2**26, 2**26, 2**26]]]], b"", "describe 1 to"),
        (["image", [["a", "F32", [1] * (MAX_DIMENSIONS + 1)]]], FLOAT[:4], "describe 1 to"),
        (["image", [["a", "F32", [-2, -1]]]], FLOAT, "describe 1 to"),
        (["image", [["a", "BF16", [4]]]], FLOAT, "describe 1 to"),
        (["image", []], b"", "describe 1 to"),
        (["image", [["a", "F32", [0]]] * 2], b"", "describe 1 to"),
        (["image", [["a", "F32", [2]], ["b", "I64", [1]]]], FLOAT * 2, "another order"),
        (["image", [["b", "F32", [1]], ["a", "F32", [1]]]], FLOAT, "another order"),
        (b'["image",  [["a","F32",[2]]]]', FLOAT, "in another form"),
        (["image", [["a", "F32", [2]]], "more"], FLOAT, "in another form"),
        (b"{", b"", "has no header"),
        (b"\xff" * 8, b"", "has no header"),
    ],
)
def test_other_forms_of_the_same_bytes_are_refused(header, values, says):
    data = bytes_of(header, values)
    with pytest.raises(InvalidField, match=says):
        read(name_of(data), data)


def test_a_header_that_claims_to_be_longer_than_all_is_refused():
    for claimed in (2**64 - 1, 2**31, 100):
        data = np.frombuffer(struct.pack("<Q", claimed) + b"x" * 92, np.uint8)
        with pytest.raises(InvalidField, match="has no header"):
            read(name_of(data), data)


@pytest.mark.parametrize("tensor", [np.zeros(2), np.zeros(2, np.int32), ["x"], object(), [[1], [2, 3]]])
def test_other_types_are_refused_by_the_tensor_s_name(tensor):
    with pytest.raises(InvalidField, match="pixel_values"):
        make("image", {"pixel_values": tensor})


def test_torch_tensors_are_taken_where_torch_is():
    torch = pytest.importorskip("torch")
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert make("image", {"a": torch.from_numpy(values)}).name == make("image", {"a": values}).name
    for refused in (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, requires_grad=True)):
        with pytest.raises(InvalidField, match="float32 or int64"):
            make("image", {"a": refused})


def test_an_image_that_is_too_large_is_refused():
    with pytest.raises(InvalidField, match=f"up to {MAX_IMAGE_BYTES} bytes"):
        make("image", {"a": np.zeros(MAX_IMAGE_BYTES // 4, np.float32)})
