"""slime's rollout function on Seer.

Invariants:
- all responses of a call are of the weights that were live when it began, or the call raises;
- the n samples of a prompt are one submission;
- which groups of a rollout are kept depends on their samples and the data source's order, never on time;
- a request that fails raises; no sample is ever empty or aborted.
"""

from __future__ import annotations

import asyncio
import copy
from argparse import Namespace
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import (
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.utils.async_utils import run
from slime.utils.data import Dataset
from slime.utils.misc import load_function
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

from seer.client import OpenRollout, Response, RolloutClient, SamplingParams
from seer.common.errors import InvalidField
from seer.integrations.slime.settings import check, endpoint, eval_sampling, first, train_sampling
from seer.integrations.submissions import Keys, Place, generate


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Return a rollout's groups, or an evaluation's samples; slime calls this.

    Raises `InvalidField` for arguments that Seer does not support, and the client's errors.
    """
    check(args)
    return run(_call(args, rollout_id, data_source, evaluation=evaluation))


async def _call(
    args: Namespace, rollout_id: int, data_source: Any, *, evaluation: bool
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    async with RolloutClient(endpoint(args)) as client:
        keys = Keys(args.rollout_seed, rollout_id, (await client.status()).weight_version)
        call = _Call(args, client.open_rollout(), keys)
        return await (call.evaluate() if evaluation else call.train(data_source))


class _Call:
    """One call of slime's: a rollout for training, or an evaluation."""

    def __init__(self, args: Namespace, rollout: OpenRollout, keys: Keys) -> None:
        self._args = args
        self._rollout = rollout
        self._keys = keys
        self._tokenizer = _tokenizer(args.hf_checkpoint, bool(getattr(args, "trust_remote_code", False)))

    # --- training ------------------------------------------------------------------------

    async def train(self, data_source: Any) -> RolloutFnTrainOutput:
        """Return `rollout_batch_size` groups that the filter keeps, in the data source's order."""
        args, metrics = self._args, MetricGatherer()
        keep = load_function(args.dynamic_sampling_filter_path) if args.dynamic_sampling_filter_path else None
        sampling = train_sampling(args)
        running: deque[asyncio.Task[list[Sample]]] = deque()
        kept: list[list[Sample]] = []
        finished: list[list[Sample]] = []
        try:
            while len(kept) < args.rollout_batch_size:
                while len(kept) + len(running) < args.rollout_batch_size:
                    for group in data_source.get_samples(args.over_sampling_batch_size):
                        running.append(asyncio.create_task(self._train_group(group, sampling)))
                there = len(kept) + len(running)
                group = await running.popleft()
                finished.append(group)
                found = call_dynamic_filter(keep, args, group)
                if should_drop_dynamic_filter_output(
                    found, remaining_batch_size=there, target_data_size=args.rollout_batch_size
                ):
                    metrics.on_dynamic_filter_drop(reason=found.reason)
                else:
                    kept.append(group)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if args.rollout_sample_filter_path:
            load_function(args.rollout_sample_filter_path)(args, kept)
        if args.rollout_all_samples_process_path:
            load_function(args.rollout_all_samples_process_path)(args, finished, data_source)
        return RolloutFnTrainOutput(samples=kept, metrics=metrics.collect())

    async def _train_group(self, group: list[Sample], sampling: SamplingParams) -> list[Sample]:
        name = f"slime-train-{group[0].group_index}"
        skip = self._args.rollout_skip_special_tokens
        samples = await self._sampled(name, group, sampling, skip_special=skip)
        samples = [await apply_rollout_sample_hooks(self._args, each, evaluation=False) for each in samples]
        if self._args.group_rm:
            rewards = await batched_async_rm(self._args, samples)
            for sample, reward in zip(samples, rewards, strict=True):
                sample.reward = reward
        else:
            await asyncio.gather(*(self._reward(sample) for sample in samples))
        return samples

    # --- evaluation ----------------------------------------------------------------------

    async def evaluate(self) -> RolloutFnEvalOutput:
        """Return the samples of all evaluation datasets with their rewards."""
        if self._args.group_rm:
            raise InvalidField("--group-rm", True, "slime has it for training alone: leave it out")
        datasets = self._args.eval_datasets or []
        return RolloutFnEvalOutput(data={each.name: await self._evaluate(each) for each in datasets})

    async def _evaluate(self, dataset: Any) -> dict[str, list[Any]]:
        sampling = eval_sampling(self._args, dataset)
        n = dataset.n_samples_per_eval_prompt
        groups: list[list[Sample]] = []
        for number, prompt in enumerate(self._dataset(dataset).samples):
            group = [copy.deepcopy(prompt) for _ in range(n)]
            for position, sample in enumerate(group):
                sample.index = number * n + position
                sample.metadata = dataset.inject_metadata(sample.metadata)
                sample.custom_rm_path = dataset.custom_rm_path
            groups.append(group)
        work = [self._eval_group(dataset, number, group, sampling) for number, group in enumerate(groups)]
        samples = [sample for group in await _all(work) for sample in group]
        key = self._args.eval_reward_key or self._args.reward_key
        return {
            "rewards": [sample.reward[key] if key else sample.reward for sample in samples],
            "truncated": [sample.status == Sample.Status.TRUNCATED for sample in samples],
            "samples": samples,
        }

    async def _eval_group(
        self, dataset: Any, number: int, group: list[Sample], sampling: SamplingParams
    ) -> list[Sample]:
        skip = first(dataset.skip_special_tokens, self._args.rollout_skip_special_tokens)
        name = f"slime-eval-{self._keys.weight_version}-{dataset.name}-{number}"  # slime evaluates twice at 0
        samples = await self._sampled(name, group, sampling, skip_special=skip)
        samples = [await apply_rollout_sample_hooks(self._args, each, evaluation=True) for each in samples]
        await asyncio.gather(*(self._reward(sample) for sample in samples))
        return samples

    def _dataset(self, dataset: Any) -> Dataset:
        args = self._args
        if dataset.custom_generate_function_path:
            where = f"eval_datasets[{dataset.name!r}].custom_generate_function_path"
            raise InvalidField(where, dataset.custom_generate_function_path, "Seer generates: leave it out")
        return Dataset(
            path=dataset.path,
            tokenizer=self._tokenizer,
            processor=None,
            max_length=args.eval_max_prompt_len,
            prompt_key=dataset.input_key,
            label_key=dataset.label_key,
            multimodal_keys=first(dataset.multimodal_keys, args.multimodal_keys),
            metadata_key=dataset.metadata_key,
            tool_key=dataset.tool_key,
            apply_chat_template=first(dataset.apply_chat_template, args.apply_chat_template),
            apply_chat_template_kwargs=first(
                dataset.apply_chat_template_kwargs, args.apply_chat_template_kwargs
            ),
        )

    # --- samples -------------------------------------------------------------------------

    async def _sampled(
        self, name: str, group: Sequence[Sample], sampling: SamplingParams, *, skip_special: bool
    ) -> list[Sample]:
        """Fill the samples of a group with their responses."""
        for sample in group:
            sample.tokens = self._prompt_tokens(sample)
        places = [Place(name, index) for index in range(len(group))]
        prompts = [sample.tokens for sample in group]
        responses = await generate(self._rollout, places, prompts, sampling, self._keys)
        for sample, response in zip(group, responses, strict=True):
            self._fill(sample, response, skip_special=skip_special)
        return list(group)

    def _prompt_tokens(self, sample: Sample) -> list[int]:
        if sample.status != Sample.Status.PENDING or sample.response_length:
            fix = "Seer generates whole responses: give samples that have none yet"
            raise InvalidField("sample.status", sample.status, fix)
        if sample.multimodal_inputs:
            raise InvalidField("sample.multimodal_inputs", "given", "Seer takes text")
        if sample.tokens:
            return list(sample.tokens)
        if not isinstance(sample.prompt, str):
            raise InvalidField("sample.prompt", sample.prompt, "set --apply-chat-template")
        return list(self._tokenizer.encode(sample.prompt, add_special_tokens=False))

    def _fill(self, sample: Sample, response: Response, *, skip_special: bool) -> None:
        ids = response.token_ids.tolist()
        version = str(self._keys.weight_version)
        sample.append_response_tokens(
            self._args,
            tokens=ids,
            log_probs=response.logprobs.tolist(),
            text=self._tokenizer.decode(ids, skip_special_tokens=skip_special),
            meta_info={"finish_reason": {"type": response.finish_reason}, "weight_version": version},
        )
        if response.routed_experts is not None:
            sample.rollout_routed_experts = response.routed_experts.astype(np.int32)

    async def _reward(self, sample: Sample) -> None:
        if sample.reward is None:
            sample.reward = await async_rm(self._args, sample)


@cache
def _tokenizer(folder: str, trust: bool) -> Any:
    return load_tokenizer(folder, trust_remote_code=trust)


async def _all(work: Sequence[Any]) -> list[Any]:
    """Return all results in order; the first error cancels the rest."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each) for each in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in running]
