"""Who is awake when: the exact order, what memory holds at most, and that numbers stay the same."""

from dataclasses import replace

import pytest

from quartet.errors import StateError
from quartet.trainer.filtering import PromptCursor
from quartet.trainer.ppo_loop import PpoLoop
from quartet.types import Failure
from tests.unit.trainer.players import Cast, FakeTrainee, inputs, ppo_config, prompts

SLEEP = {
    "train": {"batch_size": 4, "seed": 7, "colocate_all": True, "full_determinism_enable": True},
    "vllm": {"enable_sleep": True},
    "ds": {"enable_sleep": True, "zero_stage": 2},
}
GAE = {"algo": {"advantage": {"estimator": "gae"}}}
MODELS = ("learner", "critic", "reward", "ref")


class Watched:
    """Wraps the calls of a player: they must find it awake, and say in one log that they came."""

    def __init__(self, role, events, player, calls):
        self.awake = True
        self.role, self.events = role, events
        for name in calls:
            setattr(player, name, self.checked(name, getattr(player, name)))
        if role != "rollout":
            player.sleep, player.wake = self.sleep, self.wake

    def checked(self, name, call):
        async def checked(*args, **more):
            if not self.awake:
                raise StateError(f"{self.role} is asleep and is asked to {name}")
            self.events.append(f"{self.role} {name}")
            return await call(*args, **more)

        return checked

    async def sleep(self):
        assert self.awake
        self.awake = False
        self.events.append(f"{self.role} sleep")

    async def wake(self):
        self.awake = True
        self.events.append(f"{self.role} wake")


def new_cast(**players):
    """A cast whose players say in `events` when they sleep, wake and work."""
    cast = Cast(critic=FakeTrainee(head="value"), **players)
    cast.events = cast.sampler.naps
    learner = ("start_run", "forward", "train", "push_weights", "save_checkpoint", "export_model")
    cast.watched = [
        Watched(role, cast.events, player, calls)
        for role, player, calls in (
            ("rollout", cast.sampler, ("generate",)),
            ("learner", cast.policy, learner),
            ("critic", cast.critic, tuple(n for n in learner if n != "push_weights")),
            ("reward", cast.judge, ("score",)),
            ("ref", cast.reference, ("compute_logprobs",)),
        )
    ]
    return cast


async def play(cast, folder, *, num_prompts=4, eval_prompts=(), **sections):
    folder.mkdir(parents=True, exist_ok=True)
    settings = ppo_config(**GAE | sections)
    run = cast.run(settings, folder)
    given = replace(inputs(num_prompts), eval_prompts=eval_prompts)
    try:
        await PpoLoop(settings, run, given, cast.players).run()
        return await run.ledger.counts()
    finally:
        await run.ledger.close()
        run.progress.close()


async def test_exact_order_of_a_step(tmp_path):
    cast = new_cast()
    await play(cast, tmp_path, **SLEEP)
    start, step = cast.events[: cast.events.index("rollout generate")], cast.events
    assert (
        start
        == [
            "rollout sleep 2",  # a push follows: nothing of the engine is worth keeping
            *in_any_order(start[1:3], "reward sleep", "ref sleep"),
            # Who knows how the last run left them?
            *in_any_order(start[3:5], "learner wake", "critic wake"),
            *in_any_order(start[5:7], "learner start_run", "critic start_run"),
            "critic sleep",
            "rollout wake weights",
            "learner push_weights",
            "learner sleep",
            "rollout wake kv_cache",
        ]
    )
    step = step[len(start) :]
    assert step == [
        "rollout generate",
        "rollout sleep 2",
        *in_any_order(step[2:4], "reward wake", "ref wake"),
        *in_any_order(step[4:6], "reward score", "ref compute_logprobs"),
        *in_any_order(step[6:8], "reward sleep", "ref sleep"),
        *in_any_order(step[8:10], "learner wake", "critic wake"),
        *in_any_order(step[10:12], "learner forward", "critic forward"),
        *in_any_order(step[12:16], *["learner train"] * 2, *["critic train"] * 2),
        "critic sleep",
        "rollout wake weights",
        "learner push_weights",
        "learner sleep",
        "rollout wake kv_cache",
        # The model is exported by a learner that is awake.
        "rollout sleep 1",
        *in_any_order(step[22:24], "learner wake", "critic wake"),
        "learner export_model",
        *step[25:],
    ]


def in_any_order(found, *wanted):
    """What is done at the same time, as it came."""
    assert sorted(found) == sorted(wanted)
    return found


def memory(events):
    """What is awake after each event."""
    awake = {"rollout weights", "rollout kv_cache", *MODELS}
    for event in events:
        role, what, *rest = event.split()
        if what == "sleep":
            awake -= {"rollout weights", "rollout kv_cache"} if role == "rollout" else {role}
        if what == "wake":
            tags = rest or ["weights", "kv_cache"]
            awake |= {f"rollout {tag}" for tag in tags} if role == "rollout" else {role}
        yield set(awake)


