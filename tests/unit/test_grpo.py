"""The parts of the GRPO example: advantages, batches, loss, step, checkpoint, prompts, picture."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "matplotlib")):
    pytest.skip("needs the engine extra and matplotlib", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[2] / "examples" / "grpo"))

import checkpoint
import curves
import problems
import torch
import train
from learner import CLIP, ROUNDING, Learner, Sample, advantages, batches, pad, shown, token_loss

from seer.client import Unreachable
from seer.integrations.replayed_routing import padded_experts, replayed_routing

MODEL = problems.MODEL
MIXTURE = MODEL.parent / "mixture"


def sample(ids: list[int], prompt: int, advantage: float = 1.0, logprob: float = -0.5) -> Sample:
    logprobs = np.full(len(ids) - prompt, logprob, dtype=np.float32)
    return Sample(np.array(ids, dtype=np.int32), logprobs, advantage)


def test_what_a_tool_said_carries_no_loss() -> None:
    said = np.array([True, False, False, True])
    given = dataclasses.replace(sample([1, 5, 6, 7, 8], 1), loss_mask=said)
    assert given.tokens == 2
    assert pad([given, sample([1, 5, 6], 1)])["mask"].tolist() == [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0]]


def test_a_step_on_a_mixture_sends_tokens_where_the_engines_sent_them() -> None:
    """By the engines' experts, the trainer's logprobs are theirs; by its own, where these differ, they are not."""
    ids, given = (
        [1, 5, 6, 7, 8, 9],
        np.array([[[0, 1]] * 4, [[1, 2]] * 4, [[2, 3]] * 4, [[3, 0]] * 4, [[1, 3]] * 4]),
    )
    plain = Learner(MIXTURE)
    with replayed_routing(plain.model, padded_experts([given], len(ids))):
        engine = plain._logprobs(torch.tensor([ids]))[0].detach().numpy()
    sampled = Sample(np.array(ids, np.int32), engine[1:], 1.0)
    own = plain.step([sampled], 1e-3)
    replayed = Learner(MIXTURE).step([dataclasses.replace(sampled, experts=given)], 1e-3)
    assert replayed.gap < 1e-6 < own.gap
    assert replayed.kl < 1e-9 < own.kl


def weights(learner: Learner) -> list[torch.Tensor]:
    return [each.detach().clone() for each in learner.model.parameters()]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_advantages_are_standard_scores_within_the_group() -> None:
    assert advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([3**0.5, *[-(3**-0.5)] * 3])
    assert advantages([1.0, 1.0]) == [0.0, 0.0]


def test_batches_hold_every_sample_once_and_respect_the_bound() -> None:
    sizes = [int(size) for size in np.random.default_rng(1).integers(2, 60, 50)]
    samples = [sample([1] * size, 1) for size in [*sizes, 200]]
    made = list(batches(samples, 128))
    assert sorted(id(each) for batch in made for each in batch) == sorted(map(id, samples))
    padded = [len(batch) * max(each.token_ids.size for each in batch) for batch in made]
    assert padded[0] == 200  # one that is longer than the bound runs alone
    assert max(padded[1:]) <= 128
    assert len(made) < len(samples) / 2


def test_padding_and_prompts_carry_no_loss() -> None:
    padded = pad([sample([5, 6, 7, 8, 9], 2, 2.0, -0.1), sample([5, 6, 7], 1, -1.0, -0.2)])
    assert padded["ids"].tolist() == [[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]]
    assert padded["mask"].tolist() == [[0, 1, 1, 1], [1, 1, 0, 0]]  # of tokens 1 to 4
    assert torch.equal(padded["logprobs"] != 0, padded["mask"] == 1)
    assert padded["advantages"].tolist() == [[2.0] * 4, [-1.0] * 4]


def gradient(logprobs: list[float], engine: list[float], advantage: list[float]) -> torch.Tensor:
    given = torch.tensor(logprobs, requires_grad=True)
    token_loss(given, torch.tensor(engine), torch.tensor(advantage)).sum().backward()
    assert given.grad is not None
    return given.grad


def test_on_policy_the_gradient_is_the_advantage_and_rounding_does_not_reach_it() -> None:
    exact = gradient([-1.0, -2.0], [-1.0, -2.0], [0.7, -1.3])
    assert exact.tolist() == pytest.approx([-0.7, 1.3])
    rounded = gradient([-1.0, -2.0], [-1.0 + ROUNDING / 2, -2.0 - ROUNDING / 2], [0.7, -1.3])
    assert torch.equal(exact, rounded)


def test_a_token_of_other_weights_is_corrected_and_clipped() -> None:
    apart = 0.1
    inside = gradient([-1.0], [-1.0 - apart], [1.0])
    assert inside.item() == pytest.approx(-np.exp(apart))
    far = 2 * CLIP
    assert gradient([-1.0], [-1.0 - far], [1.0]).item() == 0  # already likelier than clipping allows
    assert gradient([-1.0], [-1.0 - far], [-1.0]).item() == pytest.approx(np.exp(far))


@pytest.fixture(scope="module")
def rollout() -> list[Sample]:
    """Two texts of the shipped model's vocabulary, one good and one bad, with exact logprobs."""
    rng = np.random.default_rng(0)
    learner = Learner(MODEL)
    made = []
    for length, advantage in ((40, 1.0), (25, -1.0), (30, 0.0)):
        ids = rng.integers(4, 60, length).astype(np.int32)
        with torch.no_grad():
            logprobs = learner._logprobs(torch.tensor(ids[None], dtype=torch.long))[0, 4:]
        made.append(Sample(ids, logprobs.numpy(), advantage))
    return made


