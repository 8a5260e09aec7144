"""What is not finite is found, in every type, wherever it stands."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer.common.weights.finite import is_finite
from seer.common.weights.safetensors import BITS

torch = pytest.importorskip("torch")
st_torch = pytest.importorskip("safetensors.torch")

FLOATS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
}  # fmt: skip


def by_torch(data, dtype):
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
    return bool(torch.isfinite(values.to(torch.float64) if values.element_size() == 1 else values).all())


@pytest.mark.parametrize("dtype", [dtype for dtype in FLOATS if BITS[dtype] <= 16])
def test_every_number_of_one_or_two_bytes_is_judged_as_torch_judges_it(dtype):
    size = BITS[dtype] // 8
    for bits in range(2 ** BITS[dtype]):
        data = bits.to_bytes(size, "little")
        assert is_finite(data, dtype) == (bits not in _not_finite(dtype)), (dtype, hex(bits))


def _not_finite(dtype, known={}):  # noqa: B006 - computed once
    if dtype not in known:
        size = BITS[dtype] // 8
        every = np.arange(2 ** BITS[dtype], dtype=f"<u{size}")
        values = torch.from_numpy(every.view("u1").copy()).view(FLOATS[dtype]).to(torch.float64)
        known[dtype] = set(torch.nonzero(~torch.isfinite(values)).flatten().tolist())
    return known[dtype]


@given(st.sampled_from(["F64", "F32", "F16", "BF16"]), st.binary(min_size=8, max_size=64))
def test_any_bytes_are_judged_as_torch_judges_them(dtype, data):
    data = data[: len(data) // 8 * 8]
    assert is_finite(data, dtype) == by_torch(data, FLOATS[dtype])


@given(
    st.sampled_from(["F64", "F32", "F16"]),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), -float("nan")]),
    st.integers(0, 999),
)
def test_one_among_many_is_found(dtype, bad, place):
    kind = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]
    values = np.linspace(-6e4, 6e4, 1000).astype(kind)
    assert is_finite(values.tobytes(), dtype)
    values[place] = bad
    assert not is_finite(values.tobytes(), dtype)


def test_every_type_of_safetensors_is_known_with_its_size():
    names = dict(zip(st_torch._TYPES.values(), st_torch._TYPES, strict=True))
    assert BITS.items() >= {name: 8 * dtype.itemsize for dtype, name in names.items()}.items()
    assert {name for dtype, name in names.items() if dtype.is_floating_point} <= FLOATS.keys()


def test_integers_and_nothing_are_finite_and_complex_numbers_are_pairs():
    for dtype in BITS.keys() - FLOATS.keys() - {"C64"}:
        assert is_finite(b"\xff" * 16, dtype)
    assert all(is_finite(b"", dtype) for dtype in BITS)
    assert not is_finite(np.array([1 + 1j, complex(0, float("nan"))], "<c8").tobytes(), "C64")
    assert is_finite(np.array([1 + 1j, -1e38j], "<c8").tobytes(), "C64")
