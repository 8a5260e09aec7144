"""Position-keyed Gumbel sampling: the specification, and its implementation in eager torch.

`native/` implements the same specification for CPUs, `triton_sampler.py` for GPUs; a token is a function of
the logits' bits and of the row's parameters, the same on every device. All arithmetic on logits and noise is
IEEE binary32, every operation rounded on its own (no fused multiply-add), constants rounded from the decimals
below; `a * b + c` is a product, rounded, then a sum.

Noise of token t, for a 64-bit key and the token's absolute position p in the sequence
(original prompt length + output index):
- word: Philox4x32-10 with key (low, high half of the key), counter (t // 4, low, high half of p, 0);
  its output word t % 4, an unsigned 32-bit w.
- v = min((f32(w) + 0.5) * 2^-32, 1 - 2^-24), the conversion rounding to nearest even.
- exponential E = -log1p(-v): LOG of 1 - v, its fraction f replaced by -v when its exponent is 0
  (1 - v would round away what a small v says).
- noise G = -LOG(E), from -2.81 to 22.87.
- LOG(x): bits = u32 of x - 0x3F3504F3 (wrapping), e = f32(bits >> 23 arithmetic),
  f = f32 from ((bits & 0x7FFFFF) + 0x3F3504F3) - 1; z = f * f; y = Horner of `LOG_POLY` in f
  (highest first), y * f, y * z, y + e * -2.12194440e-4, y - 0.5 * z, (f + y) + e * 0.693359375.
- EXP(y), y <= 0: y = max(y, -87); s = y * 1.44269504088896341 + 12582912; n = s - 12582912;
  r = y - n * 0.693359375, r - n * -2.12194440e-4; q = Horner of `EXP_POLY` in r, q * (r * r),
  q + r, q + 1; the result is q * 2^n.

Pipeline per row (order of vLLM's `v1/sample/sampler.py`), x starting as the raw logits:
1. if generated < min_tokens, x = -inf at every stop id; then x + bias. Ids outside the vocabulary
   are ignored, here and in histories.
2. penalties: tokens in prompt or output: x / repetition if x > 0 else x * repetition; tokens in the
   output, n times: x - frequency * n, then x - presence. The prompt is the original one.
3. x / temperature. Temperature 0 is greedy: no division, no noise.
4. cuts, each a value below which tokens drop (ties at it stay): keep = max(x) + log_min_p, with
   log_min_p = f32(log(min_p)) or -inf; top-k: the k-th largest x if above keep; top-p: weights
   floor(EXP(x - max(x)) * 2^30) of the tokens >= keep, as integers; the largest x at which the
   weight of the tokens >= x reaches max(1, ceil(f64(top_p) * f64(total weight))).
5. token = argmax of x + G over x >= keep, the lowest id among equals.

A row cannot be sampled when its raw logits hold a NaN or when the maximum of the raw logits or of
x after step 3 is not finite (+inf, or everything masked): token -1, logprob NaN.

Logprobs (float32 accuracy, about 1e-5, not bit for bit) are of the sampled token: `scaled`
log_softmax(raw / T), T = 0 counting as 1; `raw` log_softmax(raw); `processed` log_softmax(x) over
x >= keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from seer.services.engine.vllm.sampling.rows import RowParams

SampleFunction = Callable[[torch.Tensor, RowParams], tuple[torch.Tensor, torch.Tensor]]
"""Takes logits [rows, vocab]; returns tokens int32 [rows] and logprobs float32 [rows]."""

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_SLAB_ELEMENTS = 1 << 24
"""Most logits processed at once: a dozen temporaries of 8 bytes each stay below 2 GiB."""

LOG_POLY = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
EXP_POLY = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
)  # fmt: skip
SQRT_HALF_BITS = 0x3F3504F3
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4


def philox_words(key: torch.Tensor, position: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return the 32-bit words [rows, vocab], as int64, for int64 keys and positions [rows]."""
    counter = torch.arange(-(-vocab // 4), device=key.device).expand(len(key), -1)
    c0, c1, c2 = counter, (position & _MASK)[:, None], (position >> 32 & _MASK)[:, None]
    c3 = torch.zeros_like(c1)
    k0, k1 = (key & _MASK)[:, None], (key >> 32 & _MASK)[:, None]
    for i in range(_ROUNDS):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps in int64: the right 64 bits
        c0, c1, c2, c3 = (
            (p1 >> 32 & _MASK) ^ c1 ^ (k0 + i * 0x9E3779B9 & _MASK),
            p1 & _MASK,
            (p0 >> 32 & _MASK) ^ c3 ^ (k1 + i * 0xBB67AE85 & _MASK),
            p0 & _MASK,
        )
    return torch.stack((c0, c1, c2, c3), dim=-1).flatten(1)[:, :vocab]


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    offset = x.view(torch.int32) - SQRT_HALF_BITS
    mantissa = ((offset & 0x7FFFFF) + SQRT_HALF_BITS).view(torch.float32)
    return (offset >> 23).float(), mantissa - 1.0


def _log_split(e: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    z = f * f
    y = torch.full_like(f, LOG_POLY[0])
    for c in LOG_POLY[1:]:
        y = y * f + c
    y = y * f * z
    y = y + e * LN2_LOW
    y = y - z * 0.5
    return (f + y) + e * LN2_HIGH


def gumbel_noise(key: torch.Tensor, position: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return the float32 noise [rows, vocab] of int64 keys (their 64 bits) and positions [rows]."""
    v = (philox_words(key, position, vocab).float() + 0.5) * 2.0**-32
    v = v.clamp(max=1.0 - 2.0**-24)
    e, f = _split(1.0 - v)
    exponential = -_log_split(e, torch.where(e == 0, -v, f))
    return -_log_split(*_split(exponential))


def _exp(y: torch.Tensor) -> torch.Tensor:
    y = y.clamp(min=-87.0)
    shifted = y * 1.44269504088896341 + 12582912.0
    n = shifted - 12582912.0
    r = y - n * LN2_HIGH
    r = r - n * LN2_LOW
    q = torch.full_like(r, EXP_POLY[0])
    for c in EXP_POLY[1:]:
        q = q * r + c
    q = q * (r * r) + r
    q = q + 1.0
    return q * ((n.to(torch.int32) + 127) << 23).view(torch.float32)


class _Columns:
    """The records of the rows on the logits' device: one copy, columns [rows, 1] as views."""

    def __init__(self, params: RowParams, device: torch.device) -> None:
        fields = params.records.dtype.fields
        assert fields is not None  # noqa: S101 - a structured dtype has fields
        self._fields = fields
        words = torch.from_numpy(params.records.view(np.int64).reshape(len(params.records), -1)).to(device)
        self._views = {np.dtype(kind): words.view(as_torch) for kind, as_torch in _TORCH_TYPES.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        kind, offset = self._fields[name][:2]
        index = offset // kind.itemsize
        return self._views[kind][:, index : index + 1]


_TORCH_TYPES = {
    np.uint64: torch.int64, np.int64: torch.int64, np.float64: torch.float64,
    np.float32: torch.float32, np.int32: torch.int32,
}  # fmt: skip


def ragged_points(
    starts: np.ndarray, lengths: np.ndarray, flat: np.ndarray, vocab: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (row, token, index into flat) of every ragged entry inside the vocabulary."""
    rows = np.repeat(np.arange(len(starts)), lengths)
    index = np.arange(len(rows)) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    tokens = flat[index]
    inside = (tokens >= 0) & (tokens < vocab)
    return rows[inside], tokens[inside], index[inside]


def _mask_and_bias(x: torch.Tensor, params: RowParams) -> None:
    records, vocab = params.records, x.shape[1]
    due = records["position"] - records["prompt_len"] < records["min_tokens"]
    rows, tokens, _ = ragged_points(
        records["stop_start"], np.where(due, records["stop_len"], 0), params.stop_ids, vocab
    )
    if len(rows):
        x[torch.from_numpy(rows), torch.from_numpy(tokens).long()] = -math.inf
    rows, tokens, index = ragged_points(records["bias_start"], records["bias_len"], params.bias_ids, vocab)
    if len(rows):
        where = torch.from_numpy(rows), torch.from_numpy(tokens).long()
        x[where] = x[where] + torch.from_numpy(params.bias_values[index]).to(x.device)


def _penalise(x: torch.Tensor, params: RowParams, columns: _Columns) -> None:
    rows = np.flatnonzero(params.penalised)
    if not len(rows):
        return
    vocab = x.shape[1]
    lengths = params.records["position"][rows]
    tokens = np.full((len(rows), int(lengths.max(initial=0))), vocab, np.int64)
    for line, row in zip(tokens, rows, strict=True):
        history = params.history_of(int(row))
        line[: len(history)] = np.where((history >= 0) & (history < vocab), history, vocab)
    output = np.arange(tokens.shape[1]) >= params.records["prompt_len"][rows, None]
    index = torch.from_numpy(tokens).to(x.device)
    seen = torch.zeros((len(rows), vocab + 1), dtype=torch.int32, device=x.device)
    counts = seen.clone().scatter_add_(1, index, torch.from_numpy(output.astype(np.int32)).to(x.device))
    seen = seen.scatter_add_(1, index, torch.ones_like(index, dtype=torch.int32))[:, :vocab]
    count = counts[:, :vocab].float()
    where = torch.from_numpy(rows).to(x.device)
    repetition, frequency, presence = (columns[n][where] for n in ("repetition", "frequency", "presence"))
    part = x[where]
    repeated = torch.where(part > 0, part / repetition, part * repetition)
    part = torch.where(seen > 0, repeated, part)
    reduced = part - frequency * count
    x[where] = torch.where(count > 0, reduced - presence, part)


def _cut(x: torch.Tensor, top: torch.Tensor, params: RowParams, columns: _Columns) -> torch.Tensor:
    """Return the value [rows, 1] below which tokens drop; `top` is the maximum [rows, 1]."""
    keep = top + columns["log_min_p"]
    has_k, has_p = (params.records["top_k"] > 0).any(), (params.records["top_p"] < 1.0).any()
    if not (has_k or has_p):
        return keep
    ranked = x.sort(dim=-1, descending=True).values
    if has_k:
        k = columns["top_k"].long()
        kth = ranked.gather(1, torch.where(k > 0, k, x.shape[1]).clamp(max=x.shape[1]) - 1)
        keep = torch.maximum(keep, kth)
    if has_p:
        weight = (_exp(ranked - top) * 2.0**30).long() * (ranked >= keep)
        mass = weight.cumsum(dim=-1)
        top_p = columns["top_p"]
        needed = (top_p * mass[:, -1:].double()).ceil().long().clamp(min=1)
        index = (mass < needed).sum(dim=-1, keepdim=True).clamp(max=x.shape[1] - 1)
        keep = torch.where(top_p < 1.0, ranked.gather(1, index), keep)
    return keep


def _process(logits: torch.Tensor, params: RowParams, columns: _Columns) -> tuple[torch.Tensor, torch.Tensor]:
    x = logits.clone()
    _mask_and_bias(x, params)
    _penalise(x, params, columns)
    temperature = columns["temperature"]
    x = x / torch.where(temperature == 0, 1.0, temperature)
    top = x.amax(dim=-1, keepdim=True)
    if params.truncated:
        x = x.masked_fill(x < _cut(x, top, params, columns), -math.inf)
    return x, logits.amax(dim=-1).isfinite() & top[:, 0].isfinite()  # amax propagates NaN


def noisy_logits(logits: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (processed logits, the same plus noise, whether the row can be sampled).

    float32 [rows, vocab] twice, -inf where a token cannot be chosen, and bool [rows]. The
    token is the argmax of the second; a checker reads the gap to the runner-up there.
    """
    columns = _Columns(params, logits.device)
    x, valid = _process(logits.float(), params, columns)
    noise = gumbel_noise(columns["key"][:, 0], columns["position"][:, 0], x.shape[1])
    return x, torch.where(columns["temperature"] == 0, x, x + noise), valid


def _sample_slab(logits: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.float()
    x, noisy, valid = noisy_logits(logits, params)
    token = noisy.argmax(dim=-1, keepdim=True)
    columns = _Columns(params, logits.device)
    mode, temperature = columns["logprobs"], columns["temperature"]
    divisor = torch.where((mode == 1) | (temperature == 0), 1.0, temperature)
    shown = torch.where(mode == 2, x, logits / divisor)
    logprob = shown.log_softmax(dim=-1).gather(1, token)
    return (torch.where(valid, token[:, 0], -1).to(torch.int32), torch.where(valid, logprob[:, 0], math.nan))


def sample(logits: torch.Tensor, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens int32 [rows], logprobs float32 [rows]) of logits [rows, vocab].

    Reads nothing back from the device. Rows that cannot be sampled get token -1, logprob NaN.
    """
    step = max(1, _SLAB_ELEMENTS // logits.shape[1])
    slabs = [
        _sample_slab(logits[start : start + step], params.part(start, start + step))
        for start in range(0, len(logits), step)
    ]
    tokens, logprobs = zip(*slabs, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)