def test_a_step_makes_good_responses_likelier_and_reports_what_it_saw(rollout: list[Sample]) -> None:
    learner = Learner(MODEL)
    stats = learner.step(rollout, 1e-3)
    assert stats.samples == 2
    assert stats.gap < 1e-5
    assert stats.corrected == 0
    assert stats.gradient_norm > 0
    after = []
    for each in rollout[:2]:
        with torch.no_grad():
            logprobs = learner._logprobs(torch.tensor(each.token_ids[None], dtype=torch.long))[0, 4:]
        after.append(logprobs.mean().item() - each.logprobs.mean())
    assert after[0] > 0 > after[1]


def test_a_step_repeats_to_the_bit_whatever_the_engines_rounding(rollout: list[Sample]) -> None:
    made = []
    for noise in (0.0, 0.0, 1e-5):
        learner = Learner(MODEL)
        learner.step(
            [dataclasses.replace(each, logprobs=each.logprobs + np.float32(noise)) for each in rollout], 1e-3
        )
        made.append(weights(learner))
    assert equal(made[0], made[1])
    assert equal(made[0], made[2])
    assert not equal(made[0], weights(Learner(MODEL)))


def test_a_rollout_without_advantages_leaves_the_weights_alone(rollout: list[Sample]) -> None:
    learner = Learner(MODEL)
    learner.step(rollout, 1e-3)  # its momentum would move them
    before = weights(learner)
    stats = learner.step([dataclasses.replace(each, advantage=0.0) for each in rollout], 1e-3)
    assert stats.samples == 0
    assert equal(before, weights(learner))


def test_a_checkpoint_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "run" / "checkpoint.pt"
    assert checkpoint.load(file) is None
    checkpoint.save(file, {"rows": [{"reward": 0.5}], "model": {"w": torch.ones(3)}})

    def stopped(opened: Any) -> None:
        opened.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.write_whole(file, stopped)
    state = checkpoint.load(file)
    assert state is not None
    assert state["rows"] == [{"reward": 0.5}]
    assert torch.equal(state["model"]["w"], torch.ones(3))
    checkpoint.save(file, {"rows": []})
    assert checkpoint.load(file) == {"rows": []}
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"checkpoint\.pt is not a checkpoint"):
        checkpoint.load(file)


def test_a_run_of_other_settings_is_not_continued(tmp_path: Path) -> None:
    settings = train.Settings(model="digest", held_out=2)
    trainer = train.Trainer(settings, problems, MODEL, tmp_path)
    trainer.rows.append({"iteration": 0})
    trainer._save()
    assert train.Trainer(settings, problems, MODEL, tmp_path).rows == [{"iteration": 0}]
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"iteration": 0}
    with pytest.raises(ValueError, match=r"has seed 0, not 1: give that, or another --out"):
        train.Trainer(dataclasses.replace(settings, seed=1), problems, MODEL, tmp_path)


