"""What both of the pool's services derive from `[pool]`."""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path

from seer.common.config import Config
from seer.common.errors import ConfigError, SeerError

MASTER_PROGRAM = "mooncake_master"

CLIENT_SECONDS = 5
"""The master drops a member of the pool that is silent for this long. Until then, reads of its blocks fail;
a machine that stalls for longer loses its blocks."""


class PoolError(SeerError):
    """The pool's master or memory cannot be started, or failed."""

    code = "pool"


def master_program() -> str:
    """Return the path of Mooncake's master. Raises `ConfigError` where Mooncake is not installed."""
    found = importlib.util.find_spec("mooncake")
    for folder in (found and found.submodule_search_locations) or ():
        program = Path(folder) / MASTER_PROGRAM
        if program.is_file():
            return str(program)
    raise ConfigError("Mooncake is not installed here: install the extra cpu or cuda13")


def listen_address(config: Config, field: str, address: str) -> tuple[str, int]:
    """Return host and port to listen on for `address`. Raises `ConfigError` when that cannot be."""
    host, _, port = address.rpartition(":")
    host = config.endpoints.bind_host or host
    host = "0.0.0.0" if host == "*" else host  # noqa: S104 - the configuration says so
    try:
        with socket.create_server((host, int(port))):
            pass
    except OSError as error:
        said = os.strerror(error.errno) if error.errno else error
        raise ConfigError(f"{field} = {address!r}: {said}; give a free port of this machine") from error
    return host, int(port)
