"""`seer doctor`: is this machine right for Seer, and how fast? From its driver to an engine's tokens.

Invariants:
- only what decides something for its user, and runs here, is checked: `bench/gpu/kernels.py` has what is only
  about the speed of a GPU's parts;
- the report says which model was run: of a tiny one, only what it says about right and wrong carries over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from msgspec.structs import replace

from seer.common.config import Config, dump
from seer.common.process.devices import visible_devices
from seer.common.process.scratch import Scratch
from seer.doctor.bundle import write_bundle
from seer.doctor.checked_config import SHIPPED_MODEL
from seer.doctor.output import as_json, counted, show, write
from seer.doctor.runner import Check, run_checks
from seer.doctor.verdict import verdict

SECONDS = 600.0

_ENGINE = "seer.doctor.engine:"
_ENGINE_SECONDS = 240.0
"""What the start of an engine may take: minutes on a GPU, where it compiles."""

_MACHINE = (
    Check("versions", "seer.doctor.builds:versions", 60),
    Check("imports", "seer.doctor.builds:imports", 180),
    Check("devices", "seer.doctor.devices:devices", 60),
    Check("compilers", "seer.doctor.devices:compilers", 60),
    Check("limits", "seer.doctor.limits:check", 60),
    Check("ports", "seer.doctor.ports:check", 60),
    Check("clock", "seer.doctor.ports:clock", 10),
)
_ENGINES = (
    Check("start", f"{_ENGINE}start", 20, "engine", _ENGINE_SECONDS),
    Check("largest-batch", f"{_ENGINE}largest_batch", 60, "engine", _ENGINE_SECONDS, needs="start"),
    Check("step-table", f"{_ENGINE}step_table", 90, "engine", _ENGINE_SECONDS, needs="start"),
    Check("sleep", f"{_ENGINE}sleep", 90, "engine", _ENGINE_SECONDS, needs="start"),
    Check("same-tokens", "seer.doctor.same_tokens:check", 360, needs="start"),
    Check("pool", "seer.doctor.pool:check", 300, needs="start"),
    Check("other-kernels", "seer.doctor.same_tokens:other_kernels", 240, needs="start", optional=True),
)
_BITS = Check("bits", "seer.doctor.sampler_bits:bits", 150)
_REPEATS = Check("repeats", "seer.doctor.sampler_bits:repeats", 60)
"""Threads that race are a GPU's."""

CHECKS = (*_MACHINE, _BITS, _REPEATS, *_ENGINES)
"""In this order: what others build on comes first. Seconds are upper bounds."""


def run(
    config: Config, only: Sequence[str], json_file: Path | None, bundle: Path | None, seconds: float
) -> int:
    """Run the checks of these names, or all that apply; return 1 if a line failed, else 0.

    Raises `OSError` if the report or the bundle cannot be written.
    """
    config, about = _with_model(config)
    chosen = [check for check in CHECKS if check.name in only] if only else _applying()
    with Scratch("doctor") as scratch:
        logs = scratch.path / "logs"
        logs.mkdir()
        file = scratch.path / "config.toml"
        file.write_text(dump(config))
        lines = show(run_checks(chosen, seconds, str(file), logs), json_file, about)
        found = verdict(lines)
        print(f"{counted(lines)}\n{found.shown()}", flush=True)
        if about["shipped_model"]:
            print(
                "this was the model of a checkout, a tiny one: give --model for speeds and settings",
                flush=True,
            )
        about["verdict"] = asdict(found)
        if json_file:
            write(json_file, lines, about)
        if bundle:
            parts = write_bundle(bundle, as_json(lines, about), dump(config), logs)
            print(f"{bundle} has {', '.join(parts)}", flush=True)
    return int(any(line.status == "fail" for line in lines))


def _with_model(config: Config) -> tuple[Config, dict[str, object]]:
    """Return the configuration with the shipped model if it has none, and what the report says of it."""
    shipped = not config.shared.model and SHIPPED_MODEL.is_dir()
    if shipped:
        shared = replace(config.shared, model=str(SHIPPED_MODEL))
        config = replace(config, shared=shared)
    return config, {"model": config.shared.model, "shipped_model": shipped}


def _applying() -> list[Check]:
    """Return the checks that say something on this machine."""
    return [check for check in CHECKS if check is not _REPEATS or visible_devices()]
