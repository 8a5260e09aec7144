"""Options that several commands have, and what is made of them: a configuration, a job."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

if TYPE_CHECKING:
    import msgspec

    from seer.common.config import Config

F = TypeVar("F", bound=Callable[..., Any])
J = TypeVar("J", bound="msgspec.Struct")

FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)
POSITIVE = click.IntRange(min=1)


class Number(click.FloatRange):
    """A range of numbers, of which NaN is none: click finds it neither below nor above a bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401
        """Return the number. Raises `click.BadParameter`."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is no number.", param, ctx)
        return number


def together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return one decorator for several options, which help lists in this order."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


# An option named `section__key` is the setting `section.key` of the configuration; see `config_of`.
MODEL = click.option(
    "--model", "shared__model", type=click.Path(path_type=Path, file_okay=False, resolve_path=True),
    help="Hugging Face model folder.",
)  # fmt: skip
BACKEND = click.option(
    "--backend", "engine__backend", type=click.Choice(["vllm", "replay"]),
    help="Engine backend.  [default: vllm]",
)  # fmt: skip
INSTANCES = click.option(
    "--instances", type=POSITIVE, help="Engines to start.  [default: GPUs ÷ ranks, or 2 on CPUs]"
)
SAMPLING = together(
    click.option("-n", "n", default=8, show_default=True, help="Responses per prompt."),
    click.option("--max-tokens", default=512, show_default=True, help="Most tokens of a response."),
    click.option("--temperature", default=1.0, show_default=True, help="0: greedy."),
    click.option("--top-p", default=1.0, show_default=True),
    click.option("--top-k", default=0, show_default=True, help="0: all tokens."),
)
SEED = click.option("--seed", default=0, show_default=True, help="Seed of the responses' noise.")
POOL_AND_DRAFTS = together(
    click.option(
        "--kv-pool", "pool__kind", type=click.Choice(["auto", "mooncake", "none"]),
        help="KV pool that engines share.  [default: auto, Mooncake if it is installed]",
    ),
    click.option(
        "--drafts", "drafts__source", type=click.Choice(["off", "own", "grouped"]),
        help="Source of draft tokens: none, the request's own, or all of its group.  [default: grouped]",
    ),
    click.option(
        "--max-draft", "drafts__max_draft", type=click.IntRange(1, 128),
        help="Most tokens drafted per request and step.  [default: 8]",
    ),
    click.option(
        "--max-paths", "drafts__max_paths", type=POSITIVE,
        help="Most draft paths per request and step.  [default: as many as pay]",
    ),
)  # fmt: skip
CONFIG = together(
    click.option("--config", "config_file", type=FILE, help="TOML configuration file."),
    click.option(
        "--set", "sets", multiple=True, metavar="A.B=C", help="Override a setting, e.g. engine.kv_blocks=48."
    ),
)


CONNECT = click.option(
    "--connect", default="", metavar="ENDPOINT",
    help="The buffer's endpoint for trainers.  [default: the system that runs on this machine]",
)  # fmt: skip


def config_of(options: dict[str, object]) -> Config:
    """Load the configuration, and take what went into it out of a command's options."""
    from seer.common.config import load

    file = cast("Path | None", options.pop("config_file"))
    sets = cast("tuple[str, ...]", options.pop("sets"))
    settings = {name: options.pop(name) for name in list(options) if "__" in name}
    given = [f"{name.replace('__', '.')}={value}" for name, value in settings.items() if value is not None]
    return load(file, os.environ, [*given, *sets])


def endpoint_of(connect: str, config: Config) -> str:
    """Return where a command connects: as told or configured, else to the system that runs on this machine.

    Raises `ConfigError` if several run here.
    """
    from seer.common.process.running import the_system

    configured = config.endpoints.trainers
    if connect or _names_system(config):
        return connect or configured
    if found := the_system("--connect {endpoint}"):
        return found.endpoint
    click.echo(f"no system of this user was found on this machine: asking {configured}", err=True)
    return configured


def beside_running(config: Config, name_it: str) -> Config | None:
    """Return a configuration with the endpoint of the system that stays on this machine, and its model if
    none is configured; None if no such system runs, or another is configured.

    Raises `ConfigError` if several run here, listed as `name_it` (`running.the_system`).
    """
    from msgspec.structs import replace

    from seer.common.process.running import the_system

    found = None if _names_system(config) else the_system(name_it, stays=True)
    if found is None:
        return None
    return replace(
        config,
        endpoints=replace(config.endpoints, trainers=found.endpoint),
        shared=replace(config.shared, model=config.shared.model or found.model),
    )


def log_of_running() -> Path:
    """Return the log of the system that runs on this machine. Raises `InvalidField`, `ConfigError`."""
    from seer.common.errors import InvalidField
    from seer.common.process.running import the_system

    found = the_system("seer report {log}")
    if found is None or not found.log:
        raise InvalidField("LOG", "", "no system of this user was found on this machine: give a buffer's log")
    return Path(found.log)


def _names_system(config: Config) -> bool:
    from seer.common.config import Endpoints

    return config.endpoints.trainers != Endpoints().trainers


def job_of(kind: type[J], options: dict[str, object], config: Config) -> J:
    """Make a command's job of its options: options that are no field of the job are sampling parameters."""
    import msgspec

    from seer.common.types import SamplingParams

    fields = {name: options.pop(name) for name in kind.__struct_fields__ if name in options}
    given = {name: value for name, value in options.items() if value is not None}
    sampling = msgspec.convert(given, SamplingParams)
    return msgspec.convert(fields | {"config": config, "sampling": sampling}, kind)
