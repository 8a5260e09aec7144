"""The commands that show how a running system is, for as long as somebody looks."""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path

import click

from seer.cli.options import CONFIG, CONNECT, FILE, Number, config_of, endpoint_of, log_of_running


@click.command()
@CONNECT
@click.option(
    "--listen",
    default="127.0.0.1:7112",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to serve metrics.",
)
@click.option("--tls-certificate", "certificate", type=FILE, help="Serve HTTPS with this chain, PEM.")
@click.option("--tls-key", "key", type=FILE, help="The certificate's key.")
@click.option(
    "--tls-client-ca", "client_ca", type=FILE, help="Serve only clients with a certificate of this CA."
)
@click.option("--password-file", type=FILE, help="Serve only who knows its one line, USER:PASSWORD.")
@click.option("--ready-fd", type=int, hidden=True)
@CONFIG
def exporter(connect: str, listen: str, ready_fd: int | None, **options: object) -> None:
    """Serve a running system's metrics to Prometheus, at /metrics.

    With keys it needs an observer's: security.key and security.server. docs/operations.md lists the metrics.
    """
    import msgspec

    from seer.common.errors import ConfigError, InvalidField
    from seer.common.process.service import run_process

    try:
        from seer.observe.access import Access
        from seer.observe.exporter import Exporter
    except ModuleNotFoundError as error:
        raise ConfigError(f"seer exporter needs an extra, 'seer-rollout[metrics]': {error}") from error
    host, _, port = listen.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 2**16):
        raise InvalidField("--listen", listen, "give HOST:PORT, as 127.0.0.1:7112")
    config = config_of(options)
    make = functools.partial(
        Exporter, connect=endpoint_of(connect, config), listen=(host.strip("[]"), int(port)),
        access=msgspec.convert(options, Access),
    )  # fmt: skip
    sys.exit(run_process("exporter", make, config, ready_fd))


@click.command()
@CONNECT
@CONFIG
def top(connect: str, **options: object) -> None:
    """Show a running system on one screen, once a second: rollouts, engines, the longest open responses.

    Arrows scroll, q quits. With keys it needs an observer's: security.key and security.server.
    """
    from seer.observe.top import show

    config = config_of(options)
    show(endpoint_of(connect, config), config.security)


@click.command()
@click.argument("wanted", metavar="ID")
@click.argument("log", type=click.Path(path_type=Path), required=False)
def trace(wanted: str, log: Path | None) -> None:
    """Tell the way of one prompt from a buffer's LOG: submitted, placed, moved, lost, delivered.

    ID is PROMPT, ROLLOUT/PROMPT, or ROLLOUT/PROMPT#INDEX for one response. LOG is a folder of `buffer.log`,
    or a file; without it, that of the system that runs on this machine.
    """
    from seer.prompt_trace.command import told

    click.echo(told(log or log_of_running(), wanted))


@click.command()
@click.argument("log", type=click.Path(path_type=Path), required=False)
@click.option(
    "--otlp", default="", metavar="URL",
    help="The collector, for OTLP over HTTP.  [default: OTEL_EXPORTER_OTLP_ENDPOINT, or http://localhost:4318]",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Send what the log has, and end.")
@click.option(
    "--oldest", type=Number(min=0), metavar="SECONDS",
    help="Drop spans that ended longer ago.  [default: 600, with --once none]",
)  # fmt: skip
@click.option("--ready-fd", type=int, hidden=True)
@CONFIG
def spans(
    log: Path | None, otlp: str, once: bool, oldest: float | None, ready_fd: int | None, **options: object
) -> None:
    """Follow a buffer's LOG, and send rollouts, groups, requests, chunks and updates as OpenTelemetry spans.

    LOG is a folder of `buffer.log`, or a file; without it, that of the system that runs on this machine.
    """
    from seer.common.errors import ConfigError
    from seer.common.process.service import run_process

    try:
        from seer.spans.service import SpanService
    except ModuleNotFoundError as error:
        raise ConfigError(f"seer spans needs an extra, 'seer-rollout[spans]': {error}") from error
    if oldest is None:
        oldest = math.inf if once else 600.0
    make = functools.partial(SpanService, log=log or log_of_running(), otlp=otlp, oldest=oldest, once=once)
    sys.exit(run_process("spans", make, config_of(options), ready_fd))


COMMANDS = (exporter, top, trace, spans)
