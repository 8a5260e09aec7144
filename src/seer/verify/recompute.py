"""`seer recompute`: generates responses again from their receipts, and says whether they are the same.

Invariants (tests/unit/test_recompute.py, tests/e2e/test_receipts.py):
- every receipt of the file has one line: equal, last-bit or different, with what differs first;
- of a receipt that was changed, or that has other weights, nothing is generated: it is different;
- what is generated is compared, and a difference of tokens judged, as `seer verify` does.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import msgspec
import numpy as np
from msgspec.structs import replace

from seer.client.results import Group, Response
from seer.common.config import Config
from seer.common.errors import NOT_DECODED, InvalidField
from seer.common.receipt import Receipt, problems
from seer.common.types import FinishReason
from seer.common.weights.digest import digest_of_folder, tag_of
from seer.rollout.files import check_weights, model_facts, receipts_of, with_length
from seer.services.engine.backend import Chunk
from seer.verify.compare import Mismatch, compare, logprob_tolerance
from seer.verify.teacher import Divergence, in_process, judged

if TYPE_CHECKING:
    from seer.services.engine.vllm.backend import VllmBackend

AT_ONCE = 256
"""Receipts that an engine is given at a time: their lines come when all of them have ended."""

Outcome = Literal["equal", "last-bit", "different"]


class Named(NamedTuple):
    """A receipt, and where it stands: `FILE:LINE GROUP#INDEX`."""

    where: str
    receipt: Receipt


class Verdict(NamedTuple):
    """What became of a receipt, and why it is not equal."""

    outcome: Outcome
    why: str = ""


def perform(file: Path, config: Config) -> int:
    """Recompute a file of receipts and print a line for each; return 1 if one is different, else 0.

    Raises `InvalidField` for a file without receipts, or a folder without weights.
    """
    if not config.shared.model:
        raise InvalidField("--model", "", "give the Hugging Face model folder that has the weights")
    receipts, counts = read(file), Counter[Outcome]()
    for each, verdict in verdicts(receipts, config):
        counts[verdict.outcome] += 1
        print(f"{each.where}: {verdict.outcome}" + (verdict.why and f": {verdict.why}"), flush=True)
    if len(receipts) > 1:
        said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("equal", "last-bit", "different"))
        print(f"{len(receipts)} receipts: {said}", file=sys.stderr)
    return int(counts["different"] > 0)


def read(file: Path) -> list[Named]:
    """Return the receipts of a file. Raises `InvalidField` naming the first line that has none."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise InvalidField("RECEIPTS", str(file), f"{error.strerror}; give a readable JSONL file") from error
    found = [
        each
        for number, line in enumerate(lines, start=1)
        if line.strip()
        for each in _read_line(line, f"{file}:{number}")
    ]
    if not found:
        raise InvalidField(
            "RECEIPTS", str(file), "holds no receipts; give what `seer rollout --receipts` wrote"
        )
    return found


def _read_line(line: bytes, where: str) -> Iterator[Named]:
    try:
        found = receipts_of(msgspec.json.decode(line))
    except (*NOT_DECODED, LookupError, TypeError) as error:
        shown = line[:60].decode(errors="replace")
        fix = f"has no receipts that can be read ({error}): `seer rollout --receipts` writes them"
        raise InvalidField(f"{where}: line", shown, fix) from error
    for receipt in found:
        receipt.sampling.check(f"{where}: sampling")
        if receipt.images:
            fix = "a receipt has only the names of images: responses to text alone can be generated again"
            raise InvalidField(f"{where}: images", len(receipt.images), fix)
        yield Named(f"{where} {receipt.group}#{receipt.index}", receipt)


def verdicts(receipts: Sequence[Named], config: Config) -> Iterator[tuple[Named, Verdict]]:
    """Yield every receipt's verdict: first of those for which no engine is needed."""
    model = Path(config.shared.model)
    facts = model_facts(model)
    check_weights(model)
    by_settings: dict[tuple[str, bool], list[Named]] = {}
    for each in receipts:
        weights = digest_of_folder(model, tag_of(each.receipt.weights_digest))
        if why := at_sight(each.receipt, weights):
            yield each, Verdict("different", why)
        else:
            versions = each.receipt.chunks[0].versions
            settings = versions.get("dtype", "auto"), versions.get("batch_invariant") == "yes"
            by_settings.setdefault(settings, []).append(each)
    for (dtype, invariant), those in by_settings.items():
        engine = config.engine
        engine = replace(
            engine, dtype=dtype if engine.dtype == "auto" else engine.dtype,
            batch_invariant=engine.batch_invariant or invariant,
        )  # fmt: skip
        longest = max(len(each.receipt.prompt_token_ids) + len(each.receipt.token_ids) for each in those)
        with in_process(with_length(replace(config, engine=engine), longest, facts)) as backend:
            left = iter(those)
            while part := list(islice(left, AT_ONCE)):
                yield from zip(part, compared([each.receipt for each in part], backend), strict=True)


