"""The commands that run one process of a system, e.g. `seer engine`, until it is told to stop."""

from __future__ import annotations

import importlib
import sys

import click

from seer.cli.options import CONFIG, beside_running, config_of


def _service(name: str, help_text: str, module: str = "") -> click.Command:
    @click.command(name, help=help_text)
    @CONFIG
    @click.option("--ready-fd", type=int, hidden=True)  # of launchers: common/process/service.py
    @click.option("--parent-pid", type=int, hidden=True)
    def command(ready_fd: int | None, parent_pid: int | None, **options: object) -> None:
        if parent_pid is not None:
            from seer.common.process.children import die_with

            die_with(parent_pid)
        from seer.common.process.service import run_process

        config = config_of(options)
        if name == "gateway":
            config = beside_running(config, "--set endpoints.trainers={endpoint}") or config
        try:
            make = importlib.import_module(f"seer.{module or f'services.{name}.server'}").make
        except ModuleNotFoundError as error:
            from seer.common.errors import ConfigError

            raise ConfigError(f"seer {name} needs an extra, 'seer-rollout[{name}]': {error}") from error
        own = config.engine.name if name == "engine" else ""
        sys.exit(run_process(own or name, make, config, ready_fd))

    return command


COMMANDS = (
    _service("buffer", "Run the buffer: it has all requests, and schedules their chunks on engines."),
    _service("context", "Run the context service: estimates of response lengths and of draft acceptance."),
    _service("dgds", "Run the dgds: token streams of groups, shared between engines for drafts."),
    _service("engine", "Run an engine: one model replica."),
    _service("pool-master", "Run the KV pool's master: supervises Mooncake's own.", "services.pool.master"),
    _service("pool-owner", "Run the provider of the KV pool's memory and disk.", "services.pool.owner"),
    _service("gateway", "Run the gateway: vLLM's HTTP for trainers and agents.", "gateway.server"),
)
