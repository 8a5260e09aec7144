"""What tokens tell of lengths (bench/scheduling/evidence.py): features, and evaluations whose answer is known."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
    pytest.skip("needs the engine extra", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[2] / "bench" / "scheduling"))

import torch
from evidence import Recomputed, Seen, Signals, beside, evaluation, features, repeats, seen
from foreseeable import ceiling
from lib.held_out import centred, correlations, held_out

MODEL = Path(__file__).parents[2] / "examples" / "countdown" / "model"
GROUPS, EACH = 300, 8
GROUP = np.repeat(np.arange(GROUPS), EACH)
LEAST = 0.95
"""Of a correlation that nothing blurs."""


def figure(text: str) -> tuple[float, float, float]:
    """Return a figure and its interval as numbers."""
    middle, low, _, high = text.replace("(", "").replace(")", "").split()
    return float(middle), float(low), float(high)


def noise(seed: int, *more: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((GROUPS * EACH, *more))


def made_up(signal: float) -> Seen:
    """Log lengths of a group's and an own part; `end` knows the own part so well, `loops` only the group."""
    own, between = noise(1), np.repeat(np.random.default_rng(2).standard_normal(GROUPS), EACH)
    tells = signal * own + np.sqrt(1 - signal**2) * noise(3)
    named = [{"end": x, "loops": y, "markers": z} for x, y, z in zip(tells, between, noise(4), strict=True)]
    left = 5 + between + own
    siblings = np.stack([between, between, between], axis=1)
    return Seen(GROUP, left, left, siblings, named, noise(5, 3))


def test_repeats_is_the_share_of_n_grams_that_were_there_before():
    assert repeats([1, 2, 3, 4], 2) == 0
    assert repeats([1, 2, 1, 2, 1], 2) == 0.5
    assert repeats([1], 2) == 0


def test_features_look_at_the_last_tokens_and_at_no_later_ones():
    at = 100
    end = np.zeros(200)
    end[at - 16 : at] = 2.0
    end[at:] = 99.0  # after the point
    signals = Signals(end, np.ones(200), np.arange(200.0), np.zeros((200, 2)))
    tokens = [*range(1000, 1000 + at - 3), 7, 7, 8]
    found = features(tokens, signals, {"seven": 7, "none": 6})
    assert found["end 16"] == 2.0
    assert found["end 64"] == 0.5
    assert found["end slope"] == 1.5
    assert found["entropy 16"] == 1.0
    assert found["entropy said 16"] == np.mean(range(84, 100))
    assert found["markers seven, share"] == 2 / 64
    assert found["markers seven, count"] == pytest.approx(np.log(3))
    assert found["markers seven, ago"] == pytest.approx(np.log(2))
    assert found["markers none, ago"] == pytest.approx(np.log(1 + at))


def test_siblings_are_the_others():
    mean, share, left = beside(np.array([1000, 10, 30]), 0, 20)
    assert mean == pytest.approx(np.log([10, 30]).mean())
    assert share == 0.5
    assert left == pytest.approx(np.log(10))
    assert beside(np.array([30, 10]), 0, 20)[1:] == [0, 0]


def test_a_known_signal_is_found_beside_what_tells_only_the_group():
    found = evaluation(made_up(0.6))
    middle, low, high = figure(found["tokens"]["end"])
    assert low < 0.6 < high
    assert high - low < 0.1
    assert middle == pytest.approx(0.6, abs=0.05)
    assert figure(found["length"]["all"])[0] == pytest.approx(0.6, abs=0.05)
    for kind in ("loops", "markers", "hidden"):
        assert abs(figure(found["tokens"][kind])[0]) < 0.1, kind
    alone, both = (figure(found["siblings"][name])[0] for name in ("alone", "with all"))
    assert alone == pytest.approx(np.sqrt(1 / 2), abs=0.05), "the group has half of the variance"
    assert both == pytest.approx(np.sqrt((1 + 0.36) / 2), abs=0.05), "and of the other half the signal 0.36"
    assert figure(found["gain"]["all"])[1] > 0
    _, low, high = figure(found["gain"]["hidden"])
    assert low - 0.01 < 0 < high + 0.01


