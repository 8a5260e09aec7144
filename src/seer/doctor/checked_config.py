"""What the whole doctor checks: the configuration, its model, and its engine's plan."""

from __future__ import annotations

from pathlib import Path

from seer.common.config import Config, load
from seer.doctor.report_lines import Report

SHIPPED_MODEL = Path(__file__).resolve().parents[3] / "examples" / "countdown" / "model"
"""The small model of a checkout; installed packages have none."""


def given(report: Report) -> Config:
    """Return the configuration that is checked; what environment and command line set is in its file."""
    return load(Path(report.config))


def weight_bytes(config: Config) -> int:
    """Return the bytes of the model's weights; 0 if there is no model."""
    model = Path(config.shared.model)
    if not config.shared.model or not model.is_dir():
        return 0
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))
