"""What veRL loads by path: a reward, a sampler, and a tool that the shipped model calls by finding a dead end."""

import sys
from pathlib import Path

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "countdown"))
from task import IDS, check


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return float(check(ground_truth, solution_str))


class PromptSampler(ReplayBuffer):
    """Asks often whether a rollout is over: every two seconds, as usual, says little of how long it took."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options, poll_interval=0.05)


if not ToolParser._registry.get("wrong"):  # veRL loads this file once as a reward, and once for its tools

    @function_tool
    def give_up() -> str:
        """Ends the search."""
        return "ans"

    @ToolParser.register("wrong")
    class WrongParser(ToolParser):
        """A turn ends at the first `x`."""

        @property
        def stop_token_ids(self):
            return [IDS["x"]]

        async def extract_tool_calls(self, responses_ids, tools=None):
            calls = [FunctionCall(name="give_up", arguments="{}")] if responses_ids[-1] == IDS["x"] else []
            return self.tokenizer.decode(responses_ids), calls
