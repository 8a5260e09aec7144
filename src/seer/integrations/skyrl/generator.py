"""SkyRL's generator with its environments and turns, on Seer.

Invariant: every request of a call is of the step and phase that its batch names.
"""

from __future__ import annotations

from skyrl.train.generators.base import GeneratorInput, GeneratorOutput
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator

from seer.common.errors import InvalidField


class SeerGenerator(SkyRLGymGenerator):
    """`inference_engine_client` must be a `SeerInferenceClient`; all else is as in SkyRL."""

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        """Return the trajectories of a batch, in order. Raises the error of the first that fails."""
        metadata, trajectories = input_batch.get("batch_metadata"), input_batch.get("trajectory_ids")
        if metadata is None or trajectories is None:
            missing = "batch_metadata" if metadata is None else "trajectory_ids"
            raise InvalidField(missing, None, "give it, as prepare_generator_input does: keys depend on it")
        step = metadata.global_step or 0  # None: evaluation without training
        sessions = [trajectory.to_string() for trajectory in trajectories]
        turns = self.generator_cfg.max_turns > 1
        max_input = self.generator_cfg.max_input_length if turns else None
        await self.inference_engine_client.begin(step, metadata.training_phase, sessions, max_input)
        return await super().generate(input_batch, disable_tqdm)
