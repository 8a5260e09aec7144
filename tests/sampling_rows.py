"""Rows to sample with every parameter, logits with ties, masks and every scale, and steps of requests in slots."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from seer.common.types import SamplingParams
from seer.services.engine.vllm.sampling.rows import RECORD, RequestSampling, SamplingTable
from seer.services.engine.vllm.sampling.sampler import sample_rows
from seer.services.engine.vllm.sampling.slot_rows import accept_drafts


def pack(vocab, *, key=1, prompt_len=1, stop_ids=(), **fields):
    params = SamplingParams(max_tokens=2**20, **fields)
    return RequestSampling.pack(params, key=key, prompt_len=prompt_len, stop_ids=stop_ids, vocab=vocab)


def random_batch(rng, vocab, rows):
    requests = []
    for _ in range(rows):
        pick = lambda *options: options[rng.integers(len(options))]  # noqa: E731 - reads best here
        bias_ids = rng.integers(0, vocab, pick(0, 0, 3))
        requests.append(
            pack(
                vocab,
                key=int(rng.integers(0, 2**64 - 1, dtype=np.uint64, endpoint=True)),
                prompt_len=int(rng.integers(0, 20)),
                stop_ids=tuple(rng.integers(0, vocab + 2, 3).tolist()) if vocab > 4 else (),
                temperature=pick(1.0, 1.0, 0.0, 0.3, 0.7, 1.7, 1e-4),
                top_p=pick(1.0, 1.0, 0.95, 0.5, 1e-6, float(rng.random()) or 0.5),
                top_k=pick(0, 0, 1, 2, 50, vocab, 10**6),
                min_p=pick(0.0, 0.0, 0.05, 0.9, 1.0),
                repetition_penalty=pick(1.0, 1.0, 1.3, 0.8),
                frequency_penalty=pick(0.0, 0.0, 0.4, -0.4),
                presence_penalty=pick(0.0, 0.0, 1.1),
                min_tokens=pick(0, 0, 5, 100),
                logit_bias={int(t): float(rng.normal() * 5) for t in bias_ids},
                logprobs=pick("scaled", "raw", "processed"),
            )
        )
    return requests


def random_logits(rng, vocab, rows):
    scale = rng.choice([1e-30, 0.01, 1.0, 3.0, 20.0, 1e4, 1e9, 1e25])
    x = rng.normal(size=(rows, vocab)) * scale
    if rng.random() < 0.4:
        x = np.round(x * rng.choice([1, 4]))  # ties, and zeros of both signs
    if rng.random() < 0.3:
        x[rng.random(x.shape) < 0.3] = -np.inf
    if rng.random() < 0.3:
        x[np.arange(rows), rng.integers(0, vocab, rows)] += 15 * scale
    return torch.from_numpy(x.astype(np.float32))


class Slots:
    """Requests in the slots of model runner V2: steps as it has them on the device, and as the host would."""

    def __init__(self, rng, vocab, slots=6, length=1000, device="cpu"):
        self.rng, self.vocab, self.device = rng, vocab, device
        self.tokens = rng.integers(-1, vocab + 1, (slots, length)).astype(np.int32)
        self.history = torch.from_numpy(self.tokens).to(device).clone()
        self._alike = random_batch(rng, vocab, 1)[0] if rng.random() < 0.3 else None
        self.extras, self.prefill, self.computed, self.known = {}, {}, {}, {}

    def come(self, slot, rows, sampling=None):
        """Have a new request in a slot, one at random by default, and tell `rows` of it."""
        sampling = sampling or self._alike or random_batch(self.rng, self.vocab, 1)[0]
        (record,) = np.frombuffer(sampling.record, RECORD)
        due = int(record["prompt_len"] + record["min_tokens"])  # then stop ids are allowed
        length = int(
            self.rng.integers(20, 30) if self.rng.random() < 0.5 else max(1, due - self.rng.integers(5))
        )
        self.prefill[slot] = self.known[slot] = length
        self.computed[slot] = int(self.rng.integers(0, length))
        fault = length + int(self.rng.integers(0, 10)) if self.rng.random() < 0.3 else None
        self.extras[slot] = SimpleNamespace(sampling=sampling, fault_position=fault)
        rows.table.set(slot, self.extras[slot])

    def step(self, most, *, everyone=False):
        """Return a step's batch of some requests, with at most so many drafts each, and its rows."""
        rng = self.rng
        count = len(self.extras) if everyone else rng.integers(1, len(self.extras) + 1)
        slots = rng.permutation(list(self.extras))[:count]
        pick = lambda kept: np.array([kept[slot] for slot in slots], np.int32)  # noqa: E731 - reads best here
        computed, prefill, known = pick(self.computed), pick(self.prefill), pick(self.known)
        left = np.minimum(
            prefill - computed, rng.integers(1, 12, count)
        )  # of a prefill that may take some steps
        counts = np.where(computed < prefill, 0, rng.integers(0, most + 1, count)).astype(np.int32)
        scheduled = np.where(computed < prefill, left, counts + 1).astype(np.int32)
        ends, drafts = np.cumsum(scheduled), rng.integers(0, self.vocab, counts.sum()).astype(np.int32)
        places = np.concatenate([np.arange(each + 1) for each in counts])
        of_row = np.repeat(np.arange(count), counts + 1)
        indices = (ends - counts - 1)[of_row] + places
        ids = rng.integers(0, self.vocab, ends[-1] + 3).astype(np.int32)
        ids[indices[places > 0]] = drafts
        positions = np.repeat(computed - ends + scheduled, scheduled) + np.arange(ends[-1])
        starts = np.concatenate(([0], np.cumsum(counts + 1))).astype(np.int32)
        on = lambda array, kind: torch.from_numpy(array.astype(kind)).to(self.device)  # noqa: E731
        batch = SimpleNamespace(
            num_reqs=count, idx_mapping_np=slots, expanded_idx_mapping=on(slots[of_row], np.int64),
            expanded_local_pos=on(places, np.int32), logits_indices=on(indices, np.int64),
            positions=on(np.append(positions, [0] * 3), np.int64), input_ids=on(ids, np.int32),
            cu_num_logits=on(starts, np.int32), cu_num_logits_np=starts, prefill_len_np=prefill,
            num_draft_tokens_per_req=counts if most else None, num_scheduled_tokens=scheduled,
            num_computed_prefill_tokens_np=np.minimum(computed, prefill),
            num_computed_tokens_np=computed + np.where(computed < prefill, 0, rng.integers(0, 4, count)),
        )  # fmt: skip
        table = SamplingTable([self.extras[slot].sampling for slot in slots], slots)
        last = computed + scheduled - counts
        params = (
            table.step(last, self.tokens.copy(), counts, drafts)
            if most
            else table.step(last, self.tokens.copy())
        )
        faults = np.array(
            [-1 if self.extras[s].fault_position is None else self.extras[s].fault_position for s in slots]
        )
        params.records["key"] ^= (params.records["position"] == faults[of_row]).astype(np.uint64)
        self._gain(slots, counts, scheduled, known)
        return batch, params, counts, drafts

    def _gain(self, slots, counts, scheduled, known):
        """Have a request gain a token or more, once its prompt is computed."""
        for slot, count, new, before in zip(slots.tolist(), counts, scheduled, known, strict=True):
            if self.computed[slot] + new < self.prefill[slot]:
                self.computed[slot] += new
            else:
                self.known[slot] = before + self.rng.integers(1, count + 2)
                self.computed[slot] = self.known[slot] - 1

    def drawn(self, counts, drafts):
        """Return tokens that some drafts guess, and logprobs; some rows cannot be sampled."""
        tokens = self.rng.integers(0, self.vocab, counts.sum() + len(counts)).astype(np.int32)
        last = np.cumsum(counts + 1) - 1
        guessed = np.delete(np.arange(len(tokens)), last)
        guessed, drafts = guessed[right := self.rng.random(len(guessed)) < 0.8], drafts[right]
        tokens[guessed] = drafts
        logprobs = self.rng.normal(size=len(tokens)).astype(np.float32)
        bad = self.rng.random(len(tokens)) < 0.1
        tokens[bad], logprobs[bad] = -1, np.nan
        return torch.from_numpy(tokens), torch.from_numpy(logprobs)

    def fill(self, rows):
        """Have requests come, at least one."""
        for slot in range(len(self.tokens)):
            if self.rng.random() < (0.1 if slot in self.extras else 0.4) or not self.extras:
                self.come(slot, rows)


