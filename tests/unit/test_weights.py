"""What a folder's weights are said to be."""

import json
import os
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from seer.common.errors import InvalidField
from seer.common.weights import safetensors
from seer.common.weights.digest import BLAKE3
from seer.services.engine.weights.manifest import (
    Manifest,
    Tensor,
    differences,
    optional_tensors,
    read_manifest,
    resolve_beneath,
)

A, B = ("a", "F32", [2, 2], bytes(range(16))), ("b", "BF16", [3], b"abcdef")
KNOWN = {"": "38abaa2f0d34d54427affa69b067baf8", BLAKE3: "blake3-e6f5165c3e050d53147ec0e1c7ba224c"}
"""By tag: the digest that every release finds of these."""


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


@pytest.mark.parametrize("tag", ["", BLAKE3])
def test_the_digest_follows_from_the_tensors_alone(tag, tmp_path):
    one = read_manifest(model(tmp_path / "one", (A, B)), tag=tag)
    assert one.tensors == {"a": Tensor("F32", (2, 2)), "b": Tensor("BF16", (3,))}
    assert read_manifest(model(tmp_path / "two", (B,), (A,)), tag=tag) == one
    assert one.digest == KNOWN[tag]
    changes = [("a", "F32", [2, 2], bytes(16)), ("a", "F32", [4], A[3]), ("c", *A[1:]), ("a", "I32", *A[2:])]
    digests = {
        read_manifest(model(tmp_path / str(i), (change, B)), tag=tag).digest
        for i, change in enumerate(changes)
    }
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
    live = read_manifest(model(tmp_path / "live", (A, B)))
    assert differences(live, read_manifest(model(tmp_path / "new", new))) == problem


@pytest.mark.parametrize(
    ("ours", "theirs", "problem"),
    [
        (("q.weight_scale_inv", "BF16", (2, 2)), ("q.weight_scale_inv", "F32", (2, 2)), ""),
        (("q.weight_scale", "F32", ()), ("q.weight_scale", "F32", (1,)), ""),
        (("q.weight_scale", "F32", (4, 1)), ("q.weight_scale", "F32", (1,)), "q.weight_scale has shape"),
        (("q.weight_scale", "F32", ()), ("q.weight_scale", "F8_E8M0", ()), "q.weight_scale has type F8_E8M0"),
        (("q.weight", "F8_E4M3", ()), ("q.weight", "F8_E5M2", ()), "q.weight has type F8_E5M2"),
        (
            ("q.weight", "F8_E4M3", (2,)),
            ("q.weight", "BF16", (2,)),
            "BF16, the model's has F8_E4M3: send what",
        ),
        (("q.weight", "BF16", (2,)), ("q.weight", "F8_E4M3", (2,)), "F8_E4M3, .*engine.vllm.quantization"),
        (("q.weight", "BF16", (1,)), ("q.weight", "BF16", ()), "q.weight has shape"),
        (("q.weight", "BF16", (2,)), ("q.weight", "F32", (2,)), "the model's has BF16$"),
    ],
)
def test_quantizers_may_write_a_scale_in_other_ways(ours, theirs, problem):
    """slime's has float32 for what Qwen's checkpoints have in bfloat16; all else must be the model's."""
    live, new = (Manifest({name: Tensor(dtype, shape)}, "") for name, dtype, shape in (ours, theirs))
    found = differences(live, new)
    assert re.search(problem, found) if problem else found == ""


