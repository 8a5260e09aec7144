"""Every setting and every option of the command line is named on a page of docs/."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest

from seer.cli.main import main
from seer.common.config import Config

TEXT = "\n".join(page.read_text() for page in (Path(__file__).parents[2] / "docs").rglob("*.md"))


def settings(kind: type[msgspec.Struct], section: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(kind):
        name = f"{section}{field.name}"
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from settings(field.type, f"{name}.")
        else:
            yield name


def set_in_toml(text: str) -> set[str]:
    """Return what blocks of TOML set, also commented out, by whole names."""
    found, section = set(), ""
    for line in "".join(re.findall(r"^```.*?^```", text, re.DOTALL | re.MULTILINE)).splitlines():
        if header := re.match(r"\[([a-z.]+)\]", line):
            section = header[1]
        elif key := re.match(r"(?:# )?([a-z_]+) = ", line):
            found.add(f"{section}.{key[1]}")
    return found


def names(text: str, setting: str) -> bool:
    """Whether a text names a setting: whole, as a variable, in TOML, or its key as code."""
    variable = "SEER_" + setting.upper().replace(".", "__")
    key = setting.rpartition(".")[2]
    whole = re.search(rf"(?<![\w.])(?:{re.escape(setting)}|{variable})\b", text)
    return bool(whole) or f"`{key}`" in text or setting in set_in_toml(text)


def options(command: click.Command) -> Iterator[tuple[str, list[str]]]:
    if isinstance(command, click.Group):
        for each in command.commands.values():
            yield from options(each)
        return
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            yield f"{command.name} {option.opts[0]}", option.opts


def test_every_setting_is_named():
    found = list(settings(Config))
    assert {"buffer.chunk_size", "engine.vllm.quantization"} <= set(found)
    assert [setting for setting in found if not names(TEXT, setting)] == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("Raise `buffer.chunk_size`.", True),
        ("`SEER_BUFFER__CHUNK_SIZE=64 seer buffer`", True),
        ("`chunk_size` of the buffer", True),
        ("```toml\n[buffer]\n# chunk_size = 64\n```", True),
        ("```toml\n[engine]\nchunk_size = 64\n```", False),
        ("the chunk_size of it, context.buffer.chunk_size, `buffer.chunk_sizes`", False),
    ],
)
def test_what_counts_as_naming_it(text, named):
    assert names(text, "buffer.chunk_size") is named


def test_every_option_is_named():
    found = dict(options(main))
    assert {"rollout --out", "add --until"} <= found.keys()
    unnamed = [
        name
        for name, spellings in found.items()
        if not any(re.search(rf"(?<![\w-]){re.escape(each)}(?![\w-])", TEXT) for each in spellings)
    ]
    assert unnamed == []
