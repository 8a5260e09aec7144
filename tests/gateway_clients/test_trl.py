"""TRL's `VLLMClient`."""

import pytest

VLLMClient = pytest.importorskip("trl.generation.vllm_client").VLLMClient
pytest.importorskip("vllm")


@pytest.fixture
def client(control):
    return VLLMClient(base_url=control, connection_timeout=30)


def test_generate(client):
    got = client.generate(["1 2", "3"], n=3, temperature=0.7, top_p=0.9, max_tokens=9, logprobs=0)
    assert [len(got[key]) for key in ("prompt_ids", "completion_ids", "logprobs")] == [2, 6, 6]
    for tokens, logprobs, ids in zip(
        got["completion_ids"], got["logprobs"], got["logprob_token_ids"], strict=True
    ):
        assert 1 <= len(tokens) <= 9
        assert [each[0] for each in ids] == tokens
        assert all(len(each) == 1 and each[0] <= 0 for each in logprobs)
    ids = client.generate(got["prompt_ids"], n=1, max_tokens=4)
    assert ids["prompt_ids"] == got["prompt_ids"]
    seeded = [client.generate(["1"], max_tokens=9, generation_kwargs={"seed": 5}) for _ in range(2)]
    assert seeded[0] == seeded[1]


def test_chat(client):
    messages = [[{"role": "user", "content": "1 2"}], [{"role": "user", "content": "3"}]]
    tools = [{"type": "function", "function": {"name": "S4", "parameters": {}}}]
    got = client.chat(messages, n=2, max_tokens=7, tools=tools)
    assert [len(got[key]) for key in ("prompt_ids", "completion_ids", "logprobs")] == [2, 4, 4]


def test_control(client):
    assert client.get_world_size() == 1
    client.reset_prefix_cache()
    with pytest.raises(RuntimeError, match="no weight-transfer engine"):
        client.init_communicator(device="cpu")


def test_structured_outputs(client):
    got = client.generate(["1 2"], n=4, max_tokens=7, structured_outputs_regex="7|none")
    assert {ids[0] for ids in got["completion_ids"]} <= {10, 62}  # the words 7 and none
    assert {tuple(ids[1:]) for ids in got["completion_ids"]} <= {(), (2,)}


def test_refusals(client):
    with pytest.raises(Exception, match=r"structured_outputs\.regex"):
        client.generate(["1"], structured_outputs_regex="(")
