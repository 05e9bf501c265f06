"""Samples of agents on their way through the trainer; the agent itself is a fake."""

import asyncio
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest

from quartet.agents.episode import read_result
from quartet.errors import DataError, InfraError
from quartet.trainer.agent_log import agent_log
from quartet.trainer.episodes import Episodes
from quartet.trainer.experience import Group
from quartet.trainer.generation import GenerationSettings, Made
from quartet.trainer.ledger import DroppedSample
from quartet.trainer.ppo_loop import PpoLoop
from quartet.trainer.seeds import sample_seed, turn_seed
from quartet.types import FinishReason, PromptGroup, SamplingParams
from tests.unit.trainer.players import Cast, FakeSampler, inputs, ppo_config, prompts

FEEDBACK = [97, 98]


@dataclass
class FakeAgents:
    """Plays two turns with a feedback of two tokens between them."""

    failures: dict = field(default_factory=dict)
    """sample id -> error."""
    wanted: dict = field(default_factory=dict)
    """Changes of what is asked of the policy."""
    played: list = field(default_factory=list)
    refusals: list = field(default_factory=list)
    settings: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(vocab_size=100))

    async def play(self, episode, script, attempt):
        self.played.append(episode)
        if episode.sample_id in self.failures:
            raise self.failures[episode.sample_id]
        answer = attempt(0)
        tokens, spans = [1, 2, 3], []
        for turn in range(2):
            asked = {
                "prompt_token_ids": list(tokens),
                "max_tokens": None,
                "min_tokens": 1,
                "stop_token_ids": [],
                "ignore_eos": False,
                **self.wanted,
            }
            said = (await answer(turn, asked))["token_ids"]
            spans.append([len(tokens), len(tokens) + len(said)])
            tokens += said + FEEDBACK
        result = {
            "observation_tokens": tokens,
            "action_ranges": spans,
            "reward": float(said[0] % 5),
            "extra_logs": {"first": said[0]} if len(said) > 2 else {},
        }
        return read_result(result, script, max_length=episode.max_length, vocab_size=100)


SETTINGS = GenerationSettings(
    run_id="run", seed=7, sampling=SamplingParams(max_new_tokens=16), num_samples=1
)


async def make(agents, sampler, *, settings=SETTINGS, max_length=64, count=1, say=print):
    groups = [Group(index=i, prompt=p) for i, p in enumerate(prompts(count))]
    requests = [
        PromptGroup(
            group_id=f"0/{g.prompt.prompt_id}",
            prompt_token_ids=g.prompt.token_ids,
            sample_ids=(f"0/{g.prompt.prompt_id}/0",),
            seeds=(11 + g.index,),
        )
        for g in groups
    ]
    made = await Episodes(agents, sampler, max_length=max_length, say=say).make(
        groups, requests, settings=settings, policy_version=4
    )
    assert all(len(entries) == 1 for entries in made)
    return [entries[0] for entries in made]


async def test_each_turn_is_a_call_with_its_own_id_and_seed():
    sampler = FakeSampler(version=4)
    [made] = await make(FakeAgents(), sampler, settings=replace(SETTINGS, isolated=True))
    first, second = sampler.log
    assert [r.request_id for r in sampler.log] == ["run/agent/0/p0/0/0/0", "run/agent/0/p0/0/0/1"]
    assert first.groups[0].seeds == (11,) == (turn_seed(11, 0),)
    assert second.groups[0].seeds == (turn_seed(11, 1),) != (11,)
    assert all(r.isolated and r.min_policy_version == 4 for r in sampler.log)
    assert first.groups[0].prompt_token_ids == (1, 2, 3)
    # The second prompt is the first, what was said, and the feedback.
    sample = made.sample
    (a, b), (c, d) = sample.action_spans
    assert second.groups[0].prompt_token_ids == tuple(sample.token_ids[:c].tolist())
    assert sample.token_ids[b:c].tolist() == FEEDBACK
    assert (a, d) == (3, len(sample.token_ids))
    assert (sample.prompt_length, sample.response_length) == (3, d - 3)
    assert sample.action_mask.sum() == (b - a) + (d - c)
    assert not sample.rollout_logprobs[~sample.action_mask].any()
    assert (sample.rollout_logprobs[sample.action_mask] < 0).all()
    assert (sample.first_policy_version, sample.last_policy_version) == (4, 4)
    assert [(s.start, s.end) for s in sample.versions] == [(0, b - a), (c - 3, d - 3)]
    assert made.reward.extra_logs["num_turns"] == 2


@pytest.mark.parametrize(
    ("asked", "max_length", "expected"),
    [(None, 64, 16), (5, 64, 5), (99, 64, 16), (99, 10, 7), (0, 64, 1)],
)
async def test_no_turn_gets_more_than_the_run_allows(asked, max_length, expected):
    sampler = FakeSampler()
    await make(FakeAgents(wanted={"max_tokens": asked}), sampler, max_length=max_length)
    assert sampler.log[0].sampling.max_new_tokens == expected


@pytest.mark.parametrize(
    ("tokens", "reason"), [([1] * 64, "NO_ROOM"), ([], "BAD_RESULT"), ([1, 100], "BAD_RESULT")]
)
async def test_a_prompt_that_cannot_be_completed_is_refused(tokens, reason):
    [lost] = await make(FakeAgents(wanted={"prompt_token_ids": tokens}), FakeSampler())
    assert isinstance(lost, DroppedSample)
    assert lost.reason == f"agent_{reason.lower()}"