def test_a_draft_heads_tensors_may_come_or_not(tmp_path):
    base = tmp_path / "model"
    layers = [f"model.layers.{layer}.mlp.w" for layer in (0, 1, 2)]
    names = [*layers, "mtp.fc.w", "model.visual.layers.7.w", "lm_head.w"]
    model(base, tuple((name, "BF16", [1], b"12") for name in names))
    (base / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    head = model(tmp_path / "head", (("fc.w", "BF16", [2], b"1234"), ("a.d2t", "BF16", [], b"12")))
    read = read_manifest(base)
    live = replace(read, optional=optional_tensors(base, read.tensors, str(head)))
    assert sorted(live.optional) == ["draft.a.d2t", "draft.fc.w", layers[2], "mtp.fc.w"]
    assert live.uncertain_bytes == 2 * (4 + 2 + 2 + 2)  # of a head in bfloat16 that comes as float32

    def told(*without: str, **more: Tensor) -> str:
        tensors = {name: each for name, each in read.tensors.items() if name not in without}
        return differences(live, Manifest(tensors | more, ""))

    fits = {"draft.fc.w": Tensor("F32", (2,))}
    assert [told(), told(layers[2], "mtp.fc.w"), told(**fits)] == [""] * 3
    assert "lacks tensor mtp.fc.w, and has others" in told("mtp.fc.w")
    assert "lacks tensor model.layers.1" in told(layers[1])
    assert "lacks tensor model.visual.layers.7" in told("model.visual.layers.7.w")
    assert "draft.fc.w has shape [3]" in told(**{"draft.fc.w": Tensor("F32", (3,))})
    assert "draft.fc.w has type I32" in told(**{"draft.fc.w": Tensor("I32", (2,))})
    assert "draft.other that the model lacks" in told(**{"draft.other": Tensor("F32", (2,))})
    assert "draft.fc.w that the model lacks" in differences(read, Manifest(read.tensors | fits, ""))
    for folder, kept in (("mtp", 2), ("", 2)):
        assert len(optional_tensors(base, read.tensors, folder)) == kept
    (tmp_path / "bad").mkdir()
    with pytest.raises(InvalidField, match=r"drafts\.head"):
        optional_tensors(base, read.tensors, str(tmp_path / "bad"))


def test_scales_are_counted_apart():
    """A stream has another size when its scales have another type."""
    found = {"a.weight": Tensor("F8_E4M3", (4, 6)), "a.weight_scale_inv": Tensor("BF16", (2, 3))}
    assert Manifest(found | {"b.weight_scale": Tensor("F32", ())}, "").uncertain_bytes == 2 * 6 + 4


def test_what_is_wrong_with_a_folder(tmp_path):
    good = model(tmp_path / "good", (A,), (B,))
    index = {"weight_map": {"a": "part-0.safetensors", "c": "part-9.safetensors"}}
    (good / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidField, match=r"lacks part-9\.safetensors"):
        read_manifest(good)
    with pytest.raises(InvalidField, match="two files"):
        read_manifest(model(tmp_path / "twice", (A,), (A,)))
    with pytest.raises(InvalidField, match="has no"):
        read_manifest(tmp_path / "nowhere")
    cut = model(tmp_path / "cut", (A, B)) / "part-0.safetensors"
    whole = cut.read_bytes()
    for length in (0, 7, 20, len(whole) - 1):
        cut.write_bytes(whole[:length])
        with pytest.raises(InvalidField, match=r"part-0\.safetensors"):
            read_manifest(cut.parent)
    beyond = model(tmp_path / "beyond", (A, ("b", "BF16", [3], b""))) / "part-0.safetensors"
    beyond.write_bytes(beyond.read_bytes().replace(b"[16, 16]", b"[10, 99]"))
    with pytest.raises(InvalidField):
        read_manifest(beyond.parent)


def raw(folder: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    folder.mkdir()
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + text + data)
    return folder


def entry(first: int, last: int, shape: object = None, dtype: str = "U8") -> dict[str, object]:
    return {
        "dtype": dtype,
        "shape": [last - first] if shape is None else shape,
        "data_offsets": [first, last],
    }


LIES = {
    "a length of exabytes": (b"{}", b"", 2**63),
    "a length beyond the file": (b"{}", b"", 3),
    "a length above the format's": (b"{}", b"", safetensors.MAX_HEADER_BYTES + 1),
    "not JSON": (b"{...", b"", None),
    "deep JSON": (b'{"a":' + b"[" * 100_000, b"", None),
    "no object": ([1], b"", None),
    "no entry": ({"a": 1}, b"", None),
    "beyond the end": ({"a": entry(0, 99)}, b"1234", None),
    "a negative offset": ({"a": entry(-4, 0)}, b"", None),
    "a negative size": ({"a": entry(4, 0, [0])}, b"1234", None),
    "a negative shape": ({"a": entry(0, 4, [-2, -2])}, b"1234", None),
    "a shape of another size": ({"a": entry(0, 4, [2**62, 2**62])}, b"1234", None),
    "a fraction": ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4.5]}}, b"1234", None),
    "a gap": ({"a": entry(0, 1), "b": entry(2, 4)}, b"1234", None),
    "an overlap": ({"a": entry(0, 3), "b": entry(2, 4)}, b"1234", None),
    "the same bytes for all": ({str(i): entry(0, 4) for i in range(1000)}, b"1234", None),
    "more behind it": ({"a": entry(0, 2)}, b"1234", None),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_an_error_that_names_the_file(tmp_path, lie):
    with pytest.raises(InvalidField, match=r"model\.safetensors"):
        read_manifest(raw(tmp_path / "model", *LIES[lie]))


