"""What a folder's weights are said to be."""

import json
import struct
from pathlib import Path

import pytest

from seer.common.errors import InvalidField
from seer.services.engine.weights import Tensor, differences, inspect

A, B = ("a", "F32", [2, 2], bytes(range(16))), ("b", "BF16", [3], b"abcdef")


def write(file: Path, *tensors: tuple[str, str, list[int], bytes]) -> None:
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, dtype, shape, content in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def model(folder: Path, *files: tuple[tuple[str, str, list[int], bytes], ...]) -> Path:
    folder.mkdir()
    for number, tensors in enumerate(files):
        write(folder / f"part-{number}.safetensors", *tensors)
    return folder


def test_the_digest_follows_from_the_tensors_alone(tmp_path):
    one = inspect(model(tmp_path / "one", (A, B)))
    assert one.tensors == {"a": Tensor("F32", (2, 2)), "b": Tensor("BF16", (3,))}
    assert len(one.digest) == 32
    assert inspect(model(tmp_path / "two", (B,), (A,))) == one
    changes = [("a", "F32", [2, 2], bytes(16)), ("a", "F32", [4], A[3]), ("c", *A[1:]), ("a", "I32", *A[2:])]
    digests = {inspect(model(tmp_path / str(i), (change, B))).digest for i, change in enumerate(changes)}
    assert len(digests | {one.digest}) == len(changes) + 1


@pytest.mark.parametrize(
    ("new", "problem"),
    [
        ((A,), "lacks tensor b"),
        ((A, B, ("c", "F32", [1], b"1234")), "has a tensor c that the model lacks"),
        ((("a", "F32", [4], A[3]), B), "tensor a has shape [4], the model's has [2, 2]"),
        ((("a", "I32", [2, 2], A[3]), B), "tensor a has type I32, the model's has F32"),
        ((("a", "F32", [2, 2], bytes(16)), B), ""),
    ],
)
def test_what_a_model_cannot_take(tmp_path, new, problem):
    live = inspect(model(tmp_path / "live", (A, B)))
    assert differences(live, inspect(model(tmp_path / "new", new))) == problem


def test_what_is_wrong_with_a_folder(tmp_path):
    good = model(tmp_path / "good", (A,), (B,))
    index = {"weight_map": {"a": "part-0.safetensors", "c": "part-9.safetensors"}}
    (good / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidField, match=r"lacks part-9\.safetensors"):
        inspect(good)
    with pytest.raises(InvalidField, match="two files"):
        inspect(model(tmp_path / "twice", (A,), (A,)))
    with pytest.raises(InvalidField, match="has no"):
        inspect(tmp_path / "nowhere")
    cut = model(tmp_path / "cut", (A, B)) / "part-0.safetensors"
    whole = cut.read_bytes()
    for length in (0, 7, 20, len(whole) - 1):
        cut.write_bytes(whole[:length])
        with pytest.raises(InvalidField, match=r"part-0\.safetensors"):
            inspect(cut.parent)
    beyond = model(tmp_path / "beyond", (A, ("b", "BF16", [3], b""))) / "part-0.safetensors"
    beyond.write_bytes(beyond.read_bytes().replace(b"[16, 16]", b"[10, 99]"))
    with pytest.raises(InvalidField):
        inspect(beyond.parent)
