"""The engine as its room sees it: asyncio on one side, the model's thread on the other."""

import asyncio
import copy
import dataclasses

import pytest
import torch
from quartet_rollout.engines import ENGINES, find_engine
from quartet_rollout.engines.transformers import open_engine

from quartet.config.data import TokenizerFields
from quartet.errors import ConfigError, FatalError, RequestError, UnavailableError
from quartet.types import (
    FinishReason,
    GenerateRequest,
    PauseMode,
    PromptGroup,
    SamplingParams,
)
from quartet.weights import check_manifest

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, min_new_tokens=0)


@pytest.fixture
async def engine(serve_config):
    async with open_engine(serve_config) as made:
        yield made


def group(prompt=(5, 6, 7), samples=1, name="g", **rest):
    return PromptGroup(group_id=name, prompt_token_ids=prompt, num_samples=samples, **rest)


def request(*groups, sampling=GREEDY, **rest):
    return GenerateRequest(request_id="r", groups=groups or (group(),), sampling=sampling, **rest)


def tokens(generated):
    return [[c.token_ids.tolist() for c in g.completions] for g in generated.groups]


async def test_answers_in_the_order_of_groups_and_seeds(engine):
    sampling = SamplingParams(max_new_tokens=6)
    groups = [group((5, 6), 3, "a", seeds=(3, 1, 2), sample_ids=("x", "y", "z")), group((7,), 2)]
    made = await engine.generate(request(*groups, sampling=sampling))
    assert [g.group_id for g in made.groups] == ["a", "g"]
    assert [c.sample_id for c in made.groups[0].completions] == ["x", "y", "z"]
    swapped = dataclasses.replace(groups[0], seeds=(1, 2, 3))
    again = await engine.generate(request(swapped, sampling=sampling))
    a, b, c = tokens(made)[0]
    assert tokens(again)[0] == [b, c, a]
    assert made.queue_seconds >= 0


async def test_without_seeds_samples_differ(engine):
    made = await engine.generate(request(group(samples=4), sampling=SamplingParams()))
    assert len({tuple(t) for t in tokens(made)[0]}) == 4


async def test_ignore_eos_and_the_end_of_the_context(engine, model):
    (eos,) = model.eos_token_ids
    sampling = SamplingParams(ignore_eos=True, min_new_tokens=0)
    made = await engine.generate(
        request(group(tuple(3 + i % 300 for i in range(480)), 2), sampling=sampling)
    )
    for completion in made.groups[0].completions:
        assert completion.finish_reason is FinishReason.LENGTH
        assert len(completion.token_ids) == model.max_length - 480
    assert eos == 2


@pytest.mark.parametrize(
    ("prompt", "reason", "words"),
    [
        (tuple([5] * 512), "PROMPT_TOO_LONG", ["512 tokens", "at most 511"]),
        ((5, 384), "TOKEN_UNKNOWN", ["token 384", "vocabulary of 384"]),
    ],
)
async def test_prompts_that_do_not_fit_are_refused_by_name(engine, prompt, reason, words):
    with pytest.raises(RequestError) as caught:
        await engine.generate(request(group(), group(prompt, name="bad")))
    assert caught.value.info.reason == reason
    assert all(word in str(caught.value) for word in (*words, "bad"))
    assert engine.num_in_flight == 0


