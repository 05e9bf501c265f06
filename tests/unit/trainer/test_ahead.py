"""Rollouts made ahead of training: overlap, bounds, order, pushes, failures, and resume.

Nothing here looks at a clock: players wait for events, and say in one log what happened when.
"""

import asyncio
import random
from contextlib import contextmanager
from dataclasses import replace

import pytest

from quartet.errors import InfraError
from quartet.trainer.ppo_loop import PpoLoop
from quartet.types import PauseMode, Reward, VersionSpan
from tests.unit.trainer.players import (
    Cast,
    FakeSampler,
    FakeTrainee,
    inputs,
    ppo_config,
    prompts,
)

ROLLOUT = {"batch_size": 2, "n_samples_per_prompt": 2, "max_new_tokens": 1024}
HALF, SOLVED = (0.0, 1.0), (1.0, 1.0)


def config(*, train=None, rollout=None, **sections):
    """Steps of 2 prompts and 2 samples, one optimizer step each, generated ahead."""
    train = {"batch_size": 4, "seed": 7, "async_enable": True} | (train or {})
    return ppo_config(train=train, rollout=ROLLOUT | (rollout or {}), **sections)


class Engine(FakeSampler):
    """A sampler that can be paused between two tokens, as the real engines can."""

    def __init__(self, events, jitter=None):
        super().__init__()
        self.events = events
        self.jitter = jitter or (lambda: 0)
        self.running = 0
        self.free = asyncio.Event()
        self.free.set()
        self.idle = asyncio.Condition()

    async def pause(self, mode):
        await super().pause(mode)
        self.free.clear()
        if mode is PauseMode.DRAIN:
            async with self.idle:
                await self.idle.wait_for(lambda: self.running == 0)

    async def resume(self):
        await super().resume()
        self.free.set()

    async def generate(self, request):
        await self.free.wait()
        began = self.version
        self.running += 1
        names = [n for g in request.groups for n in g.sample_ids]
        self.events.append(("generate", began, names))
        await turns(self.jitter())
        result = await super().generate(request)
        self.running -= 1
        async with self.idle:
            self.idle.notify_all()
        self.events.append(("generated", self.version, names))
        return replace(result, groups=tuple(self.spanned(g, began) for g in result.groups))

    def spanned(self, group, began):
        """The first token is of the weights at the beginning, the rest of those at the end."""
        return replace(
            group,
            completions=tuple(
                replace(c, versions=spans(len(c.token_ids), began, self.version))
                for c in group.completions
            ),
        )


def spans(length, first, last):
    if first == last or length < 2:
        return (VersionSpan(policy_version=first, start=0, end=length),)
    return (
        VersionSpan(policy_version=first, start=0, end=1),
        VersionSpan(policy_version=last, start=1, end=length),
    )


class Learner(FakeTrainee):
    """A policy that writes into the same log, and may be held in `train`."""

    def __init__(self, events, jitter=None):
        super().__init__()
        self.events = events
        self.jitter = jitter or (lambda: 0)
        self.gate = asyncio.Event()
        self.gate.set()
        self.training = asyncio.Event()

    async def forward(self, chunks, *, output, temperature=1.0):
        self.events.append(
            ("forward", self.sampler.version, [n for c in chunks for n in c.sample_ids])
        )
        return await super().forward(chunks, output=output, temperature=temperature)

    async def train(self, step, samples):
        names = [name for s in samples for name in s.sequences.sample_ids]
        self.events.append(("train", self.sampler.version, names))
        self.training.set()
        await self.gate.wait()
        await turns(self.jitter())
        result = await super().train(step, samples)
        self.events.append(("trained", self.sampler.version, names))
        return result

    async def push_weights(self, *, request_id, policy_version, addresses):
        self.events.append(("push", policy_version, self.sampler.running))
        return await super().push_weights(
            request_id=request_id, policy_version=policy_version, addresses=addresses
        )


async def turns(count):
    for _ in range(count):
        await asyncio.sleep(0)


def new_cast(slow_engine=None, slow_learner=None):
    events = []
    cast = Cast(sampler=Engine(events, slow_engine), policy=Learner(events, slow_learner))
    cast.events = events
    return cast


