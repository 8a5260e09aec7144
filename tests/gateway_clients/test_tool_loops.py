"""Loops of three tool calls by frameworks for agents, each with its own client and defaults."""

import json

import pytest

SUM = "the sum is 21"
KEYS = ["a", "b", "c"]
ASKED = "look up a, b and c, and add them"


class LookUp:
    """The tool; `keys` are what it was asked."""

    def __init__(self):
        self.keys = []

    def __call__(self, key: str) -> str:
        """Look a key up.

        Args:
            key: the key
        """
        self.keys.append(key)
        return f"value of {key} is 7"


@pytest.fixture
def look_up():
    return LookUp()


@pytest.fixture
def url(tools, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", f"{tools}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    return f"{tools}/v1"


PARAMETERS = {
    "type": "object",
    "properties": {"key": {"type": "string"}},
    "required": ["key"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_openai_responses(url, look_up, stream):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI()
    tool = {"type": "function", "name": "look_up", "parameters": PARAMETERS, "strict": True}
    history = [{"role": "user", "content": ASKED}]
    for _ in range(4):
        asked = {"model": "model", "input": history, "tools": [tool], "instructions": "be brief"}
        if stream:
            with client.responses.stream(**asked) as events:
                got = events.get_final_response()
        else:
            got = client.responses.create(**asked)
        calls = [item for item in got.output if item.type == "function_call"]
        history += [item.model_dump(exclude_none=True) for item in got.output]
        for call in calls:
            output = look_up(**json.loads(call.arguments))
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    assert got.output_text == SUM
    assert got.status == "completed"
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="model", input="a", previous_response_id=got.id)
    assert look_up.keys == KEYS


@pytest.mark.parametrize("kind", ["responses", "chat"])
@pytest.mark.parametrize("stream", [False, True])
async def test_openai_agents(url, look_up, kind, stream):
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    kinds = {"responses": agents.OpenAIResponsesModel, "chat": agents.OpenAIChatCompletionsModel}
    model = kinds[kind]("model", agents.AsyncOpenAI())
    tool = agents.function_tool(look_up.__call__, name_override="look_up")
    agent = agents.Agent("a", instructions="be brief", tools=[tool], model=model)
    if stream:
        got = agents.Runner.run_streamed(agent, ASKED)
        async for _ in got.stream_events():
            pass
    else:
        got = await agents.Runner.run(agent, ASKED)
    assert got.final_output == SUM
    assert look_up.keys == KEYS


def test_litellm(url, look_up):
    litellm = pytest.importorskip("litellm")
    tool = {"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS}}
    history = [{"role": "user", "content": ASKED}]
    for _ in range(4):
        got = litellm.completion("hosted_vllm/model", api_base=url, messages=history, tools=[tool])
        message = got.choices[0].message
        history.append(message.model_dump())
        for call in message.tool_calls or []:
            output = look_up(**json.loads(call.function.arguments))
            history.append({"role": "tool", "tool_call_id": call.id, "content": output})
    assert message.content == SUM
    assert look_up.keys == KEYS


def test_langchain(url, look_up):
    langchain_openai = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import StructuredTool

    tool = StructuredTool.from_function(look_up.__call__, name="look_up")
    model = langchain_openai.ChatOpenAI(model="model").bind_tools([tool])
    history = [HumanMessage(ASKED)]
    for _ in range(4):
        history.append(model.invoke(history))
        history += [tool.invoke(call) for call in history[-1].tool_calls]
    assert history[-1].content == SUM
    assert look_up.keys == KEYS


async def test_pydantic_ai(url, look_up):
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent, Tool
    from pydantic_ai.models.openai import OpenAIChatModel

    agent = Agent(OpenAIChatModel("model"), tools=[Tool(look_up.__call__, name="look_up")])
    assert (await agent.run(ASKED)).output == SUM
    assert look_up.keys == KEYS


def test_inspect_ai(url, look_up, tmp_path):
    inspect_ai = pytest.importorskip("inspect_ai")
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    @tool(name="look_up")
    def made():
        async def execute(key: str) -> str:
            """Look a key up.

            Args:
                key: the key
            """
            return look_up(key)

        return execute

    task = inspect_ai.Task(
        [Sample(ASKED, target="21")], solver=[use_tools(made()), generate()], scorer=includes()
    )
    model = "openai-api/openai/model"
    (log,) = inspect_ai.eval(task, model=model, model_base_url=url, log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    assert log.results.scores[0].metrics["accuracy"].value == 1
    assert look_up.keys == KEYS


def test_smolagents(url, look_up):
    smolagents = pytest.importorskip("smolagents")

    @smolagents.tool
    def look_up_(key: str) -> str:
        """Look a key up.

        Args:
            key: the key
        """
        return look_up(key)

    look_up_.name = "look_up"
    model = smolagents.OpenAIModel("model", api_base=url, api_key="none")
    agent = smolagents.ToolCallingAgent([look_up_], model, verbosity_level=0)
    assert agent.run(ASKED) == SUM
    assert look_up.keys == KEYS
