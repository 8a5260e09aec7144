"""`openai`: completions, chats, streams, errors."""

import pytest

openai = pytest.importorskip("openai")

MESSAGES = [{"role": "user", "content": "1 2"}]


@pytest.fixture
def client(data):
    return openai.OpenAI(base_url=f"{data}/v1", api_key="none")


def test_models(client, model):
    (card,) = client.models.list().data
    assert card.id == "model"
    assert card.root == model
    assert card.max_model_len == 1024


def test_completions(client):
    got = client.completions.create(model="model", prompt=["1 2", "3"], n=2, max_tokens=5, logprobs=1, seed=1)
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    for choice in got.choices:
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) <= 5
        assert choice.finish_reason in ("stop", "length")
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
    again = client.completions.create(
        model="model", prompt=["1 2", "3"], n=2, max_tokens=5, logprobs=1, seed=1
    )
    assert [choice.text for choice in again.choices] == [choice.text for choice in got.choices]


def test_chat(client):
    got = client.chat.completions.create(model="model", messages=MESSAGES, max_tokens=6, logprobs=True)
    assert got.choices[0].message.role == "assistant"
    assert got.choices[0].message.tool_calls is None
    assert 1 <= len(got.choices[0].logprobs.content) <= 6
    assert got.choices[0].logprobs.content[0].logprob <= 0


def test_tools_go_in(client):
    tools = [
        {"type": "function", "function": {"name": "S4", "parameters": {"type": "object", "properties": {}}}}
    ]
    plain = client.chat.completions.create(model="model", messages=MESSAGES, max_tokens=6)
    got = client.chat.completions.create(model="model", messages=MESSAGES, max_tokens=6, tools=tools)
    assert got.usage.prompt_tokens == plain.usage.prompt_tokens + 2
    turns = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "S4", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "7"},
    ]
    client.chat.completions.create(model="model", messages=turns, max_tokens=6, tools=tools)


def test_streams(client):
    whole = client.completions.create(model="model", prompt="1 2", max_tokens=8, seed=4)
    parts = list(client.completions.create(model="model", prompt="1 2", max_tokens=8, seed=4, stream=True))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    parts = list(
        client.chat.completions.create(
            model="model",
            messages=MESSAGES,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-1].usage.completion_tokens >= 1


def test_errors(client):
    with pytest.raises(openai.NotFoundError, match="this system has 'model' alone"):
        client.completions.create(model="other", prompt="1")
    with pytest.raises(openai.BadRequestError, match="response_format") as info:
        client.chat.completions.create(
            model="model", messages=MESSAGES, response_format={"type": "json_object"}
        )
    assert info.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match=r"temperature = -1\.0: must be in"):
        client.completions.create(model="model", prompt="1", temperature=-1)


async def test_many_at_once(data):
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"{data}/v1", api_key="none") as client:
        got = await asyncio.gather(
            *(client.completions.create(model="model", prompt="1 2", max_tokens=12) for _ in range(64))
        )
    assert len({choice.text for each in got for choice in each.choices}) > 1
