"""What prime-rl and AReaL send, field by field, where their packages cannot be installed beside a client."""

import asyncio

import pytest

httpx = pytest.importorskip("httpx")

AREAL = {
    "top_p": 1.0, "top_k": 100_000_000, "max_tokens": 9, "temperature": 1.0, "stop_token_ids": [2],
    "ignore_eos": False, "skip_special_tokens": True, "return_tokens_as_token_ids": True, "logprobs": 0,
    "use_beam_search": False, "stream": False,
}  # fmt: skip


async def test_areal(control, model):
    async with httpx.AsyncClient(base_url=control, timeout=120) as client:
        (await client.post("/areal_pause_generation", json={})).raise_for_status()
        held = asyncio.create_task(client.post("/v1/completions", json=AREAL | {"prompt": [4, 5]}))
        (await client.post("/areal_update_weights", json={"model_path": model})).raise_for_status()
        assert not held.done()
        (await client.post("/areal_continue_generation", json={})).raise_for_status()
        (choice,) = (await held).json()["choices"]
    tokens = [int(text.split(":")[1]) for text in choice["logprobs"]["tokens"]]
    assert len(tokens) == len(choice["logprobs"]["token_logprobs"])
    assert choice["finish_reason"] in ("stop", "length")
    assert (choice["stop_reason"] == 2) == (choice["finish_reason"] == "stop")


async def test_prime_rl_s_update(control, model):
    body = {"token_ids": [4, 5], "sampling_params": {"max_tokens": 20, "seed": 3, "logprobs": 1}}
    async with httpx.AsyncClient(base_url=control, timeout=120) as client:
        before = (await client.post("/inference/v1/generate", json=body)).json()["choices"][0]
        for path, update in (
            ("/pause?mode=keep&clear_cache=false", None),
            ("/update_weights", {"weight_dir": model}),
            ("/resume", None),
        ):
            (await client.post(path, json=update)).raise_for_status()
        after = (await client.post("/inference/v1/generate", json=body)).json()["choices"][0]
    versions = [int(each["weight_versions"][0]["version"]) for each in (before, after)]
    assert versions[1] == versions[0] + 1
    assert after["token_ids"] == before["token_ids"]  # the weights are the same
    logprobs = [[entry["logprob"] for entry in each["logprobs"]["content"]] for each in (before, after)]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-4)