@pytest.mark.parametrize("ahead", [True, False])
async def test_it_names_what_it_will_submit_before_it_trains_and_goes_on_if_it_cannot(
    ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[Any] = []
    submitted: list[Any] = []

    class Client:
        async def submit(self, prompts: Any, **asked: Any) -> Any:
            submitted.append((prompts, asked))
            raise Unreachable("this test has no engines")

        async def next_prompts(self, prompts: Any, *, timeout_seconds: float, **asked: Any) -> None:
            named.append((prompts, asked))
            raise Unreachable("a buffer of an earlier release")

    async def brought(*_: Any) -> SimpleNamespace:
        return SimpleNamespace(quarantined={})

    async def rolled(*_: Any) -> Any:
        return [], None, 0.0

    def step(*_: Any) -> None:
        assert len(named) == ahead
        raise ZeroDivisionError

    settings = train.Settings("digest", seed=5, held_out=2)
    trainer, client = train.Trainer(settings, problems, MODEL, tmp_path, ahead=ahead), Client()
    with pytest.raises(Unreachable):
        await trainer._roll(client, 4, problems.training_prompts(5, 4, 24, trainer._held_out), 16)
    monkeypatch.setattr(train, "bring", brought)
    monkeypatch.setattr(trainer, "_roll", rolled)
    monkeypatch.setattr(trainer.learner, "step", step)
    with pytest.raises(ZeroDivisionError):
        await trainer._iterate(client, 3)
    assert named == submitted * ahead


def test_prompts_follow_from_seed_and_iteration_and_hold_nothing_out_twice() -> None:
    held_out = problems.held_out_prompts(256)
    drawn = [problems.training_prompts(0, iteration, 16, held_out) for iteration in range(20)]
    assert drawn[3] == problems.training_prompts(0, 3, 16, held_out)
    assert drawn[3] != problems.training_prompts(1, 3, 16, held_out)
    kept = {prompt.text for prompt in held_out}
    assert not any(prompt.text in kept for prompts in drawn for prompt in prompts)
    assert all(len({prompt.text for prompt in prompts}) == 16 for prompts in drawn)
    with pytest.raises(ValueError, match="--held-out 0: give 1 to 256"):
        problems.held_out_prompts(0)


AGENTS = {"iteration", "reward", "held_out", "mixed_groups", "gap", "seconds"}
"""What rows of agents have."""


def row(iteration: int) -> dict[str, Any]:
    numbers = ("reward", "held_out", "mixed_groups", "length_mean", "length_max", "tokens_per_second")
    numbers += ("tail_seconds", "reward_overlap", "reward_seconds", "gap")
    seconds = dict.fromkeys(curves.PHASES, 1.0)
    return {"iteration": iteration, **dict.fromkeys(numbers, iteration / 10), "seconds": seconds}


def test_the_summary_compares_the_first_with_the_last_iterations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(iteration) for iteration in range(10)]
    figures = curves.figures(rows)
    assert figures["held_out"] == pytest.approx([0.2, 0.7])
    assert figures["total_seconds"] == 40
    assert "held-out 0.300" in curves.line(rows[3], 10)
    for runs in ({"": rows}, {"seed-0": rows, "seed-1": rows[:4]}):
        curves.draw(runs, tmp_path / "curves.png")
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "curves.png").unlink()
    curves.report(rows, tmp_path / "curves.png")
    assert "0.200 → 0.700" in capsys.readouterr().out
    fewer = [{name: each for name, each in one.items() if name in AGENTS} for one in rows]
    curves.report(fewer, tmp_path / "curves.png", {"with no answer": "0.05"})
    said = capsys.readouterr().out
    assert "0.200 → 0.700" in said
    assert "0.05" in said
    assert "tokens/s" not in said


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="needs the extra images")
def test_images_of_a_batch_belong_to_their_rows() -> None:
    """Padded together, with images of several sizes, samples have the logprobs that each has alone."""
    import problems_images

    learner = Learner(problems_images.MODEL)
    placeholder = learner.model.config.image_token_id
    rng = np.random.default_rng(0)
    made = []
    for prompt in problems_images.training_prompts(0, 0, 4, []):
        response = rng.integers(4, 60, int(rng.integers(5, 30)))
        ids = np.concatenate([prompt.token_ids, response]).astype(np.int32)
        images: Any = prompt.metadata["images"]
        made.append(Sample(ids, np.zeros(response.size, np.float32), 1.0, images=images))
    assert len({each.images["pixel_values"].shape for each in made}) > 1
    (batch,) = batches(made, 10_000)
    assert len(batch) == 4

    def logprobs(some: list[Sample]) -> list[torch.Tensor]:
        with torch.no_grad():
            ids = pad(some)["ids"]
            rows = learner._logprobs(ids, shown(some, ids, placeholder))
        return [row[: each.token_ids.size - 1] for row, each in zip(rows, some, strict=True)]

    for row, each in zip(logprobs(batch), batch, strict=True):
        torch.testing.assert_close(row, logprobs([each])[0], rtol=0, atol=1e-4)
    swapped = [dataclasses.replace(each, images=made[0].images) for each in made[:2]]
    swapped[1] = dataclasses.replace(swapped[1], token_ids=swapped[0].token_ids, logprobs=swapped[0].logprobs)
    other = [swapped[0], dataclasses.replace(swapped[1], images=_inverted(made[0].images))]
    assert not torch.allclose(*logprobs(other)), "the image is looked at"


def _inverted(images: Any) -> Any:
    return {**images, "pixel_values": -images["pixel_values"].flip(0)}