async def play(cast, settings, folder, *, num_prompts=8, **given):
    folder.mkdir(parents=True, exist_ok=True)
    run = cast.run(settings, folder)
    try:
        await PpoLoop(settings, run, replace(inputs(num_prompts), **given), cast.players).run()
        return await run.ledger.counts(), await run.ledger.drop_reasons()
    finally:
        cast.open_samples = await run.ledger.counts()
        await run.ledger.close()
        run.progress.close()


def of(cast, kind):
    return [entry for entry in cast.events if entry[0] == kind]


def trained(cast):
    """Names of the samples of each optimizer step; here that is a step."""
    return [sorted(names) for _, _, names in of(cast, "train")]


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - fakes have no event for everything
            await asyncio.sleep(0.001)


async def test_the_next_rollout_is_generated_and_scored_while_one_is_trained(tmp_path):
    cast = new_cast()
    cast.policy.gate.clear()
    playing = asyncio.create_task(play(cast, config(), tmp_path))
    await cast.policy.training.wait()
    # 4 samples are being trained; 4 more are generated, scored and seen by the reference.
    await until(lambda: sum(len(r.items) for r in cast.judge.log) == 8)
    await until(lambda: sum(len(ids) for call in cast.reference.log for ids in call) == 8)
    assert len(of(cast, "trained")) == 0
    # But not evaluated by the learner: its weights are about to change.
    assert sum(len(names) for _, _, names in of(cast, "forward")) == 4
    cast.policy.gate.set()
    counts, _ = await playing
    assert counts == {"trained": 16}


async def test_old_logprobs_are_of_the_weights_that_are_trained_next(tmp_path):
    cast = new_cast()
    await play(cast, config(), tmp_path)
    order = [(kind, version) for kind, version, _ in cast.events if kind in ("forward", "train")]
    assert order == [(k, v) for v in (1, 2, 3, 4) for k in ("forward", "train")]


@pytest.mark.parametrize("queue_size", [1, 2, 3])
async def test_no_more_rollouts_wait_than_the_queue_holds(tmp_path, queue_size):
    cast = new_cast()
    cast.policy.gate.clear()
    settings = config(train={"async_queue_size": queue_size})
    playing = asyncio.create_task(play(cast, settings, tmp_path, num_prompts=16))
    await cast.policy.training.wait()
    held = 4 * (1 + queue_size)
    await until(lambda: sum(len(names) for _, _, names in of(cast, "generated")) == held)
    cast.policy.gate.set()
    assert await playing == ({"trained": 32}, {})
    begun = 0
    for kind, _, names in cast.events:
        begun += {"generate": len(names), "trained": -len(names)}.get(kind, 0) if names else 0
        assert begun <= held
    depths = [m["rollout/queue_depth"] for m in cast.metrics]
    assert max(depths) <= queue_size
    assert depths[-1] == 0


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("slow", ["engine", "learner"])
async def test_no_token_is_older_than_allowed(tmp_path, slow, bound, partial):
    rng = random.Random(f"{slow}{bound}{partial}")
    delay = lambda: rng.randrange(60)  # noqa: E731
    cast = new_cast(
        delay if slow == "engine" else None,
        delay if slow == "learner" else None,
    )
    train = {"async_queue_size": 3, "max_staleness": bound, "partial_rollout_enable": partial}
    settings = config(train=train)
    counts, reasons = await play(cast, settings, tmp_path, num_prompts=16)
    assert (counts, reasons) == ({"trained": 32}, {})
    assert [m["staleness/max"] <= bound for m in cast.metrics] == [True] * 8
    assert all(m["staleness/mean"] <= m["staleness/max"] for m in cast.metrics)
    # Held back at the draw, and not thrown away: a generation of step s begins at version
    # s - bound, or later.
    steps = {name: step for step, names in enumerate(trained(cast), start=1) for name in names}
    for _, version, names in of(cast, "generate"):
        assert all(version >= steps[name] - bound for name in names)


async def test_without_staleness_it_is_training_in_turn(tmp_path):
    ahead, in_turn = new_cast(), new_cast()
    await play(ahead, config(train={"max_staleness": 0}), tmp_path / "a")
    await play(in_turn, config(train={"async_enable": False}), tmp_path / "b")
    assert trained(ahead) == trained(in_turn)
    assert [m["staleness/max"] for m in ahead.metrics] == [0.0] * 4
    for first, second in zip(ahead.metrics, in_turn.metrics, strict=True):
        assert {k: first[k] for k in second if not k.startswith("timing/")} == {
            k: v for k, v in second.items() if not k.startswith("timing/")
        }


