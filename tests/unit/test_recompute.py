"""What `seer recompute` decides without an engine: files of receipts, weights, and what differences mean."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from unit.test_receipt import WHOLE

from seer.cli.main import main
from seer.client.results import Group, Response
from seer.common.config import Config, SharedConfig
from seer.common.errors import InvalidField
from seer.common.receipt import Receipt, sealed
from seer.common.weights.digest import BLAKE3, digest_of_folder
from seer.rollout.files import encode_group
from seer.verify import recompute
from seer.verify.compare import Mismatch
from seer.verify.recompute import Named, Verdict, at_sight, read, verdicts, worst

PLAIN = sealed(msgspec.structs.replace(WHOLE, images=[]))


def line(receipt: Receipt = PLAIN) -> bytes:
    """What `seer rollout --receipts` writes."""
    response = Response(
        receipt.index, np.array(receipt.token_ids, np.int32), np.array(receipt.logprobs, np.float32), "text",
        receipt.finish_reason, receipt.stop_reason, receipt=receipt,
    )  # fmt: skip
    prompt = np.array(receipt.prompt_token_ids, np.int32)
    return encode_group(Group(receipt.group, prompt, {}, 1, receipt.weights_digest, (response,), 2, 1, 0))


def written(folder: Path, *lines: bytes) -> Path:
    file = folder / "receipts.jsonl"
    file.write_bytes(b"\n".join(lines))
    return file


def test_a_receipt_is_read_from_a_line_of_responses_or_alone(tmp_path):
    file = written(tmp_path, line(), msgspec.json.encode(PLAIN))
    assert [each.receipt for each in read(file)] == [PLAIN, PLAIN]
    assert [each.where for each in read(file)] == [f"{file}:1 p1#2", f"{file}:3 p1#2"]


CHANGES = {
    "id": (lambda group: group.update(id="p9"), "group"),
    "prompt": (lambda group: group["prompt_token_ids"].append(3), "prompt_token_ids"),
    "index": (lambda group: group["responses"][0].update(index=0), "index"),
    "token": (lambda group: group["responses"][0]["token_ids"].__setitem__(4, 9), "token_ids[3:5]"),
    "logprob": (lambda group: group["responses"][0]["logprobs"].__setitem__(0, -1.0), "logprobs[0:3]"),
    "finish": (lambda group: group["responses"][0].update(finish_reason="length"), "finish_reason"),
    "seed": (lambda group: group["responses"][0]["receipt"].update(seed=1), "seed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_in_a_line_of_responses_is_named(change, tmp_path):
    edit, name = CHANGES[change]
    group = json.loads(line())
    edit(group)
    (found,) = read(written(tmp_path, json.dumps(group).encode()))
    assert name in at_sight(found.receipt, PLAIN.weights_digest)
    assert at_sight(PLAIN, PLAIN.weights_digest) == ""


def test_other_weights_are_said_first():
    assert at_sight(PLAIN, "0" * 32).startswith(
        f"the weights differ: the receipt's are {PLAIN.weights_digest}, "
    )
    unknown = sealed(msgspec.structs.replace(PLAIN, weights_digest=""))
    assert "the receipt's are unknown" in at_sight(unknown, "0" * 32)


def test_the_folder_s_weights_are_digested_as_a_receipt_s_digest_was(monkeypatch):
    model = Path(__file__).parents[2] / "examples" / "countdown" / "model"
    monkeypatch.setattr(recompute, "in_process", lambda _: nullcontext())
    monkeypatch.setattr(recompute, "compared", lambda part, _: [Verdict("equal") for _ in part])
    digests = [digest_of_folder(model, tag) for tag in ("", BLAKE3)]
    made = [sealed(msgspec.structs.replace(PLAIN, weights_digest=each)) for each in (*digests, f"{BLAKE3}0")]
    found = verdicts([Named("", each) for each in made], Config(shared=SharedConfig(model=str(model))))
    outcomes = {each.receipt.weights_digest: verdict.outcome for each, verdict in found}
    assert outcomes == {digests[0]: "equal", digests[1]: "equal", f"{BLAKE3}0": "different"}


BARE = json.loads(msgspec.json.encode(PLAIN))
NOT_RECEIPTS = {
    "no JSON": (b"{", "line"),
    "no object": (b"[1]", "line"),
    "a response without a receipt": (json.dumps({**json.loads(line()), "responses": [{}]}).encode(), "'receipt'"),
    "a field left out": (json.dumps({k: v for k, v in BARE.items() if k != "seed"}).encode(), "`seed`"),
    "a token below zero": (json.dumps({**BARE, "token_ids": [-1]}).encode(), "token_ids"),
    "a seed too large": (json.dumps({**BARE, "seed": 2**63}).encode(), "seed"),
    "sampling out of bounds": (
        json.dumps({**BARE, "sampling": {**BARE["sampling"], "top_p": 2}}).encode(), "sampling.top_p"
    ),
    "images": (msgspec.json.encode(WHOLE), "images"),
    "nothing": (b"\n", "holds no receipts"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_RECEIPTS)
def test_what_is_no_receipt_is_refused_by_name(case, tmp_path):
    text, name = NOT_RECEIPTS[case]
    with pytest.raises(InvalidField, match="receipts") as refused:
        read(written(tmp_path, text))
    assert name in str(refused.value)


def test_the_command_refuses_bad_input_by_name(tmp_path):
    file = written(tmp_path, line())
    missing = CliRunner().invoke(main, ["recompute", str(file)])
    assert missing.exit_code == 2
    assert "--model" in missing.output
    absent = CliRunner().invoke(main, ["recompute", str(tmp_path / "none"), "--model", str(tmp_path)])
    assert absent.exit_code == 2
    assert "RECEIPTS" in absent.output


def mismatch(verdict="bug", position=4, kind="token", **fields) -> Mismatch:
    return Mismatch(
        kind=kind, prompt_id="p", index=0, position=position, reference=7, found=9, verdict=verdict, **fields
    )


def test_the_first_difference_that_decides_is_named():
    assert worst([]) == ("equal", "")
    assert worst([mismatch()]) == ("different", "token 4 is 9, and 7 when generated again")
    outcome, why = worst([mismatch("numeric", 2, gap=1e-6, error=3e-6)])
    assert outcome == "last-bit"
    assert why.startswith("token 2 is 9, and 7 when generated again; an error of 1.00e-06 ")
    outcome, why = worst([mismatch("numeric", 9, gap=1e-6, error=3e-6), mismatch(kind="logprob", position=3)])
    assert (outcome, why.partition(" is ")[0]) == ("different", "logprob 3")
    assert worst([mismatch(kind="finish")])[1].startswith("the end is 9")
