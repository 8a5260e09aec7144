"""The kit for half an hour on a GPU machine (bench/gpu): five commands, their time, their verdicts."""

import argparse
import asyncio
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu_kit import FOLDER, loaded

from seer.common.config import load
from seer.doctor.checkup import CHECKS
from seer.verify.cells import CELLS

ORDER = ["gate", "split", "graphs", "verify", "drafts"]


@pytest.fixture
def on_gpu(monkeypatch):
    return loaded("on_gpu", monkeypatch)


@pytest.fixture
def verdicts(monkeypatch):
    return loaded("verdicts", monkeypatch)


def after(command: tuple[str, ...], option: str) -> list[str]:
    return command[command.index(option) + 1].split(",") if option in command else []


def test_five_commands_take_at_most_28_minutes_and_none_more_than_ten(on_gpu):
    for commands in (on_gpu.GPU, on_gpu.CPU):
        assert list(commands) == ORDER
        assert sum(each.seconds for each in commands.values()) <= 28 * 60
        for command in commands.values():
            assert command.seconds <= 600
            assert all(piece.seconds <= command.seconds for piece in command.pieces.values())


def test_a_quarter_of_an_hour_has_room_for_the_gate_the_least_of_the_rest_and_a_start(on_gpu):
    for gate, brief in ((on_gpu.GPU["gate"], on_gpu.BRIEF), (on_gpu.CPU["gate"], on_gpu.CPU_BRIEF)):
        assert brief.seconds <= 600
        assert gate.seconds + brief.seconds <= 12 * 60
        assert next(iter(brief.pieces)) == "rates", "ratios are measured first, whatever time there is"
        assert brief.pieces["rates"].seconds + 120 <= brief.seconds
    assert on_gpu.BRIEF.first == "rates", "nothing else runs while rates are measured"


def test_pieces_name_what_there_is(on_gpu):
    pieces = [
        (command, piece)
        for commands in (on_gpu.GPU, on_gpu.CPU)
        for command in (*commands.values(), on_gpu.BRIEF, on_gpu.CPU_BRIEF)
        for piece in command.pieces.values()
    ]
    for command, piece in pieces:
        assert command.first in ("", *command.pieces)
        assert "OUT" in piece.command
        assert set(after(piece.command, "--matrix")) <= CELLS.keys()
        assert set(after(piece.command, "--only")) <= {check.name for check in CHECKS}
        assert all(Path(part).exists() for part in piece.command if part.endswith((".py", "prompts.jsonl")))
        given = [piece.command[at + 1] for at, part in enumerate(piece.command) if part == "--set"]
        load(None, {}, given)


def test_sides_are_settings_that_there_are(monkeypatch):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs the engine extra")
    sides = loaded("sides", monkeypatch)
    for cpu in (False, True):
        given = argparse.Namespace(cpu=cpu, share=0.25, sets=[])
        for name in (*sides.ENGINES, *sides.SYSTEMS):
            config = load(None, {}, sides.config_of(name, Path("model"), 64, given))
            assert (config.engine.max_num_seqs, config.engine.max_model_len) == (64, sides.LONGEST)
        kind, settings, environ = sides.in_process("vllm-v1", Path("model"), 64, given)
        assert (kind, settings["max_num_seqs"], environ["VLLM_USE_V2_MODEL_RUNNER"]) == ("vllm", 64, "0")
        assert environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0", "there is no ninja to compile it with"


def test_a_piece_that_hangs_ends_at_its_deadline_with_all_that_it_started(
    on_gpu, tmp_path, monkeypatch, capsys
):
    hangs = (
        "import json, subprocess, sys, time; child = subprocess.Popen(['sleep', '600'], start_new_session=True); "
        "open(sys.argv[1], 'w').write(json.dumps({'child': child.pid})); time.sleep(600)"
    )
    writes = "import sys; open(sys.argv[1], 'w').write('{\"cells\": {}}')"
    command = on_gpu.Command(5, {
        "hangs": on_gpu.Piece(1.5, (sys.executable, "-c", hangs, "OUT")),
        "gate": on_gpu.Piece(60, (sys.executable, "-c", writes, "OUT")),
    })  # fmt: skip
    monkeypatch.setitem(on_gpu.GPU, "gate", command)
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", "gate", "--out", str(tmp_path)])
    assert on_gpu.main() == 1
    report = json.loads((tmp_path / "gate.json").read_text())
    assert (report["pieces"]["hangs"]["code"], report["pieces"]["gate"]["code"]) == (124, 0)
    assert report["verdict"] == "incomplete"
    assert "verdict gate: incomplete in " in capsys.readouterr().out
    child = report["pieces"]["hangs"]["figures"]["child"]
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]


