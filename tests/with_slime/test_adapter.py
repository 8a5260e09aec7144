"""slime's classes with Seer: groups, filters, rewards, evaluation, weights, refusals."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from itertools import chain
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

if "SEER_ENDPOINT" not in os.environ:
    pytest.skip("make slime-test runs this", allow_module_level=True)
# What slime imports here and this test does not use: remote objects, and a reader of LaTeX for rewards.
for name in ("ray", "pylatexenc", "pylatexenc.latex2text"):
    sys.modules.setdefault(name, MagicMock())

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from slime.rollout.base_types import call_rollout_fn  # noqa: E402
from slime.rollout.data_source import RolloutDataSource  # noqa: E402
from slime.rollout.filter_hub.base_types import DynamicFilterOutput  # noqa: E402
from slime.utils.eval_config import EvalDatasetConfig  # noqa: E402
from slime.utils.misc import load_function  # noqa: E402
from slime.utils.types import Sample  # noqa: E402

from seer.client import Prompt, RequestRefused, SamplingParams, SyncRolloutClient  # noqa: E402
from seer.common.errors import InvalidField  # noqa: E402
from seer.services.engine.replay.backend import made_up_routes  # noqa: E402

ENDPOINT, MODEL = os.environ["SEER_ENDPOINT"], os.environ["SEER_MODEL"]
N, TOKENS, SEED = 3, 12, 42
HERE = __name__


async def reward_length(args, sample):
    return float(sample.response_length)


async def reward_ranks(args, samples):
    return [float(sorted(samples, key=lambda each: each.response).index(sample)) for sample in samples]


def even_prompts(args, group):
    return DynamicFilterOutput(keep=group[0].group_index % 2 == 0, reason="odd")


def hide_first_token(args, sample, evaluation):
    sample.loss_mask[0] = 0
    sample.metadata["evaluation"] = evaluation


@pytest.fixture
def args(tmp_path):
    data = tmp_path / "prompts.jsonl"
    lines = [{"input": text, "label": text} for text in ("1 2", "3", "4 5", "6", "7")]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluation = EvalDatasetConfig(
        name="small", path=str(data), input_key="input", label_key="label", metadata_key="metadata",
        n_samples_per_eval_prompt=2, temperature=0.7, top_p=0.9, top_k=-1, max_response_len=8,
    )  # fmt: skip
    return Namespace(
        seer_endpoint=ENDPOINT, hf_checkpoint=MODEL, prompt_data=str(data), rollout_global_dataset=True,
        rollout_seed=SEED, rollout_shuffle=False, n_samples_per_prompt=N, rollout_batch_size=2,
        over_sampling_batch_size=2, rollout_max_prompt_len=None, rollout_max_response_len=TOKENS,
        rollout_temperature=1.0, rollout_top_p=1.0, rollout_top_k=-1, rollout_stop=None,
        rollout_stop_token_ids=None, rollout_skip_special_tokens=False, input_key="input",
        label_key="label", metadata_key="metadata", tool_key=None, multimodal_keys=None,
        apply_chat_template=False, apply_chat_template_kwargs=None, dump_details=None,
        custom_rm_path=f"{HERE}.reward_length", rm_type=None, group_rm=False, reward_key=None,
        eval_reward_key=None, dynamic_sampling_filter_path=None, rollout_sample_filter_path=None,
        rollout_all_samples_process_path=None, rollout_sample_hook_path=None, partial_rollout=False,
        custom_generate_function_path=None, use_rollout_routing_replay=False,
        eval_datasets=[evaluation], eval_max_prompt_len=None, sglang_speculative_algorithm=None,
    )  # fmt: skip


def rolled(args, number=4, source=None, *, evaluation=False):
    """What slime's rollout manager gets."""
    function = load_function("seer.integrations.slime.generate_rollout")
    return call_rollout_fn(function, args, number, source or RolloutDataSource(args), evaluation=evaluation)


def asked_for_again(group: str, tokens: list[int], n: int, **sampling: object) -> list[tuple[list, list]]:
    with SyncRolloutClient(ENDPOINT) as client:
        params = SamplingParams(**({"max_tokens": TOKENS} | sampling))
        rollout = client.submit(
            [Prompt(group, token_ids=tokens)], n=n, sampling=params, seed=SEED, rollout_number=4
        )
        [found] = rollout.result()
    return [(each.token_ids.tolist(), each.logprobs.tolist()) for each in found.responses]


def live_version() -> str:
    with SyncRolloutClient(ENDPOINT) as client:
        return str(client.status().weight_version)