@pytest.mark.parametrize(
    "secret", [b"hunter2\n", b"x", b'{"token": "hunter2"}', b"\x05" + bytes(7) + b"hunter2!"]
)
def test_a_link_to_another_file_tells_nothing_of_it(tmp_path, secret):
    (tmp_path / "key").write_bytes(secret)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "key")
    with pytest.raises(InvalidField) as refused:
        read_manifest(folder)
    said = str(refused.value).replace(str(tmp_path), "")
    assert "hunter" not in said
    assert str(int.from_bytes(secret[:8], "little")) not in said


def test_the_headers_of_a_folder_are_bounded_together(tmp_path, monkeypatch):
    folder = model(tmp_path / "model", *[((f"{i}", *A[1:]),) for i in range(20)])
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 600)
    with pytest.raises(InvalidField, match=r"part-\d+\.safetensors"):
        read_manifest(folder)
    monkeypatch.undo()
    monkeypatch.setattr(safetensors, "MAX_TENSORS", 10)
    with pytest.raises(InvalidField, match="more than 10 tensors"):
        read_manifest(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_only_regular_files_are_opened(tmp_path, name):
    good = model(tmp_path / "good", (A,))
    os.mkfifo(good / name)
    with pytest.raises(InvalidField, match=f"{name}, which is not a regular file"):
        read_manifest(good)
    (good / name).unlink()
    (good / name).mkdir()
    with pytest.raises(InvalidField, match=f"{name}, which is not a regular file"):
        read_manifest(good)
    (good / name).rmdir()
    (good / name).symlink_to("/dev/zero")
    with pytest.raises(InvalidField, match=f"{name}, which is not a regular file"):
        read_manifest(good)


def test_reading_stops_when_it_is_not_wanted_any_more(tmp_path):
    with pytest.raises(InvalidField, match="not needed any more"):
        read_manifest(model(tmp_path / "model", (A,)), lambda: True)


def test_a_folder_lies_beneath_the_root_once_links_are_resolved(tmp_path):
    root, outside = tmp_path / "root", model(tmp_path / "outside", (A,))
    root.mkdir()
    inside = model(root / "inside", (A,))
    (root / "link").symlink_to(outside)
    (root / "alias").symlink_to(inside)
    assert resolve_beneath(root / "alias", root) == inside.resolve()
    linked = model(root / "linked", (A,))
    (linked / "more.safetensors").symlink_to(outside / "part-0.safetensors")
    (tmp_path / "root-not").mkdir()
    for folder in (outside, root / "link", root / ".." / "outside", linked, tmp_path / "root-not"):
        with pytest.raises(InvalidField, match=r"engine\.weights_root"):
            resolve_beneath(folder, root)
    with pytest.raises(InvalidField, match=r"engine\.weights_root|cannot be read"):
        resolve_beneath(Path("/proc/self/root"), root)
