"""Episodes as executors play them, with a policy in this process."""

import pytest
import torch

from quartet.agents import (
    AgentInstanceBase,
    MultiTurnAgentExecutor,
    SamplingParams,
    SingleTurnAgentExecutor,
)
from quartet.agents.outputs import as_wire, output_of


class Engine:
    """Says texts in turn; the log-probability of the i-th token of a turn is -(i + 1) / 10."""

    def __init__(self, tokenizer, *texts, finish="stop"):
        self.tokenizer = tokenizer
        self.texts = list(texts)
        self.finish = finish
        self.asked = []

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        self.asked.append((prompt_token_ids, sampling_params))
        ids = self.tokenizer(self.texts.pop(0), add_special_tokens=False)["input_ids"]
        ids = ids[: sampling_params.max_tokens]
        if self.finish == "stop":
            ids = [*ids, self.tokenizer.eos_token_id]
        answer = {
            "request_id": "r",
            "token_ids": ids,
            "logprobs": [-(i + 1) / 10 for i in range(len(ids))],
            "finish_reason": self.finish,
        }
        return output_of(answer, prompt_token_ids, tokenizer=self.tokenizer)


def world(*answers, first="ask: "):
    """A world that gives these answers and keeps what it was told; its functions are plain."""

    told = []

    class World(AgentInstanceBase):
        def reset(self, states, **kwargs):
            told.append(states)
            return {"observation": first}

        def step(self, states, **kwargs):
            told.append(states)
            return {"rewards": 0.0, "done": False, **answers[len(told) - 2]}

    World.told = told
    return World


async def play(engine, instance, *, max_length=200, **sampling):
    return await MultiTurnAgentExecutor(instance).execute(
        prompt="the prompt",
        label="the label",
        sampling_params=SamplingParams(**sampling),
        max_length=max_length,
        hf_tokenizer=engine.tokenizer,
        llm_engine=engine,
    )


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


async def test_every_token_of_two_turns_is_where_it_belongs(tokenizer):
    eos = tokenizer.eos_token_id
    instance = world(
        {"rewards": torch.tensor(0.25), "environment_feedback": " no, "},
        {"rewards": 1, "done": True, "environment_feedback": " yes"},
    )
    engine = Engine(tokenizer, "one", "two more")
    result = await play(engine, instance)
    first, one = ids(tokenizer, "ask: "), [*ids(tokenizer, "one"), eos]
    no, two = ids(tokenizer, " no, "), [*ids(tokenizer, "two more"), eos]
    assert result["observation_tokens"] == [*first, *one, *no, *two, *ids(tokenizer, " yes")]
    start = len(first) + len(one) + len(no)
    assert result["action_ranges"] == [
        (len(first), len(first) + len(one)),
        (start, start + len(two)),
    ]
    for a, b in result["action_ranges"]:
        expected = [-(i + 1) / 10 for i in range(b - a)]
        assert result["rollout_log_probs"][a:b] == expected
        result["rollout_log_probs"][a:b] = [0.0] * (b - a)
    assert not any(result["rollout_log_probs"])
    assert result["reward"] == 1.25
    assert result["scores"] == 1.25
    assert not result["truncated"]
    # The second prompt is the sample so far, token by token.
    assert engine.asked[1][0] == [*first, *one, *no]
    assert [told.get("action_text") for told in instance.told] == [None, "one", "two more"]
    assert instance.told[2]["observation_text"] == "ask: one no, "
    assert instance.told[0] == {"observation": "the prompt", "label": "the label"}


async def test_each_turn_has_the_limit_of_new_tokens_and_the_context_that_is_left(tokenizer):
    engine = Engine(tokenizer, "a", "b", "c")
    instance = world({}, {}, {"done": True})
    await play(engine, instance, max_length=12, max_tokens=4)
    used = len(ids(tokenizer, "ask: "))
    assert [asked.max_tokens for _, asked in engine.asked] == [
        min(4, 12 - used),
        min(4, 12 - used - 2),
        min(4, 12 - used - 4),
    ]


async def test_an_episode_without_room_is_truncated_and_keeps_its_rewards(tokenizer):
    engine = Engine(tokenizer, "a", "b")
    length = len(ids(tokenizer, "ask: ")) + 4
    feedback = " and a long answer that does not fit"
    instance = world({"rewards": 0.5, "environment_feedback": feedback})
    result = await play(engine, instance, max_length=length)
    assert result["truncated"]
    assert result["reward"] == 0.5
    assert len(result["observation_tokens"]) == length
    assert len(engine.asked) == 1