@pytest.mark.parametrize("deterministic", [True, False])
async def test_memory_never_holds_two_phases(tmp_path, deterministic):
    cast = new_cast()
    train = SLEEP["train"] | {"full_determinism_enable": deterministic}
    ckpt = {"save_steps": 1, "path": str(tmp_path / "ckpt"), "output_dir": "/exported"}
    counts = await play(
        cast,
        tmp_path / "run",
        num_prompts=12,
        eval_prompts=prompts(2),
        **SLEEP | {"train": train, "ckpt": ckpt, "eval": {"steps": 2, "n_samples_per_prompt": 2}},
    )
    assert counts == {"trained": 24}
    allowed = [
        {"rollout weights", "rollout kv_cache"},
        {"reward", "ref"},
        {"learner", "critic"},
        {"learner", "rollout weights"},
        {"rollout weights", "rollout kv_cache", "reward"},  # an evaluation of the policy
    ]
    settled = list(memory(cast.events))[cast.events.index("critic start_run") :]
    assert all(any(awake <= phase for phase in allowed) for awake in settled)
    assert "learner save_checkpoint" in cast.events


async def test_the_same_numbers_as_without_sleep(tmp_path):
    rows = []
    for number, sections in enumerate((SLEEP, {"train": SLEEP["train"]})):
        cast = new_cast()
        await play(cast, tmp_path / str(number), num_prompts=8, **sections)
        rows.append(
            [{k: v for k, v in m.items() if not k.startswith("timing/")} for m in cast.metrics]
        )
    assert rows[0] == rows[1]
    assert len(rows[0]) == 2


async def test_weights_are_kept_while_the_policy_rests(tmp_path):
    cast = new_cast()
    await play(cast, tmp_path, num_prompts=8, critic={"freezing_steps": 1}, **SLEEP)
    assert [e for e in cast.events if e.startswith("rollout sleep")] == [
        "rollout sleep 2",
        "rollout sleep 1",  # nothing is pushed after the first step
        "rollout sleep 2",
        "rollout sleep 1",  # the export
    ]
    assert "rollout wake weights kv_cache" in cast.events


async def test_weights_are_kept_where_a_filter_may_ask_for_more(tmp_path):
    cast = new_cast()
    cast.sampler.version = 1
    generate, versions = cast.sampler.generate, []

    async def noting(request):
        versions.append(cast.sampler.version)
        return await generate(request)

    cast.sampler.generate = noting
    algo = GAE["algo"] | {"dynamic_filtering_enable": True, "dynamic_filtering_range": (0.45, 0.75)}
    counts = await play(cast, tmp_path, num_prompts=24, algo=algo, **SLEEP | {"eval": {"steps": 1}})
    assert counts["dropped"] > 0
    assert counts["trained"] > 0
    # Rounds of generation that no push preceded, and none of them without weights.
    assert len(versions) > cast.events.count("learner push_weights")
    assert min(versions) >= 0
    assert "rollout sleep 1" in cast.events


async def test_a_rollout_of_which_nothing_is_left_is_followed_by_a_push(tmp_path):
    cast = new_cast()
    broken = Failure(error_class="DATA", reason="TIME_LIMIT", message="took too long")
    # 5 prompts: the rollout of one prompt, the last of the first pass, loses all its samples.
    lost = PromptCursor(prompts(5), seed=7, num_episodes=1).draw(5).prompts[-1].prompt_id
    for index in range(2):
        cast.judge.failures[f"0/{lost}/{index}"] = broken
    train = SLEEP["train"] | {"num_episodes": 2}
    counts = await play(cast, tmp_path, num_prompts=5, **SLEEP | {"train": train})
    assert counts == {"trained": 18, "dropped": 2}
    # The engine had forgotten its weights: without a push it would have nothing to serve.
    assert cast.events.count("learner push_weights") == 5


async def test_what_another_run_left_asleep_is_woken(tmp_path):
    cast = new_cast()
    for watched in cast.watched:
        watched.awake = watched.role == "rollout"
    addresses = {role: {"address": "h:1"} for role in ("learner", "critic", "ref", "reward")}
    rollout = {"address": "h:1", "batch_size": 4, "n_samples_per_prompt": 2, "max_new_tokens": 8}
    counts = await play(cast, tmp_path, rollout=rollout, **addresses)
    assert counts == {"trained": 8}
    assert cast.events[0] == "rollout wake"
    assert {"learner wake", "critic wake", "ref wake", "reward wake"} < set(cast.events)


@pytest.mark.parametrize("which", ["vllm", "ds"])
async def test_either_flag_works_alone(tmp_path, which):
    cast = new_cast()
    sections = {k: v for k, v in SLEEP.items() if k in ("train", which)}
    assert await play(cast, tmp_path, **sections) == {"trained": 8}
    slept = {event.split()[0] for event in cast.events if event.split()[1] == "sleep"}
    assert slept == ({"rollout"} if which == "vllm" else set(MODELS))


async def test_functions_and_endpoints_do_not_sleep(tmp_path):
    cast = new_cast()
    await play(cast, tmp_path, reward={"remote_url": ["file.py"]}, **SLEEP)
    assert "reward sleep" not in cast.events


async def test_a_restarted_engine_gets_its_weights_from_a_learner_that_sleeps(tmp_path):
    cast = new_cast()
    settings = ppo_config(**GAE | SLEEP)
    run = cast.run(settings, tmp_path)
    loop = PpoLoop(settings, run, inputs(4), cast.players)
    generate = cast.sampler.generate

    async def once_restarted(request):
        cast.sampler.generate = generate
        await cast.sampler.catch_up("r:1")
        return await generate(request)

    cast.sampler.generate = once_restarted
    await loop.run()
    await run.ledger.close()
    run.progress.close()
    at = cast.events.index("rollout generate")
    assert cast.events[at - 3 : at] == ["learner wake", "learner push_weights", "learner sleep"]
