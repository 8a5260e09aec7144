"""Whether all numbers of a tensor are finite, by its bytes.

Invariants (tests/property/test_finite.py):
- infinities and NaN of every type that safetensors knows are found, whatever their sign and payload, and
  nothing else is: denormals, zeros and the largest numbers are finite;
- no copy of the bytes is made.
"""

from __future__ import annotations

import numpy as np

_EXPONENTS = {
    "F64": (8, 0x7FF << 52), "F32": (4, 0xFF << 23), "C64": (4, 0xFF << 23), "BF16": (2, 0xFF << 7),
    "F16": (2, 0x1F << 10), "F8_E5M2": (1, 0x1F << 2), "F8_E4M3": (1, 0x7F),
}  # fmt: skip
"""By type: bytes of a number, and the least bits, sign apart, of one that is not finite."""

_SCALE = "F8_E8M0"
"""Exponents without a sign, of which the largest is NaN."""

_UNSIGNED_ZERO = ("F8_E4M3FNUZ", "F8_E5M2FNUZ")
"""Numbers without infinities, whose NaN stands where others have -0."""


def is_finite(data: bytes, dtype: str) -> bool:
    """Return whether all numbers in `data` are finite; `dtype` as in safetensors, its numbers whole.

    Among numbers of a sign, those that are not finite have the largest bits: two maxima find them.
    """
    if not data:
        return True
    if dtype == _SCALE:
        return int(np.frombuffer(data, "u1").max()) < 0xFF
    if dtype in _UNSIGNED_ZERO:
        return int(np.frombuffer(data, "i1").min()) > -128
    if dtype not in _EXPONENTS:
        return True
    size, least = _EXPONENTS[dtype]
    positive = int(np.frombuffer(data, f"<i{size}").max())
    negative = int(np.frombuffer(data, f"<u{size}").max())
    return positive < least and negative < least | 1 << (8 * size - 1)
