"""Whether the tokens so far tell which responses of a group will be long, beyond what their siblings tell.

Reads what `seer rollout` wrote, and computes what an engine could have seen once a response had generated a
part of the cap (`POINTS`), of those that were still running there:
- `end`: the end token's log probability, mean over the last 16 and 64 tokens, and the difference;
- `entropy`: of the next token's distribution, and the log probability of what was sampled, over the same;
- `loops`: the share of n-grams that were there before, in the last 64 tokens and in the whole;
- `markers`: of each of `--markers` the share in the last 64 tokens, how many so far, how long ago the last;
- `hidden`: the last layer's output, mean over the last 16 tokens, which takes a head trained for each model.

All is held out: a ridge regression is fitted to other prompts, its penalty chosen among theirs. `tokens` has
correlations with how far the log of what remains is from the mean of its group's that still run, from what
the features are beyond the group's: as if siblings were all seen at that point, the best case. `length` is
the same of the log of the whole length, the signal of `possible.py --signals`. `siblings` has correlations
with the log of what remains, from all lengths of the siblings, and with features besides. Brackets: 95 %
intervals over prompts. Prints JSON.

    python bench/scheduling/evidence.py OUT --model MODEL --cap 1024 --markers S4 S3 S2 ! x ans
    python bench/scheduling/evidence.py OUT --model MODEL --cap 1024 --markers S3 x --until ! ans
    python bench/scheduling/evidence.py OUT --model MODEL --cap 1024 --prompts PROMPTS    # with images
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lib.hardware import machine
from lib.held_out import centred, correlations, held_out, told
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from seer.rollout.image_reader import ImageReader

Floats = NDArray[np.float64]
Features = dict[str, float]

POINTS = (1 / 16, 1 / 8, 1 / 4)
"""Of the cap."""

LAST, SHORT = 64, 16
KINDS = ("end", "entropy", "loops", "markers")


class Signals(NamedTuple):
    """What the model gave for each token of a response: [tokens] each, and `hidden` [tokens, width]."""

    end: Floats
    entropy: Floats
    sampled: Floats
    hidden: Floats


class Seen(NamedTuple):
    """Responses that still run at a point, [rows] each; `siblings`: [rows, 3], see `beside`."""

    group: NDArray[np.int64]
    left: Floats
    length: Floats
    siblings: Floats
    features: list[Features]
    hidden: Floats


def repeats(tokens: Sequence[int], n: int) -> float:
    """Return the share of n-grams that occurred before."""
    grams = [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def features(tokens: Sequence[int], signals: Signals, markers: Mapping[str, int]) -> Features:
    """Return what is known of a response after `tokens`; `signals` may have more of them."""
    at = len(tokens)
    short, last = slice(max(0, at - SHORT), at), slice(max(0, at - LAST), at)
    found = {"loops 4": repeats(tokens[last], 4), "loops 8 in all": repeats(tokens, 8)}
    for name, each in (("end", signals.end), ("entropy", signals.entropy), ("entropy said", signals.sampled)):
        near, far = float(each[short].mean()), float(each[last].mean())
        found |= {f"{name} {SHORT}": near, f"{name} {LAST}": far, f"{name} slope": near - far}
    for name, token in markers.items():
        places = [place for place in range(at) if tokens[place] == token]
        found[f"markers {name}, share"] = sum(place >= at - LAST for place in places) / min(at, LAST)
        found[f"markers {name}, count"] = math.log1p(len(places))
        found[f"markers {name}, ago"] = math.log1p(at - 1 - places[-1] if places else at)
    return found


def beside(lengths: Sequence[int], own: int, point: int) -> list[float]:
    """Return of a response's siblings the mean log length, the share that still runs, the mean log left."""
    others = np.delete(lengths, own)
    left = others[others > point] - point
    return [np.log(others).mean(), left.size / others.size, np.log(left).mean() if left.size else 0.0]


