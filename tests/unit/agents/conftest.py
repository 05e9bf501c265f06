"""Helpers of the agents' tests: a policy that is a table, and a way to run a file."""

import textwrap

import numpy as np
import pytest

from quartet.agents.episode import Episode, Script, Turn
from quartet.agents.pool import AgentPool, AgentSettings
from quartet.data.tokenizer import fingerprint_of, load_tokenizer
from quartet.types import Completion, FinishReason, SamplingParams, VersionSpan


@pytest.fixture(scope="session")
def tokenizer(tiny_model_dir):
    return load_tokenizer(tiny_model_dir)


@pytest.fixture
def write_agent(tmp_path):
    """Write an agent's file and return its path."""

    def write(text, name="my_agent.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


class Policy:
    """Says a text at every turn, token by token with log-probability -0.1, -0.2, ..."""

    def __init__(self, tokenizer, texts, *, finish="stop", version=3):
        self.tokenizer = tokenizer
        self.texts = texts
        self.finish = finish
        self.version = version
        self.asked = []
        self.error = None
        self.gate = None

    def answer_of(self, script):
        async def answer(turn, wanted):
            self.asked.append(wanted)
            if self.gate is not None:
                await self.gate.wait()
            if self.error is not None:
                raise self.error
            tokens = self.tokenizer(self.texts[turn % len(self.texts)], add_special_tokens=False)
            ids = tokens["input_ids"]
            if self.finish == "stop":
                ids = [*ids, self.tokenizer.eos_token_id]
            logprobs = [-(i + 1) / 10 for i in range(len(ids))]
            script.turns.append(
                Turn(
                    prompt_token_ids=tuple(wanted["prompt_token_ids"]),
                    completion=Completion(
                        token_ids=np.array(ids, np.int32),
                        logprobs=np.array(logprobs, np.float32),
                        finish_reason=FinishReason(self.finish),
                        versions=(VersionSpan(policy_version=self.version, start=0, end=len(ids)),),
                    ),
                    replica="rollout-0",
                )
            )
            return {
                "request_id": "r",
                "token_ids": ids,
                "logprobs": logprobs,
                "finish_reason": self.finish,
            }

        return lambda attempt: answer


@pytest.fixture
def policy(tokenizer):
    return lambda *texts, **more: Policy(tokenizer, texts or ("yes",), **more)


@pytest.fixture
def pool_of(tiny_model_dir, tokenizer):
    """An open pool for a file."""

    def make(path, **changes):
        return AgentPool(
            AgentSettings(
                path=path,
                model_name_or_path=str(tiny_model_dir),
                fingerprint=fingerprint_of(tokenizer),
                vocab_size=len(tokenizer),
                **{"num_workers": 1, "time_limit": 30.0, **changes},
            )
        )

    return make


def make_episode(name="s", *, prompt="guess ", label="7", max_length=64, **sampling):
    return Episode(
        sample_id=name,
        prompt=prompt,
        label=label,
        sampling=SamplingParams(**sampling),
        max_length=max_length,
    )


async def play(pool, policy, episode=None):
    script = Script()
    return await pool.play(episode or make_episode(), script, policy.answer_of(script))


@pytest.fixture(name="make_episode")
def make_episode_fixture():
    return make_episode


@pytest.fixture(name="play")
def play_fixture():
    return play
