"""`bench/gpu/on_gpu.py`: its pieces name what there is, and end at their deadlines."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from seer.doctor.checkup import CHECKS
from seer.verify.cells import CELLS

FOLDER = Path(__file__).parents[2] / "bench" / "gpu"


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("on_gpu", FOLDER / "on_gpu.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "on_gpu", module)
    spec.loader.exec_module(module)
    return module


def after(command: tuple[str, ...], option: str) -> list[str]:
    return command[command.index(option) + 1].split(",") if option in command else []


def test_pieces_name_cells_checks_and_scripts_that_there_are(on_gpu):
    for piece in on_gpu.PIECES.values():
        assert set(after(piece.command, "--matrix")) <= CELLS.keys()
        assert set(after(piece.command, "--only")) <= {check.name for check in CHECKS}
        assert all(Path(part).exists() for part in piece.command if part.endswith((".py", "prompts.jsonl")))
        assert any("OUT" in part for part in piece.command)


def test_a_piece_that_hangs_ends_at_its_deadline_and_the_next_one_runs(on_gpu, tmp_path, monkeypatch):
    hangs = "import subprocess, time; print('begun', flush=True); subprocess.run(['sleep', '600'])"
    writes = "import sys; open(sys.argv[1], 'w').write('{}')"
    pieces = {
        "hangs": on_gpu.Piece(0.5, (sys.executable, "-c", hangs, "OUT")),
        "writes": on_gpu.Piece(60, (sys.executable, "-c", writes, "OUT")),
    }
    monkeypatch.setattr(on_gpu, "PIECES", pieces)
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", str(tmp_path), "--only", "hangs", "writes"])
    assert on_gpu.main() == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["hangs"]["code"], summary["writes"]["code"]) == (124, 0)
    assert (tmp_path / "writes.json").read_text() == "{}"