def check_slots(seed, kind, device="cpu", same=np.testing.assert_array_equal, steps=12):
    """Take steps with `kind` of slot rows, and assert that all is as if the host had known everything."""
    rng = np.random.default_rng(seed)
    vocab = int(rng.choice([5, 66, 300]))
    slots = Slots(rng, vocab, device=device)
    rows = kind(slots.history)
    for _ in range(steps):
        slots.fill(rows)
        batch, params, counts, drafts = slots.step(int(rng.choice([0, 3, 5])))
        logits = random_logits(rng, vocab, len(params.records))
        expected, expected_logprobs = sample_rows(logits, params)
        tokens, logprobs = rows.draw(logits.to(device), batch)
        assert tokens.tolist() == expected.tolist()
        same(logprobs.cpu().numpy(), expected_logprobs.numpy())
        tokens, logprobs = slots.drawn(counts, drafts)
        found = rows.accept(tokens.to(device), logprobs.to(device), batch)
        wanted = accept_drafts(np.maximum(tokens.numpy(), 0), logprobs.numpy(), counts, drafts)
        assert [each.dtype for each in found] == [torch.int64, torch.float32, torch.int32]
        assert found[0].tolist() == wanted[0].tolist()
        np.testing.assert_array_equal(found[1].cpu().numpy(), wanted[1].numpy())
        assert found[2].tolist() == (wanted[0] != -1).sum(dim=1).tolist()