class Recomputed:
    """A model that runs over recorded responses of one prompt at a time."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        with_images = hasattr(AutoConfig.from_pretrained(folder), "image_token_id")
        kind = AutoModelForImageTextToText if with_images else AutoModelForCausalLM
        self.model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        self.placeholder = getattr(self.model.config, "image_token_id", None)
        ends = self.model.generation_config.eos_token_id
        self.ends = [ends] if isinstance(ends, int) else list(ends)

    @torch.inference_mode()
    def signals(
        self, prompt: list[int], responses: list[list[int]], images: Mapping[str, torch.Tensor]
    ) -> list[Signals]:
        """Return the signals of each response. `images`: what the processor returned of the prompt's."""
        ids = torch.zeros(len(responses), len(prompt) + max(map(len, responses)), dtype=torch.long)
        for row, tokens in enumerate(responses):  # padding is on the right, which a causal mask hides
            ids[row, : len(prompt) + len(tokens)] = torch.tensor(prompt + tokens)
        shown = {name: torch.cat([each] * len(responses)) for name, each in images.items()}
        if shown:
            shown["mm_token_type_ids"] = (ids == self.placeholder).int()
        out = self.model(input_ids=ids, use_cache=False, output_hidden_states=True, **shown)
        logprobs = torch.log_softmax(out.logits[:, len(prompt) - 1 : -1], dim=-1)
        said = logprobs.gather(-1, ids[:, len(prompt) :, None]).squeeze(-1)
        end = logprobs[..., self.ends].logsumexp(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        hidden = out.hidden_states[-1][:, len(prompt) :]
        every = zip(end, entropy, said, hidden, strict=True)
        return [Signals(*(each.double().numpy() for each in row)) for row in every]


def seen(
    groups: list[dict[str, Any]], shown: Mapping[str, Any], model: Recomputed, points: Sequence[int],
    markers: Mapping[str, int], until: Container[int] = (),
) -> Iterator[Seen]:  # fmt: skip
    """Yield who still runs at each point and has none of `until` yet, with its features.

    `shown`: images by the prompt's id.
    """
    rows: dict[int, list[Any]] = {point: [] for point in points}
    for number, group in enumerate(groups):
        every = [each["token_ids"] for each in group["responses"]]
        lengths = np.array([len(tokens) for tokens in every])
        running = np.flatnonzero(lengths > points[0])
        if not running.size:
            continue
        cut = [every[index][: points[-1]] for index in running]
        given = model.signals(group["prompt_token_ids"], cut, shown.get(group["id"], {}))
        for index, tokens, signals in zip(running, cut, given, strict=True):
            for point in (point for point in points if lengths[index] > point):
                if any(token in until for token in tokens[:point]):
                    break  # it has them at all later points, too
                logs = np.log([lengths[index] - point, lengths[index]])
                known = features(tokens[:point], signals, markers)
                hidden = signals.hidden[max(0, point - SHORT) : point].mean(0)
                rows[point].append((number, *logs, beside(lengths, index, point), known, hidden))
    for found in rows.values():
        *columns, known, hidden = zip(*found, strict=True)
        yield Seen(*map(np.array, columns), list(known), np.array(hidden))


def evaluation(at: Seen) -> dict[str, Any]:
    """Return what the tokens tell at one point."""
    names = list(at.features[0])
    every = np.array([[each[name] for name in names] for each in at.features])
    columns = {kind: every[:, [name.startswith(kind) for name in names]] for kind in KINDS}
    sets = {kind: x for kind, x in columns.items() if x.size} | {"all": every, "hidden": at.hidden}
    several = np.bincount(at.group)[at.group] > 1
    group = at.group[several]
    left, length = (centred(each[several], group) for each in (at.left, at.length))
    own = {kind: centred(x[several], group) for kind, x in sets.items()}
    after = [at.siblings, *(np.hstack([at.siblings, sets[kind]]) for kind in ("all", "hidden"))]
    drawn = correlations([held_out(x, at.left, at.group) for x in after], at.left, at.group)

    def of(y: Floats) -> dict[str, str]:
        return told(own, correlations([held_out(x, y, group) for x in own.values()], y, group))

    return {
        "running": at.left.size, "prompts": int(np.unique(at.group).size), "with siblings": group.size,
        "spread": round(float(at.left.std()), 3), "spread within": round(float(left.std()), 3),
        "tokens": of(left), "length": of(length),
        "single": told(names, correlations(centred(every[several], group).T, length, group)),
        "siblings": told(("alone", "with all", "with hidden"), drawn),
        "gain": told(("all", "hidden"), drawn[1:] - drawn[0]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="OUT of a rollout")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--cap", type=int, required=True, help="--max-tokens of the rollout")
    parser.add_argument("--markers", nargs="*", default=[], help="tokens of the model")
    parser.add_argument("--until", nargs="*", default=[], help="leave out responses that have one of these")
    parser.add_argument("--prompts", type=Path, help="PROMPTS of the rollout, if they have images")
    options = parser.parse_args()
    groups = [json.loads(line) for line in options.out.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    markers = {word: tokenizer.convert_tokens_to_ids(word) for word in options.markers}
    until = set(tokenizer.convert_tokens_to_ids(options.until))
    shown = {}
    if options.prompts:
        reader = ImageReader(options.prompts.parent, options.model)
        for line in map(json.loads, options.prompts.read_text().splitlines()):
            inputs = reader.prompt(line["prompt"], line["images"], line["id"]).inputs
            shown[line["id"]] = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
    lengths = np.array([len(each["token_ids"]) for group in groups for each in group["responses"]])
    report = {
        "machine": machine("torch", "transformers", "numpy"), "out": options.out.name, "cap": options.cap,
        "until": options.until,
        "responses": lengths.size, "at the cap": round(float((lengths >= options.cap).mean()), 3),
        "10, 50, 90 %": np.percentile(lengths, [10, 50, 90]).tolist(),
    }  # fmt: skip
    points = [round(point * options.cap) for point in POINTS]
    found = seen(groups, shown, Recomputed(options.model), points, markers, until)
    for point, at in zip(points, found, strict=True):
        report[f"after {point}"] = evaluation(at)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