async def test_a_push_waits_for_completions_under_way(tmp_path):
    rng = random.Random(3)
    cast = new_cast(lambda: rng.randrange(30))
    await play(cast, config(train={"async_queue_size": 2}), tmp_path, num_prompts=16)
    assert [running for _, _, running in of(cast, "push")] == [0] * 9
    assert set(cast.sampler.pauses) == {PauseMode.DRAIN, None}
    assert all(m["staleness/mixed_rate"] == 0 for m in cast.metrics)
    assert all(m["timing/push_wait"] >= 0 for m in cast.metrics)


async def test_a_partial_rollout_goes_on_with_the_new_weights(tmp_path):
    cast = new_cast()
    gate = cast.sampler.gates["0/" + order(8)[2].prompt_id] = asyncio.Event()
    settings = config(train={"partial_rollout_enable": True})
    playing = asyncio.create_task(play(cast, settings, tmp_path))
    # The first step is trained and pushed while a completion of the second one is under way.
    await until(lambda: len(of(cast, "push")) == 2)
    assert of(cast, "push")[1][2] == 1
    gate.set()
    counts, _ = await playing
    assert counts == {"trained": 16}
    # Nobody was held for it: engines swap between two tokens by themselves.
    assert cast.sampler.pauses == []
    assert [m["timing/push_wait"] for m in cast.metrics] == [0.0] * 4
    second = cast.metrics[1]
    assert second["staleness/mixed_rate"] > 0
    assert second["staleness/max"] == 1
    assert 0 < second["staleness/mean"] < 1


def order(count):
    """Prompts in the order of their draw."""
    from quartet.trainer.filtering import PromptCursor

    return PromptCursor(prompts(count), seed=7, num_episodes=1).draw(count).prompts


def scored(cast, scores):
    """Have prompts scored by their number; the others have one right answer of two."""
    score = cast.judge.score

    async def by_prompt(request):
        batch = await score(request)
        return replace(
            batch,
            results=tuple(
                replace(r, outcome=Reward(reward=value, score=value))
                for r in batch.results
                for _, prompt, index in [r.sample_id.split("/")]
                for value in [scores.get(prompt, HALF)[int(index)]]
            ),
        )

    cast.judge.score = by_prompt
    return cast


@pytest.mark.parametrize("filtering", [False, True])
@pytest.mark.parametrize("generate", [None, 3, 4])
async def test_how_much_is_drawn_at_once_does_not_decide_what_belongs_to_a_step(
    tmp_path, generate, filtering
):
    drawn = order(13)
    useless = {drawn[i].prompt_id: SOLVED for i in (0, 3, 4, 9, 12)}
    algo = {"advantage": {"estimator": "group_norm"}, "dynamic_filtering_enable": filtering}
    casts = [scored(new_cast(), useless), scored(new_cast(), useless)]
    results = []
    for number, cast in enumerate(casts):
        train = {"async_enable": number == 0, "num_episodes": 2}
        size = {"vllm_generate_batch_size": generate} if number == 0 else {}
        settings = config(train=train, rollout=size, algo=algo)
        results.append(await play(cast, settings, tmp_path / str(number), num_prompts=13))
    assert trained(casts[0]) == trained(casts[1])
    if filtering:
        assert results[0][0]["trained"] == results[1][0]["trained"]
        rates = [[m["dynamic_filtering_pass_rate"] for m in cast.metrics] for cast in casts]
        assert rates[0] == rates[1]
        drops = [[m.get("dropped/filtered") for m in cast.metrics] for cast in casts]
        assert drops[0] == drops[1]
    else:
        assert results == [({"trained": 52}, {})] * 2
    if generate == 4 and not filtering:
        assert max(m["staleness/max"] for m in casts[0].metrics) <= 2


async def test_a_pass_without_anything_to_learn_ends_and_says_so(tmp_path):
    cast = scored(new_cast(), {p.prompt_id: SOLVED for p in prompts(12)})
    algo = {"advantage": {"estimator": "group_norm"}, "dynamic_filtering_enable": True}
    settings = config(algo=algo, rollout={"vllm_generate_batch_size": 5})
    counts, reasons = await play(cast, settings, tmp_path, num_prompts=12)
    assert (counts, reasons) == ({"dropped": 24}, {"filtered": 24})
    (row,) = cast.metrics
    assert row["dynamic_filtering_pass_rate"] == 0
    assert row["dropped/filtered"] == 24
    assert of(cast, "train") == []