def test_no_regression_sees_the_prompts_that_it_predicts():
    by_group = np.repeat(np.random.default_rng(6).standard_normal(GROUPS), EACH)
    names = np.eye(GROUPS)[GROUP]  # with these, who has seen a prompt knows its value
    assert correlations([by_group], by_group, GROUP)[0, 0] > LEAST
    assert abs(correlations([held_out(names, by_group, GROUP, [1.0])], by_group, GROUP)[0, 0]) < 0.2


def test_an_interval_is_over_prompts_not_over_responses():
    value = np.repeat(np.random.default_rng(7).standard_normal(GROUPS), EACH)
    tells = 0.5 * value + np.repeat(np.random.default_rng(8).standard_normal(GROUPS), EACH)
    draws = correlations([tells], value, GROUP)[0, 1:]
    few = correlations([tells[::EACH]], value[::EACH], np.arange(GROUPS))[0, 1:]
    assert draws.std() == pytest.approx(few.std(), rel=0.1), "copies of a response make nothing surer"


def test_centred_takes_each_groups_mean_away():
    values = np.array([[1.0, 5], [3, 5], [7, 1]])
    assert centred(values, np.array([4, 4, 9])).tolist() == [[-1, 0], [1, 0], [0, 0]]


def test_the_ceiling_is_what_beginnings_share_however_often_they_go_on():
    draw, point = np.random.default_rng(9), 64
    begins, own = draw.standard_normal((GROUPS, EACH)), draw.standard_normal((GROUPS, EACH))
    lengths = (
        np.exp(5 + 0.6 * begins + 0.8 * own).round().astype(int)
    )  # of the variance 0.36 is the beginning's
    for times in (2, 16):
        others = np.exp(5 + 0.6 * begins[..., None] + 0.8 * draw.standard_normal((GROUPS, EACH, times)))
        groups = [
            {"id": f"{g}", "responses": [{"token_ids": [5] * (point + length)} for length in each]}
            for g, each in enumerate(lengths)
        ]
        again = [
            {
                "id": f"{g}#{i}",
                "responses": [{"token_ids": [5] * length} for length in others[g, i].astype(int)],
            }
            for g in range(GROUPS)
            for i in range(EACH)
        ]
        found = ceiling(groups, again, point, ())
        _, low, high = figure(found["left"])
        assert found["responses"] == GROUPS * EACH
        assert low < 0.6 < high, times
        assert high - low < 0.15
        assert ceiling(groups[:9], again[: 8 * EACH], point, ())["responses"] == 8 * EACH


class Fake:
    """A model for which nothing differs."""

    def signals(self, prompt, responses, images):
        return [
            Signals(*(np.zeros(len(each)) for _ in range(3)), np.zeros((len(each), 2))) for each in responses
        ]


def test_who_runs_at_a_point():
    lengths = {"a": [4, 8, 9], "b": [8, 2, 2]}
    groups = [
        {"id": name, "prompt_token_ids": [1], "responses": [{"token_ids": list(range(n))} for n in each]}
        for name, each in lengths.items()
    ]
    first, second = seen(groups, {}, Fake(), [4, 8], {})
    assert first.group.tolist() == [0, 0, 1]
    assert np.exp(first.left).round().tolist() == [4, 5, 4]
    assert np.exp(first.length).round().tolist() == [8, 9, 8]
    assert second.group.tolist() == [0]
    groups[0]["responses"][1]["token_ids"][2] = 77
    first, second = seen(groups, {}, Fake(), [4, 8], {}, until={77})
    assert np.exp(first.length).round().tolist() == [9, 8], "the one that has said it is left out"
    assert second.group.tolist() == [0]


def test_signals_are_those_of_each_response_alone():
    model = Recomputed(MODEL)
    prompt, responses = [1, 13, 11, 8, 57, 16], [[64, 13, 11, 8, 56, 13, 53, 11], [64, 13, 11]]
    for tokens, found in zip(responses, model.signals(prompt, responses, {}), strict=True):
        with torch.inference_mode():
            logits = model.model(input_ids=torch.tensor([prompt + tokens])).logits[0].double()
        logprobs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].numpy()
        of = slice(len(tokens))
        assert np.allclose(found.end[of], logprobs[:, 2], atol=1e-4), "its end token is 2"
        assert np.allclose(found.sampled[of], logprobs[range(len(tokens)), tokens], atol=1e-4)
        assert np.allclose(found.entropy[of], -(np.exp(logprobs) * logprobs).sum(-1), atol=1e-4)
        assert found.hidden[of].shape == (len(tokens), 128)
