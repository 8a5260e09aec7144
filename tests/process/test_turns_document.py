"""The program in docs/turns.md runs as it stands there."""

import asyncio
import re
from pathlib import Path

from gateway_system import MODEL, GatewaySystem

ROOT = Path(__file__).parents[2]


def test_the_program_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [program] = re.findall(
        r"```python\n(import asyncio\n.*?)```", (ROOT / "docs/turns.md").read_text(), re.DOTALL
    )
    names = {"__name__": "document"}
    exec(program, names)
    with GatewaySystem() as system:
        for service in ("buffer", "engine-0"):
            system.start(service)
        asyncio.run(names["main"](system.endpoint, str(MODEL)))
        first = capsys.readouterr().out
        asyncio.run(names["main"](system.endpoint, str(MODEL)))
    assert sorted(first.splitlines()) == sorted(capsys.readouterr().out.splitlines())
    assert len(first.splitlines()) == 8
    assert "trajectory" not in first, first
    assert (tmp_path / "step-1.journal").exists()
