"""SkyRL's trainer on Seer: `python -m seer.integrations.skyrl.main`, with SkyRL's own options.

`generator.inference_engine.external_proxy_url` is the buffer's endpoint, e.g. tcp://head:7101.
"""

from __future__ import annotations

import sys
from typing import Any

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from seer.common.errors import InvalidField
from seer.integrations.skyrl.client import SeerInferenceClient
from seer.integrations.skyrl.generator import SeerGenerator
from seer.integrations.skyrl.weights import policy_worker

ENGINE = "generator.inference_engine"


def check_config(cfg: Any) -> None:
    """Raise `InvalidField` for settings of SkyRL that Seer does not support."""
    engine, trainer = cfg.generator.inference_engine, cfg.trainer
    url = engine.external_proxy_url
    if not str(url).startswith(("tcp://", "ipc://")):
        raise InvalidField(f"{ENGINE}.external_proxy_url", url, "give Seer's endpoint: tcp://head:7101")
    for field, value, wanted, why in (
        ("trainer.placement.colocate_all", trainer.placement.colocate_all, False, "Seer has the engines"),
        ("trainer.fully_async.enabled", trainer.fully_async.enabled, False, "Seer is on-policy"),
        ("trainer.policy.model.lora.rank", trainer.policy.model.lora.rank, 0, "Seer takes whole weights"),
        (
            "generator.vision_language_generator", cfg.generator.vision_language_generator, False,
            "Seer takes text",
        ),
    ):  # fmt: skip
        if value != wanted:
            raise InvalidField(field, value, f"{why}: set it to {wanted}")


class SeerTrainer(RayPPOTrainer):
    """SkyRL's trainer, with policy workers that send weights to Seer."""

    def build_models(self, PolicyWorker: Any, CriticWorker: Any, RefWorker: Any) -> None:  # noqa: N803
        """Build the models as SkyRL does."""
        worker = ray.remote(num_gpus=1)(policy_worker(self.cfg.trainer.strategy))
        super().build_models(worker, CriticWorker, RefWorker)


class SeerExp(BasePPOExp):
    """SkyRL's experiment, with Seer's client, generator and weights."""

    def get_inference_client(self) -> SeerInferenceClient:
        """Return a client of the running system."""
        engine, trainer = self.cfg.generator.inference_engine, self.cfg.trainer
        return SeerInferenceClient(
            engine.external_proxy_url, self.tokenizer, trainer.policy.model.path, trainer.seed,
            routed_experts=engine.enable_return_routed_experts,
        )  # fmt: skip

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> SeerGenerator:
        """Return the generator of SkyRL's environments."""
        gym = cfg.environment.skyrl_gym
        return SeerGenerator(cfg.generator, gym, inference_engine_client, tokenizer)

    def get_trainer(self, **given: Any) -> SeerTrainer:
        """Return the trainer."""
        return SeerTrainer(**given)


@ray.remote(num_cpus=1)
def run(cfg: SkyRLTrainConfig) -> None:
    """Train; away from the head node's driver, as SkyRL does."""
    SeerExp(cfg).run()


def main() -> None:
    """Train with the command line's options. Raises `InvalidField` for options that Seer does not support."""
    cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    check_config(cfg)
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(run.remote(cfg))


if __name__ == "__main__":
    main()