async def test_what_was_drawn_beyond_a_step_is_generated_once(tmp_path):
    cast = new_cast()
    await play(cast, config(rollout={"vllm_generate_batch_size": 6}), tmp_path, num_prompts=12)
    names = [name for _, _, names in of(cast, "generate") for name in names]
    assert len(names) == len(set(names)) == 24


async def test_nothing_is_drawn_that_no_step_will_train(tmp_path):
    cast = new_cast()
    settings = config(train={"max_steps": 3}, rollout={"vllm_generate_batch_size": 4})
    counts, _ = await play(cast, settings, tmp_path, num_prompts=16)
    assert counts == {"trained": 12}


async def test_a_failing_engine_ends_the_run_while_the_learner_works(tmp_path):
    cast = new_cast()
    cast.policy.gate.clear()
    generate = cast.sampler.generate

    async def failing(request):
        if request.groups[0].group_id == f"0/{order(8)[2].prompt_id}":
            await cast.policy.training.wait()
            raise InfraError("the engine is gone")
        return await generate(request)

    cast.sampler.generate = failing
    with pytest.raises(BaseExceptionGroup) as caught:
        async with asyncio.timeout(10):
            await play(cast, config(), tmp_path)
    assert "the engine is gone" in str(leaf(caught.value))
    assert of(cast, "trained") == []


async def test_a_failing_learner_ends_generation(tmp_path):
    cast = new_cast()
    group = "0/" + order(8)[2].prompt_id
    cast.sampler.gates[group] = asyncio.Event()  # never set: only a cancellation ends the call

    async def failing(step, samples):
        raise InfraError("the learner is gone")

    cast.policy.train = failing
    with pytest.raises(BaseExceptionGroup) as caught:
        async with asyncio.timeout(10):
            await play(cast, config(), tmp_path)
    assert "the learner is gone" in str(leaf(caught.value))


async def test_cancelling_the_run_ends_both_and_lets_the_engine_go_on(tmp_path):
    cast = new_cast()
    cast.sampler.gates["0/" + order(8)[2].prompt_id] = asyncio.Event()
    playing = asyncio.create_task(play(cast, config(), tmp_path))
    # The push waits for a completion that never ends.
    await until(lambda: len(cast.sampler.pauses) == 3)
    assert cast.sampler.pauses[-1] is PauseMode.DRAIN
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(10):
            await playing
    assert cast.sampler.pauses[-1] is None


def leaf(error):
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@pytest.mark.parametrize("filtering", [False, True])
@pytest.mark.parametrize("kill_at", range(1, 5))
async def test_a_killed_run_trains_every_prompt_once(tmp_path, kill_at, filtering):
    """Whatever is ahead when it dies: nothing is lost, nothing comes twice."""
    drawn = order(12)
    useless = {drawn[i].prompt_id: SOLVED for i in (1, 2, 6)} if filtering else {}
    algo = {"advantage": {"estimator": "group_norm"}, "dynamic_filtering_enable": filtering}
    ckpt = {"save_steps": 1, "max_num": 9, "path": str(tmp_path / "ckpt")}

    def settings(**more):
        return config(
            train={"async_queue_size": 2},
            rollout={"vllm_generate_batch_size": 5},
            algo=algo,
            ckpt=ckpt | more,
        )

    killed = scored(new_cast(), useless)
    train = killed.policy.train

    async def dying(step, samples):
        if len(of(killed, "trained")) == kill_at:
            raise InfraError("killed")
        return await train(step, samples)

    killed.policy.train = dying
    whole = scored(new_cast(), useless)
    whole_settings = replace(settings(), ckpt=replace(settings().ckpt, path=str(tmp_path / "w")))
    wanted = await play(whole, whole_settings, tmp_path / "whole", num_prompts=12)
    assert kill_at < len(whole.metrics)
    with pytest.raises(BaseExceptionGroup):
        await play(killed, settings(), tmp_path / "run", num_prompts=12)
    # Something was ahead: it is in the ledger, and has reached no end.
    assert set(killed.open_samples) & {"issued", "generated", "scored"}
    resumed = scored(new_cast(), useless)
    resumed.policy.steps = killed.policy.steps
    found = await play(resumed, settings(load_enable=True), tmp_path / "run", num_prompts=12)
    assert found == wanted
    assert trained(killed)[:kill_at] + trained(resumed) == trained(whole)