def test_a_command_ends_at_its_deadline_whatever_its_pieces_may_take(on_gpu, tmp_path):
    sleeps = (sys.executable, "-c", "import time; time.sleep(600)", "OUT")
    begun = time.monotonic()
    report = on_gpu.run(
        "gate", on_gpu.Command(1.5, {name: on_gpu.Piece(60, sleeps) for name in "ab"}), tmp_path
    )
    assert time.monotonic() - begun < 30
    assert [each["code"] for each in report["pieces"].values()] == [124, 124]
    assert (report["verdict"], report["pieces"]["b"]["seconds"]) == ("incomplete", 0.0)


def test_a_command_ends_sooner_where_less_time_is_left(on_gpu, tmp_path, monkeypatch):
    sleeps = (sys.executable, "-c", "import time; time.sleep(600)", "OUT")
    monkeypatch.setitem(on_gpu.GPU, "gate", on_gpu.Command(500, {"gate": on_gpu.Piece(500, sleeps)}))
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", "gate", "--seconds", "1", "--out", str(tmp_path)])
    assert on_gpu.main() == 1
    assert json.loads((tmp_path / "gate.json").read_text())["limit_seconds"] == 1


def gate_cells(function: float, flag: float) -> dict:
    cells = {"copies 0": 1.0, "function 0": function, "function 400": function + 1, "flag 400": flag}
    return {name: {"beyond_us": us, "launch_us": 1.0} for name, us in cells.items()}


def test_the_verdict_on_gates(verdicts):
    deadline = {"deadline 100": {"beyond_us": 3.0, "launch_us": 1.0}}
    status, line = verdicts.gate({"gate": {"cells": gate_cells(30, 12) | deadline}})
    assert status == "pass"
    assert line.startswith("flag is cheaper: function 31 us beyond its work, flag 12 us")
    assert verdicts.gate({"gate": {"cells": gate_cells(300, 120) | deadline}})[0] == "short"
    assert verdicts.gate({"gate": {"cells": gate_cells(30, 12)}})[0] == "incomplete"
    assert verdicts.gate({}) == ("incomplete", "gates measured: none")


def rated(cells: dict[str, dict[str, float]], sides: dict | None = None, skipped: list | None = None) -> dict:
    return {
        "reference": "vllm", "sides": sides or {}, "skipped": skipped or [],
        "cells": {
            cell: {"vllm": {"ratio": [1.0, 1.0, 1.0]}}
            | {side: {"ratio": [each, each, each]} for side, each in ratios.items()}
            for cell, ratios in cells.items()
        },
    }  # fmt: skip


def test_the_verdict_on_what_is_lost_without_drafts(verdicts):
    cells = {"512x64": {"vllm-v1": 0.9, "off": 0.6, "off-now": 1.0}, "512x1": {"off": 0.99, "off-now": 0.98}}
    status, line = verdicts.split({"rates": rated(cells), "profile": {}})
    assert (status, line) == (
        "pass", "512x64: vllm-v1 0.90, off 0.60, off-now 1.00; best of Seer 512x64 1.00, 512x1 0.99"
    )  # fmt: skip
    assert verdicts.split({"rates": rated(cells)})[0] == "incomplete"
    assert (
        verdicts.split({"rates": rated(cells, skipped=[["512x1", "off"]]), "profile": {}})[0] == "incomplete"
    )
    cells["512x1"] = {"off": 0.97}
    assert verdicts.split({"rates": rated(cells), "profile": {}})[0] == "short"
    status, line = verdicts.split({"rates": rated({"512x1": {}}, {"v2": {"refused": "no setting"}})})
    assert (status, line) == ("incomplete", "1 cells, not all with one of Seer's sides; v2 refused")


