"""An environment for `verifiers`: say a number, be told it, say another; two turns, the reward is how many."""

import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

TURNS = 2


class SayTask(vf.Task):
    @vf.reward
    async def said(self, trace) -> float:
        return float(len(trace.nodes))


class SayTaskset(vf.Taskset[SayTask, vf.TasksetConfig]):
    def load(self):
        for number in range(4):
            yield SayTask(vf.TaskData(prompt=f"{number + 1} {number + 2}"), self.config.task)


class SayHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt_text}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(TURNS):
                got = await client.chat.completions.create(model=ctx.model, messages=messages)
                answer = got.choices[0].message.content or ""
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "3"}]
        return ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["SayHarness", "SayTaskset"]