async def test_one_cut_turn_makes_the_episode_truncated(tokenizer):
    engine = Engine(tokenizer, "a b c d e", "b", finish="length")
    result = await play(engine, world({}, {"done": True}), max_tokens=2)
    assert result["truncated"]


async def test_a_first_observation_beyond_the_context_is_no_action(tokenizer):
    engine = Engine(tokenizer)
    result = await play(engine, world(first="much too long for this"), max_length=3)
    assert result["action_ranges"] == []
    assert result["truncated"]


async def test_logs_of_all_turns_are_merged_and_the_later_one_counts(tokenizer):
    instance = world(
        {"extra_logs": {"a": 1, "b": 1}, "scores": 0.9},
        {"extra_logs": {"b": 2, "c": 3}, "done": True, "rewards": 0.5},
    )
    result = await play(Engine(tokenizer, "x", "y"), instance)
    assert result["extra_logs"] == {"a": 1, "b": 2, "c": 3}
    # The scores of the last turn count; it gave none, so they are the sum of rewards.
    assert result["scores"] == 0.5


async def test_sampling_params_are_of_one_sample_and_one_turn(tokenizer):
    engine = Engine(tokenizer, "x", "y", "z")
    shorter = SamplingParams(max_tokens=3)
    instance = world({"sampling_params": shorter}, {}, {"done": True})
    mine = SamplingParams(max_tokens=9)
    await MultiTurnAgentExecutor(instance).execute("p", "l", mine, 200, tokenizer, engine)
    assert [asked.max_tokens for _, asked in engine.asked] == [9, 3, 3]
    assert mine == SamplingParams(max_tokens=9)
    assert shorter.max_tokens == 3
    assert len({id(asked) for _, asked in engine.asked} | {id(mine), id(shorter)}) == 5


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"rewards": None}, "step returned no 'rewards'"),
        ({"done": None}, "step returned no 'done'"),
        ({"rewards": "much"}, "rewards is 'much', not a number"),
        ({"rewards": torch.ones(2)}, "rewards has 2 numbers"),
        ({"environment_feedback": 3}, "'environment_feedback' as int, not as text"),
        ({"environment_images": ["x.png"]}, "models of images are not in this release"),
        ({"extra_logs": [1]}, "extra_logs is or returned a list, not a dict"),
    ],
)
async def test_a_wrong_answer_of_step_is_named(tokenizer, answer, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        await play(Engine(tokenizer, "x"), world({"done": True, **answer}))


async def test_a_single_turn_is_judged_by_a_reward_function(tokenizer):
    asked = []

    def reward_func(queries, prompts, labels):
        asked.append((queries, prompts, labels))
        return {"rewards": torch.tensor([0.5]), "scores": [1.0], "extra_logs": {"n": 2}}

    engine = Engine(tokenizer, "fine")
    result = await SingleTurnAgentExecutor(reward_func).execute(
        "say ", "lbl", SamplingParams(max_tokens=5), 50, tokenizer, engine
    )
    assert asked == [(["say fine" + tokenizer.eos_token], ["say "], ["lbl"])]
    assert (result["reward"], result["scores"], result["extra_logs"]) == (0.5, 1.0, {"n": 2})
    start = len(ids(tokenizer, "say "))
    assert result["action_ranges"] == [(start, len(result["observation_tokens"]))]


class Foreign:
    """Sampling parameters of another package, with the names of vLLM's."""

    temperature, top_p, top_k = 1.0, 1.0, 0
    max_tokens, min_tokens, stop_token_ids, ignore_eos = 7, 2, [5], False
    n, seed, stop, min_p, repetition_penalty = 1, None, [], 0.0, 1.0


def test_other_sampling_params_are_read_by_their_names():
    assert as_wire(Foreign(), SamplingParams()) == {
        "max_tokens": 7,
        "min_tokens": 2,
        "stop_token_ids": [5],
        "ignore_eos": False,
    }
    assert as_wire(None, SamplingParams(max_tokens=3))["max_tokens"] == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", 0.5), ("top_p", 0.9), ("top_k", 3), ("n", 2), ("seed", 1)),
        *(("stop", ["\n"]), ("min_p", 0.1), ("repetition_penalty", 1.2)),
    ],
)
def test_what_would_sample_another_policy_is_refused_by_name(name, value):
    params = Foreign()
    setattr(params, name, value)
    with pytest.raises(ValueError, match=f"sampling_params.{name} is "):
        as_wire(params, SamplingParams())