def test_groups_of_the_data_source_are_filled(args):
    source = RolloutDataSource(args)
    first, second = rolled(args, source=source), rolled(args, source=source)
    groups = [*first.samples, *second.samples]
    assert [[sample.index for sample in group] for group in groups] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9, 10, 11],
    ]
    for group in groups:
        prompt = group[0].tokens[: -group[0].response_length]
        again = asked_for_again(f"slime-train-{group[0].group_index}", prompt, N)
        for sample, (tokens, logprobs) in zip(group, again, strict=True):
            assert isinstance(sample, Sample)
            assert sample.tokens == prompt + tokens
            assert sample.rollout_log_probs == logprobs
            assert sample.response_length == len(tokens) == sample.reward
            assert sample.loss_mask == [1] * len(tokens)
            assert sample.weight_versions == [live_version()]
            ended = Sample.Status.TRUNCATED if len(tokens) == TOKENS else Sample.Status.COMPLETED
            assert sample.status == ended
            assert sample.response


def test_experts_of_all_tokens_but_the_last_are_returned_to_who_asks(args):
    assert all(sample.rollout_routed_experts is None for group in rolled(args).samples for sample in group)
    args.use_rollout_routing_replay, args.seer_endpoint = True, os.environ["SEER_EXPERTS_ENDPOINT"]
    for sample in chain(*rolled(args).samples):
        assert sample.rollout_routed_experts.dtype == np.int32
        assert np.array_equal(sample.rollout_routed_experts, made_up_routes(sample.tokens[:-1]))


def test_filters_hooks_and_rewards_of_groups(args):
    args.dynamic_sampling_filter_path = f"{HERE}.even_prompts"
    args.rollout_sample_hook_path = [f"{HERE}.hide_first_token"]
    args.group_rm, args.custom_rm_path = True, f"{HERE}.reward_ranks"
    found = rolled(args)
    assert [group[0].group_index for group in found.samples] == [0, 2]
    assert found.metrics == {"rollout/dynamic_filter/drop_odd": 1}
    for group in found.samples:
        assert all(sample.loss_mask[0] == 0 and sample.metadata["evaluation"] is False for sample in group)
        assert len({sample.reward for sample in group}) > 1


def test_groups_beyond_the_batch_are_given_up(args):
    args.over_sampling_batch_size = 5
    assert [group[0].group_index for group in rolled(args).samples] == [0, 1]


def test_evaluation(args):
    got = rolled(args, evaluation=True).data["small"]
    assert len(got["samples"]) == len(got["rewards"]) == 10
    assert got["rewards"] == [sample.response_length for sample in got["samples"]]
    assert got["truncated"] == [sample.response_length == 8 for sample in got["samples"]]
    pair = got["samples"][2:4]
    prompt = pair[0].tokens[: -pair[0].response_length]
    group = f"slime-eval-{live_version()}-small-1"
    again = asked_for_again(group, prompt, 2, max_tokens=8, temperature=0.7, top_p=0.9)
    assert [(sample.tokens[len(prompt) :], sample.rollout_log_probs) for sample in pair] == again


def test_failures_are_raised(args):
    args.rollout_max_response_len = 5000
    with pytest.raises(RequestRefused, match="fit"):
        rolled(args)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seer_endpoint": None}, "seer_endpoint"),
        ({"partial_rollout": True}, "--partial-rollout"),
        ({"custom_generate_function_path": "a.b"}, "--custom-generate-function-path"),
        ({"rollout_top_p": 0.9}, "--rollout-top-p"),
        ({"rollout_temperature": -1.0}, "--rollout.temperature"),
    ],
)
def test_arguments_are_refused_by_name(args, change, named):
    vars(args).update(change)
    with pytest.raises(InvalidField, match=named):
        rolled(args)


def test_samples_that_seer_cannot_take_are_refused_by_name(args):
    for field, value, named in (
        ("response_length", 3, "sample.status"),
        ("multimodal_inputs", {"images": [1]}, "sample.multimodal_inputs"),
        ("prompt", [{"role": "user", "content": "1"}], "--apply-chat-template"),
    ):
        source = RolloutDataSource(args)
        setattr(source.dataset.samples[1], field, value)
        with pytest.raises(InvalidField, match=named):
            rolled(args, source=source)


def test_weights_that_slime_wrote(args, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        before = rolled(args).samples
        folder = tmp_path / "weight_v000001"
        folder.mkdir()
        [file] = Path(MODEL).glob("*.safetensors")
        save_file({name: each * 1.1 for name, each in load_file(file).items()}, folder / file.name)
        load_function("seer.integrations.slime.update_weights")(args, str(folder), [])
    finally:
        torch.distributed.destroy_process_group()
    after = rolled(args).samples
    assert after[0][0].weight_versions == [live_version()] != before[0][0].weight_versions
    assert [each.tokens for group in after for each in group] != [
        each.tokens for group in before for each in group
    ]