def steps(**times: float) -> dict:
    lines = [{"text": "capacity", "figures": {}}]
    for name, ms in times.items():
        batch, drafts = map(int, name[1:].split("_"))
        lines.append({"text": "step", "figures": {"batch": batch, "drafts": drafts, "ms": ms}})
    return {"lines": lines}


def test_the_verdict_on_graphs(verdicts):
    found = {
        "model": {"model": "padded"},
        "default": steps(b64_0=12.0, b64_8=20.0, b256_0=1.0), "full": steps(b64_0=7.0, b64_8=12.0),
        "off": steps(b64_0=6.95),
    }  # fmt: skip
    status, line = verdicts.graphs(found)
    assert status == "pass"
    assert line.startswith("64 rows, 0 drafts: off 6.95 ms, full 7 ms, default 12 ms; 8 drafts: full 12 ms")
    assert verdicts.graphs(found | {"off": steps(b64_0=5.0)})[0] == "short"
    assert verdicts.graphs(found | {"full": {"lines": []}})[0] == "incomplete"
    assert verdicts.graphs({"model": {}})[0] == "incomplete"


def test_the_verdict_on_tokens(verdicts):
    good = {"passed": True, "bug": 0, "numeric": 3, "tokens_compared": 5000}
    exact = good | {"numeric": 0}
    ways = {"ways": {"chunks of 16": {"rows": 900, "differ": 0}}}
    found = {"verify-bfloat16": good, "verify-invariant": exact, "ways-invariant": ways}
    assert verdicts.verify(found) == (
        "pass", "0 bugs in 10000 tokens; batch-invariant: 0 numeric differences, 0 rows of logits differ"
    )  # fmt: skip
    broken = {
        "verify-bfloat16": good | {"bug": 1, "passed": False}, "verify-invariant": good,
        "ways-invariant": {"ways": {"a": {"rows": 9, "differ": 2}}},
    }  # fmt: skip
    for name, each in broken.items():
        assert verdicts.verify(found | {name: each})[0] == "short"
    assert verdicts.verify({"ways-invariant": ways})[0] == "incomplete"


def test_the_verdict_on_drafts(verdicts):
    cells = {"512x1": {"grouped": 2.1}, "512x64": {"own": 1.2, "grouped": 1.4}, "16x256": {"grouped": 0.98}}
    assert verdicts.drafts({"rates": rated(cells)}) == (
        "pass", "best with drafts: 512x1 2.10, 512x64 1.40, 16x256 0.98"
    )  # fmt: skip
    for cell, ratio in (("512x1", 1.9), ("512x64", 1.2), ("16x256", 0.97)):
        assert verdicts.drafts({"rates": rated(cells | {cell: {"grouped": ratio}})})[0] == "short"
    assert verdicts.drafts({})[0] == "incomplete"


def test_the_brief_verdict_is_the_worst_of_three(verdicts):
    good = {"passed": True, "bug": 0, "numeric": 3, "tokens_compared": 5000}
    cells = {"512x64": {"grouped": 1.4, "off": 1.0}, "16x256": {"grouped": 0.99, "off": 0.98}}
    found = {"verify-bfloat16": good, "rates": rated(cells)}
    status, line = verdicts.brief(found)
    assert status == "pass"
    assert line.startswith(
        "0 bugs in 5000 tokens; 512x64: off 1.00; best of Seer 512x64 1.00, 16x256 0.98; best"
    )
    slow = rated(cells | {"512x64": {"grouped": 1.2, "off": 1.0}})
    assert verdicts.brief(found | {"rates": slow})[0] == "short"
    assert verdicts.brief(found | {"verify-bfloat16": good | {"bug": 1}})[0] == "short"
    assert verdicts.brief({"rates": slow})[0] == "incomplete"


