"""`openai`: completions, chats, streams, errors."""

import pytest

openai = pytest.importorskip("openai")

MESSAGES = [{"role": "user", "content": "1 2"}]


def same(logprobs):
    """Equal but for last bits: a stream's steps may verify other drafts than the whole answer's."""
    return pytest.approx(logprobs, abs=1e-4)


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
    asked = {
        "model": "model",
        "max_tokens": 700,
        "seed": 4,
        "logprobs": 1,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(prompt="1 2", **asked).choices[0]
    parts = [part.choices[0] for part in client.completions.create(prompt="1 2", stream=True, **asked)]
    assert len(parts) > 1
    assert "".join(part.text for part in parts) == whole.text
    logprobs = [each for part in parts for each in part.logprobs.token_logprobs]
    assert logprobs == same(whole.logprobs.token_logprobs)
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]


def test_chat_streams(client):
    asked = {"model": "model", "messages": MESSAGES, "max_tokens": 700, "seed": 4}
    asked |= {"logprobs": True, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**asked)
    usage = {"include_usage": True}
    *parts, last = client.chat.completions.create(stream=True, stream_options=usage, **asked)
    assert last.usage == whole.usage
    deltas = [part.choices[0].delta for part in parts]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content for delta in deltas) == whole.choices[0].message.content
    logprobs = [each for part in parts[1:] for each in part.choices[0].logprobs.content]
    expected = whole.choices[0].logprobs.content
    assert [each.token for each in logprobs] == [each.token for each in expected]
    assert [each.logprob for each in logprobs] == same([each.logprob for each in expected])
    with client.chat.completions.stream(**asked) as stream:  # puts the parts together itself
        stream.until_done()
        message = stream.current_completion_snapshot.choices[0].message
    assert message.content == whole.choices[0].message.content


def test_errors(client):
    with pytest.raises(openai.NotFoundError, match="this system has 'model' alone"):
        client.completions.create(model="other", prompt="1")
    with pytest.raises(openai.BadRequestError, match="response_format") as info:
        client.chat.completions.create(model="model", messages=MESSAGES, response_format={"type": "xml"})
    assert info.value.param == "response_format.type"
    with pytest.raises(openai.BadRequestError, match=r"temperature = -1\.0: must be in"):
        client.completions.create(model="model", prompt="1", temperature=-1)


async def test_many_at_once(data):
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"{data}/v1", api_key="none") as client:
        got = await asyncio.gather(
            *(client.completions.create(model="model", prompt="1 2", max_tokens=12) for _ in range(64))
        )
    assert len({choice.text for each in got for choice in each.choices}) > 1