async def test_evaluations_are_of_the_weights_that_are_kept(tmp_path):
    """The best checkpoint is written between an evaluation and the next optimizer step."""
    cast = new_cast(slow_engine=lambda: 3)
    values = {1: 0.2, 2: 0.7, 3: 0.4, 4: 0.9}
    score = cast.judge.score

    async def by_step(request):
        batch = await score(request)
        return replace(
            batch,
            results=tuple(
                replace(r, outcome=Reward(reward=values[int(r.sample_id.split("/")[1])], score=0.5))
                if r.sample_id.startswith("eval/")
                else r
                for r in batch.results
            ),
        )

    cast.judge.score = by_step
    save = cast.policy.save_checkpoint

    async def noted(**request):
        cast.events.append(("save", cast.sampler.version, [request["tag"]]))
        return await save(**request)

    cast.policy.save_checkpoint = noted
    settings = config(
        train={"async_queue_size": 2},
        eval={"steps": 1, "n_samples_per_prompt": 2},
        ckpt={"path": str(tmp_path / "ckpt"), "save_steps": -1},
    )
    await play(cast, settings, tmp_path / "run", eval_prompts=prompts(2))
    assert [names[0] for _, _, names in of(cast, "save")] == [
        "best_global_step1",
        "best_global_step2",
        "best_global_step4",
    ]
    # A save belongs to the version that its step pushed, and no training lies between.
    for kind, version, names in cast.events:
        if kind == "save":
            assert version == 1 + int(names[0].removeprefix("best_global_step"))
        if kind in ("generate", "generated") and names[0].startswith("eval/"):
            assert version == 1 + int(names[0].split("/")[1])


async def test_a_replica_with_older_weights_than_asked_for_is_not_trained_on(tmp_path):
    cast = new_cast()
    generate = cast.sampler.generate
    liar = order(8)[5].prompt_id

    async def lying(request):
        result = await generate(request)
        if request.groups[0].group_id != f"0/{liar}":
            return result
        old = (VersionSpan(policy_version=0, start=0, end=1),)
        return replace(
            result,
            groups=tuple(
                replace(g, completions=tuple(replace(c, versions=old) for c in g.completions))
                for g in result.groups
            ),
        )

    cast.sampler.generate = lying
    counts, reasons = await play(cast, config(), tmp_path)
    assert counts == {"trained": 14, "dropped": 2}
    assert reasons == {"stale": 2}
    assert cast.metrics[2]["dropped/stale"] == 2


async def test_the_wait_says_what_it_waits_for(tmp_path):
    cast = new_cast()
    cast.sampler.gates["0/" + order(8)[0].prompt_id] = gate = asyncio.Event()
    settings = config()
    run = cast.run(settings, tmp_path)
    phases = []
    phase = run.progress.phase

    @contextmanager
    def seen(name, **more):
        with phase(name, **more) as opened:
            phases.append(opened)
            yield opened

    run.progress.phase = seen
    playing = asyncio.create_task(PpoLoop(settings, run, inputs(8), cast.players).run())
    await until(lambda: any(phase.name == "step 1 wait" for phase in phases))
    (waiting,) = [phase for phase in phases if phase.name == "step 1 wait"]
    await until(lambda: waiting.waiting_for != "")
    assert waiting.waiting_for == "2 prompts of step 1, rollout and reward"
    gate.set()
    await playing
    await run.ledger.close()
    run.progress.close()


async def test_the_critic_is_warmed_up_without_pushes_and_without_stalling(tmp_path):
    events = []
    cast = Cast(sampler=Engine(events), policy=Learner(events), critic=FakeTrainee(head="value"))
    cast.events = events
    settings = config(
        algo={"advantage": {"estimator": "gae"}},
        critic={"freezing_steps": 2},
        train={"max_staleness": 1},
    )
    counts, _ = await play(cast, settings, tmp_path)
    assert counts == {"trained": 16}
    assert len(of(cast, "push")) == 3
    assert [m["staleness/max"] for m in cast.metrics][:3] == [0.0] * 3
