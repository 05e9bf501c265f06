"""The engine's own logic, with a scripted vLLM in place of the real one."""

import asyncio

import pytest
import torch
from quartet_rollout.engine import EngineSpec
from quartet_rollout.engines.vllm.crew import Crew
from quartet_rollout.engines.vllm.engine import VllmEngine, _spec
from quartet_rollout.engines.vllm.facts import ModelFacts
from quartet_rollout.engines.vllm.sample import Answer

from quartet.errors import ConfigError, FatalError, InfraError, RequestError, StateError
from quartet.obs import metrics
from quartet.types import (
    FinishReason,
    GenerateRequest,
    LogprobKind,
    PauseMode,
    PromptGroup,
    PushBackend,
    SamplingParams,
    TensorSpec,
    VersionSpan,
    WeightManifest,
)

FACTS = ModelFacts(
    manifest=WeightManifest(tensors=(TensorSpec(name="w", dtype="float32", shape=(2,)),)),
    max_positions=16,
    vocabulary=32,
    eos_token_ids=frozenset({0}),
    head_dim=32,
    cache_bytes_per_token=64,
    digest="",
)
CPU = {
    "max_model_len": 16,
    "max_num_seqs": 4,
    "logprobs_mode": "processed_logprobs",
}


class ScriptedVllm:
    """Answers when it is told to, and writes down what it is asked."""

    def __init__(self):
        self.calls = []
        self.is_dead = False
        self.answer = asyncio.Event()
        self.load_error = None
        self.asked = 0
        self.sharing = []
        self.cached = 0

    async def ask(self, prompt, parameters, *, shares_with, on_output):
        self.sharing.append(shares_with)
        self.asked += 1
        try:
            await self.answer.wait()
        except asyncio.CancelledError:
            self.calls.append("cancelled")
            raise
        on_output(0.0)
        return Answer(
            token_ids=[7, 8],
            logprobs=[-1.0, -2.0],
            finish_reason="length",
            versions=[VersionSpan(policy_version=0, start=0, end=2)],
            cached_tokens=self.cached,
        )

    async def has_requests(self, count, *, unless):
        while self.asked < count and not unless():  # noqa: ASYNC110
            await asyncio.sleep(0)
        self.calls.append(f"has {count}")

    async def died(self):
        await asyncio.Event().wait()

    async def hold(self, mode):
        self.calls.append(mode)

    async def go_on(self):
        self.calls.append("go on")

    async def load(self, tensors, policy_version):
        self.calls.append(f"load {[name for name, _ in tensors]} as {policy_version}")
        if self.load_error:
            raise self.load_error

    async def sleep(self, level):
        self.calls.append(f"sleep {level}")

    async def wake(self, tags):
        self.calls.append(f"wake {' '.join(tags)}")


def spec(**arguments) -> EngineSpec:
    return _spec(FACTS, {**CPU, **arguments})


@pytest.fixture
async def vllm():
    return ScriptedVllm()


@pytest.fixture
async def engine(vllm):
    return VllmEngine(vllm, FACTS, spec(), seed=1)


def request(*prompts, **rest):
    groups = tuple(
        PromptGroup(group_id=str(i), prompt_token_ids=p, num_samples=2)
        for i, p in enumerate(prompts or [(1, 2, 3)])
    )
    return GenerateRequest(request_id="r", groups=groups, **rest)


WEIGHTS = [("w", torch.ones(2))]


async def settled():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_all_samples_of_all_groups_come_back_in_order(engine, vllm):
    vllm.answer.set()
    made = await engine.generate(request((1, 2), (3, 4)))
    assert [g.group_id for g in made.groups] == ["0", "1"]
    completions = [c for g in made.groups for c in g.completions]
    assert [c.token_ids.tolist() for c in completions] == [[7, 8]] * 4
    assert {c.finish_reason for c in completions} == {FinishReason.LENGTH}
    assert engine.num_in_flight == 0


async def test_samples_of_a_prompt_share_it_and_calls_do_not(engine, vllm):
    vllm.answer.set()
    await engine.generate(request((1, 2), (3, 4)))
    await engine.generate(request((1, 2)))
    first, first_again, second, second_again, later, later_again = vllm.sharing
    assert (first, second, later) == (first_again, second_again, later_again)
    assert len({first, second, later}) == 3


async def test_prompt_tokens_are_counted_by_where_they_came_from(engine, vllm):
    def counted():
        return [metrics.PROMPT_TOKENS.labels(s)._value.get() for s in ("computed", "cache")]

    before = counted()
    vllm.answer.set()
    vllm.cached = 2
    await engine.generate(request((1, 2, 3)))
    assert [now - was for now, was in zip(counted(), before, strict=True)] == [2, 4]


async def test_a_cancelled_call_stops_all_its_requests(engine, vllm):
    call = asyncio.ensure_future(engine.generate(request((1, 2), (3, 4))))
    await settled()
    assert engine.num_in_flight == 4
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert vllm.calls == ["cancelled"] * 4
    assert engine.num_in_flight == 0


async def test_one_failure_stops_the_others_and_is_the_error(engine, vllm):
    async def ask(prompt, parameters, *, shares_with, on_output):
        raise InfraError("gone", reason="ENGINE_DEAD")

    vllm.ask = ask
    with pytest.raises(InfraError, match="gone"):
        await engine.generate(request())
    assert engine.num_in_flight == 0


async def test_an_isolated_call_begins_in_one_step_and_alone(engine, vllm):
    other = asyncio.ensure_future(engine.generate(request()))
    await settled()
    isolated = asyncio.ensure_future(engine.generate(request((1, 2), (3,), isolated=True)))
    await settled()
    assert vllm.asked == 2
    vllm.answer.set()
    await asyncio.gather(other, isolated)
    assert vllm.calls == ["keep", "has 4", "go on"]


