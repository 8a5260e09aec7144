"""A configuration for checks that run beside a system, made of that system's configuration.

Invariants (tests/process/test_beside.py asserts them):
- no folder or file of the given configuration is written to or locked; models, traces and profiles of steps
  are read;
- the check listens on no port of the configuration, only on the sockets of a private `LocalSystem`;
- the check writes only into a folder of its own, which is removed in the end.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from seer.common.config import Config, SecurityConfig
from seer.common.errors import ConfigError
from seer.common.process.scratch import Scratch, cache_folder


@contextlib.contextmanager
def beside(config: Config) -> Iterator[Config]:
    """Give the configuration of a check, whose own files are there until the context ends.

    Folders that are left empty are made by `LocalSystem`. Raises `ConfigError` if no folder can be made.
    """
    try:
        scratch = Scratch("check")
    except OSError as error:
        raise ConfigError(f"TMPDIR: {error}; set it to a folder that can be written to") from error
    with scratch:
        yield replace(
            config,
            security=SecurityConfig(),  # sockets are files of this user alone; their peers have no keys
            buffer=replace(config.buffer, log="", keep_chunks=False, spool="", images=""),
            dgds=replace(config.dgds, remember_path="", shard=0),
            drafts=replace(config.drafts, cache=str(_profiles(config.drafts.cache, scratch.path))),
            engine=replace(config.engine, weights_endpoint="off"),
            pool=replace(config.pool, ssd_gib=0.0, ssd_path=""),
        )


def _profiles(cache: str, scratch: Path) -> Path:
    """Copy the engines' profiles of steps: what is measured beside a running system must not be kept."""
    own = scratch / "profiles"
    own.mkdir()
    for profile in (Path(cache) if cache else cache_folder()).glob("steps-*.json"):
        with contextlib.suppress(OSError):  # given up meanwhile, or unreadable: it is measured again
            shutil.copy(profile, own)
    return own
