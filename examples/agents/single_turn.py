"""An agent of one turn: a completion, and a reward for it.

    quartet train ppo --train.agent_func_path examples/agents/single_turn.py ...

For rewards alone `--reward.remote_url` with a file like `examples/math_reward_func.py` does the
same in a service of its own. This is the place to start from when the prompt is to be changed, the
policy to be asked twice, or tokens are to be put into the sample: `execute` can be written anew.
"""

from __future__ import annotations

from typing import Any

from quartet.agents import SingleTurnAgentExecutor


def reward_func(
    queries: list[str], prompts: list[str], labels: list[Any], **kwargs: Any
) -> dict[str, Any]:
    """1 for a completion that holds the label. The lists have one entry each."""
    answer = queries[0][len(prompts[0]) :]
    right = str(labels[0]) in answer
    return {
        "rewards": [float(right)],
        "scores": [float(right)],
        "extra_logs": {"answer_chars": len(answer)},
    }


class AgentExecutor(SingleTurnAgentExecutor):
    """What Quartet looks for in this file."""

    def __init__(self) -> None:
        """Judge by `reward_func`."""
        super().__init__(reward_func)