async def test_a_swap_is_made_while_held(engine, vllm):
    assert await engine.load_weights(WEIGHTS, 3) == 0
    assert vllm.calls == ["keep", "load ['w'] as 3", "go on"]


async def test_a_swap_during_a_pause_leaves_it_paused(engine, vllm):
    await engine.pause(PauseMode.KEEP)
    await engine.load_weights(WEIGHTS, 3)
    assert vllm.calls == ["keep", "keep", "load ['w'] as 3"]
    await engine.resume()
    assert vllm.calls[-1] == "go on"


async def test_after_a_torn_swap_nothing_is_computed_until_the_next(engine, vllm):
    vllm.load_error = RuntimeError("tensor w does not fit")
    with pytest.raises(FatalError, match="tensor w does not fit") as caught:
        await engine.load_weights(WEIGHTS, 3)
    assert caught.value.info.reason == "WEIGHTS_TORN"
    assert vllm.calls[-2:] == ["abort", "keep"]
    await engine.resume()
    with pytest.raises(InfraError, match="not whole"):
        await engine.generate(request())
    assert "go on" not in vllm.calls
    vllm.load_error = None
    await engine.load_weights(WEIGHTS, 4)
    assert vllm.calls[-1] == "go on"
    vllm.answer.set()
    await engine.generate(request())


async def test_a_drain_waits_for_what_runs_and_holds_what_comes(engine, vllm):
    running = asyncio.ensure_future(engine.generate(request()))
    await settled()
    drain = asyncio.ensure_future(engine.pause(PauseMode.DRAIN))
    late = asyncio.ensure_future(engine.generate(request()))
    await settled()
    assert not drain.done()
    vllm.answer.set()
    await running
    assert await drain == 2
    assert not late.done()
    await engine.resume()
    await late


async def test_a_resume_ends_a_drain(engine, vllm):
    running = asyncio.ensure_future(engine.generate(request()))
    await settled()
    drain = asyncio.ensure_future(engine.pause(PauseMode.DRAIN))
    await settled()
    await engine.resume()
    assert await drain == 2
    vllm.answer.set()
    await running


@pytest.mark.parametrize(
    ("asked", "reason", "words"),
    [
        (request(tuple(range(1, 17))), "PROMPT_TOO_LONG", "16 tokens"),
        (request((1, 32)), "TOKEN_UNKNOWN", "32"),
        (request(logprob_kind=LogprobKind.RAW), "LOGPROB_KIND_UNSUPPORTED", "raw"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(engine, vllm, asked, reason, words):
    with pytest.raises(RequestError, match=words) as caught:
        await engine.generate(asked)
    assert caught.value.info.reason == reason
    assert vllm.asked == 0


async def test_a_completion_ends_where_the_context_ends(engine, vllm):
    seen = []

    async def ask(prompt, parameters, *, shares_with, on_output):
        seen.append(parameters["max_tokens"])
        return Answer(token_ids=[7], logprobs=[0.0], finish_reason="length", versions=[])

    vllm.ask = ask
    await engine.generate(request(tuple(range(1, 11)), sampling=SamplingParams()))
    await engine.generate(request((1, 2), sampling=SamplingParams(max_new_tokens=3)))
    assert seen == [6, 6, 3, 3]


async def test_a_worker_that_takes_no_more_pushes_is_the_end_of_the_engine(vllm):
    its_crew = Crew(1, {PushBackend.GLOO})
    engine = VllmEngine(vllm, FACTS, spec(), seed=1, crew=its_crew)
    failing = asyncio.ensure_future(engine.failed())
    await settled()
    assert not failing.done()
    its_crew._broken.set()
    assert (await failing).info.reason == "ENGINE_DEAD"


async def test_sleep_frees_a_gpu_that_was_prepared_for_it(vllm):
    asleep = VllmEngine(vllm, FACTS, spec(enable_sleep_mode=True), seed=1)
    await asleep.sleep(2)
    await asleep.wake()
    assert vllm.calls == ["sleep 2", "wake kv_cache weights"]
    never = VllmEngine(vllm, FACTS, spec(enable_sleep_mode=False), seed=1)
    with pytest.raises(StateError, match="means to sleep"):
        await never.sleep(1)


async def test_a_push_between_the_wakings_finds_memory_for_weights_alone(engine, vllm):
    """The order that keeps the peak of a shared device lowest; vLLM itself steps when all is back,
    and must not before the service says so."""
    await engine.pause(PauseMode.DRAIN)
    await engine.sleep(2)
    await engine.wake({"weights"})
    await engine.load_weights(WEIGHTS, 3)
    await engine.wake({"kv_cache"})
    assert "go on" not in vllm.calls
    await engine.resume()
    assert [call for call in vllm.calls if call != "keep"] == [
        "sleep 2",
        "wake weights",
        "load ['w'] as 3",
        "wake kv_cache",
        "go on",
    ]
    assert vllm.calls[-2:] == ["keep", "go on"]


def test_spec_of_machine_and_arguments():
    assert spec().device == "cpu"
    assert PushBackend.NCCL not in spec().push_backends
    assert "sleep" in spec().capabilities
    on_gpu = spec(enable_sleep_mode=False)
    assert PushBackend.NCCL in on_gpu.push_backends
    assert PushBackend.IPC in on_gpu.push_backends
    assert "sleep" not in on_gpu.capabilities
    assert spec(logprobs_mode="raw_logprobs").logprob_kinds == (LogprobKind.RAW,)
    with pytest.raises(ConfigError, match="processed_logits"):
        spec(logprobs_mode="processed_logits")