def test_rates_are_written_after_each_cell_and_ratios_are_of_the_same_turns(monkeypatch, tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs the engine extra")
    module = loaded("rates", monkeypatch)
    rates = module.Rates(tmp_path / "rates.json", {"skipped": []}, "vllm")
    some, other = [("0", 0, [1, 2, 3, 4])], [("0", 0, [1, 2, 3, 5])]
    rates.tell("v2", {"refused": "because"})
    rates.keep("4x1", {"vllm": [(2.0, some), (1.0, some)], "off": [(4.0, some), (1.0, some)]})
    rates.keep("4x1", {"vllm": [(1.0, some), (1.0, some)], "grouped": [(0.5, some), (0.5, other)]})
    written = json.loads((tmp_path / "rates.json").read_text())
    assert written["sides"] == {"v2": {"refused": "because"}}
    cell = written["cells"]["4x1"]
    assert cell["off"]["ratio"] == [0.75, 0.5, 1.0]
    assert (cell["off"]["differing"], cell["grouped"]["differing"], cell["grouped"]["responses"]) == (0, 1, 2)
    assert cell["grouped"]["ratio"] == [2.0, 2.0, 2.0]
    assert cell["vllm"]["again"] == [4]


class Side:
    """A contestant that fails in a turn, or hangs there."""

    def __init__(self, worst: str = "", turn: int = 0) -> None:
        self.worst, self.turn, self.closed = worst, turn, False

    async def run(self, prompts, n, tokens, seed):
        if self.worst and seed == self.turn:
            if self.worst == "hangs":
                await asyncio.sleep(60)
            raise ValueError if self.worst == "bug" else sys.modules["contestants"].RefusedError("it ended")
        return [("0", 0, [1])]

    async def close(self):
        self.closed = True


def test_a_side_that_fails_or_hangs_is_left_out_and_others_go_on(monkeypatch, tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs the engine extra")
    module = loaded("rates", monkeypatch)
    monkeypatch.setattr(module, "RUN_SECONDS", 0.2)
    rates = module.Rates(tmp_path / "rates.json", {"skipped": []}, "vllm")
    sides = {"vllm": Side(), "grouped": Side("hangs", 1), "off": Side("fails", 0), "engine": Side()}
    there = dict(sides)
    given = argparse.Namespace(cells=["4x1", "2x1"], turns=2, end=float("inf"))
    asyncio.run(module.cells(there, rates, given))
    assert list(there) == ["vllm", "engine"]
    assert [name for name, side in sides.items() if side.closed] == ["grouped", "off"]
    written = json.loads((tmp_path / "rates.json").read_text())
    assert all(sorted(cell) == ["engine", "vllm"] for cell in written["cells"].values())
    assert written["sides"]["grouped"]["refused"].startswith("in turn 1 of 4x1: TimeoutError")
    assert written["sides"]["off"]["refused"] == "in turn 0 of 4x1: RefusedError: it ended"


def test_a_process_that_has_ended_is_refused(monkeypatch):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs the engine extra")
    module = loaded("contestants", monkeypatch)
    process = module.Process("vllm", {}, {})
    process._command = [sys.executable, "-c", "print('answer {}'); input()"]

    async def ask():
        await process.start()
        with pytest.raises((module.RefusedError, OSError)):
            await process.run([], 1, 1, 0)
        await process.close()
        await process.close()

    asyncio.run(ask())


def test_a_profile_is_summed_a_step(monkeypatch):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs the engine extra")
    module = loaded("profile_steps", monkeypatch)
    found = module.summary([
        ("cudaLaunchKernel", 40, 2000.0, 0.0), ("cudaGraphLaunch", 20, 1000.0, 0.0), ("aten::add", 40, 500.0, 0.0),
        ("gemm", 20, 0.0, 60_000.0), ("cudaEventSynchronize", 20, 30_000.0, 0.0),
    ], 20)  # fmt: skip
    assert (found["device_ms"], found["launches"]) == (3.0, {"count": 3.0, "host_ms": 0.15})
    assert found["waits"] == {"count": 1.0, "host_ms": 1.5}
    assert [each["name"] for each in found["top"]][:2] == ["gemm", "cudaEventSynchronize"]


def test_gates_run_on_a_fake_stream_and_a_stalled_host_does_not_hang_it(tmp_path):
    out = tmp_path / "gate.json"
    command = [sys.executable, str(FOLDER / "gate_bench.py"), str(out), "--steps", "6"]
    subprocess.run([*command, "--cpu"], check=True, timeout=120)
    cells = json.loads(out.read_text())["cells"]
    kinds = {"copies", "function", "flag", "deadline"}
    assert {name.split()[0] for name in cells} == kinds | {f"{kind}-beside" for kind in kinds}
