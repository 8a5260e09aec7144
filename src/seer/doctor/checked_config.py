"""What the whole doctor checks: the configuration, its model, and its engine's plan."""

from __future__ import annotations

from pathlib import Path

from seer.common.config import Config, load
from seer.config_check import command
from seer.doctor.report_lines import Report

SHIPPED_MODEL = Path(__file__).resolve().parents[3] / "examples" / "countdown" / "model"
"""The small model of a checkout; installed packages have none."""


def given(report: Report) -> Config:
    """Return the configuration that is checked; what environment and command line set is in its file."""
    return load(Path(report.config))


def model_bytes(config: Config) -> tuple[int, int]:
    """Return the bytes of the model's weights, and of its experts; zeros if there is no model."""
    if not config.shared.model:
        return 0, 0
    model = Path(config.shared.model)
    return command.weight_bytes(model), command.expert_bytes(model)