async def test_what_the_engine_gave_up_is_told_to_the_agent():
    sampler = FakeSampler(failures={"0/p0/0/0/0": FinishReason.ABORTED})
    [lost] = await make(FakeAgents(), sampler)
    assert lost.reason == "agent_rollout_aborted"


async def test_one_lost_episode_costs_no_other(tmp_path):
    error = DataError("the agent failed: ValueError: x (a.py:3)", reason="ERROR")
    error.add_note("Traceback: all of it")
    said = []
    failures = {"0/p0/0": error, "0/p1/0": error}
    with agent_log(tmp_path) as path:
        lost, again, kept = await make(
            FakeAgents(failures=failures), FakeSampler(), count=3, say=said.append
        )
    assert (lost.sample_id, lost.reason) == ("0/p0/0", "agent_error")
    assert again.sample_id == "0/p1/0"
    assert isinstance(kept, Made)
    [line] = said  # the first of a kind is shown, all are written down
    assert line.endswith("ValueError: x (a.py:3) [sample 0/p0/0]")
    written = path.read_text()
    assert "ValueError: x (a.py:3) [sample 0/p0/0]" in written
    assert "ValueError: x (a.py:3) [sample 0/p1/0]" in written
    assert "Traceback: all of it" in written


async def test_without_a_policy_the_call_fails_and_nothing_goes_on():
    class Gone(FakeSampler):
        async def generate(self, request):
            if "p1" in request.request_id:
                raise InfraError("no rollout service")
            await asyncio.Event().wait()

    agents = FakeAgents()
    with pytest.raises(InfraError, match="no rollout service"):
        await make(agents, Gone(), count=2)
    assert len(asyncio.all_tasks()) == 1


async def run_loop(tmp_path, agents, *, train_flags=None, **sections):
    cast = Cast(reference=None)
    config = ppo_config(
        train={"agent_func_path": "a.py", **(train_flags or {})},
        algo={"kl": {"init_coef": 0.0}},
        data={"max_len": 64},
        **sections,
    )
    await train(cast, config, tmp_path, agents)
    return cast


async def train(cast, config, folder, agents):
    run = cast.run(config, folder)
    players = replace(cast.players, judge=None, agents=agents)
    try:
        await PpoLoop(config, run, inputs(4), players).run()
    finally:
        await run.ledger.close()
        run.progress.close()


MODES = [{}, {"full_determinism_enable": True}, {"async_enable": True}]


@pytest.mark.parametrize("flags", MODES, ids=["stream", "barriers", "ahead"])
async def test_the_learner_trains_on_actions_alone(tmp_path, flags):
    cast = await run_loop(tmp_path, FakeAgents(), train_flags=flags)
    [metrics] = cast.metrics
    assert metrics["num_turns"] == 2
    assert metrics["rollout_logprob_gap"] == 0
    assert metrics["num_samples_trained"] == 8
    rows = 0
    for _, _, parts in cast.policy.of("train"):
        for part in parts:
            mask = part.action_mask.astype(bool)
            assert not part.advantages[~mask].any()
            for tokens, actions in zip(
                part.sequences.rows(), np.split(mask, part.sequences.offsets[1:-1]), strict=True
            ):
                rows += 1
                inner = np.flatnonzero(~actions)[3:]
                assert np.asarray(tokens)[inner].tolist() == FEEDBACK
                assert actions[-1]
    assert rows == 8


async def test_episodes_have_the_seeds_of_their_samples(tmp_path):
    agents = FakeAgents()
    cast = await run_loop(tmp_path, agents)
    names = {episode.sample_id for episode in agents.played}
    assert names == {f"0/p{i}/{k}" for i in range(4) for k in range(2)}
    firsts = {
        request.groups[0].group_id: request.groups[0].seeds[0]
        for request in cast.sampler.log
        if request.request_id.endswith("/0/0")
    }
    assert firsts == {
        f"0/p{i}/{k}/0/0": sample_seed(run_seed=7, episode=0, prompt_id=f"p{i}", index=k)
        for i in range(4)
        for k in range(2)
    }


async def test_lost_episodes_are_counted_and_their_groups_go_on(tmp_path):
    agents = FakeAgents(
        failures={
            "0/p0/0": DataError("slow", reason="TIMEOUT"),
            "0/p1/0": DataError("x", reason="ERROR"),
            "0/p1/1": DataError("x", reason="ERROR"),
        }
    )
    cast = await run_loop(tmp_path, agents, rollout={"n_samples_per_prompt": 3})
    [metrics] = cast.metrics
    assert metrics["dropped/agent_timeout"] == 1
    assert metrics["dropped/agent_error"] == 2
    assert metrics["dropped/group_too_small"] == 1
    assert metrics["num_samples_trained"] == 8


async def test_dynamic_filtering_looks_at_the_agents_scores(tmp_path):
    algo = {"kl": {"init_coef": 0.0}, "dynamic_filtering_enable": True}
    cast = Cast(reference=None)
    config = ppo_config(
        train={"agent_func_path": "a.py"},
        algo={**algo, "dynamic_filtering_range": (100.0, 200.0)},
        data={"max_len": 64},
    )
    await train(cast, config, tmp_path, FakeAgents())
    [metrics] = cast.metrics
    assert metrics["dynamic_filtering_pass_rate"] == 0
    assert metrics["dropped/filtered"] == 8
