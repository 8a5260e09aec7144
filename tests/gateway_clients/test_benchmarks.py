"""Programs that measure models and servers, each with a task or a benchmark of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SUMS = [(10, 8), (12, 5), (9, 7), (14, 3), (20, 6), (8, 5)]
"""What the shipped model can add."""


def test_lm_evaluation_harness(data, model, tmp_path, monkeypatch):
    """Its `local-completions`: a multiple choice by the logprobs of echoed prompts."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    rows = []
    for place, (a, b) in enumerate(SUMS):
        choices = [str(a + b + off) for off in (1, 2, 3)]
        choices[place % 3] = str(a + b)
        shown = f"<bos> {a} {b} > {a + b} S2 {a} {b} : {a} + {b} ="
        rows.append({"shown": shown, "choices": choices, "right": place % 3})
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "sums.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{shown}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{right}}",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "sums.yaml").write_text(json.dumps(task))
    arguments = {
        "model": "model", "base_url": f"{data}/v1/completions", "tokenizer": model, "num_concurrent": 4,
        "max_length": 512,
    }  # fmt: skip
    got = lm_eval.simple_evaluate(
        "local-completions", model_args=arguments, tasks=["sums"], task_manager=TaskManager(include_path=str(tmp_path)),
        bootstrap_iters=0,
    )  # fmt: skip
    assert got["results"]["sums"]["acc,none"] == 1
    for sample in got["samples"]["sums"]:
        logprobs = [answers[0][0] for answers in sample["resps"]]
        assert max(logprobs) > -0.7 > sorted(logprobs)[-2]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_guidellm(data, model, tmp_path, route):
    """Its benchmark of streams: all requests complete, and its counts of tokens are the gateway's."""
    pytest.importorskip("guidellm")
    prompts = [{"prompt": f"{a} {b} > {a + b}"} for a, b in SUMS]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in prompts * 3))
    command = [
        str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console",
        "--backend", f"kind=openai_http,target={data},model=model,request_format={route},max_tokens=20",
        "--profile", "kind=concurrent,streams=3", "--constraint", "kind=max_requests,count=12",
        "--tokenizer", f"kind=hf_auto,model={model}", "--data", f"kind=json_file,path={tmp_path}/prompts.jsonl",
        "--output", f"kind=json,path={tmp_path}/report.json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    assert report["metrics"]["request_totals"] == {
        "successful": 12,
        "errored": 0,
        "incomplete": 0,
        "total": 12,
    }
    for request in report["requests"]["successful"]:
        words = len(request["output"].split())
        assert request["output_tokens"] - words in (0, 1)  # the token that ends a text has no word
        assert 0 < words <= 20
        assert request["time_to_first_token_ms"] > 0
