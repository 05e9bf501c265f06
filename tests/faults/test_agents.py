"""Faults of agents."""

from types import SimpleNamespace

import pytest

from quartet.agents import MultiTurnAgentExecutor, SamplingParams
from quartet.agents.outputs import output_of


class Tokenizer:
    """One token a character."""

    eos_token_id = 0

    def __call__(self, text, **_):
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids, **_):
        return "".join(map(chr, ids))


class Engine:
    """Says "x" as often as it may."""

    def __init__(self):
        self.limits = []

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        self.limits.append(sampling_params.max_tokens)
        sampling_params.max_tokens = 1  # its own copy, so nobody minds
        answer = {
            "request_id": "r",
            "token_ids": [120] * self.limits[-1],
            "logprobs": [-1.0] * self.limits[-1],
            "finish_reason": "length",
        }
        return output_of(answer, prompt_token_ids, tokenizer=Tokenizer())


def game(rewards, *, num_turns):
    class Game:
        turns = 0

        def reset(self, states):
            return {"observation": states["observation"]}

        def step(self, states):
            self.turns += 1
            states["sampling_params"].max_tokens = 1
            return {"rewards": rewards, "done": self.turns == num_turns}

    return MultiTurnAgentExecutor(Game)


async def test_fault_17_every_turn_has_the_limit_of_new_tokens():
    engine = Engine()
    result = await game(0, num_turns=3).execute(
        "abc", "", SamplingParams(max_tokens=4), 10, Tokenizer(), engine
    )
    # 3 tokens, then 4, then the 3 that the context leaves; a fourth turn would have no room.
    assert engine.limits == [4, 3]
    assert result["action_ranges"] == [(3, 7), (7, 10)]
    assert result["truncated"]


@pytest.mark.parametrize("reward", [1, 1.0, True, SimpleNamespace(tolist=lambda: 1.0)])
async def test_rewards_may_be_numbers_or_tensors(reward):
    result = await game(reward, num_turns=2).execute(
        "a", "", SamplingParams(max_tokens=1), 9, Tokenizer(), Engine()
    )
    assert result["reward"] == 2.0
