"""`seer config check`: finds the facts, and prints settings and advice."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from seer.common.config import Config, load_with_sources
from seer.common.data_parallel import EXPERTS
from seer.common.errors import InvalidField
from seer.common.policy.device_defaults import Device, engine_defaults
from seer.common.process.log import printable
from seer.common.process.memory_limit import limit_bytes
from seer.common.process.scratch import nearest_existing
from seer.common.weights.safetensors import open_regular, stored
from seer.config_check.advice import Advice, advice
from seer.config_check.facts import MEAN_TOKENS, Facts
from seer.config_check.settings import Row, gib, rank_text, rows
from seer.local.hardware import Hardware
from seer.rollout.files import model_json

INDEX, MOST_INDEX_BYTES = "model.safetensors.index.json", 100_000_000

MEMORY_ROLES = ("buffer", "dgds", "engine")
"""Roles whose limit matters here."""


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line says of a cluster; None and empty: what is here. `memory`: in GiB by role."""

    model: Path | None = None
    engines: int | None = None
    gpu_gib: float | None = None
    memory: Mapping[str, float] | None = None
    disk_gib: float | None = None
    mean_tokens: int = MEAN_TOKENS


def check(files: Sequence[Path], sets: Sequence[str], given: Given) -> tuple[str, bool]:
    """Return what to print, and whether something should change. Raises `ConfigError`, `InvalidField`.

    Of `files` those named *.env have environment variables, and at most one other is a configuration.
    """
    tables = [file for file in files if file.suffix != ".env"]
    if len(tables) > 1:
        raise InvalidField("FILE", str(tables[1]), "give one configuration; further files are *.env")
    environ = dict(pair for file in files if file.suffix == ".env" for pair in _variables(file))
    config, sources = load_with_sources(tables[0] if tables else None, environ | os.environ, sets)
    facts = find(config, given)
    wanted = advice(config, sources, facts)
    return str(printable(shown(rows(config, sources, facts), wanted, facts, config))), bool(wanted)


def _variables(file: Path) -> list[tuple[str, str]]:
    """Return the variables of a file with lines NAME=VALUE. Raises `InvalidField`."""
    try:
        lines = [line.strip() for line in file.read_text().splitlines()]
    except (OSError, UnicodeError) as error:
        raise InvalidField("FILE", str(file), f"cannot be read ({error}); give lines NAME=VALUE") from error
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return [(name, value) for name, _, value in pairs]


def find(config: Config, given: Given) -> Facts:
    """Return the facts: the given ones, else facts about this machine."""
    model = given.model or Path(config.shared.model or "/nonexistent")
    if given.model is not None and not model.is_dir():
        raise InvalidField("--model", str(model), "give a folder with the model's config.json and its index")
    devices = Hardware.here().devices
    ranks = config.engine.tensor_parallel * config.engine.vllm.data_parallel_size
    here = engine_defaults(devices, ranks, {}).instances
    if given.gpu_gib is not None:
        size = int(given.gpu_gib * 2**30)
        devices = [Device(name="0", total_bytes=size, free_bytes=size)]
    memory = {role: int(size * 2**30) for role, size in (given.memory or {}).items()}
    limit = limit_bytes()
    return Facts(
        engines=given.engines or here,
        devices=devices,
        model=model_json(model) if (model / "config.json").is_file() else {},
        weight_bytes=weight_bytes(model),
        expert_bytes=expert_bytes(model),
        memory={role: memory.get(role, limit) for role in MEMORY_ROLES},
        room_bytes=_room(config) if given.disk_gib is None else int(given.disk_gib * 2**30),
        mean_tokens=given.mean_tokens,
        elsewhere=(given.engines or 0) > here,
    )


def weight_bytes(model: Path) -> int:
    """Return the size of a model's weights, by its index, else by its files; 0: there are none.

    Raises `InvalidField` for files that are gone, as of links that lead nowhere.
    """
    try:
        with open_regular(model / INDEX) as index:
            size = json.loads(index.read(MOST_INDEX_BYTES))["metadata"]["total_size"]
        if isinstance(size, int | float) and size > 0:
            return int(size)
    except (OSError, ValueError, LookupError, TypeError, RecursionError, OverflowError):
        pass
    try:
        return sum(file.stat().st_size for file in model.glob("*.safetensors"))
    except OSError as error:
        fix = f"{error.filename}: {error.strerror}; give a complete Hugging Face model folder"
        raise InvalidField("--model", str(model), fix) from error


def expert_bytes(model: Path) -> int:
    """Return the size of a mixture's experts, by its files; 0: there are none, or no files."""
    try:
        return sum(each.size for each in stored(model) if EXPERTS in each.name)
    except (OSError, ValueError):
        return 0


def shown(settings: Sequence[Row], wanted: Sequence[Advice], facts: Facts, config: Config) -> str:
    """Return the text: settings by role, then the facts, then the advice."""
    lines: list[str] = []
    role = ""
    for row in settings:
        if row.role != role:
            role = row.role
            lines.append(f"{role}:")
        lines.append(f"  {row.key:36} {row.value:34} {row.source}")
    weights = f"weights of {gib(facts.weight_bytes)}" if facts.weight_bytes else "weights of unknown size"
    on = f"GPUs of {gib(facts.devices[0].total_bytes)}" if facts.devices else "CPUs"
    memory = ", ".join(f"{role} {gib(size)}" for role, size in facts.memory.items() if size)
    lines.append(f"judged for {facts.engines:,} engines on {on}, {weights}; memory: {memory}")
    if config.engine.vllm.data_parallel_size > 1:
        lines.append(rank_text(config, facts))
    lines += [f"change {each.what}: {each.now} -> {each.wanted}\n  {each.why}" for each in wanted]
    return "\n".join(lines if wanted else [*lines, "nothing to change"])


def _room(config: Config) -> int:
    """Return the room where the spool is, or will be, on this machine."""
    return shutil.disk_usage(nearest_existing(Path(config.buffer.spool or tempfile.gettempdir()))).free