def at_sight(receipt: Receipt, weights_digest: str) -> str:
    """Return what of a receipt differs that no engine is needed for; empty: nothing."""
    found = []
    if receipt.weights_digest != weights_digest:
        its = receipt.weights_digest or "unknown"
        found.append(f"the weights differ: the receipt's are {its}, the folder's {weights_digest}")
    if changed := problems(receipt):
        found.append(f"changed after it was made: {', '.join(changed)}")
    return "; ".join(found)


def compared(receipts: Sequence[Receipt], backend: VllmBackend) -> Iterator[Verdict]:
    """Generate responses again, and yield how each differs from its receipt."""
    tolerance = logprob_tolerance(backend.versions)
    for receipt, ours in zip(receipts, generated(receipts, backend), strict=True):
        if isinstance(ours, str):
            yield Verdict("different", f"it cannot be generated: {ours}")
            continue
        theirs = _response(receipt.token_ids, receipt.logprobs, receipt.finish_reason, receipt.stop_reason)
        prompt = np.array(receipt.prompt_token_ids, np.int32)
        again, told = [[Group(receipt.group, prompt, {}, 0, "", (each,), 0, 0, 0)] for each in (ours, theirs)]
        mismatches = compare(again, told, receipt.sampling.temperature, tolerance).mismatches
        cases = [Divergence(each, ours, theirs, receipt.prompt_token_ids) for each in mismatches]
        yield worst([_judged(each, receipt, tolerance, backend) for each in cases])


def _judged(case: Divergence, receipt: Receipt, tolerance: float, backend: VllmBackend) -> Mismatch:
    if case.mismatch.kind != "token" or int(case.mismatch.found) >= backend.core.vocab_size:
        return case.mismatch
    dtype = backend.versions["dtype"]
    return judged(case, receipt.sampling, dtype, tolerance, backend, int(receipt.key, 16))


def worst(mismatches: Sequence[Mismatch]) -> Verdict:
    """Return the verdict that follows from judged differences, with the first that decides it."""
    if not mismatches:
        return Verdict("equal")
    bugs = [each for each in mismatches if each.verdict != "numeric"]
    first = min(bugs or mismatches, key=lambda each: (each.kind != "token", each.position))
    what = "the end" if first.kind == "finish" else f"{first.kind} {first.position}"
    why = f"{what} is {first.found}, and {first.reference} when generated again"
    if first.gap is not None:
        why += f"; an error of {first.gap:.2e} in the logits would explain it, {first.error:.2e} was measured"
    return Verdict("different" if bugs else "last-bit", why)


def generated(receipts: Sequence[Receipt], backend: VllmBackend) -> list[Response | str]:
    """Generate as many tokens as each receipt has; in place of a response, why it cannot be generated."""
    tokens: list[list[int]] = [[] for _ in receipts]
    logprobs: list[list[float]] = [[] for _ in receipts]
    ends: dict[int, tuple[str, str]] = {}
    failed: dict[int, str] = {}
    for place, receipt in enumerate(receipts):
        try:
            backend.add(_chunk(str(place), receipt))
        except InvalidField as error:
            failed[place] = str(error)
    while backend.has_work():
        output = backend.step()
        for part in output.generated:
            tokens[int(part.request_id)] += part.token_ids
            logprobs[int(part.request_id)] += part.logprobs
        ends |= {int(end.request_id): (end.finish, end.stop_reason) for end in output.ended}
        failed |= {int(failure.request_id): str(failure.error) for failure in output.failed}
    return [
        failed.get(place) or _response(tokens[place], logprobs[place], *ends[place])
        for place in range(len(receipts))
    ]


def _chunk(name: str, receipt: Receipt) -> Chunk:
    alone = replace(receipt.sampling, routed_experts_from=None, top_logprobs=None, prompt_logprobs=None)
    return Chunk(
        request_id=name, group_id="", attempt=0, key=int(receipt.key, 16), sampling=alone,
        prompt_len=len(receipt.prompt_token_ids), tokens=receipt.prompt_token_ids,
        max_new_tokens=len(receipt.token_ids),
    )  # fmt: skip


def _response(tokens: list[int], logprobs: list[float], finish: str, reason: str) -> Response:
    """Return a response; one that is generated and would go on has no finish reason: not the receipt's."""
    arrays = np.array(tokens, np.int32), np.array(logprobs, np.float32)
    return Response(0, *arrays, None, cast("FinishReason", finish), reason)
