"""An agent of several turns: the policy guesses a number, and is told whether to go up or down.

    quartet train ppo --train.agent_func_path examples/agents/guess_number.py ...

Rows of the data set have the question as prompt and the number as label. A right guess is worth 1,
and half as much with every turn that it took; the game ends after `TURNS` guesses.
"""

from __future__ import annotations

import re
from typing import Any

from quartet.agents import AgentInstanceBase, MultiTurnAgentExecutor

TURNS = 2


class AgentInstance(AgentInstanceBase):
    """One game. `reset` begins it, `step` answers a guess."""

    def __init__(self) -> None:
        """Nothing is known yet; what is to be awaited would be done in `reset`."""
        self.turn = 0

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Show the question as it is."""
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Judge the first number of the guess."""
        self.turn += 1
        found = re.search(r"\d+", states["action_text"])
        number, guess = int(states["label"]), int(found[0]) if found else None
        right = guess == number
        if right or self.turn == TURNS:
            feedback = ""
        elif guess is None:
            feedback = "\nSay a number.\nGuess: "
        else:
            feedback = f"\nIt is {'more' if guess < number else 'less'}.\nGuess: "
        return {
            "rewards": 0.5 ** (self.turn - 1) if right else 0.0,
            "scores": float(right),
            "environment_feedback": feedback,
            "done": right or self.turn == TURNS,
            "extra_logs": {"said_number": float(guess is not None), "turns": self.turn},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    """What Quartet looks for in this file."""

    def __init__(self) -> None:
        """Play games of `AgentInstance`."""
        super().__init__(AgentInstance)