async def test_a_cancelled_call_stops_its_completions(engine):
    endless = SamplingParams(ignore_eos=True)
    task = asyncio.ensure_future(engine.generate(request(group(samples=8), sampling=endless)))
    await asyncio.sleep(0)
    # All rows are taken: this is answered only because the other call gives them up.
    short = asyncio.ensure_future(engine.generate(request()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(tokens(await short)[0][0]) == 12
    assert engine.num_in_flight == 0


async def test_load_weights_is_seen_by_the_next_token(engine, model, greedy):
    before = tokens(await engine.generate(request()))[0][0]
    assert before == greedy((5, 6, 7), 12)
    other = copy.deepcopy(model)
    with torch.no_grad():
        # The tied embedding alone: an engine whose head keeps a copy of its own would not notice.
        embedding = other.model.get_input_embeddings().weight
        embedding += torch.randn(embedding.shape, generator=torch.Generator().manual_seed(1)) * 0.2
    await engine.load_weights(dict(other.model.named_parameters()).items(), 4)
    made = await engine.generate(request())
    assert tokens(made)[0][0] == greedy((5, 6, 7), 12, other) != before
    assert made.groups[0].completions[0].versions[0].policy_version == 4


async def test_load_weights_while_paused_in_the_middle(engine, model, greedy):
    sampling = dataclasses.replace(GREEDY, max_new_tokens=400, ignore_eos=True)
    task = asyncio.ensure_future(engine.generate(request(sampling=sampling)))
    while not await engine.pause(PauseMode.KEEP):
        await engine.resume()
    continued = await engine.load_weights(dict(model.model.named_parameters()).items(), 1)
    assert continued in (0, 1)  # 0 when the pause came before the first token
    assert await engine.resume() == 1
    completion = (await task).groups[0].completions[0]
    assert len(completion.token_ids) == 400
    assert completion.versions[-1].policy_version == 1
    assert completion.versions[-1].end == 400


async def test_torn_weights_are_fatal_and_say_so(engine, model):
    partial = list(model.model.named_parameters())[:-1]
    with pytest.raises(FatalError, match="1 tensors are missing") as caught:
        await engine.load_weights(partial, 1)
    assert caught.value.info.reason == "WEIGHTS_TORN"


async def test_no_token_is_of_torn_weights(engine, model):
    sampling = SamplingParams(temperature=0.0, max_new_tokens=200, ignore_eos=True)
    undisturbed = tokens(await engine.generate(request(sampling=sampling)))[0][0]
    task = asyncio.ensure_future(engine.generate(request(sampling=sampling)))
    await engine.generate(request(sampling=SamplingParams(max_new_tokens=1)))
    partial = [(name, -tensor) for name, tensor in model.model.named_parameters()][:-1]
    with pytest.raises(FatalError):
        await engine.load_weights(partial, 1)
    (completion,) = (await task).groups[0].completions
    assert completion.finish_reason is FinishReason.ABORTED
    count = len(completion.token_ids)
    assert completion.token_ids.tolist() == undisturbed[:count]
    # What is asked for now waits for whole weights.
    waiting = asyncio.ensure_future(engine.generate(request()))
    await engine.load_weights(dict(model.model.named_parameters()).items(), 2)
    await engine.resume()
    (completion,) = (await waiting).groups[0].completions
    assert [span.policy_version for span in completion.versions] == [2]
    assert completion.token_ids.tolist() == undisturbed[:12]


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_and_wake(engine, model, level):
    before = tokens(await engine.generate(request()))
    await engine.sleep(level)
    await engine.wake()
    check_manifest(engine.spec.manifest, engine.spec.manifest)
    if level == 2:
        await engine.load_weights(dict(model.model.named_parameters()).items(), 0)
    assert tokens(await engine.generate(request())) == before


async def test_what_runs_when_the_engine_closes_fails(serve_config):
    async with open_engine(serve_config) as engine:
        endless = SamplingParams(ignore_eos=True)
        task = asyncio.ensure_future(engine.generate(request(sampling=endless)))
        await engine.pause(PauseMode.KEEP)
    with pytest.raises(UnavailableError, match="closing"):
        await task


async def test_a_failing_step_fails_the_calls_and_not_the_engine(engine):
    broken = engine._model.decode
    engine._model.decode = lambda *_: 1 / 0
    with pytest.raises(Exception, match="ZeroDivisionError"):
        await engine.generate(request())
    engine._model.decode = broken
    assert len(tokens(await engine.generate(request()))[0][0]) == 12


async def test_wrong_settings_are_config_errors(serve_config):
    missing = dataclasses.replace(
        serve_config,
        rollout=dataclasses.replace(serve_config.rollout, model_name_or_path="/nowhere"),
    )
    with pytest.raises(ConfigError, match="/nowhere"):
        async with open_engine(missing):
            pass
    with pytest.raises(ConfigError, match=r"sglang is not in this build.*transformers, vllm"):
        find_engine("sglang")
    assert find_engine("auto") is open_engine
    assert list(ENGINES) == ["transformers", "vllm", "openai"]


async def test_max_len_bounds_the_context(serve_config):
    short = dataclasses.replace(serve_config, data=TokenizerFields(max_len=10))
    async with open_engine(short) as engine:
        assert engine.spec.max_sequence_length == 10
        made = await engine.generate(request(sampling=SamplingParams(ignore_eos=True)))
        assert len(tokens(made)[0][0]) == 7
