"""SkyRL's `RemoteInferenceClient`; its package needs Python 3.12."""

import sys

import pytest

if sys.version_info < (3, 12):
    pytest.skip("skyrl 0.3.0 needs Python 3.12", allow_module_level=True)
module = pytest.importorskip("skyrl.backends.skyrl_train.inference_servers.remote_inference_client")


@pytest.fixture
async def client(data, control):
    made = module.RemoteInferenceClient(
        proxy_url=data, server_urls=[control], model_name="model", data_parallel_size=1
    )
    yield made
    await made.teardown()


async def test_generate(client):
    given = {
        "prompt_token_ids": [[4, 5], [6]],
        "sampling_params": {"max_tokens": 6, "min_tokens": 1, "logprobs": 1, "top_k": -1, "stop": None},
        "session_ids": ["7_0", "7_1"],
        "cache_salt": "model@3",
    }
    got = await client.generate(given)
    assert [1 <= len(ids) <= 6 for ids in got["response_ids"]] == [True, True]
    assert list(map(len, got["response_logprobs"])) == list(map(len, got["response_ids"]))
    assert set(got["stop_reasons"]) <= {"stop", "length"}
    assert await client.detokenize(got["response_ids"]) == got["responses"]


async def test_routed_experts(client, experts):
    client.enable_return_routed_experts, client.proxy_url = True, experts
    got = await client.generate({"prompt_token_ids": [[4, 5]], "sampling_params": {"max_tokens": 6}})
    [experts] = got["rollout_expert_indices"]
    assert len(experts) == 1 + len(got["response_ids"][0])


async def test_turns_of_sessions(client, counters, caplog):
    """SkyRL's loop sends each turn with its trajectory's id, and says when that has ended."""
    given = {"sampling_params": {"max_tokens": 3, "min_tokens": 3, "logprobs": 1}, "session_ids": ["8_0"]}
    contexts, later = [4, 5], []
    for observation in ([9], [10, 11], []):
        before = counters()
        got = await client.generate(given | {"prompt_token_ids": [contexts]})
        later.append(counters()["later_turns"] - before["later_turns"])
        contexts = contexts + got["response_ids"][0] + observation
    assert later == [0, 1, 1]
    await client.finish_session("8_0")
    assert not caplog.records  # SkyRL would log a refusal


async def test_chats_and_text(client, data):
    body = {"model": "model", "messages": [{"role": "user", "content": "1"}], "max_tokens": 4}
    chat = await client.chat_completion({"json": body})
    assert chat["choices"][0]["message"]["role"] == "assistant"
    text = await client.completion({"json": {"model": "model", "prompt": "1 2", "max_tokens": 4}})
    assert len(text["choices"]) == 1
    assert await client.tokenize(["1 2"]) == [[4, 5]]
    assert client.get_endpoint_url() == data


async def test_tinkers_samples(client):
    prompt = {"chunks": [{"tokens": [4, 5]}]}
    body = {"prompt": prompt, "num_samples": 3, "sampling_params": {"max_tokens": 5, "seed": 1}}
    got = await client.sample({"json": body})
    assert len(got["sequences"]) == 3


async def test_control(client):
    await client.pause_generation()
    await client.resume_generation()
    await client.reset_prefix_cache()
    assert await client.get_world_size() == (1, 1)


async def test_refusals(client):
    with pytest.raises(Exception, match="weights by NCCL are not received"):
        await client.start_weight_update()
