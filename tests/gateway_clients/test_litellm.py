"""`litellm`, provider `hosted_vllm`."""

import pytest

litellm = pytest.importorskip("litellm")

MESSAGES = [{"role": "user", "content": "1 2"}]


def test_chat(data):
    got = litellm.completion(
        model="hosted_vllm/model", api_base=f"{data}/v1", messages=MESSAGES, max_tokens=5, logprobs=True,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert got.choices[0].message.role == "assistant"
    assert 1 <= got.usage.completion_tokens <= 5


def test_chat_streams(data):
    parts = litellm.completion(
        model="hosted_vllm/model", api_base=f"{data}/v1", messages=MESSAGES, max_tokens=5, stream=True
    )
    assert [part.choices[0].finish_reason for part in parts][-1] in ("stop", "length")


def test_completions(data):
    got = litellm.text_completion(
        model="hosted_vllm/model", api_base=f"{data}/v1", prompt="1 2", max_tokens=5, n=2
    )
    assert len(got.choices) == 2


def test_errors(data):
    schema = {"type": "integer", "multipleOf": 3}
    with pytest.raises(litellm.BadRequestError, match="structured_outputs"):
        litellm.completion(
            model="hosted_vllm/model", api_base=f"{data}/v1", messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        )  # fmt: skip
